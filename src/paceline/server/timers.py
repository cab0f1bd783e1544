"""The timers that a strategy has set; one that was replaced or cleared never fires."""


class Timers:
    """The setting in force for each name: its number and its time."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[int, float]] = {}
        self._made = 0

    def set(self, name: str, at: float | None) -> int:
        """Set, replace or clear (`at` is None) a timer; return the number of this setting."""
        self._made += 1
        if at is None:
            self._current.pop(name, None)
        else:
            self._current[name] = self._made, at
        return self._made

    def take(self, name: str, number: int) -> bool:
        """Remove an expired setting; return whether it was still in force."""
        if self._current.get(name, (0, 0.0))[0] != number:
            return False
        del self._current[name]
        return True

    def names(self) -> list[str]:
        """Return the names of all timers that are set."""
        return list(self._current)

    def pending(self) -> dict[str, float]:
        """Return when each timer expires."""
        return {name: at for name, (_, at) in self._current.items()}
