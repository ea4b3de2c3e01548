"""Reductions along axes, by the array API standard.

All of them take one axis, several, or None for all axes; without axes, ``axis=()``, each element stands for
itself. `keepdims` leaves the reduced axes with one element. float16, bfloat16 and float32 are added and
multiplied in float64, complex64 in complex128, and the result is rounded once. The order of the elements
differs between devices and from NumPy's. Each device makes the same result of the same array each time.

A NaN among the elements is the result of `max`, `min`, and of sums of all kinds. `argmax` and `argmin` tell
the first NaN. Of no elements, `sum` and `count_nonzero` are 0, `prod` 1, `any` False, `all` True, and `mean`,
`var` and `std` NaN. The others refuse them, before the launch.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from ..backends.base import DTypeLike
from ..devices import AccelRef, Operand
from ..expressions import Axis, Out, like, reduction, rows, scaled

__all__ = [
    "all", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "max", "mean", "min", "prod", "std",
    "sum", "var",
]  # fmt: skip


Dtype: TypeAlias = "DTypeLike | None"
"""A dtype; None for the usual one."""

# Without degrees of freedom it divides by zero, as NumPy does.
VARIANCE = (
    "a = mean(x); d = x - a; s = sum(real(d) * real(d) + imag(d) * imag(d)); "
    "v = where(n > correction, s / (n - correction), s / 0.0)"
)
"""The mean, ``a``, of each element how far it is from that, ``d``, and the variance, ``v``."""


def of_scaled(text: str) -> str:
    """Write an expression of ``x`` for elements whose squares do not overflow, by a factor ``q``."""
    return scaled("x", "u", "q") + re.sub(r"\bx\b", "u", text)


@reduction("all")
async def all(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Tell whether all elements along axes are true: NaN is, and so are no elements.

    Args:
        x: The array, of any dtype.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        Truth values.

    Raises:
        TypeError: `x` is no array, or `out` is of a dtype that the result does not become.
        ValueError: An axis that there is not, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    ...


@like(all, "any")
def any() -> None:
    """Tell whether any element along axes is true: NaN is, and of no elements none is.

    Arguments and errors are those of `all`.
    """


@reduction("argmax")
async def argmax(x: Operand, axis: int | None = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Find the place of the largest element along an axis: the first NaN, and the first of equal ones.

    Args:
        x: The array, of a dtype that has an order.
        axis: Axis to search along; None for all elements in C order.
        keepdims: Whether the axis stays, with one element.
        out: Array to write to.

    Returns:
        Indices, of int64.

    Raises:
        TypeError: `x` is no array or complex, several axes, or `out` is of a dtype that indices do not
            become.
        ValueError: No elements, an axis that there is not, or `out` has another shape or shares memory
            with `x`.
        NotSupportedError: float8.
    """
    ...


@like(argmax, "argmin")
def argmin() -> None:
    """Find the place of the smallest element along an axis: the first NaN, and the first of equal ones.

    Arguments and errors are those of `argmax`.
    """


@like(all, "sum", "x != 0")
def count_nonzero() -> None:
    """Count the elements along axes that are not zero, as int64: NaN is not zero.

    Arguments and errors are those of `all`.
    """


@rows("m = max(x); m = where(isfinite(m), m, 0.0); y = log(sum(exp(x - m))) + m")
async def logsumexp(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute the logarithm of the sum of exponentials along axes, as `scipy.special.logsumexp` does.

    Nothing overflows on the way: the largest element is taken from all others first. It is one launch; see
    `softmax` for few long rows. Exponentials of float16 and bfloat16 are those of float32.

    Args:
        x: The array, real. The result of whole numbers is float64.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        The logarithms: ``-inf`` where all elements are.

    Raises:
        TypeError: `x` is no array or complex, or `out` is of a dtype that the result does not become.
        ValueError: No elements, an axis that there is not, or `out` has another shape or shares memory
            with `x`.
        NotSupportedError: float8.
    """
    ...


@like(all, "max")
def max() -> None:
    """Find the largest element along axes; NaN if there is one.

    Args:
        x: The array, of a dtype that has an order.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        The largest elements, of the dtype of `x`.

    Raises:
        TypeError: `x` is no array or complex, or `out` is of a dtype that the result does not become.
        ValueError: No elements, an axis that there is not, or `out` has another shape or shares memory
            with `x`.
        NotSupportedError: float8.
    """


@like(all, "mean")
def mean() -> None:
    """Compute the mean of the elements along axes; NaN of no elements.

    It has the dtype of `x`, and float64 for whole numbers and truth values, which are converted before they
    are added. Arguments and errors are those of `all`.
    """


@like(all, "min")
def min() -> None:
    """Find the smallest element along axes; NaN if there is one.

    Arguments and errors are those of `max`.
    """


@reduction("prod")
async def prod(
    x: Operand, axis: Axis = None, *, dtype: Dtype = None, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Multiply the elements of an array along axes; 1 of no elements.

    Arguments and errors are those of `sum`.
    """
    ...


@rows(f"{VARIANCE}; y = sqrt(v)", wide=of_scaled(f"{VARIANCE}; y = sqrt(v) / q"), precision="float64")
async def std(
    x: Operand, axis: Axis = None, *, correction: float = 0, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Compute the standard deviation of the elements along axes: the root of `var`.

    Arguments and errors are those of `var`.
    """
    ...


@like(prod, "sum")
def sum() -> None:
    """Add the elements of an array along axes; 0 of no elements.

    >>> import trio, numpy as np, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("sums") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.arange(6, dtype=np.int8).reshape(2, 3))
    ...         total = await ta.arrays.sum(x, axis=1)
    ...         print(total.dtype, await total.to_host())
    >>> trio.run(main)
    int64 [ 3 12]

    Args:
        x: The array.
        axis: Axis or axes to add along, from the end for negative ones; None for all.
        dtype: Type that the elements are converted to before they are added. By default it is that of `x`; of
            whole numbers and truth values `int64`, of unsigned ones `uint64`.
        keepdims: Whether the axes that are added along stay, with one element.
        out: Array to write to.

    Returns:
        The sums.

    Raises:
        TypeError: `x` is no array, there is no such dtype, or the sum does not become that of `out`.
        ValueError: An axis that there is not, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """


@like(std, VARIANCE)
def var() -> None:
    """Compute the variance of the elements along axes: the mean square of what they differ from the mean.

    It is computed in float64, in two passes over the elements and one launch; see `softmax` for few long
    rows. It has the dtype of `x`; that of complex numbers is real, and that of whole numbers float64.

    Args:
        x: The array.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        correction: Taken from the count of elements that is divided by: 1 for that of a sample.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        The variances. Where `correction` is not below the count, they are infinite, or NaN for 0.

    Raises:
        TypeError: `x` is no array, or `out` is of a dtype that the result does not become.
        ValueError: An axis that there is not, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
