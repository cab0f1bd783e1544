"""What a strategy's publication claims, and what was measured here: read from a file that a script of the docs writes.

A test fails while the file says something else than the committed results.
"""

from importlib import resources

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """A claim, the publication's figure, ours, and the verdict."""

    claim: str
    figure: str
    ours: str
    verdict: str


class Claims(msgspec.Struct, frozen=True):
    """All claims of one publication, and the commands that measured them."""

    publication: str
    standing: str  # how many are met, missed and so on, in words
    claims: tuple[Claim, ...]
    commands: tuple[str, ...]


def load_claims() -> dict[str, Claims]:
    """Return the claims by strategy; baselines have none."""
    text = (resources.files("paceline") / "cli" / "claims.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Claims])
