"""The exchange of gradients: workers compute on a version and push; the server merges pushes into the next.

Not public: scripts use `Session.prepare` and `Session.batches`.
"""
