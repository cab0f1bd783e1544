"""Five strategies train the same digits on the same uneven cluster: who gets to the target first, and why.

    python examples/demo.py

The cluster is virtual (4 workers at full speed, 2 at half, 2 at a quarter), the gradients are real, and the seconds are
the cluster's: what the same run would take on such machines.
"""

import time

from rich.console import Console
from rich.table import Table

import paceline
from paceline import scenario, strategies, tasks

SCENARIO, TARGET = "uneven8", "accuracy=0.93"
STRATEGIES = ["bsp", "asp", "ssp", "dasp", "balanced"]


def main() -> None:
    """Run them all and compare."""
    console, began = Console(), time.monotonic()
    console.print(f"[bold]Training digits on {SCENARIO} until held-out {TARGET}[/bold]")
    console.print(scenario.describe(scenario.load(SCENARIO)).strip(), style="dim")
    reports = {}
    for name in STRATEGIES:
        with console.status(f"{name}: {strategies.describe(strategies.strategy_class(name)).rule}"):
            lr = tasks.learning_rate("digits", name)
            settings = {"scenario": SCENARIO, "strategy": name, "target": TARGET, "options": {"lr": str(lr)}}
            reports[name] = paceline.launch(tasks.get("digits"), engine="sim", **settings).summary
    console.print(compare(reports))
    for line in winners(reports):
        console.print(line)
    console.print(f"[dim]{time.monotonic() - began:.0f} s of real time; the same command gives the same table.[/dim]")


def seconds_to_target(report: paceline.Report) -> float:
    """Virtual seconds, infinite if the target was missed."""
    reached = report.target.reached_at_seconds if report.target is not None else None
    return float("inf") if reached is None else reached


def compare(reports: dict[str, paceline.Report]) -> Table:
    """One row a strategy."""
    table = Table(caption="Waiting: share of the workers' time spent idle. Staleness: updates missed by a gradient.")
    for heading in ("strategy", "time to target", "against bsp", "waiting", "staleness", "accuracy"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    best, bsp = min(map(seconds_to_target, reports.values())), seconds_to_target(reports["bsp"])
    for name, report in reports.items():
        seconds = seconds_to_target(report)
        row = [name, f"{seconds:.2f} s", f"{bsp / seconds:.2f} x", f"{report.wait_fraction:.0%}"]
        row += [f"{report.staleness.mean:.1f}", f"{report.accuracy:.1%}"]
        table.add_row(*row, style="bold green" if seconds == best else "")
    return table


def winners(reports: dict[str, paceline.Report]) -> list[str]:
    """Who is best at what, and the rule that makes it so."""
    quests = {
        "Soonest at the target": (seconds_to_target, lambda v: f"{v:.2f} s"),
        "Least waiting": (lambda r: r.wait_fraction, lambda v: f"{v:.0%}"),
        "Freshest gradients": (lambda r: (r.staleness.mean, seconds_to_target(r)), lambda v: f"staleness {v[0]:.1f}"),
    }
    lines: list[str] = []
    for quest, (measure, show) in quests.items():
        name = min(reports, key=lambda n: measure(reports[n]))
        rule = strategies.strategy_class(name).rule
        lines.append(f"[bold]{quest}:[/bold] {name}, {show(measure(reports[name]))}. {rule[0].upper() + rule[1:]}")
    return lines


if __name__ == "__main__":
    main()
