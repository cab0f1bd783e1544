"""Scenario files: reading them, and the times, network and faults they describe.

Not public: import from `paceline.scenario`.
"""
