"""The simulator: the same coordinator and strategy in virtual time."""
