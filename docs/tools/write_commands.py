"""Write docs/reference/commands.md from the command line's own declaration: `python docs/tools/write_commands.py`."""

import re
from pathlib import Path
from typing import Any

import typer

from paceline.cli.app import app
from paceline.core.settings import SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
HEAD = """# Commands and their options

Written by `docs/tools/write_commands.py` from the command line itself, as `paceline COMMAND --help` shows it.
[The command line](cli.md) explains the commands, [Settings](settings.md) the options that are settings of a run.
"""


def page() -> str:
    """Return the whole page."""
    group: Any = typer.main.get_command(app)
    return HEAD + "".join(section(name, command) for name, command in group.commands.items())


def section(name: str, command: Any) -> str:
    """Return what one command takes."""
    context = command.make_context(f"paceline {name}", [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    told = " ".join((command.help or "").split())
    parts = [f"\n## `paceline {name}`\n\n```text\npaceline {name} {usage}\n```\n\n{told}\n"]
    flags = {setting.flag for setting in SETTINGS.values()}
    shown = [each for each in command.params if each.name != "help"]
    own = [each for each in shown if not flags & set(each.opts)]
    if own:
        parts.append("\n| argument or option | what | default |\n|---|---|---|\n")
        parts += [row(each) for each in own]
    taken = [f"`{each.opts[0]}`" for each in shown if flags & set(each.opts)]
    if taken:
        parts.append(f"\nOf the [settings](settings.md): {', '.join(taken)}.\n")
    return "".join(parts)


def row(parameter: Any) -> str:
    """Return one line of the table."""
    if parameter.param_type_name == "argument":
        name = f"`{(parameter.metavar or parameter.name).upper()}`"
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
        name = ", ".join(f"`{each}{value}`" for each in names)
    default = (
        "" if parameter.default in (None, False, (), "") or callable(parameter.default) else f"`{parameter.default}`"
    )
    told = " ".join((getattr(parameter, "help", None) or "").split())
    return "| " + " | ".join(re.sub(r"\|", r"\\|", cell) for cell in (name, told, default)) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
