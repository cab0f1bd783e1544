"""Checkpoints: their files, the run's state in them, and how a run resumes.

Not public: `paceline.launch` takes `checkpoint_every` and `resume`.
"""
