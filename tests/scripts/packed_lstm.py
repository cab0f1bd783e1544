"""An LSTM on packed sequences; a batch is a dict."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

import paceline


def make_samples(count):
    generator = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(count):
        length = int(torch.randint(3, 12, (), generator=generator))
        values = torch.randn(length, 1, generator=generator)
        samples.append({"values": values, "label": int(values.sum() > 0)})
    return samples


def collate(samples):
    return {
        "values": pad_sequence([sample["values"] for sample in samples], batch_first=True),
        "lengths": torch.tensor([len(sample["values"]) for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


class Sign(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, batch):
        packed = pack_padded_sequence(batch["values"], batch["lengths"], batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.out(hidden[-1])


torch.manual_seed(0)
session = paceline.init()
samples = make_samples(1000)
loader = DataLoader(samples[:768], batch_size=32, shuffle=True, collate_fn=collate)

model = Sign()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer = session.prepare(model, optimizer)
for _ in range(4):
    for batch in session.batches(loader):
        loss = nn.functional.cross_entropy(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

test = collate(samples[768:])
accuracy = (model(test).argmax(1) == test["label"]).float().mean().item()
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
