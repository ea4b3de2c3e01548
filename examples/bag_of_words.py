"""A sentence encoder as a program: a class of your own with device arrays as weights."""

from __future__ import annotations

import numpy as np

import trio_accel as ta


def shape_of_embeddings(words: ta.programs.Array, width: int) -> tuple[tuple[int, int], str]:
    """Return the shape and dtype of `BagOfWords.encode`, which are known before the call."""
    return (words.shape[0], width), "float32"


class BagOfWords:
    """The mean of a sentence's words, projected.

    Args:
        table: A row for each word.
        projection: From rows to embeddings.
    """

    def __init__(self, table: ta.programs.Array, projection: ta.programs.Array) -> None:
        self.table = table
        self.projection = projection

    @ta.programs.method(out=shape_of_embeddings)
    def encode(self, words: ta.programs.Array, width: int) -> ta.programs.Array:
        """Return embeddings of length 1, with `width` numbers each; `words` has a row for each sentence."""
        found = self.table[words].mean(axis=1) @ self.projection[:, :width]
        return found / np.linalg.norm(found, axis=1, keepdims=True)
