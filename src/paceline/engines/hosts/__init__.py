"""The engine of runs whose workers join from other machines by hand: `paceline serve` and `paceline join`.

Not public: `paceline.launch(engine="hosts", listen=...)` is.
"""
