"""The evaluator's side of the conversation: the user's function on each version the server asks about.

It runs the same script as the workers, up to `prepare`, in a process of its own; so the function has everything that
exists before `prepare`, and measuring takes nothing from the workers.
"""

from typing import NoReturn

from paceline.model.measuring import Evaluate as EvaluateFunction
from paceline.model.measuring import measure
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
