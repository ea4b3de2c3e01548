"""Elements that are left out at random, while a model is trained."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol

from ..backends.base import DType
from ..devices import AccelRef, Operand
from ..devices.operations._calls import composed
from ..expressions import Elementwise, check_array
from ._library import check_range

__all__ = ["DropoutResult", "dropout", "dropout_grad"]


class DropoutResult(NamedTuple):
    """The rest of an array; see `dropout`."""

    y: AccelRef
    """The elements, or 0."""
    mask: AccelRef
    """Truth values: which are left."""


class _Uniform(Protocol):
    """Draws numbers, as `ta.random.Generator` does."""

    def uniform(self, shape: tuple[int, ...], dtype: str) -> Coroutine[Any, Any, AccelRef]: ...


# A draw is above 0 and up to 1: with p of 0 all are left, with p of 1 none.
_dropping = Elementwise[Any](
    "mask = drawn > p; y = where(mask, x * scale, 0)",
    inputs=("x", "drawn", "p", "scale"),
    outputs=("y", "mask"),
    operation="nn.dropout",
    promoted=("x", "scale"),
)
_slopes = Elementwise[AccelRef](
    "where(mask, grad * scale, 0)",
    inputs=("grad", "mask", "scale"),
    operation="nn.dropout_grad",
    promoted=("grad", "scale"),
    truths=("mask",),
)


@composed
async def dropout(x: Operand, p: float = 0.5, *, generator: _Uniform) -> DropoutResult:
    """Replace elements by 0 at random, and divide the others by ``1 - p``, as `torch.nn.functional.dropout`.

    It is two launches: one draws a number of float32 for each element. The same state of the generator makes
    the same mask on every backend. While a model is not trained, leave the call out.

    Args:
        x: The array, of floating numbers.
        p: Probability that an element is left out, from 0 to 1.
        generator: A `ta.random.Generator` of the device.

    Returns:
        The elements, of the shape and dtype of `x`; and the mask, which `dropout_grad` takes.

    Raises:
        TypeError: `x` is no array of floating numbers, or `generator` no generator.
        ValueError: `p` is not from 0 to 1.
        NotSupportedError: float8.
    """
    check_array("nn.dropout", x=x)
    check_range("nn.dropout", 0, 1, is_closed=True, p=p)
    given: object = generator
    if not callable(getattr(given, "uniform", None)):
        raise TypeError(f"nn.dropout: generator must be a random.Generator, got {type(generator).__name__}")
    scale = _scale("nn.dropout: x", x, p)
    y, mask = await _dropping(x, await generator.uniform(x.shape, "float32"), float(p), scale)
    return DropoutResult(y, mask)


@composed
async def dropout_grad(grad: Operand, mask: Operand, p: float = 0.5) -> AccelRef:
    """Compute the gradient of `dropout`: one launch.

    Args:
        grad: Gradient of the elements.
        mask: The mask that it has returned.
        p: The same as there.

    Returns:
        The gradient, of the shape and dtype of `grad`.

    Raises:
        TypeError: `grad` is no array of floating numbers, or `mask` none of truth values.
        ValueError: Different shapes, or `p` is not from 0 to 1.
        NotSupportedError: float8.
    """
    check_array("nn.dropout_grad", grad=grad, mask=mask)
    check_range("nn.dropout_grad", 0, 1, is_closed=True, p=p)
    if grad.shape != mask.shape:
        raise ValueError(
            f"nn.dropout_grad: grad and mask must have one shape, got {grad.shape} and {mask.shape}"
        )
    return await _slopes(grad, mask, _scale("nn.dropout_grad: grad", grad, p))


def _scale(where: str, x: Operand, p: float) -> float:
    if not DType.of(x.dtype).is_inexact:
        raise TypeError(f"{where} must be of a floating dtype, got {x.dtype}; use cast()")
    return 1 / (1 - float(p)) if p < 1 else 0.0
