"""Virtual workers as threads that run one at a time, each with random generators of its own.

The engine and the workers pass one baton: a worker runs until it waits for a message or ends, and only then does the
engine go on. So no two of them ever run at once, and the engine determines the order of everything.
"""

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.transport.base import Closed
from paceline.transport.memory import MemoryLink
from paceline.transport.messages import Ended, ToServer
from paceline.worker import context
from paceline.worker.context import WorkerContext


class Streams:
    """One worker's saved copy of what a process has once: the random generators of torch, NumPy and Python, and the
    module called `__main__`."""

    def __init__(self, seed: int | None = None) -> None:
        self.state: tuple[Any, Any, Any, Any] | None = None  # None while installed in the process
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            legacy = np.random.RandomState(seed % 2**32).get_state(legacy=False)
            main = sys.modules["__main__"]
            self.state = (generator.get_state(), legacy, random.Random(seed).getstate(), main)


class Turns:
    """Whose streams are installed. They are swapped only when another worker's turn comes."""

    def __init__(self) -> None:
        self._callers = self._in_force = Streams()

    def take(self, streams: Streams) -> None:
        """Install these streams and save the previous ones."""
        if streams is self._in_force or streams.state is None:
            return
        generators = (torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())
        self._in_force.state = (*generators, sys.modules["__main__"])
        torch.set_rng_state(streams.state[0])
        np.random.set_state(streams.state[1])
        random.setstate(streams.state[2])
        sys.modules["__main__"] = streams.state[3]
        streams.state = None
        self._in_force = streams

    def give_back(self) -> None:
        """Restore the caller's streams."""
        self.take(self._callers)


class ScriptThread:
    """One virtual worker's thread."""

    def __init__(self, train: Callable[[], None], turns: Turns, seed: int, incarnation: int) -> None:
        self.incarnation = incarnation
        self._train = train
        self._turns = turns
        self._streams = Streams(seed)
        self._engines_turn = threading.Lock()
        self._engines_turn.acquire()
        self.link = MemoryLink(on_wait=self._engines_turn.release)
        self.error: BaseException | None = None
        self.ended = False
        self.said_end = False  # in a message of its own, since it outlives its script
        self.interrupted = False  # it was computing at the second interrupt
        self._thread: threading.Thread | None = None

    def start(self, given: WorkerContext) -> None:
        """Start the script and run it until it waits."""
        self._thread = threading.Thread(
            target=self._run, args=(given,), name=f"paceline-worker-{given.worker}", daemon=True
        )
        self._with_baton(self._thread.start)

    def resume(self, message: Any) -> None:
        """Deliver a message and let the script run until it waits again."""
        self._with_baton(lambda: self.link.deliver(message))

    def lose_server(self) -> None:
        """Let the script notice that the server is gone, and wait for another one."""
        self._with_baton(self.link.lose)

    def find_server(self) -> None:
        """Let the script find another server and introduce itself."""
        self._with_baton(self.link.restore)

    def collect(self) -> ToServer | None:
        """Return the script's next message; None if there is none."""
        return self.link.collect()

    def abandon(self) -> None:
        """End the script where it waits."""
        if self.interrupted:
            self.link.close()
        elif not self.ended and self._thread is not None:
            self._with_baton(self.link.close)

    def _with_baton(self, hand_over: Callable[[], None]) -> None:
        self._turns.take(self._streams)
        try:
            hand_over()
            self._engines_turn.acquire()
        except KeyboardInterrupt:  # the second interrupt: do not wait for the script
            self.interrupted = True
            raise

    def _outlive_script(self, given: WorkerContext) -> None:
        """Do what a worker's process does once its script has ended, such as waiting for a server to come back."""
        if given.after_script:
            self.said_end = True
            self.link.send(Ended())
            for call in given.after_script:
                call()

    def _run(self, given: WorkerContext) -> None:
        context.bind(given)
        try:
            self._train()
            self._outlive_script(given)
        except Closed:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                self.error = error
        except BaseException as error:  # noqa: BLE001 - the engine reports whatever ended the script
            self.error = error
        finally:
            self.ended = True
            self._engines_turn.release()
