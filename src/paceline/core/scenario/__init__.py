"""Scenario files: the cluster they describe, its times, its network and its faults.

Not public: import from `paceline.scenario`.
"""
