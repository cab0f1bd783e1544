"""Tasks on tables in one process and without tables: the yardstick of what staleness costs them."""

import numpy as np

from paceline.tasks import factorize, lasso, logreg


def factorized(ratings, rank, lr, reg, batch, clocks, seed):
    left = factorize.first_factors(ratings.users, rank, seed)
    right = factorize.first_factors(ratings.items, rank, seed + 1)
    chance = np.random.default_rng(seed)
    for _ in range(clocks):
        chosen = chance.integers(0, len(ratings.user), batch)
        user, item = ratings.user[chosen], ratings.item[chosen]
        by_user, by_item = factorize.gradient(left[user], right[item], ratings.value[chosen], reg)
        np.add.at(left, user, -lr * by_user)
        np.add.at(right, item, -lr * by_item)
    return left, right


def descended(problem, lam, block, clocks):
    weights, residual = np.zeros(problem.features), problem.target.copy()
    for clock in range(clocks):
        features = (clock * block + np.arange(block)) % problem.features
        weights[features] += lasso.descend(problem, residual, weights[features], features, lam)
    return weights


def regressed(examples, lr, reg, batch, clocks, seed):
    weights, chance = np.zeros(examples.features), np.random.default_rng(seed)
    for _ in range(clocks):
        part = examples.chosen(chance.integers(0, examples.rows, batch))
        known = np.unique(part.feature)
        weights[known] -= lr * logreg.gradient(part, known, weights[known], reg)
    return weights
