"""Checkpoints: their files, the run's state in them, and how a run resumes."""
