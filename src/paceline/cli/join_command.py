"""`paceline join`: run a worker of another machine's run here, or hold a shard of its weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.run_command import DEFAULT_TASK, workload
from paceline.cli.streams import logging_shown
from paceline.core import settings as configuration
from paceline.core.errors import DataError, OptionError
from paceline.core.settings import EVERY_ADDRESS, TOKEN, Count, Positive, Start, host_and_port
from paceline.core.values import read, shown

# What torchrun, Slurm, MPI and Kubernetes say of a process, in this order: its number among all; the server's machine.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun alone


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where `paceline serve` listens.")],
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="The script of the run.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its own, if they are not those of the run.")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="A built-in task instead.")] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Hold a part of the weights (see --remote-shards); needs no script.")
    ] = False,
    shard_at: Annotated[
        str | None,
        typer.Option(
            "--shard-at",
            metavar="HOST:PORT",
            help="Where workers reach the shard. Default: any port of the address towards the server.",
        ),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option("--token-file", metavar="FILE", help=f"Has the join token; else {TOKEN}, else a prompt."),
    ] = None,
    trusted_network: Annotated[
        bool, typer.Option("--trusted-network", help="Join a run that does not encrypt.")
    ] = False,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="FOLDER", help="Where the data sets are on this machine.")
    ] = None,
    threads: Annotated[
        str | None, typer.Option("--threads", metavar="N", help="Of torch in the worker. Default: as the run says.")
    ] = None,
    wait: Annotated[
        str, typer.Option("--wait", metavar="S", help="Seconds to wait for the server, at first and if it is lost.")
    ] = "60",
    start: Annotated[
        str, typer.Option("--start", metavar="nursery|fresh", help="How the worker's process is started.")
    ] = "nursery",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes.")] = False,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ] = None,
) -> int:
    """Run a worker of another machine's run on this one, or with --shard hold a part of its weights.

    HOST:PORT may be `env`, for MASTER_ADDR:MASTER_PORT, or `env:PORT`, for MASTER_ADDR:PORT.
    """
    with logging_shown(configuration.chosen_log_level(log_level, os.environ), quiet=quiet):
        from paceline.engines.hosts import tokens

        if script is not None and script.startswith("-"):
            raise OptionError(
                f"{script} stands after {address}: options come before it, the script's own after the script"
            )
        held = tokens.for_joining(None if token_file is None else Path(token_file), os.environ)
        place = host_and_port(from_environment(address, os.environ))
        rank = rank_of(os.environ)
        checked_threads = None if threads is None else int(read(threads, Count, "--threads:"))
        seconds = float(read(wait, Positive, "--wait:"))
        how: Literal["nursery", "fresh"] = read(start, Start, "--start:")
        _require_one_role(shard, shard_at, {"SCRIPT": script, "--task": task, "--data-dir": data_dir})
        data = None if data_dir is None else Path(data_dir)
        if data is not None and not data.is_dir():
            raise DataError(f"--data-dir: {data} is not a folder; give the one that holds the data set")
        from paceline.engines.hosts.agent import JoinSettings, hold
        from paceline.engines.hosts.agent import join as take_part

        settings = JoinSettings(
            address=place, data_dir=data, threads=checked_threads, wait_s=seconds, start=how, rank=rank,
            trusted_network=trusted_network, listen="" if shard_at is None else _place_of_shard(shard_at),
        )  # fmt: skip
        if shard:
            return hold(held, settings)
        train = workload(script, arguments or [], task)
        return take_part(train, (task or DEFAULT_TASK) if script is None else None, held, settings)


def _require_one_role(shard: bool, shard_at: str | None, of_workers: Mapping[str, str | None]) -> None:
    """Refuse what only a worker, or only a shard, has a use for."""
    given = [name for name, value in of_workers.items() if value is not None]
    if shard and given:
        raise OptionError(f"--shard holds a part of the weights and runs no script: leave out {', '.join(given)}")
    if shard_at is not None and not shard:
        raise OptionError("--shard-at is where workers reach a shard: leave it out, or give --shard")


def _place_of_shard(text: str) -> str:
    """Check where a shard is to listen."""
    try:
        place = host_and_port(text)
    except OptionError as error:
        raise OptionError(f"--shard-at: {error}") from None
    host, _, port = place.rpartition(":")
    if host in EVERY_ADDRESS:  # workers are told where the shard listens, and would look for it on their own machine
        fix = f"give this machine's address, as in lab5:{port}"
        raise OptionError(f"--shard-at: workers cannot connect to {host}; {fix}")
    return place


def token(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it (mode 0600); it must not exist.")],
) -> int:
    """Write a new join token to a file, for `--token-file` or the variable of `serve` and `join`."""
    from paceline.engines.hosts import tokens

    tokens.write_new(Path(file))
    return 0


def from_environment(address: str, environment: Mapping[str, str]) -> str:
    """Return the address, or what torchrun's variables have in place of `env`; a port of its own may follow that."""
    name, _, given = address.partition(":")
    if name != "env":
        return address
    host, port = (environment.get(name, "") for name in _MASTER)
    if not given and _TORCHRUN in environment:
        raise OptionError(
            f"under torchrun, MASTER_PORT ({port}) is torchrun's own: give env:PORT, with that of --listen"
        )
    if not host or not (given or port):
        raise OptionError(f"`env` takes the address from {' and '.join(_MASTER)}: set both, or give HOST:PORT")
    return f"{host}:{given or port}"


def rank_of(environment: Mapping[str, str]) -> int | None:
    """Return the worker's number that torchrun, Slurm, MPI or a Kubernetes Job gave this process, if any."""
    for name in _RANKS:
        text = environment.get(name, "")
        if text:
            if not text.isascii() or not text.isdigit() or len(text) > 9:
                raise OptionError(f"{name} must be a number from 0, not {shown(text)}")
            return int(text)
    return None
