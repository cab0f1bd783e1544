"""The laws that every strategy keeps, a checker that reads them off a journal, and clusters to try a strategy on.

Not public: `paceline check-strategy` holds a strategy to them.
"""
