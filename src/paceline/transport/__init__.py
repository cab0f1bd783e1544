"""How workers and server exchange messages."""
