"""What scripts have asked for and said: each remark is made once, and an option that nobody asks for is a typo."""

from collections.abc import Mapping

from paceline.core.errors import OptionError


class ScriptWords:
    """The options that scripts have asked for, and the remarks already made, so that each is made once."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = set(options)
        self.asked: set[str] = set()
        self.checked = not options
        self.remarks: set[str] = set()
        self.said_what_is_over = False

    def check(self) -> None:
        """Refuse a `--set` name that no script has asked for: it is a typo."""
        self.checked = True
        unknown = sorted(self._options - self.asked)
        if unknown:
            known = ", ".join(sorted(self.asked)) or "none"
            raise OptionError(f"--set {unknown[0]}: the script asks for no such option; it asks for: {known}")
