"""Tell two spirals apart, on all processes of `torchrun --nproc-per-node 4 ddp.py`."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(count, seed):
    generator = torch.Generator().manual_seed(seed)
    angle = 3 * torch.pi * torch.rand(count, generator=generator).sqrt()
    label = torch.arange(count) % 2
    turned = angle + torch.pi * label
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 9
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator), label)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--save", default="spirals.pt")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    train, test = spirals(2000, seed=1), spirals(1000, seed=2)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    layers = [torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)]
    model = torch.nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()

        model.eval()
        with torch.no_grad():
            x, y = test[rank::world_size]
            right = (model(x.to(device)).argmax(1) == y.to(device)).sum()
        counts = torch.tensor([right, len(y)], dtype=torch.float64, device=device)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {float(counts[0] / counts[1]):.3f}")

    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
