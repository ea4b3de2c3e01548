"""A sentence encoder as a program: your own class, with device arrays as weights."""

from __future__ import annotations

import numpy as np

import trio_accel as ta


def shape_of_embeddings(words: ta.programs.Array, width: int) -> tuple[tuple[int, int], str]:
    """Return the shape and dtype of `BagOfWords.encode`, which the device needs before the call."""
    return (words.shape[0], width), "float32"


class BagOfWords:
    """An encoder that projects the mean of a sentence's word vectors.

    Args:
        table: The word vectors, one in each row.
        projection: The matrix from word vectors to embeddings.
    """

    def __init__(self, table: ta.programs.Array, projection: ta.programs.Array) -> None:
        self.table = table
        self.projection = projection

    @ta.programs.method(out=shape_of_embeddings)
    def encode(self, words: ta.programs.Array, width: int) -> ta.programs.Array:
        """Return a unit vector of `width` numbers for each sentence, which is a row of `words`."""
        found = self.table[words].mean(axis=1) @ self.projection[:, :width]
        return found / np.linalg.norm(found, axis=1, keepdims=True)
