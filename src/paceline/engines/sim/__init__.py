"""The simulator: the same coordinator and strategy in virtual time.

Not public: `paceline.launch(engine="sim")` runs it; light workers are public in `paceline.engines.sim.light`.
"""
