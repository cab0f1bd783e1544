"""The weights in several processes, each of which holds a range of them: `--servers N`.

Not public: `paceline.launch` takes `servers`.
"""
