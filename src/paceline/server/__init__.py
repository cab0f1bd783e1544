"""What exists once per run: coordinator, phases, workers, evaluations, checkpoints."""
