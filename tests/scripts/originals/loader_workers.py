"""Texts of different length, padded by a collate_fn in two loader processes."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    """Sequences of tokens; the label says whether token 1 occurs more often than token 2."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(5, 20, (count,), generator=generator)
        self.texts = [torch.randint(1, 6, (int(length),), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        text = self.texts[i]
        return text, int((text == 1).sum() > (text == 2).sum())


def collate(samples):
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(texts, batch_first=True), torch.tensor(labels)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16, padding_idx=0)
        self.out = nn.Linear(16, 2)

    def forward(self, texts):
        return self.out(self.embed(texts).sum(1))


if __name__ == "__main__":
    torch.manual_seed(0)
    train_set, test_set = Texts(640), Texts(900)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=collate, num_workers=2)
    model = Bag()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(3):
        for texts, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(texts), labels).backward()
            optimizer.step()
    texts, labels = collate([test_set[i] for i in range(640, 900)])
    accuracy = (model(texts).argmax(1) == labels).float().mean().item()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
