"""How workers and server exchange messages.

Not public: only `paceline.transport.memory` is, for users' own tests.
"""
