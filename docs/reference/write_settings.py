"""Write settings.md beside this file from the declaration: `python docs/reference/write_settings.py`."""

from pathlib import Path

from msgspec import inspect

from paceline.core.settings import SETTINGS, Setting
from paceline.core.values import bounds_text, type_text

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

Written by `docs/reference/write_settings.py` from `RunConfig` in `paceline/core/settings.py`; change it there.

Each setting is an option of `paceline run`, a `PACELINE_*` variable, a key of a scenario's `[run]` table and a keyword
of `paceline.launch()`. The command line wins over variables, these over the `[run]` table, and that over the default;
[The command line](cli.md) has the rules. `launch()` reads no variables.

| option | variable | `[run]` key | `launch()` | what | type | default |
|---|---|---|---|---|---|---|
"""


def row(setting: Setting) -> str:
    """One line of the table."""
    about = setting.about
    info = inspect.type_info(setting.declared)
    kinds = [kind for kind in getattr(info, "types", [info]) if not isinstance(kind, inspect.NoneType)]
    kind = ", ".join(filter(None, [type_text(kinds[0]), bounds_text(info)]))
    default = f"`{setting.default_text}`" if setting.default_text and not about.default else setting.default_text
    cells = [
        f"`{setting.flag} {about.metavar}`".replace(" `", "`") + (f", `--{about.opposite}`" if about.opposite else ""),
        f"`{setting.variable}`",
        f"`{setting.written}`" if not about.not_in_scenario else "",
        f"`{setting.name}`",
        about.text + (" Engine `local` only." if about.of_processes else "") + (" Engine `ray`." * about.of_clusters),
        kind,
        default + (f": {about.why}" if about.why else ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, SETTINGS.values()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
