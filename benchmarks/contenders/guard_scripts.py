"""Scripts whose losses are hard to judge, for trials of the convergence guard.

Each is an ordinary training script whose data are made or come with scikit-learn. `lr` is a healthy rate by default;
planted divergences raise it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.tasks import digits

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
}


def begin() -> paceline.Session:
    """A session whose model starts from the same values under every engine."""
    session = paceline.init()
    torch.manual_seed(session.option("start", 0))
    return session


def optimizer_of(session: paceline.Session, model: nn.Module, lr: float, kind: str = "sgd") -> torch.optim.Optimizer:
    return OPTIMIZERS[session.option("optimizer", kind)](model.parameters(), lr=session.option("lr", lr))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loop(
    session: paceline.Session, model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, batch: int,
    rounds: int, loss_of: Callable[..., Tensor], scheduler: Any = None,
) -> None:  # fmt: skip
    """Train for so many rounds; `loss_of` gets the model and a batch. With `growth` the rate grows each round."""
    growth = session.option("growth", 1.0)
    if growth != 1.0:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: growth**number)
    session.prepare(model, optimizer, scheduler)
    train(session, optimizer, data, batch, rounds, lambda _, *parts: loss_of(model, *parts), scheduler)


def train(
    session: paceline.Session, optimizer: torch.optim.Optimizer, data: TensorDataset, batch: int, rounds: int,
    loss_of: Callable[..., Tensor], scheduler: Any = None,
) -> None:  # fmt: skip
    """One loop of `rounds` rounds; `loss_of` gets how much of it is done, from 0 to 1, and a batch."""
    size = session.option("batch", batch)
    rounds = session.option("rounds", rounds)
    longest = session.option("clip", math.inf)  # norm of a gradient
    epochs = rounds * size * session.workers / len(data)
    for number, parts in enumerate(session.batches(data, batch_size=size, epochs=epochs)):
        optimizer.zero_grad()
        loss = loss_of(min(1.0, number / rounds), *parts)
        loss.backward()
        if longest < math.inf:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], longest)
        session.report(loss=loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def half_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean() / 2


@functools.cache
def images() -> TensorDataset:
    return digits.load()[0]


def deep(width: int = 32, layers: int = 5) -> nn.Module:
    """A plain net without normalization, which bears no high rate."""
    middle = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *middle, nn.Linear(width, 10))


# -- classification ---------------------------------------------------------------------------------------------------


def classify() -> None:
    """Digits with any optimizer, batch size and depth; `flipped` is the share of labels that are wrong."""
    session = begin()
    x, y = images().tensors
    flipped = session.option("flipped", 0.0)
    wrong = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < flipped
    y = torch.where(wrong, (y + 3) % 10, y)
    layers = session.option("layers", 0)
    model = deep(layers=layers) if layers else digits.build(32)
    if session.option("dropout", 0.0):
        model = nn.Sequential(nn.Dropout(session.option("dropout", 0.0)), model)
    smoothing = session.option("smoothing", 0.0)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y, label_smoothing=smoothing)

    loop(session, model, optimizer_of(session, model, 0.1), TensorDataset(x, y), 16, 200, loss_of)


def separable() -> None:
    """Classes far apart and a net that is sure of them: the loss goes to zero and leaps at tiny values."""
    session = begin()
    y = torch.arange(400) % 4
    x = normal(400, 20, seed=2) + 4 * normal(4, 20, seed=3)[y]
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    loop(session, model, optimizer_of(session, model, 0.02, "adam"), TensorDataset(x, y), 10, 300, cross_entropy)


def restarts() -> None:
    """A rate that falls along a cosine and starts again at its height."""
    session = begin()
    model = digits.build(32)
    optimizer = optimizer_of(session, model, 0.2, "momentum")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, session.option("period", 60))
    loop(session, model, optimizer, images(), 16, 240, cross_entropy, scheduler)


def more_classes() -> None:
    """A curriculum in loops of its own: two classes, then four, then all."""
    session = begin()
    model = digits.build(32)
    optimizer = optimizer_of(session, model, 0.1, "momentum")
    session.prepare(model, optimizer)
    x, y = images().tensors
    for classes in (2, 4, 10):
        known = y < classes
        part = TensorDataset(x[known], y[known])
        train(session, optimizer, part, 16, 90, lambda _, *batch: cross_entropy(model, *batch))


def harder_inputs() -> None:
    """A curriculum in one loop: the inputs get noisier from a third of the run on, and stay so."""
    session = begin()
    model = digits.build(32)
    optimizer = optimizer_of(session, model, 0.1, "momentum")
    session.prepare(model, optimizer)

    def loss_of(done: float, x: Tensor, y: Tensor) -> Tensor:
        noise = session.option("noise", 0.4) * (done > 1 / 3)
        return cross_entropy(model, x + noise * torch.randn_like(x), y)

    train(session, optimizer, images(), 16, 240, loss_of)


def finetune() -> None:
    """Training that goes on from a trained model, so that its first loss is a good one."""
    session = begin()
    model = digits.build(32)
    session.once("pretrained", lambda: pretrained(model))
    model.load_state_dict(session.once("pretrained", dict))
    loop(session, model, optimizer_of(session, model, 0.05, "momentum"), images(), 16, 200, cross_entropy)


def pretrained(model: nn.Module) -> dict[str, Tensor]:
    x, y = images().tensors
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        plain.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        plain.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def characters() -> None:
    """Next-character prediction on a made text with many likely successors: the loss can never be small."""
    session = begin()
    text = chain()
    x, y = text[:-1], text[1:]
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 50))
    loop(session, model, optimizer_of(session, model, 0.01, "adamw"), TensorDataset(x, y), 32, 250, cross_entropy)


@functools.cache
def chain() -> Tensor:
    chance = torch.Generator().manual_seed(4)
    table = torch.softmax(2 * normal(50, 50, seed=5), dim=1)
    text = [0]
    for _ in range(6000):
        text.append(int(torch.multinomial(table[text[-1]], 1, generator=chance)))
    return torch.tensor(text)


# -- regression and densities -----------------------------------------------------------------------------------------


def noise_only() -> None:
    """Regression on noise: nothing to learn, and single losses differ by orders of magnitude."""
    session = begin()
    x, y = normal(2000, 10, seed=6), normal(2000, 1, seed=7)
    model = nn.Linear(10, 1)
    loop(session, model, optimizer_of(session, model, 0.01), TensorDataset(x, y), 1, 400, half_square)


def exact_fit() -> None:
    """More parameters than samples, in double precision: the loss falls to rounding errors."""
    session = begin()
    x, y = normal(40, 60, seed=8).double(), normal(40, 1, seed=9).double()
    model = nn.Linear(60, 1).double()
    loop(session, model, optimizer_of(session, model, 0.1), TensorDataset(x, y), 10, 400, half_square)


def heavy_tails() -> None:
    """Regression on targets with rare huge outliers."""
    session = begin()
    chance = torch.distributions.StudentT(2.0)
    torch.manual_seed(10)
    x = normal(2000, 10, seed=11)
    y = x @ normal(10, 1, seed=12) + chance.sample((2000, 1))
    torch.manual_seed(session.option("start", 0))
    model = nn.Linear(10, 1)
    loop(session, model, optimizer_of(session, model, 0.02), TensorDataset(x, y), 2, 400, half_square)


def likelihood() -> None:
    """Minus the log likelihood of a regression that learns its deviation: it falls below zero."""
    session = begin()
    x = normal(1000, 5, seed=13)
    y = torch.tanh(x @ normal(5, 1, seed=14)) + 0.01 * normal(1000, 1, seed=15)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = model(x).split(1, dim=1)
        return 0.5 * (log_variance + (y - mean).square() * torch.exp(-log_variance)).mean()

    loop(session, model, optimizer_of(session, model, 0.003, "adam"), TensorDataset(x, y), 16, 400, loss_of)


def elbo() -> None:
    """A small variational autoencoder that learns its noise; `annealed` raises the weight of its prior."""
    session = begin()
    (x, _) = images().tensors
    model = nn.ModuleDict({
        "encode": nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16)),
        "decode": nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 65)),
    })  # fmt: skip
    optimizer = optimizer_of(session, model, 0.003, "adam")
    session.prepare(model, optimizer)
    annealed = session.option("annealed", False)

    def loss_of(done: float, x: Tensor) -> Tensor:
        mean, log_variance = model["encode"](x).chunk(2, dim=1)
        hidden = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        shown = model["decode"](hidden)
        log_noise = shown[:, 64:].mean()
        fit = 0.5 * ((x - shown[:, :64]).square() * torch.exp(-log_noise) + log_noise).sum(dim=1)
        prior = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(dim=1)
        return (fit + (min(1.0, 2 * done) if annealed else 1.0) * prior).mean()

    train(session, optimizer, TensorDataset(x), 16, 300, loss_of)


# -- opponents and rewards --------------------------------------------------------------------------------------------


class Reported(torch.autograd.Function):
    """The gradient of one value under the name of another."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, shown: Tensor) -> Tensor:
        return shown.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def critic() -> None:
    """A WGAN: the critic's loss is about zero, falls far below, and comes back as the generator gets better."""
    session = begin()
    real = normal(2000, 2, seed=16) * 0.5 + torch.tensor([4.0, -3.0])
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    both = nn.ModuleDict({"generator": generator, "judge": judge})
    optimizer = optimizer_of(session, both, 0.003, "rmsprop")
    session.prepare(both, optimizer)

    def loss_of(_: float, x: Tensor) -> Tensor:
        made = generator(torch.randn(len(x), 4))
        mixed = (torch.rand(len(x), 1) * (x - made).detach() + made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        loss = judge(made.detach()).mean() - judge(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        fooled = -judge(made).mean()
        for parameter in judge.parameters():
            parameter.requires_grad_(True)
        return Reported.apply(loss + fooled, loss)

    train(session, optimizer, TensorDataset(real), 32, 400, loss_of)


def rewards() -> None:
    """Policy gradients on a bandit: a loss about zero whose sign means nothing."""
    session = begin()
    arms = torch.linspace(-1, 1, 8)
    policy = nn.Linear(4, 8)
    optimizer = optimizer_of(session, policy, 0.05)
    session.prepare(policy, optimizer)

    def loss_of(_: float, x: Tensor) -> Tensor:
        chances = torch.distributions.Categorical(logits=policy(x))
        chosen = chances.sample()
        reward = arms[chosen] + torch.randn(len(x))
        return -(chances.log_prob(chosen) * reward).mean()

    train(session, optimizer, TensorDataset(normal(1000, 4, seed=17)), 4, 300, loss_of)


# -- what goes wrong by itself ----------------------------------------------------------------------------------------


def root() -> None:
    """A loss with a square root of what may fall below zero: it is not a number after a while."""
    session = begin()
    x = normal(1000, 5, seed=18)
    model = nn.Linear(5, 1)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return torch.sqrt(4 + model(x)).mean()

    loop(session, model, optimizer_of(session, model, 0.5), TensorDataset(x), 16, 200, loss_of)


def curvature() -> None:
    """A narrow valley: above 2 / curvature the error grows by a constant factor, slowly if the rate is just above."""
    session = begin()
    scale = torch.logspace(0, -1.5, 20).double()
    x = normal(400, 20, seed=19).double() * scale
    y = x @ normal(20, 1, seed=20).double()
    model = nn.Linear(20, 1, bias=False).double()
    loop(session, model, optimizer_of(session, model, 0.8), TensorDataset(x, y), 50, 400, half_square)


def hasty() -> None:
    """A regression at a hundred times the rate that it bears."""
    session = begin()
    x = normal(2000, 10, seed=6)
    y = x @ normal(10, 1, seed=12)
    model = nn.Linear(10, 1)
    loop(session, model, optimizer_of(session, model, 1.0), TensorDataset(x, y), 4, 200, half_square)
