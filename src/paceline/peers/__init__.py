"""Nodes of a run without a server: each owns its model and a machine that decides what it exchanges.

Not public: machines are written against `paceline.strategies.peers`.
"""
