"""The loops people write: what each script of this folder shows, and what is expected of it under every engine.

`originals/NAME.py` is the plain PyTorch script, `NAME.py` its port. Both are started with the file to write their
result to: the state of model and optimizer, and a score. Alone the port must come to the original's bits. On workers it
must come to the original's score.
"""

from pathlib import Path

import msgspec

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
    Loop(name="clamping", kind="weights clamped in the loop",
         local=REFUSED + "beside the optimizer", sim=REFUSED + "beside the optimizer"),
    Loop(name="own_optimizer", kind="an optimizer with a step of its own"),
    Loop(name="gan", kind="GAN, two optimizers", batch=64, lower=True, within=0.5),
    Loop(name="actor_critic", kind="actor and critic, no data set", batch=None, lower=True, within=0.3),
    Loop(name="muon_adamw", kind="Muon and AdamW on parts of one model"),
    Loop(name="stream_dataset", kind="IterableDataset", batch=16),
    Loop(name="stream_generator", kind="generator of batches", batch=None, lower=True),
    Loop(name="epochs_loop", kind="session.epochs"),
    Loop(name="hand_schedule", kind="session.progress"),
    Loop(name="shared_metric", kind="session.mean"),
)  # fmt: skip
