"""Images stay bytes until the model sees them, so that a data set takes a quarter of the memory in every process."""

import torch
from torch import nn


class Pixels(nn.Module):
    """The first layer of an image model: bytes to floats of about zero mean and unit deviation."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean = 255 * mean
        self.deviation = 255 * deviation

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() - self.mean) / self.deviation
