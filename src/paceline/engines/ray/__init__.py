"""Runs on a Ray cluster. Nothing here imports ray but inside functions. Not public: `launch(engine="ray")` is."""
