"""A small character transformer with AdamW on the text in `input.txt` of the data folder.

A sample is a stretch of `context` characters, predicted one by one. The last tenth of the text is held out.
Evaluates `loss` (nats per character) and `perplexity` on the first `test_samples` stretches of it.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import DataError, OptionError
from paceline.tasks.inputs import require_file, require_folder, within

CHUNK = 100  # stretches per forward pass of an evaluation; bounds the memory of activations


def load(folder: Path) -> tuple[torch.Tensor, int]:
    """Read the text as character numbers, and return how many different characters it has."""
    path = require_file(folder, "input.txt")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert the file") from error
    number = {character: position for position, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text], dtype=torch.int64), len(number)


def stretches(text: torch.Tensor, context: int) -> TensorDataset:
    """Cut the text into stretches of `context` characters; the targets are the same, shifted by one character."""
    count = (len(text) - 1) // context
    if count < 1:
        raise DataError(f"{len(text)} characters are too few for context={context}; lower it or use a longer text")
    inputs = text[: count * context].view(count, context)
    return TensorDataset(inputs, text[1 : count * context + 1].view(count, context))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        joint = self.project(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        y: torch.Tensor = self.feed_forward(x)
        return x + y


class Transformer(nn.Module):
    """Maps characters to scores of the character that follows each of them."""

    def __init__(self, characters: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.score = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))
        nn.init.normal_(self.character.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.score(self.blocks(self.character(text) + self.place[: text.shape[1]]))
        return scores


def character_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy per character, in nats."""
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def score(model: nn.Module, held_out: TensorDataset) -> dict[str, float]:
    """Return the loss per character and its exponential, over all stretches."""
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in held_out.tensors)
    total = 0.0
    for x, y in zip(torch.split(inputs, CHUNK), torch.split(targets, CHUNK), strict=True):
        total += len(x) * float(character_loss(model, x, y))
    loss = total / len(inputs)
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}  # exp(710) overflows


def train() -> None:
    """Entry point of `paceline run --task shakespeare`."""
    session = paceline.init()
    folder = require_folder("shakespeare", session.data_dir, "input.txt", "../shared/data/tinyshakespeare")
    text, characters = session.once(f"shakespeare-{folder}", lambda: load(folder))
    context = within("context", session.option("context", 64), low=1)
    layers = within("layers", session.option("layers", 2), low=1)
    heads = within("heads", session.option("heads", 4), low=1)
    width = within("width", session.option("width", 64), low=heads)
    if width % heads:
        raise OptionError(f"width must be a multiple of heads={heads}, not {width}; give --set width={heads * 16}")
    split = len(text) * 9 // 10
    whole_set, held_out = stretches(text[:split], context), stretches(text[split:], context)
    samples = within("samples", session.option("samples", len(whole_set)), low=1, high=len(whole_set))
    tests = session.option("test_samples", min(200, len(held_out)))
    test_samples = within("test_samples", tests, low=1, high=len(held_out))
    lr = session.option("lr", 3e-3)
    weight_decay = session.option("weight_decay", 0.01)
    batch_size = session.option("batch_size", 16)
    epochs = session.option("epochs", 2.0)
    train_set = TensorDataset(*(tensor[:samples] for tensor in whole_set.tensors))
    test_set = TensorDataset(*(tensor[:test_samples] for tensor in held_out.tensors))

    def evaluate(model: nn.Module) -> dict[str, float]:
        return score(model, test_set)

    model = Transformer(characters, context, layers, heads, width).to(session.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    session.prepare(model, optimizer, evaluate=evaluate)
    for x, y in session.batches(train_set, batch_size=batch_size, epochs=epochs):
        optimizer.zero_grad()
        loss = character_loss(model, x.to(session.device), y.to(session.device))
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
