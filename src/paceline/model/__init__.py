"""Tensors of one process: layout, store, optimizer, memory."""
