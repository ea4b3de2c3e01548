"""An index of vectors by NumPy in int64 or float64, for tests of `VectorIndex`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Host: TypeAlias = npt.NDArray[Any]


def nearness(metric: str, queries: Host, vectors: Host) -> Host:
    """Return how near each vector is to each query; more is nearer."""
    if metric == "l2":
        return -((queries[:, None, :] - vectors[None, :, :]) ** 2).sum(axis=2)
    if metric == "cosine":
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return queries @ vectors.T


def expected_ids(metric: str, queries: Host, held: Mapping[int, Host], k: int) -> Host:
    """Return the ids that a search has to find, by integers: ties by id."""
    ids = np.array(sorted(held), np.int64)
    if not len(ids):
        return np.empty((len(queries), 0), np.int64)
    near = nearness(metric, queries, np.stack([held[number] for number in ids]))
    order = np.argsort(-near, axis=1, kind="stable")[:, :k]
    return np.asarray(ids[order])


def exact_vectors(metric: str, rng: np.random.Generator, count: int, width: int) -> Host:
    """Make vectors with exact products in any dtype; for "cosine" their lengths are powers of 2."""
    if metric == "cosine":
        return rng.choice(np.array([-1.0, 1.0]), (count, width))
    return rng.integers(-3, 4, (count, width)).astype(np.float64)
