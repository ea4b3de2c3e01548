"""What models return: brought to the host and checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..devices import AccelRef

__all__ = ["ModelOutputError", "check_logits", "host_array", "real_rows", "softmax"]


class ModelOutputError(ValueError):
    """A model returned what it must not: a wrong shape, NaN, or what is no distribution."""


async def host_array(what: str, result: object) -> NDArray[Any]:
    """Bring what a model returned to the host, as an array of numbers.

    Args:
        what: What returned it, for the error.
        result: An array of a device, or anything that NumPy takes.

    Raises:
        ModelOutputError: It is no array of numbers.
    """
    try:
        array = await result.to_host() if isinstance(result, AccelRef) else np.asarray(result)
        is_number = np.result_type(np.float64, array.dtype).kind in "fc"
    except (TypeError, ValueError) as error:  # such as rows of several lengths
        raise ModelOutputError(f"{what} returned no array of numbers: {error}") from error
    if not is_number:
        raise ModelOutputError(f"{what} must return an array of numbers, not of {array.dtype}")
    return array


async def real_rows(what: str, result: object, shape: tuple[int, int | None]) -> NDArray[np.float64]:
    """Bring rows of real numbers to the host, in float64.

    Args:
        what: What returned them, for the error.
        result: An array of a device, or anything that NumPy takes.
        shape: Rows, and columns if they are known.

    Raises:
        ModelOutputError: They are of another shape, or no real numbers.
    """
    array = await host_array(what, result)
    if array.dtype.kind == "c":
        raise ModelOutputError(f"{what} must return real numbers, not {array.dtype}")
    rows, columns = shape
    is_right = array.ndim == 2 and array.shape[0] == rows and array.shape[1] == (columns or array.shape[1])
    if not is_right or not array.shape[1]:
        expected = f"({rows}, {columns if columns is not None else 'size of the vocabulary'})"
        raise ModelOutputError(f"{what} must return an array of shape {expected}, got {array.shape}")
    return array.astype(np.float64, copy=False)


def check_logits(what: str, logits: NDArray[np.float64]) -> None:
    """Check rows of logits; -inf is the logit of what must not be chosen.

    Raises:
        ModelOutputError: A row has NaN or infinity, or nothing but -inf.
    """
    bad = np.flatnonzero(~np.isfinite(logits.max(axis=1)))  # NaN if there is one in the row
    if bad.size:
        raise ModelOutputError(f"{what} returned NaN, infinity, or nothing but -inf in row {bad[0]}")


def softmax(what: str, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The softmax of each row; for the errors see `check_logits`."""
    check_logits(what, logits)
    with np.errstate(over="ignore"):  # what is so much less likely has the share 0
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True)
    return result
