"""paceline's script of a race on a lab, for `paceline serve` and `paceline join`.

paceline serve ... contenders/rival_paceline.py FOLDER
"""

import sys
from pathlib import Path

import torch

import paceline
from contenders import lab_mnist

ENOUGH = 1000  # epochs: the target or the limit ends the run


def main() -> None:
    session = paceline.init()
    place = lab_mnist.RankPlace(Path(sys.argv[1]), session.worker)
    task, data, held_out = place.task, *(lab_mnist.load(place.task.data, part) for part in ("train", "held_out"))
    model = lab_mnist.build(task.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    session.prepare(model, optimizer, evaluate=lambda copy: {"accuracy": lab_mnist.accuracy(copy, held_out)})
    place.wait()
    for x, y in session.batches(data, batch_size=task.batch_size, epochs=ENOUGH):
        optimizer.zero_grad()
        lab_mnist.loss(model, x, y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
