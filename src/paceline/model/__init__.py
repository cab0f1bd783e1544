"""Tensors of one process: layout, store, optimizer, memory.

Not public: scripts use `Session.prepare`.
"""
