"""A GAN that learns a one-dimensional distribution: two models, two optimizers, one loop."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NOISE = 4

torch.manual_seed(0)
real_data = torch.randn(2048, 1) * 0.5 + 3.0
loader = DataLoader(TensorDataset(real_data), batch_size=64, shuffle=True)

generator = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 1))
discriminator = nn.Sequential(nn.Linear(1, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
bce = nn.functional.binary_cross_entropy_with_logits

for _ in range(6):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), NOISE))

        d_optimizer.zero_grad()
        d_loss = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
        d_loss.backward()
        d_optimizer.step()

        g_optimizer.zero_grad()
        g_loss = bce(discriminator(fake), ones)
        g_loss.backward()
        g_optimizer.step()

with torch.no_grad():
    score = abs(generator(torch.randn(1000, NOISE)).mean().item() - 3.0)
model = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
optimizer = {"generator": g_optimizer.state_dict(), "discriminator": d_optimizer.state_dict()}
torch.save({"model": model, "optimizer": optimizer, "score": score}, sys.argv[1])
