"""Rows of a table by indices, and the gradient of the table."""

from __future__ import annotations

from ..backends.base import DType
from ..devices import AccelRef, Operand, device_of
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, Out, Scatter, check_array
from ._library import naming

__all__ = ["embedding", "embedding_grad"]

# An index below 0 is moved so far down that none from the end is meant; `naming` tells of the index.
_ROW = "where(int64(indices) < 0, int64(indices) - length, int64(indices)), i(-1)"
_taking = Elementwise[AccelRef](
    f"weight[{_ROW}]", inputs=("indices", "weight", "length"), operation="nn.embedding", is_checked=True
)
_adding = Scatter(f"made[{_ROW}]", "add", inputs=("made", "indices", "length"), operation="nn.embedding_grad")


@composed
async def embedding(
    indices: Operand, weight: Operand, padding_idx: int | None = None, *, out: Out = None
) -> AccelRef:
    """Take rows of a table, as `torch.nn.functional.embedding`: one launch.

    The device checks indices before it uses them. `ta.arrays.take` also takes indices from the end.

    Args:
        indices: Whole numbers from 0 to V - 1, of any shape.
        weight: Table of shape (V, D).
        padding_idx: Row that `embedding_grad` leaves alone; it is only checked here.
        out: Array to write to.

    Returns:
        The rows: the shape of `indices`, and then D.

    Raises:
        TypeError: An argument is no array, or `indices` are no whole numbers.
        ValueError: `weight` has not two axes, there is no row `padding_idx`, or `out` has another shape or
            shares memory with an argument.
        OutOfRangeError: An index is not from 0 to V - 1. It is an `IndexError`, too.
        NotSupportedError: float8.
    """
    name = "nn.embedding"
    check_array(name, indices=indices, weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"{name}: weight must have shape (V, D), got shape {weight.shape}")
    _check(name, indices, weight.shape[0], padding_idx)
    shape = (*indices.shape, weight.shape[1])
    with naming(name, "index", weight.shape[0]):
        return await _taking(indices[..., None], weight, weight.shape[0], shape=shape, out=out)


@composed
async def embedding_grad(
    grad: Operand, indices: Operand, num_embeddings: int, padding_idx: int | None = None
) -> AccelRef:
    """Compute the gradient of the table of `embedding`: the rows of `grad` are added up by their indices.

    float16 and bfloat16 are added in float32. Sums come in any order, so they may differ from call to call.
    It is two launches: one makes zeros.

    Args:
        grad: Gradient of the rows, of the shape of `indices`, and then D.
        indices: The indices, which the device checks again.
        num_embeddings: V, the number of rows.
        padding_idx: Row whose gradient is 0; None for none.

    Returns:
        The gradient, of shape (V, D) and the dtype of `grad`.

    Raises:
        TypeError: An argument is no array, or `indices` or the others are no whole numbers.
        ValueError: `grad` has another shape, or there is no row `padding_idx`.
        OutOfRangeError: See `embedding`.
        NotSupportedError: float8.
    """
    name = "nn.embedding_grad"
    check_array(name, grad=grad, indices=indices)
    count = whole(name, "num_embeddings", num_embeddings)
    padding = _check(name, indices, count, padding_idx)
    if grad.ndim != indices.ndim + 1 or grad.shape[:-1] != indices.shape:
        raise ValueError(
            f"{name}: grad must have the shape {indices.shape} of indices and one axis more, "
            f"got shape {grad.shape}"
        )
    dtype = DType.of(grad.dtype)
    wide = DType.float32 if dtype in (DType.float16, DType.bfloat16) else dtype
    made = await device_of(name, grad, indices).zeros((count, grad.shape[-1]), wide)
    with naming(name, "index", count):
        await _adding(made, indices[..., None], count, grad, shape=grad.shape)
    if padding is not None:
        await made[padding].fill(0)
    return made if wide is dtype else await made.cast(dtype)


def _check(name: str, indices: Operand, length: int, padding_idx: int | None) -> int | None:
    if DType.of(indices.dtype).kind not in ("int", "uint"):
        raise TypeError(f"{name}: indices must be whole numbers, got {indices.dtype}")
    if padding_idx is None:
        return None
    row = whole(name, "padding_idx", padding_idx, "a whole number or None")
    if not -length <= row < length:
        raise ValueError(f"{name}: padding_idx must be a row of {length}, got {padding_idx}")
    return row % length
