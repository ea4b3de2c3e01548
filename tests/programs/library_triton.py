"""The program in Triton: its kernels compute on tensors of PyTorch, made of the device's arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from library_torch import TorchProgram, torch

import trio_accel as ta
from trio_accel.programs import Array

triton: Any = import_module("triton")  # no dependency
tl: Any = import_module("triton.language")


@triton.jit
def _dense(  # noqa: PLR0917  # by position, as in all of its kernels
    x, weights, bias, out, depth, columns, row_step, step, block: tl.constexpr, width: tl.constexpr
):
    """One row of ``tanh(x @ weights + bias)``; all but x is packed."""
    row, i, j = tl.program_id(0), tl.arange(0, block), tl.arange(0, width)
    values = tl.load(x + row * row_step + i * step, mask=i < depth, other=0.0)
    inside = (i < depth)[:, None] & (j < columns)[None, :]
    matrix = tl.load(weights + i[:, None] * columns + j[None, :], mask=inside, other=0.0)
    sums = tl.sum(values[:, None] * matrix, axis=0) + tl.load(bias + j, mask=j < columns, other=0.0)
    # This is the tanh.
    tl.store(out + row * columns + j, 2.0 * tl.sigmoid(2.0 * sums) - 1.0, mask=j < columns)


@triton.jit
def _add_rows(x, total, rows, row_step, step, block: tl.constexpr):
    """The sum of a column, added to the running one."""
    column, i = tl.program_id(0), tl.arange(0, block)
    values = tl.load(x + i * row_step + column * step, mask=i < rows, other=0.0)
    tl.store(total + column, tl.load(total + column) + tl.sum(values, axis=0))


@triton.jit
def _twice(x, out, columns, row_step, step, out_row_step, out_step, width: tl.constexpr):
    """One row of ``x + x``."""
    row, j = tl.program_id(0), tl.arange(0, width)
    values = tl.load(x + row * row_step + j * step, mask=j < columns)
    tl.store(out + row * out_row_step + j * out_step, values + values, mask=j < columns)


class TritonProgram(TorchProgram):
    """On CUDA, and on the CPU with ``TRITON_INTERPRET=1``."""

    def dense(self, x: Any) -> Any:
        (depth, columns), rows = self.weights.shape, len(x)
        out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        blocks = triton.next_power_of_2(depth), triton.next_power_of_2(columns)
        _dense[rows,](x, self.weights, self.bias, out, depth, columns, *x.stride(), *blocks)
        return out

    def twice(self, x: Array) -> Array:
        taken = self.taken(x)
        return self._doubled(taken, torch.empty_like(taken))

    @ta.programs.method(updates=["self.total"])
    def add(self, x: Array) -> None:
        taken = self.taken(x)
        rows, columns = taken.shape
        _add_rows[columns,](taken, self.total, rows, *taken.stride(), triton.next_power_of_2(rows))

    @ta.programs.method(updates=["x"])
    def double(self, x: Array) -> None:
        taken = self.taken(x)
        self._doubled(taken, taken)

    def _doubled(self, x: Any, out: Any) -> Any:
        rows, columns = x.shape
        _twice[rows,](x, out, columns, *x.stride(), *out.stride(), triton.next_power_of_2(columns))
        return out
