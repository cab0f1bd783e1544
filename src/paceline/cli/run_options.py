"""The options of `paceline run`, read as text; `paceline.core.settings` turns them into values and ranks them."""

from typing import Annotated

import typer


def _option(flag: str, metavar: str, text: str) -> object:
    return typer.Option(flag, metavar=metavar, help=text, show_default=False)


Script = Annotated[str | None, typer.Argument(metavar="SCRIPT", help="A training script.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.", show_default=False)
]
Task = Annotated[str | None, _option("--task", "NAME", "A built-in task instead of a script (`paceline tasks`).")]
Engine = Annotated[
    str | None,
    _option(
        "--engine",
        "NAME",
        "What runs the workers: local, processes of this machine, or sim, a virtual cluster. Default: local.",
    ),
]
ScenarioName = Annotated[
    str | None,
    _option(
        "--scenario",
        "NAME|FILE",
        "The cluster, which local emulates: a built-in name or a TOML file. Default: none, in sim uneven8.",
    ),
]
Strategy = Annotated[
    str | None,
    _option("--strategy", "NAME[:OPTION=VALUE,...]", "Who waits for whom (`paceline strategies`). Default: bsp."),
]
Workers = Annotated[
    str | None,
    _option("--workers", "N", "Must agree with the scenario. Default: its own, else one per CUDA device, else 2 to 4."),
]
Seed = Annotated[
    str | None, _option("--seed", "K", "Of shuffles, the model's start and the strategy's chance. Default: 0.")
]
BatchSize = Annotated[str | None, _option("--batch-size", "B", "Samples per worker and push, instead of the script's.")]
Epochs = Annotated[str | None, _option("--epochs", "E", "BatchLoop over the data, instead of the script's.")]
MaxVersions = Annotated[str | None, _option("--max-versions", "N", "End after this many updates of the model.")]
MaxSeconds = Annotated[str | None, _option("--max-seconds", "T", "End after this many seconds (virtual in sim).")]
TargetText = Annotated[
    str | None, _option("--target", "METRIC=VALUE", "End when reached, such as accuracy=0.93 or 'loss<=0.5'.")
]
EvaluateEvery = Annotated[
    str | None,
    _option("--evaluate-every", "N{v|s|e}|off", "In versions, seconds or epochs: 50v, 10s, 0.1e. Default: 0.1e."),
]
OnDivergence = Annotated[
    str | None,
    _option("--on-divergence", "warn|stop|bsp", "When the loss explodes: say so, end, or go on as bsp. Default: warn."),
]
OnNonFinite = Annotated[
    str | None,
    _option(
        "--on-nonfinite", "skip|stop", "When a push holds NaN or infinities: go on without it, or end. Default: skip."
    ),
]
Set = Annotated[
    list[str] | None, _option("--set", "NAME=VALUE", "For `session.option(NAME, ...)` of script or task; repeatable.")
]
DataDir = Annotated[str | None, _option("--data-dir", "FOLDER", "Where the data sets are.")]
Threads = Annotated[
    str | None,
    _option(
        "--threads", "N", "Of torch in each process; part of what a seed fixes. Default: cores / workers, in sim 1."
    ),
]
TransportName = Annotated[
    str | None, _option("--transport", "shm|zeromq", "How workers and server talk: shared memory or TCP. Default: shm.")
]
Respawn = Annotated[bool, typer.Option("--respawn", help="A worker that died comes back as a newcomer.")]
CheckpointEvery = Annotated[
    str | None, _option("--checkpoint-every", "N{v|s}", "In versions or seconds: 100v, 60s. Default: never.")
]
CheckpointKeep = Annotated[
    str | None, _option("--checkpoint-keep", "K", "How many checkpoints are kept, the newest. Default: 3.")
]
Resume = Annotated[
    str | None, _option("--resume", "FOLDER", "Go on from a run's newest checkpoint, or from this checkpoint.")
]
JournalFile = Annotated[str | None, _option("--journal", "FILE", "Put the journal here (.gz: compressed).")]
RunsDir = Annotated[str | None, _option("--runs-dir", "FOLDER", "Where the folder of each run is made. Default: runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="The report alone: no progress, no notes.")]
LogLevel = Annotated[str | None, _option("--log-level", "LEVEL", "debug, info, warning or error. Default: warning.")]
