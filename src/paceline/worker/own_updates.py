"""A worker's own update, made on its side: what the server did with the last push, done to what the worker has.

By the same kernels on the same gradient, options and mass, so parameters change by what they changed by on the server,
up to the rounding of adding it to other values. Only plain SGD allows that: see `is_plain`.
"""

from collections.abc import Sequence

import torch

from paceline.model.joint_optimizer import JointOptimizer, make_optimizer
from paceline.model.mass_optimizer import MassOptimizer
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient
from paceline.transport.messages import OwnUpdate


class OwnUpdates:
    """Steps of one worker's parameters, which it makes between two versions."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._optimizer: MassOptimizer | JointOptimizer | None = None
        self._addresses: list[int] = []  # of the parameters that it steps: a script may move them
        self._rate_factor = 1.0

    def add(
        self, parameters: list[torch.Tensor], views: Sequence[torch.Tensor], pushed: Gradient, own: OwnUpdate
    ) -> None:
        """Make the step of a push whose gradients are `views`, which are not written to."""
        if not own.mass:
            return
        addresses = [parameter.data_ptr() for parameter in parameters]
        if self._optimizer is None or addresses != self._addresses:
            self._optimizer, self._addresses = make_optimizer(self._spec.optimizer, parameters), addresses
            self._rate_factor = 1.0
        if own.rate_factor != self._rate_factor:
            self._optimizer.scale_rate(own.rate_factor)
            self._rate_factor = own.rate_factor
        if self._optimizer.multiplies_gradients(own.mass, pushed.options, stock=own.stock):
            views = [view.clone() for view in views]
        given = [None if place in pushed.missing else view for place, view in enumerate(views)]
        self._optimizer.step(own.mass, pushed.options, stock=own.stock, gradients=given)
