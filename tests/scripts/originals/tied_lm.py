"""A small language model of characters whose embedding is also its output layer."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 20
CONTEXT = 16


class Windows(Dataset):
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return 1280

    def __getitem__(self, i):
        piece = self.tokens[i : i + CONTEXT + 1]
        return piece[:-1], piece[1:]


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return self.out(hidden)


torch.manual_seed(0)
letters = sorted(set(TEXT))
tokens = torch.tensor([letters.index(letter) for letter in TEXT])
loader = DataLoader(Windows(tokens), batch_size=32, shuffle=True)

model = LanguageModel(len(letters))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(3):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")

with torch.no_grad():
    held_out = tokens[1300:1500]
    score = nn.functional.cross_entropy(model(held_out[None, :-1])[0], held_out[1:]).item()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": score}, sys.argv[1])
