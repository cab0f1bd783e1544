"""`paceline tasks`: the built-in workloads."""


def tasks() -> None:
    """List the built-in tasks for `paceline run --task NAME`."""
    from rich.console import Console
    from rich.table import Table

    from paceline import tasks as workloads

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("task", style="bold", no_wrap=True)
    table.add_column("what it trains")
    for name in workloads.names():
        table.add_row(name, workloads.describe(name))
    Console().print(table)
