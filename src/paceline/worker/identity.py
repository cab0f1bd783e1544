"""Who a worker is, and what it was given: the part of a session that every script has."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from paceline.transport.base import Closed, Endpoint
from paceline.transport.messages import OptionAsked
from paceline.worker.context import WorkerContext, convert_option

T = TypeVar("T")


class WorkerIdentity:
    """One worker's number, device and settings."""

    def __init__(self, given: WorkerContext, endpoint: Endpoint) -> None:
        self.device = device_for(given)
        self._context = given
        self._endpoint = endpoint
        self._asked: set[str] = set()  # options

    @property
    def worker(self) -> int:
        """This worker's number, from 0. In the process that only evaluates it equals `workers`."""
        return self._context.workers if self._context.evaluator else self._context.worker

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, which prints and saves where one worker should; never the evaluator's process."""
        return self._context.worker == 0 and not self._context.evaluator

    @property
    def workers(self) -> int:
        """The number of workers that the run started with."""
        return self._context.workers

    @property
    def data_dir(self) -> Path | None:
        """The folder given by `--data-dir`; None without one."""
        return self._context.data_dir

    def option(self, name: str, default: T) -> T:
        """Return the value given by `--set name=value`, in the type of `default`; without one, `default`."""
        self._context.shared.asked.add(name)
        if name not in self._asked:
            self._asked.add(name)
            with contextlib.suppress(Closed):  # a script may ask after the run is over
                self._endpoint.send(OptionAsked(name))
        if name not in self._context.options:
            return default
        value: T = convert_option(name, self._context.options[name], default)
        return value

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Return this process's object called `key`, which the first call makes: use it to load a data set once."""
        made: T = self._context.shared.once(key, make)
        return made


def device_for(given: WorkerContext) -> torch.device:
    """Return where this worker computes."""
    if given.device is not None:
        return torch.device(given.device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", given.worker % count) if count else torch.device("cpu")
