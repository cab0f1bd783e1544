"""Ray Train's TorchTrainer, one worker on each host of a lab with a Ray cluster across it; its loop is DDP's.

python contenders/rival_ray_train.py FOLDER ADDRESS    # the driver
"""

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
from ray.train import RunConfig, ScalingConfig

from contenders import rival_ddp


def loop(config: dict[str, Any]) -> None:
    """What every worker runs."""
    rank = ray.train.get_context().get_world_rank()
    rival_ddp.train(
        Path(config["folder"]),
        rank,
        lambda model: ray.train.torch.prepare_model(model, parallel_strategy_kwargs=rival_ddp.SETTINGS),
    )


def main() -> None:
    folder, address = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=3, placement_strategy="STRICT_SPREAD"),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=folder, name="ray-train"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
