"""The loops people write: what each script of this folder shows, and what is expected of it under every engine.

`originals/NAME.py` is the plain PyTorch script, `NAME.py` its port. Both are started with the file to write their
result to: the state of model and optimizer, and a score. Alone the port must come to the original's bits. On workers it
must come to the original's score.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import nn

import paceline
from paceline import Session
from paceline.core.errors import OptionError, UserError

FOLDER = Path(__file__).parent
ORIGINALS = FOLDER / "originals"
MODULES = {"lion.py"}  # what scripts import; each folder has it, as a script imports from its own
WORKS = "works"
REFUSED = "refused: "


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    """One script and what is expected of it."""

    name: str
    kind: str
    batch: int | None = 32  # samples of one of the original's batches, shared out on workers; None: it makes its own
    lower: bool = False  # a lower score is better
    within: float = 0.04  # how much worse the score may be on workers; the table's notes say why
    one_loop: bool = False  # the port has all epochs in one `batches` loop
    starts: int = 1  # how often the script is started, for those that go on by themselves
    needs: str | None = None  # a key of NEEDS
    local: str = WORKS  # or REFUSED and a part of the message
    sim: str = WORKS

    @property
    def original(self) -> Path:
        """The plain PyTorch script."""
        return ORIGINALS / f"{self.name}.py"

    @property
    def port(self) -> Path:
        """The same for a run."""
        return FOLDER / f"{self.name}.py"

    def batch_size(self, workers: int) -> int | None:
        """Each worker's share of the original's batch, so that an update takes as many samples as the original's."""
        return None if self.batch is None else self.batch // workers

    def reaches(self, score: float, of_original: float) -> bool:
        """Whether a score is as good as the original's, or worse by no more than is allowed."""
        worse = score - of_original if self.lower else of_original - score
        return worse <= self.within


LOOPS = (
    Loop(name="sgd", kind="plain SGD, all epochs in one loop", one_loop=True),
    Loop(name="adam_steplr", kind="Adam, StepLR once an epoch, dropout, test after each epoch"),
    Loop(name="onecycle", kind="OneCycleLR after every batch"),
    Loop(name="cosine_epochs", kind="AdamW, CosineAnnealingLR once an epoch"),
    Loop(name="plateau", kind="ReduceLROnPlateau, validation after each epoch", lower=True, within=0.01),
    Loop(name="accumulation", kind="gradient accumulation", batch=16),
    Loop(name="clipping", kind="clipping by norm, a recurrent network", lower=True),
    Loop(name="closure", kind="optimizer.step(closure)"),
    Loop(name="autocast", kind="autocast in bfloat16, GradScaler switched off"),
    Loop(name="frozen_backbone", kind="frozen backbone, BatchNorm in eval mode"),
    Loop(name="ema", kind="moving average of the weights"),
    Loop(name="compiled", kind="torch.compile"),
    Loop(name="tied_lm", kind="language model with tied weights", lower=True, within=0.1),
    Loop(name="param_groups", kind="parameter groups, rates changed by hand"),
    Loop(name="loader_workers", kind="DataLoader with processes and collate_fn"),
    Loop(name="nanogpt", kind="iterations, get_batch, hand-written rate", batch=None, lower=True, within=0.15),
    Loop(name="named_sgd", kind="a class that derives from SGD"),
    Loop(name="adafactor", kind="Adafactor"),
    Loop(name="own_checkpoint", kind="saves and resumes by itself", starts=2),
    Loop(name="leftover_sampler", kind="leftover DistributedSampler"),
    Loop(name="early_stopping", kind="early stopping between epochs"),
    # Each worker averages the loss of its own, smaller batches; the first to go below the target ends it for all.
    Loop(name="target_loss", kind="the end inside an epoch: session.stop and break",
         within=0.1),
    Loop(name="mixup", kind="mixup with random numbers"),
    Loop(name="augmentation", kind="random numbers in the data set, dropout, BatchNorm", batch=64),
    Loop(name="batchnorm", kind="BatchNorm in train mode", batch=64),
    Loop(name="multi_task", kind="several heads, a loss that joins later"),
    Loop(name="distillation", kind="distillation from a frozen teacher"),
    Loop(name="packed_lstm", kind="packed sequences, dict batches"),
    Loop(name="contrastive", kind="contrastive, negatives of the batch", batch=128),
    Loop(name="functions", kind="train_one_epoch and validate"),
    Loop(name="clamping", kind="weights clamped in the loop", needs="edits in the loop",
         local=REFUSED + "beside the optimizer", sim=REFUSED + "beside the optimizer"),
    Loop(name="own_optimizer", kind="an optimizer with a step of its own", needs="own optimizers"),
    Loop(name="gan", kind="GAN, two optimizers", batch=64, lower=True, within=0.5, needs="several models"),
    Loop(name="actor_critic", kind="actor and critic, no data set", batch=None, lower=True, within=0.3,
         needs="several models"),
    Loop(name="muon_adamw", kind="Muon and AdamW on parts of one model", needs="several optimizers"),
    Loop(name="stream_dataset", kind="IterableDataset", batch=16, needs="streams"),
    Loop(name="stream_generator", kind="generator of batches", batch=None, lower=True, needs="streams"),
    Loop(name="epochs_loop", kind="session.epochs", needs="session.epochs"),
    Loop(name="hand_schedule", kind="session.progress", needs="session.progress"),
    Loop(name="shared_metric", kind="session.mean", needs="session.mean"),
)  # fmt: skip


# -- what some of them need --------------------------------------------------------------------------------------------


class _Decays(torch.optim.SGD):
    """An optimizer with a step of its own."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
        return None


def _trains(session: Session, *models: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
    """Make two steps of each model, side by side."""
    optimizers = [optimizer(model.parameters(), lr=0.1) for model in models]
    for model, each in zip(models, optimizers, strict=True):
        session.prepare(model, each)
    for _ in session.steps(2):
        for model, each in zip(models, optimizers, strict=True):
            each.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            each.step()


def _two_optimizers(session: Session) -> None:
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        session.prepare(model, torch.optim.SGD([parameter], lr=0.1))


def _edit(session: Session) -> None:
    model = nn.Linear(1, 1)
    _, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.steps(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        before = model.weight.item()
        optimizer.step()
        if abs(before - 0.1 - model.weight.item()) > 1e-6:
            raise UserError("what was changed in the loop is gone")
        model.weight.data.fill_(7.0)


def _stream(session: Session) -> None:
    model = nn.Linear(1, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.batches(iter([torch.ones(1)])):
        pass


NEEDS: dict[str, Callable[[Session], object]] = {
    "edits in the loop": _edit,
    "own optimizers": lambda session: _trains(session, nn.Linear(1, 1), optimizer=_Decays),
    "several models": lambda session: _trains(session, nn.Linear(1, 1), nn.Linear(1, 1)),
    "several optimizers": _two_optimizers,
    "streams": _stream,
    "session.epochs": lambda session: session.epochs,
    "session.progress": lambda session: session.progress,
    "session.mean": lambda session: session.mean,
}


def available(need: str | None) -> bool:
    """Whether a script alone can do this: tries it."""
    if need is None:
        return True
    try:
        NEEDS[need](paceline.init())
    except (AttributeError, UserError, OptionError):
        return False
    return True
