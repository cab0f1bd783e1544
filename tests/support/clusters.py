"""Small scenarios and a small regression problem for tests that train."""

from pathlib import Path

import torch
from torch.utils.data import Dataset

from paceline import scenario

EVEN = (1.0, 1.0, 1.0, 1.0)
UNEVEN = (1.0, 1.0, 0.5, 0.25)


def cluster(*speeds, events="", jitter="none", network="", seed=1, run=""):
    """A scenario with one worker per speed."""
    workers = "\n".join(f"[[workers]]\nspeed = {speed}" for speed in speeds)
    text = f"""
seed = {seed}
[run]
{run}
[compute]
seconds_per_sample = 0.01
jitter = "{jitter}"
{"[network]" if network else ""}
{network}
{workers}
{events}
"""
    return scenario.parse(text, "test", Path())


def event(kind, at, **keys):
    """One `[[events]]` entry."""
    lines = [f'kind = "{kind}"', f"at = {at}", *[f"{key.rstrip('_')} = {value}" for key, value in keys.items()]]
    return "[[events]]\n" + "\n".join(lines) + "\n"


class Rows(Dataset):
    """A linear problem whose rows know their number."""

    def __init__(self, size=50, features=6, dtype=torch.float64):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, features, generator=generator, dtype=dtype)
        self.y = self.x @ torch.arange(1.0, features + 1, dtype=dtype)[:, None] + 0.1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def network(features=6, dtype=torch.float64, seed=3):
    """A net without batch statistics, the same every time."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(features, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)


def mean_square(model, x, y):
    return ((model(x) - y) ** 2).mean()
