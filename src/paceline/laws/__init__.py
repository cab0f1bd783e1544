"""The laws of strategies, a checker that verifies them in a journal, and random clusters to try a strategy on.

Not public: `paceline check-strategy` checks a strategy against them.
"""
