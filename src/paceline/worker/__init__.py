"""What runs beside the user's script: the batch loop, the replica, its state.

Not public: scripts use `paceline.Session`.
"""
