"""Real processes on this machine: a launcher, a server, workers and an evaluator."""
