"""What exists once per run: coordinator, phases, workers, evaluations, checkpoints.

Not public: `paceline.launch` starts it.
"""
