"""Scenario files: the cluster they describe, its times, its network and its faults."""
