"""Meshes: ranks by data, pipeline and tensor; the order of a pipeline's work; layers that ranks share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

from ..programs import current_rank

__all__ = ["Mesh", "column_linear", "row_linear"]

Order: TypeAlias = Literal["1f1b", "gpipe"]
Turn: TypeAlias = tuple[Literal["forward", "backward"], int]


@attrs.frozen
class Mesh:
    """The coordinates of a rank: adjacent ranks share a layer, and stages are farthest apart.

    Attributes:
        data: The number of ranks with the same parameters and different samples.
        pipeline: The number of stages, each with some of the layers.
        tensor: The number of ranks that share each layer of a stage.
        rank: The number of the rank.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.data * self.pipeline * self.tensor

    @property
    def tensor_rank(self) -> int:
        """The rank's number among the ranks that share its layers."""
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """The rank's number among the ranks with other samples."""
        return self.rank // self.tensor % self.data

    @property
    def stage(self) -> int:
        """The number of the stage."""
        return self.rank // (self.tensor * self.data)

    @property
    def is_first(self) -> bool:
        """Whether the rank's stage gets the samples."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank's stage computes the loss."""
        return self.stage == self.pipeline - 1

    @property
    def cell(self) -> int:
        """The number of the rank's parameters: ranks with the same number differ only in their samples."""
        return self.stage * self.tensor + self.tensor_rank

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the groups of ranks that differ only in one coordinate, by its name."""
        grid = np.arange(self.size).reshape(self.pipeline, self.data, self.tensor)
        axes = {"pipeline": 0, "data": 1, "tensor": 2}
        return {
            name: np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()
            for name, axis in axes.items()
        }

    def part(self, array: Any, axis: int = 0) -> Any:
        """Return this rank's part of a layer's array, along an axis.

        Raises:
            ValueError: The ranks that share the layer cannot share the axis equally.
        """
        extent, rest = divmod(array.shape[axis], self.tensor)
        if rest:
            raise ValueError(f"{self.tensor} ranks cannot share axis {axis} of shape {tuple(array.shape)}")
        span = slice(self.tensor_rank * extent, (self.tensor_rank + 1) * extent)
        return array[(slice(None),) * axis + (span,)]


def turns(order: Order, stage: int, stages: int, parts: int) -> Iterator[Turn]:
    """Yield what a stage of a pipeline does, for parts of a batch.

    With ``"gpipe"`` (Huang et al., 2019), all parts go forward, and then backward. With ``"1f1b"`` (Narayanan
    et al., 2019), a stage keeps no more of them than there are stages from it to the last one.
    """
    warmup = parts if order == "gpipe" else min(stages - 1 - stage, parts)
    for number in range(parts + warmup):
        if number < parts:
            yield "forward", number
        if number >= warmup:
            yield "backward", number - warmup


def column_linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Compute this rank's part of a layer's outputs (Shoeybi et al., 2019), in a method of a `Module`.

    Args:
        x: Tensor of shape (..., inputs), which all ranks that share the layer have.
        weight: This rank's rows of the layer's matrix, of shape (outputs / ranks, inputs).
        bias: This rank's elements.

    Returns:
        Tensor of shape (..., outputs / ranks). Its gradient for `x` is summed over the ranks.
    """
    rank, copied = current_rank().group("tensor"), x.view_as(x)
    if copied.requires_grad:

        def summed(slope: Any) -> Any:
            total = slope.contiguous().clone()
            rank.all_reduce(total)
            return total

        copied.register_hook(summed)
    return torch_of_model().nn.functional.linear(copied, weight, bias)


def row_linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Compute the outputs of a layer from inputs shared between ranks, as `column_linear` makes them.

    Args:
        x: This rank's part, of shape (..., inputs / ranks).
        weight: This rank's columns of the layer's matrix, of shape (outputs, inputs / ranks).
        bias: All elements; it is added once.

    Returns:
        Tensor of shape (..., outputs), the same on all ranks.
    """
    # The gradient of a sum is also the gradient of each part, so autograd does not have to know the sum.
    total = torch_of_model().nn.functional.linear(x, weight).contiguous()
    current_rank().group("tensor").all_reduce(total)
    return total if bias is None else total + bias


def torch_of_model() -> Any:
    """Return PyTorch, which the module of the model has imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise ImportError("a model of train.Module needs PyTorch: import torch at the top of its module")
    return torch
