"""A mixture of experts written down token by token, in float64: the reference for the router."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]
Expert = Callable[[Rows], Rows]


def probabilities(logits: Sequence[float]) -> list[float]:
    highest = max(logits)
    powers = [math.exp(logit - highest) for logit in logits]
    return [power / math.fsum(powers) for power in powers]


def dense(
    tokens: Rows,
    logits: Rows,
    experts: Sequence[Expert],
    *,
    top_k: int,
    capacity: float = math.inf,
    overflow: str = "drop",
    broken: frozenset[int] = frozenset(),
    normalise: bool = True,
) -> tuple[Rows, list[dict[int, float]]]:
    """The output, and the weights of each token's experts in it."""
    shares = [probabilities(row) for row in logits.tolist()]
    rankings = [sorted(range(len(experts)), key=lambda one, p=p: (-p[one], one)) for p in shares]
    # For each token: its choices, and the expert that computes each. None: nobody.
    chosen = [ranking[:top_k] for ranking in rankings]
    given = place(chosen, len(experts), capacity, overflow)
    weights: list[dict[int, float]] = []
    for token, p in enumerate(shares):
        total = math.fsum(p[expert] for expert in chosen[token]) if normalise else 1.0
        placed = {expert: p[expert] / total for expert in given[token] if expert is not None}
        alive = {expert: weight for expert, weight in placed.items() if expert not in broken}
        raised = math.fsum(placed.values()) / math.fsum(alive.values()) if alive else 0.0
        weights.append({expert: weight * raised for expert, weight in alive.items()})
    computed = [expert(tokens) for expert in experts]
    output = np.zeros_like(computed[0])
    for token, row in enumerate(weights):
        for expert, weight in row.items():
            output[token] += weight * computed[expert][token]
    return output, weights


def place(chosen: list[list[int]], experts: int, capacity: float, overflow: str) -> list[list[int | None]]:
    """Who computes each choice."""
    tokens, top_k = range(len(chosen)), len(chosen[0])
    given: list[list[int | None]] = [[None] * top_k for _ in tokens]
    used = [0] * experts
    for choice in range(top_k):
        for token in tokens:
            expert = chosen[token][choice]
            if overflow == "wait" or used[expert] < capacity:
                used[expert] += 1
                given[token][choice] = expert
    return given


def weights_of(routed: Any) -> list[dict[int, float]]:
    """The weights in a router's reply, in the same form."""
    return [
        {int(expert): float(weight) for expert, weight in zip(experts, weights, strict=True) if weight}
        for experts, weights in zip(routed.experts, routed.weights, strict=True)
    ]
