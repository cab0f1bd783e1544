"""Matrix factorization on two shared tables: who likes what, explained by a few numbers per user and per item.

    paceline run --workers 4 --strategy ssp:staleness=3 examples/factors.py
    paceline run --engine sim --scenario uneven8 --strategy ssp:staleness=3 examples/factors.py

A worker reads the rows that its ratings need, which may be some clocks old, and adds its steps to them.
"""

import numpy as np

import paceline

USERS, ITEMS, RANK, BATCH, CLOCKS, RATE = 400, 100, 5, 100, 150, np.float32(0.05)

chance = np.random.default_rng(0)
tastes, kinds = chance.normal(size=(USERS, RANK)), chance.normal(size=(ITEMS, RANK))
user = np.repeat(np.arange(USERS), 30)  # sorted: a range of users is a range of ratings
item = chance.integers(0, ITEMS, len(user))
rating = ((tastes[user] * kinds[item]).sum(axis=1) / RANK**0.5).astype(np.float32)


def error(tables):
    """Mean squared error over all ratings."""
    predicted = (tables["users"][user] * tables["items"][item]).sum(axis=1)
    return {"loss": float(np.mean((predicted - rating) ** 2))}


session = paceline.init()
users = session.table("users", USERS, RANK, init=lambda *shape: np.random.default_rng(1).normal(size=shape) / RANK)
items = session.table("items", ITEMS, RANK, init=lambda *shape: np.random.default_rng(2).normal(size=shape) / RANK)
session.measure(error)

while session.clocks < CLOCKS:
    mine = np.flatnonzero(np.isin(user, session.share(USERS)))  # dealt anew when a worker comes or goes
    chosen = np.random.choice(mine, BATCH) if len(mine) else mine  # a newcomer's come a little later
    a, b = users.get(user[chosen]), items.get(item[chosen])
    off = (a * b).sum(axis=1, keepdims=True) - rating[chosen, None]
    users.inc(user[chosen], -RATE * off * b)
    items.inc(item[chosen], -RATE * off * a)
    if not session.clock(work=BATCH):
        break
