"""Values and rules without torch and without effects: events, actions, settings, the ledger, scenarios."""
