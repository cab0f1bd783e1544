"""The one source of the version. Not public: read `paceline.__version__`."""

__version__ = "0.1.0"
