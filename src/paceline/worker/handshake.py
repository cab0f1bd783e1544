"""How a worker, or the evaluator, introduces itself: when its script has prepared a model, and to a server that came
back."""

from typing import Any, NoReturn

from paceline.model.measuring import Evaluate as EvaluateFunction
from paceline.model.measuring import measure
from paceline.transport.base import Endpoint, Lost
from paceline.transport.messages import Evaluate, Evaluated, Hello, Welcome
from paceline.worker.replica import Replica
from paceline.worker.state import WorkerState


class Handshake:
    """One worker's introduction."""

    def __init__(self, endpoint: Endpoint, replica: Replica, state: WorkerState, evaluator: Any = None) -> None:
        self._endpoint = endpoint
        self._replica = replica
        self._state = state
        self._evaluator = evaluator

    def send(self) -> None:
        """Say what is trained here."""
        values, buffers = self._replica.values()
        self._endpoint.send(Hello(self._replica.spec, values, buffers, self._evaluator, self._replica.reads))

    def greet(self) -> None:
        """Introduce this worker and take in the model that everybody starts from."""
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
        """The server is gone: wait for it and introduce this worker to it."""
        self._endpoint.reconnect()
        self.greet()

    def take_in(self, answer: Welcome) -> None:
        """The run's model, and this worker's state where the run goes on from a checkpoint."""
        self._replica.load(answer.parameters)
        self._state.welcome(answer.state)


def serve_versions(endpoint: Endpoint, handshake: Handshake, replica: Replica, evaluate: EvaluateFunction) -> NoReturn:
    """The evaluator's side: measure each version the server asks about, until the link closes.

    It runs the same script as the workers, up to `prepare`, in a process of its own; so the user's function has
    everything that exists before `prepare`, and measuring takes nothing from the workers.
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
            replica.load(message.parameters)
        elif isinstance(message, Evaluate):
            replica.load(message.parameters)
            endpoint.send(Evaluated(message.number, measure(evaluate, replica.model)))
