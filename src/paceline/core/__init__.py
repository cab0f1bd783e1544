"""Values and rules without torch and without effects: events, actions, settings, the ledger, scenarios.

Not public: strategies, scenarios and errors are public as `paceline.strategies`, `paceline.scenario` and `paceline`.
"""
