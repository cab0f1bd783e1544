"""Real processes on this machine: a launcher, a server, workers and an evaluator.

Not public: `paceline.launch(engine="local")` runs it.
"""
