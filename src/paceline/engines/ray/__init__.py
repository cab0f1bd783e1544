"""The engine of runs on a Ray cluster: Ray places, starts and supervises, tensors go directly between our processes.

Nothing here imports ray but inside functions. Not public: `paceline.launch(engine="ray", address=...)` is.
"""
