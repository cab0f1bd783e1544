"""What `paceline scenario` prints: a built-in file to start from, the cluster of a file in words, or a check."""

from paceline.core.scenario.file import builtin_names, builtin_text, describe, load


def show(target: str, check: bool = False) -> str:
    """A built-in's file with its description as comments, so that it can be saved and edited; of a file the latter."""
    scenario = load(target)
    if check:
        return f"{target}: valid, {scenario.count} workers, {len(scenario.events)} events"
    words = describe(scenario)
    if target not in builtin_names():
        return words
    comments = "\n".join(f"# {line}" for line in words.splitlines())
    return f"{builtin_text(target).rstrip()}\n\n# In words:\n{comments}"
