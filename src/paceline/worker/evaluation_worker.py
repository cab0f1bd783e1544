"""The evaluator's side of the conversation: the user's function on each version the server asks about.

It runs the same script as the workers, up to `prepare`, in a process of its own; so the function has everything that
exists before `prepare`, and measuring takes nothing from the workers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from paceline.server.evaluation_schedule import Evaluate as EvaluateFunction
from paceline.server.evaluation_schedule import measure
from paceline.tables.messages import EvaluateTables, Measures
from paceline.transport.base import Endpoint, Lost
from paceline.transport.messages import Evaluate, Evaluated, Welcome
from paceline.worker.handshake import Handshake
from paceline.worker.replica import Replica


def serve(endpoint: Endpoint, greeting: Handshake, replica: Replica, evaluate: EvaluateFunction) -> NoReturn:
    """Answer until the link closes."""
    greeting.send()
    while True:
        try:
            message = endpoint.receive()
        except Lost:
            endpoint.reconnect()
            greeting.send()
            continue
        if isinstance(message, Welcome):
            replica.load(message.parameters)
        elif isinstance(message, Evaluate):
            replica.load(message.parameters)
            endpoint.send(Evaluated(message.number, measure(evaluate, replica.model)))


def serve_tables(endpoint: Endpoint, evaluate: Callable[[dict[str, Any]], Mapping[str, float]]) -> NoReturn:
    """Answer for tables until the link closes."""
    endpoint.send(Measures())
    while True:
        try:
            message = endpoint.receive()
        except Lost:
            endpoint.reconnect()
            endpoint.send(Measures())
            continue
        if isinstance(message, EvaluateTables):
            metrics = evaluate(dict(zip(message.names, message.values, strict=True)))
            endpoint.send(Evaluated(message.number, {name: float(value) for name, value in metrics.items()}))
