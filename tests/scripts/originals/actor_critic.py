"""Actor and critic learn to walk to the middle of a line: two optimizers, no data set."""

import sys

import torch
from torch import nn

STEPS, EPISODES, LENGTH = 120, 32, 8


def play(actor):
    """Play episodes side by side; return positions, actions and the discounted rewards from each step on."""
    position = torch.rand(EPISODES, 1) * 2 - 1
    states, actions, rewards = [], [], []
    for _ in range(LENGTH):
        with torch.no_grad():
            action = torch.multinomial(actor(position).softmax(1), 1)
        states.append(position)
        actions.append(action)
        position = (position + 0.2 * (2 * action - 1)).clamp(-1, 1)
        rewards.append(-position.abs())
    returns = [torch.zeros(EPISODES, 1)]
    for reward in reversed(rewards):
        returns.append(reward + 0.9 * returns[-1])
    return torch.cat(states), torch.cat(actions), torch.cat(returns[:0:-1])


torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=0.02)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)

for _ in range(STEPS):
    states, actions, returns = play(actor)
    values = critic(states)
    critic_optimizer.zero_grad()
    nn.functional.mse_loss(values, returns).backward()
    critic_optimizer.step()

    advantage = returns - values.detach()
    log_probability = actor(states).log_softmax(1).gather(1, actions)
    actor_optimizer.zero_grad()
    (-log_probability * advantage).mean().backward()
    actor_optimizer.step()

score = play(actor)[2][:EPISODES].mean().neg().item()  # how far from the middle, discounted
model = {"actor": actor.state_dict(), "critic": critic.state_dict()}
optimizer = {"actor": actor_optimizer.state_dict(), "critic": critic_optimizer.state_dict()}
torch.save({"model": model, "optimizer": optimizer, "score": score}, sys.argv[1])
