"""The parts that run inside the user's script: the batch loop, the replica, its state.

Not public: scripts use `paceline.Session`.
"""
