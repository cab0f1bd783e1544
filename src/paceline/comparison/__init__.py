"""Strategies side by side: the same task on the same cluster, every side with its own best settings.

Not public: import `compare` and `Comparison` from `paceline`.
"""
