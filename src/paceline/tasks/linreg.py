"""Linear regression as in the experiment of the fastest-k publications (Kas Hanna et al. 2020/2022).

Features are uniform integers 1..10, true weights uniform integers 1..100, noise has unit deviation, and the loss is
half the mean squared residual. Every worker keeps its own rows (`sampling="shard"`) and by default uses all of them in
each push. Evaluates `error`, the loss minus its exact minimum, and `loss`.

Everything is float64: the first error is about 4e8 and the floors that the publication compares lie near 4e-4, twelve
digits below it, where float32 residuals (predictions are about 3e4) are off by more than the remaining error.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.tasks.inputs import within


def make_data(samples: int, features: int, noise: float, seed: int) -> TensorDataset:
    """Make the publication's random problem; the same for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 11, (samples, features), generator=generator).double()
    weights = torch.randint(1, 101, (features,), generator=generator).double()
    y = x @ weights + noise * torch.randn(samples, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y)


def best_weights(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the weights of least loss; the orthogonal solver also handles fewer rows than features."""
    solution: torch.Tensor = torch.linalg.lstsq(x, y[:, None], driver="gelsd").solution
    return solution[:, 0]


class Linear(nn.Module):
    """One weight per feature, no bias, all zero at the start."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def half_mean_square(residual: torch.Tensor) -> torch.Tensor:
    """Return the publication's loss."""
    return residual.square().mean() / 2


def train() -> None:
    """Entry point of `paceline run --task linreg`."""
    session = paceline.init()
    samples = within("samples", session.option("samples", 2000), low=session.workers)  # at least a row per worker
    features = within("features", session.option("features", 100), low=1)
    noise = within("noise", session.option("noise", 1.0), low=0.0)  # standard deviation
    data_seed = within("data_seed", session.option("data_seed", 0), low=0)  # not the run's seed
    lr = session.option("lr", 5e-4)  # the publication's; 2 / (largest curvature) = 6.6e-4 is the limit of stability
    momentum = within("momentum", session.option("momentum", 0.0), low=0.0)
    rows = session.option("batch_size", samples // session.workers)
    epochs = session.option("epochs", 400.0)  # 1e-4 of the first error takes about 270 rounds

    key = f"linreg-{samples}-{features}-{noise}-{data_seed}"
    train_set = session.once(key, lambda: make_data(samples, features, noise, data_seed))
    x_all, y_all = train_set.tensors
    best = session.once(f"{key}-best", lambda: best_weights(x_all, y_all))

    def evaluate(model: nn.Module) -> dict[str, float]:
        (weight,) = model.parameters()
        distance = weight.detach().cpu() - best
        # The loss is exactly quadratic around its minimum; this form avoids the difference of nearly equal numbers.
        error = float(half_mean_square(x_all @ distance))
        return {"error": error, "loss": error + float(half_mean_square(x_all @ best - y_all))}

    model = Linear(features).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    session.prepare(model, optimizer, evaluate=evaluate)
    for x, y in session.batches(train_set, batch_size=rows, epochs=epochs, sampling="shard"):
        optimizer.zero_grad()
        loss = half_mean_square(model(x.to(session.device)) - y.to(session.device))
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
