"""The timers a strategy has set: one that was replaced or cleared is not the strategy's any more, and never fires."""


class Timers:
    """By name, the number of the setting that counts and its time."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[int, float]] = {}
        self._made = 0

    def set(self, name: str, at: float | None) -> int:
        """Set, replace or clear (`at` is None) a timer; the number of this setting."""
        self._made += 1
        if at is None:
            self._current.pop(name, None)
        else:
            self._current[name] = self._made, at
        return self._made

    def take(self, name: str, number: int) -> bool:
        """A setting ran out: whether it still counts."""
        if self._current.get(name, (0, 0.0))[0] != number:
            return False
        del self._current[name]
        return True

    def names(self) -> list[str]:
        """Of all that are set."""
        return list(self._current)

    def pending(self) -> dict[str, float]:
        """When each of them runs out."""
        return {name: at for name, (_, at) in self._current.items()}
