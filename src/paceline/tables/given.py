"""What a script gives a table, as arrays; what cannot be one is refused in words."""

from typing import Any

import numpy as np
import torch

from paceline.core.errors import OptionError
from paceline.tables.table_spec import Array


def as_array(given: Any, what: str) -> Array:
    """The numbers as an array; a tensor's own memory, where it has some."""
    if isinstance(given, torch.Tensor):
        try:
            return np.asarray(given.detach().cpu().numpy())
        except (TypeError, RuntimeError, ValueError) as error:
            form = given.dtype if given.layout == torch.strided else given.layout
            raise OptionError(f"{what} must be a dense tensor of a dtype that NumPy has, not {form}") from error
    if np.ma.isMaskedArray(given):
        raise OptionError(f"{what} must not be a masked array: fill what is masked, with .filled(0) for instance")
    try:
        return np.asarray(given)
    except ValueError as error:  # rows of unequal lengths
        raise OptionError(f"{what} must be an array or lists of equal lengths: {error}") from error


def in_range(array: Array, dtype: np.dtype[Any], what: str) -> Array:
    """The same numbers in another dtype, which must be able to hold them."""
    if dtype.kind == "i" and array.dtype.kind in "iu" and array.size:
        low, high, bounds = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            wrong = low if low < bounds.min else high
            raise OptionError(f"{what}: {wrong} is not within what {dtype} holds, {bounds.min} to {bounds.max}")
    return array.astype(dtype)
