"""A tiny GPT in the style of nanoGPT: iterations instead of epochs, random batches, a hand-written learning rate."""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

text = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer " * 30
block_size, batch_size, n_embd, n_head = 16, 16, 32, 2
learning_rate, min_lr, warmup_iters, max_iters, eval_interval = 3e-3, 3e-4, 20, 150, 50
grad_clip = 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        mask = torch.triu(torch.full((x.size(1), x.size(1)), float("-inf")), diagonal=1)
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.blocks(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    loss = sum(model(*get_batch())[1].item() for _ in range(4)) / 4
    model.train()
    return loss


torch.manual_seed(1337)
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
model = GPT(len(chars))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))

for iter_num in range(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: loss {estimate_loss():.4f}")
    X, Y = get_batch()
    logits, loss = model(X, Y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

score = estimate_loss()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": score}, sys.argv[1])
