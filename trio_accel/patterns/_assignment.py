"""Which expert gets which token, within the capacity of each; nothing here waits."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = ["Assignment", "ExpertOverflow", "Shares", "assign", "capacity_of"]

ExpertOverflow: TypeAlias = Literal["drop", "next_best", "wait"]
"""What becomes of a token whose expert is full; see `MoeRouter`."""

Shares = NDArray[np.float64]


@attrs.frozen(kw_only=True, eq=False)
class Assignment:
    """Tokens and their experts; all arrays have the shape (tokens, top_k).

    Attributes:
        first: The experts that each token chose, the likeliest first.
        importance: The weights of these.
        experts: Those that it was given to in the end.
        weights: The weights of these.
        is_placed: Where there was room.
    """

    first: NDArray[np.intp]
    importance: Shares
    experts: NDArray[np.intp]
    weights: Shares
    is_placed: NDArray[np.bool]


def capacity_of(tokens: int, top_k: int, experts: int, factor: float | None) -> int:
    """How many tokens an expert takes at once: the factor times its share if all had the same, rounded up."""
    capacity = math.inf if factor is None else factor * tokens * top_k / experts
    # A token chooses an expert once at most.
    return tokens if capacity >= tokens else max(1, math.ceil(capacity))


def assign(
    shares: Shares, top_k: int, capacity: int, overflow: ExpertOverflow, *, normalise: bool
) -> Assignment:
    """Give each token to its experts.

    First choices go before second ones, and earlier tokens before later ones (Lepikhin et al. 2021). Equally
    likely experts are taken in their order.

    Args:
        shares: The gate's probabilities, of shape (tokens, experts), at least `top_k` above zero in each row.
        top_k: How many experts a token chooses.
        capacity: The most tokens of an expert.
        overflow: What becomes of a token whose expert is full.
        normalise: Whether the weights of a token have the sum 1; otherwise they are probabilities.
    """
    ranking = np.argsort(-shares, axis=1, kind="stable")
    first = ranking[:, :top_k]
    experts, is_placed = first.copy(), np.ones(first.shape, dtype=np.bool)
    if overflow != "wait":
        is_placed = _places(first, shares.shape[1]) < capacity
    if overflow == "next_best":
        _place_again(shares, ranking, experts, is_placed, capacity)
    return Assignment(
        first=first,
        importance=_weights(shares, first, normalise=normalise),
        experts=experts,
        weights=_weights(shares, experts, normalise=normalise),
        is_placed=is_placed,
    )


def _places(first: NDArray[np.intp], experts: int) -> NDArray[np.intp]:
    """The place of each choice in the row of its expert."""
    flat = first.T.ravel()  # first choices before second ones
    places = np.empty(len(flat), dtype=np.intp)
    for expert in range(experts):
        chosen = np.flatnonzero(flat == expert)
        places[chosen] = np.arange(len(chosen))
    return places.reshape(first.T.shape).T


def _place_again(
    shares: Shares,
    ranking: NDArray[np.intp],
    experts: NDArray[np.intp],
    is_placed: NDArray[np.bool],
    capacity: int,
) -> None:
    """Give choices that found their expert full to the next best one that has room, in the same order."""
    top_k = experts.shape[1]
    used = np.bincount(experts[is_placed], minlength=shares.shape[1])
    for choice in range(top_k):
        for token in np.flatnonzero(~is_placed[:, choice]):
            # Its other choices are full, or have it.
            for expert in ranking[token, top_k:]:
                is_new = expert not in experts[token][is_placed[token]]
                if used[expert] < capacity and shares[token, expert] > 0 and is_new:
                    used[expert] += 1
                    experts[token, choice], is_placed[token, choice] = expert, True
                    break


def _weights(shares: Shares, experts: NDArray[np.intp], *, normalise: bool) -> Shares:
    weights: NDArray[Any] = np.take_along_axis(shares, experts, axis=1)
    return weights / weights.sum(axis=1, keepdims=True) if normalise else weights
