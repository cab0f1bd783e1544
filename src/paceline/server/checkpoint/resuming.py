"""Settings of a resumed run: what was not given comes from the checkpoint, what contradicts it is refused.

Another seed would shuffle the data in another order: some samples would be used twice and others never.
"""

from pathlib import Path

import msgspec

from paceline.core.errors import CheckpointError, OptionError
from paceline.core.settings import RunConfig
from paceline.server.checkpoint import files as checkpoint
from paceline.strategies import build, build_peer, canonical, is_peer


def settings_of(found: checkpoint.Checkpoint, config: RunConfig, workers: int) -> RunConfig:
    """Return the settings in force for a run resumed from this checkpoint."""
    engine = found.head.engine
    strategy = engine.get("peer") or found.run.strategy
    lacking = {"seed", "workers", "sampling"} - engine.keys()
    if lacking:
        raise CheckpointError(f"{found.path} lacks {', '.join(sorted(lacking))}: it was not written by this version")
    seed = int(engine["seed"])
    if "seed" in config.given and config.seed != seed:
        raise CheckpointError(f"{found.path} was trained with seed {seed}, not {config.seed}: leave --seed out")
    given = _canonical(config.strategy, seed)
    if "strategy" in config.given and given != _canonical(strategy, seed):
        raise CheckpointError(f"{found.path} was trained under {strategy}, not {given}: leave --strategy out")
    if engine["sampling"] == "shard" and workers != engine["workers"]:
        raise CheckpointError(
            f"{found.path} has the rows of {engine['workers']} workers (sampling 'shard'), not of {workers}: give "
            f"--workers {engine['workers']}"
        )
    return msgspec.structs.replace(config, seed=seed, strategy=strategy)


def _canonical(spec: str, seed: int) -> str:
    """Return the strategy in one spelling, however its options were given."""
    return canonical(build_peer(spec, seed, 0) if is_peer(spec) else build(spec, seed))


def checkpoint_at(given: Path) -> checkpoint.Checkpoint:
    """Read the checkpoint to resume from; `given` is a run's folder or a checkpoint's own."""
    if checkpoint.newest(given) is None:
        raise OptionError(
            f"--resume: {given} holds no checkpoint; give the folder of a run that had --checkpoint-every, or of one "
            "of its checkpoints"
        )
    return checkpoint.read(given)
