"""The handshake of a worker or the evaluator, after its script has prepared a model and after a server restart."""

from typing import Any, NoReturn

from paceline.model.measuring import Evaluate as EvaluateFunction
from paceline.model.measuring import measure
from paceline.transport.base import Endpoint, Lost
from paceline.transport.messages import Evaluate, Evaluated, Hello, Welcome
from paceline.worker.replica import Replica
from paceline.worker.state import WorkerState


class Handshake:
    """One worker's handshake with the server."""

    def __init__(self, endpoint: Endpoint, replica: Replica, state: WorkerState, evaluator: Any = None) -> None:
        self._endpoint = endpoint
        self._replica = replica
        self._state = state
        self._evaluator = evaluator
        self.partial = False  # the run trains more than this script has prepared

    def send(self) -> None:
        """Send `Hello` with this worker's model."""
        values, buffers = self._replica.values()
        self._endpoint.send(Hello(self._replica.spec, values, buffers, self._evaluator, self._replica.reads))

    def greet(self) -> None:
        """Send `Hello`, wait for the answer and load the model that all workers start from."""
        while True:
            self.send()
            try:
                answer = self._endpoint.receive()
            except Lost:
                self._endpoint.reconnect()
                continue
            if isinstance(answer, Welcome):
                self.take_in(answer)
                self._replica.introduce()
            return

    def again(self) -> None:
        """Wait for a lost server to come back, then repeat the handshake."""
        self._endpoint.reconnect()
        self.greet()

    def take_in(self, answer: Welcome) -> None:
        """Load the run's model, and this worker's state if the run resumes from a checkpoint."""
        self.partial = answer.parameters is None
        if answer.parameters is None:
            return
        self._replica.load(answer.parameters)
        self._replica.watch_edits()
        self._state.welcome(answer.state)


def serve_versions(endpoint: Endpoint, handshake: Handshake, replica: Replica, evaluate: EvaluateFunction) -> NoReturn:
    """Measure each version that the server asks for, until the link closes.

    The evaluator runs the same script as the workers, up to `prepare`, in its own process; so the user's function has
    everything that exists before `prepare`, and measuring does not slow the workers.
    """
    handshake.send()
    while True:
        try:
            message = endpoint.receive()
        except Lost:
            endpoint.reconnect()
            handshake.send()
            continue
        if isinstance(message, Welcome):
            if message.parameters is not None:
                replica.load(message.parameters)
        elif isinstance(message, Evaluate):
            replica.load(message.parameters)
            endpoint.send(Evaluated(message.number, measure(evaluate, replica.model)))
