"""Training without a server: one pure machine per node, one rule and one citation per file."""
