"""Checked reading of one table of a TOML file: a refusal names the file, the key, the value, the bound and the fix."""

import math
from collections.abc import Iterable
from typing import Any

from paceline.core.errors import ScenarioError
from paceline.core.values import FINITE, nearest, shown


class Fields:
    """One table of a file. Keys outside `known` are refused at once, so that a typo never becomes a default."""

    def __init__(self, data: Any, source: str, where: str, known: Iterable[str]) -> None:
        self.source = source
        self.where = where
        if not isinstance(data, dict):
            raise self.refusal(
                f"must be a table of keys, not {shown(data)}", "write `key = value` lines below its header"
            )
        self.data: dict[str, Any] = data
        allowed = sorted(known)
        for key in data:
            if key not in allowed:
                raise self.refusal(f"has no key {shown(key)}", nearest(key, allowed))

    def refusal(self, problem: str, fix: str) -> ScenarioError:
        """Return the error to raise for this table."""
        return ScenarioError(" ".join(filter(None, [f"{self.source}:", self.where, f"{problem}; {fix}"])))

    def has(self, key: str) -> bool:
        """Return whether the table has the key."""
        return key in self.data

    def number(
        self, key: str, fix: str, *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf,
        default: float | None = None,
    ) -> float:  # fmt: skip
        """Return a finite number within bounds; without a default the key is required."""
        value = self._given(key, fix, default)
        # Compared without converting: an int may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not -FINITE <= value <= FINITE:
            raise self.refusal(f"{key} must be a finite number, not {shown(value)}", fix)
        if value <= above or value < at_least or value > at_most:
            bounds = [f"> {above:g}"] if above > -math.inf else []
            bounds += [f">= {at_least:g}"] if at_least > -math.inf else []
            bounds += [f"<= {at_most:g}"] if at_most < math.inf else []
            raise self.refusal(f"{key} must be {' and '.join(bounds)}, not {shown(value)}", fix)
        return float(value)

    def whole(self, key: str, fix: str, *, at_least: int, at_most: int, default: int | None = None) -> int:
        """Return a whole number within bounds."""
        return self.whole_value(key, self._given(key, fix, default), fix, at_least=at_least, at_most=at_most)

    def whole_value(self, key: str, value: Any, fix: str, *, at_least: int, at_most: int) -> int:
        """Check a whole number that is an item of a list."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(f"{key} must be a whole number, not {shown(value)}", fix)
        if not at_least <= value <= at_most:
            raise self.refusal(f"{key} must be from {at_least} to {at_most}, not {shown(value)}", fix)
        return value

    def text(self, key: str, fix: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._given(key, fix, default)
        if not isinstance(value, str):
            raise self.refusal(f"{key} must be a string, not {shown(value)}", fix)
        return value

    def tables(self, key: str) -> list[Any]:
        """Return the entries of a `[[key]]` list; empty if it is absent."""
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise self.refusal(f"{key} must be a list of tables, not {shown(value)}", f"head each with [[{key}]]")
        return value

    def _given(self, key: str, fix: str, default: Any) -> Any:
        if key in self.data:
            return self.data[key]
        if default is None:
            raise self.refusal(f"needs {key}", fix)
        return default
