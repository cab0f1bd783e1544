"""Four real processes train digits, one of them four times slower: bsp, dasp and balanced beside what was predicted.

    python examples/demo.py [TARGET]
The simulator says what each strategy will do on `uneven4.toml`; then the same function trains on four worker processes
of this machine, which sleep the difference to the computers of that file. Seconds count from the first batch.
"""

import sys
import time
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import paceline
from paceline import Report, scenario, tasks
from paceline.tasks import digits
from paceline.tasks.classification import score

CLUSTER, TARGET = scenario.load(Path(__file__).with_name("uneven4.toml")), (sys.argv[1:] or ["accuracy=0.93"])[0]
images, held_out = digits.load()  # once: worker processes get them together with the function


def train() -> None:
    """A plain training loop with paceline's lines; every worker runs it."""
    session = paceline.init()
    model = digits.build(hidden=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=session.option("lr", 0.1), momentum=0.9)
    session.prepare(model, optimizer, evaluate=lambda module: score(module, held_out))
    for x, y in session.batches(images, batch_size=32, epochs=20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()


def predict_and_measure(strategy: str, console: Console) -> tuple[Report, Report]:
    """The same run, simulated and on real processes."""
    lr = tasks.learning_rate("digits", strategy)
    settings = {"scenario": CLUSTER, "strategy": strategy, "target": TARGET, "options": {"lr": lr}}
    with console.status(f"{strategy}: simulating, then starting a server, 4 workers and an evaluator") as status:
        simulated = paceline.launch(train, engine="sim", **settings)
        settings["progress"] = lambda so_far: status.update(
            f"{strategy}: {so_far.seconds:.1f} s, accuracy {so_far.metrics.get('accuracy', 0.0):.1%}"
        )
        return simulated.summary, paceline.launch(train, engine="local", threads=1, **settings).summary


def facts(report: Report, bsp: Report) -> list[str]:
    """The cells of one report."""
    seconds, of_bsp = (r.target.reached_at_seconds or float("inf") for r in (report, bsp))
    more = f"{report.wait_fraction:.0%}", f"{report.staleness.mean:.2f}", f"{report.accuracy:.1%}"
    return [f"{seconds:.1f}", f"{of_bsp / seconds:.2f}", *more]


def main() -> None:
    """Predict, train, compare."""
    console, began = Console(), time.monotonic()
    console.print(f"Digits on 4 processes, one of them 4x slower, until held-out {TARGET}", style="bold")
    console.print(scenario.describe(CLUSTER).strip(), style="dim", highlight=False)
    runs = {strategy: predict_and_measure(strategy, console) for strategy in ("bsp", "dasp", "balanced")}
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, title_justify="left", caption_justify="left")
    table.title = "simulated / real, from the first batch to the target"
    table.caption = "faster: than bsp. waiting: of the workers' time. staleness: updates missed."
    for heading in ("strategy", "seconds", "times faster", "waiting", "staleness", "accuracy"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for strategy, reports in runs.items():
        pairs = zip(*(facts(report, bsp) for report, bsp in zip(reports, runs["bsp"], strict=True)), strict=True)
        table.add_row(strategy, *(" / ".join(pair) for pair in pairs))
    console.print(table)
    console.print(*(warning for _, real in runs.values() for warning in real.warnings), style="yellow")
    total, training = time.monotonic() - began, sum(real.seconds for _, real in runs.values())
    console.print(f"One seed. {total:.0f} s: {training:.0f} s training, the rest starting 18 processes.", style="dim")


if __name__ == "__main__":
    main()
