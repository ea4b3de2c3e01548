"""Functions of samples: interpolation, derivatives, integrals, polynomials, angles, and averages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import numpy as np

from ..backends.base import DType
from ..devices import AccelRef, Operand
from ..expressions import Contract, Elementwise, ExpressionArgument, Reduction, Rowwise, axes_of
from ._actor import LIBRARY
from ._checks import axis_of, check_real, placed
from ._elementwise import add
from ._reductions import mean
from ._scans import cumulative_sum
from ._sorting import searchsorted
from ._views import diagonal

__all__ = [
    "average", "corrcoef", "cov", "digitize", "gradient", "interp", "nan_to_num", "polyval", "trapezoid",
    "unwrap", "vander",
]  # fmt: skip


@functools.cache
def _elementwise(
    name: str, text: str, *inputs: str, precision: str | None = None, dtype: DType | None = None
) -> Elementwise[AccelRef]:
    return Elementwise(
        text, inputs=inputs, operation=f"arrays.{name}", library=LIBRARY, precision=precision, dtypes=dtype
    )


_AVERAGE, _CENTRED = (
    Rowwise(text, inputs, precision="float64", operation=f"arrays.{name}", library=LIBRARY)
    for name, text, inputs in (
        ("average", "y = sum(x * weights) / sum(weights)", ("x", "weights")),
        ("cov", "y = x - mean(x)", ("x",)),
    )
)
_TRAPEZOID = Reduction(
    "(y1 + y0) * (x1 - x0) / 2",
    inputs=("y0", "y1", "x0", "x1"),
    operation="arrays.trapezoid",
    library=LIBRARY,
)


async def average(
    x: Operand,
    axis: int | Sequence[int] | None = None,
    *,
    weights: Operand | None = None,
    keepdims: bool = False,
) -> AccelRef:
    """Compute the weighted mean of the elements along axes, as `numpy.average` does: one launch.

    Args:
        x: The array.
        axis: Axis or axes; None for all.
        weights: Weights of the shape of `x`, or a vector of those along the one axis; None for the `mean`.
        keepdims: Whether the axes stay, with one element.

    Returns:
        ``sum(x * weights) / sum(weights)``, computed in float64 and rounded once. It is NaN or infinite where
        the sum of the weights is 0.

    Raises:
        TypeError: An argument is no array.
        ValueError: An axis that there is not, or `weights` has another shape.
        NotSupportedError: float8.
    """
    if weights is None:
        return await mean(x, axis, keepdims=keepdims)
    name = "arrays.average"
    x, weights = await placed(name, x=x, weights=weights)
    if weights.shape != x.shape:
        axes = axes_of(name, x.shape, axis)
        if len(axes) != 1 or weights.shape != (x.shape[axes[0]],):
            told = f"the shape {x.shape} of x, or be along one axis, got {weights.shape}"
            raise ValueError(f"{name}: weights must have {told}")
        weights = weights.reshape((-1, *(1,) * (x.ndim - 1 - axes[0])))
    return await _AVERAGE.ask(_AVERAGE.compute(x, weights, axis=axis, keepdims=keepdims))


async def cov(x: Operand, *, correction: int = 1) -> AccelRef:
    """Compute the covariances of variables, as `numpy.cov` does: a launch, and a product of matrices.

    Args:
        x: An array of shape (variables, observations), or the observations of one variable.
        correction: Taken from the count of observations, which is divided by.

    Returns:
        A matrix of all pairs, or of shape (). It has the dtype of `x`, and float64 for whole numbers. The
        second variable of complex ones is conjugated.

    Raises:
        TypeError: `x` is no array.
        ValueError: More than two axes, or no more observations than `correction`.
        NotSupportedError: float8.
    """
    name = "arrays.cov"
    [x] = await placed(name, x=x)
    if not 0 < x.ndim < 3 or x.shape[-1] <= correction:
        told = f"variables and more observations than {correction}, got shape {x.shape}"
        raise ValueError(f"{name}: x must be of {told}")
    centred = await _CENTRED.ask(_CENTRED.compute(x.reshape((-1, x.shape[-1])), axis=1))
    is_complex = centred.dtype.kind == "complex"
    conjugate = await _elementwise("cov", "conj(x)", "x")(centred) if is_complex else centred
    alpha = 1 / (x.shape[-1] - correction)
    made = await x.device.ask(Contract("ij,kj->ik", centred, conjugate, alpha=alpha))
    return made if x.ndim == 2 else made.reshape(())


async def corrcoef(x: Operand) -> AccelRef:
    """Compute the correlations of variables, as `numpy.corrcoef` does: `cov`, and one launch.

    Args:
        x: An array of shape (variables, observations), real.

    Returns:
        A matrix of all pairs, from -1 to 1; NaN where a variable does not vary.

    Raises:
        TypeError: `x` is no array, or complex.
        ValueError: Not two axes, or fewer than two observations.
        NotSupportedError: float8.
    """
    [x] = await placed("arrays.corrcoef", x=x)
    check_real("arrays.corrcoef", x=x.spec)
    if x.ndim != 2:
        raise ValueError(f"arrays.corrcoef: x must have two axes, got shape {x.shape}")
    made = await cov(x)
    own = diagonal(made)
    text = "y = clip(c / sqrt(a) / sqrt(b), -1, 1)"
    return await _elementwise("corrcoef", text, "c", "a", "b", precision="float32")(made, own[:, None], own)


async def digitize(x: Operand, bins: Operand, *, right: bool = False) -> AccelRef:
    """Find the bin of each element, as `numpy.digitize` and `torch.bucketize` do: one search.

    Args:
        x: The elements, real.
        bins: Edges in ascending order, which is not checked.
        right: Whether a bin has its upper edge, and not its lower one.

    Returns:
        Numbers of bins, of int64: 0 below the first edge, and the count of edges from the last one on.

    Raises:
        TypeError, ValueError: As of `searchsorted`.
    """
    return await searchsorted(bins, x, side="left" if right else "right")


async def gradient(
    x: Operand, spacing: float | Operand = 1.0, *, axis: int | Sequence[int] | None = None
) -> AccelRef | tuple[AccelRef, ...]:
    """Compute derivatives of samples by central differences, as `numpy.gradient` does.

    At both ends of an axis they are differences of two neighbours. There is a launch for each axis.

    Args:
        x: The samples: floating or complex numbers.
        spacing: The distance of neighbours along each axis; or, for one axis, the vector of its coordinates.
        axis: Axis or axes; None for all.

    Returns:
        The derivatives, of the shape of `x`: one array, or a tuple of one for each of several axes.

    Raises:
        TypeError: `x` is no array.
        ValueError: An axis that there is not, one of fewer than two samples, or coordinates of another shape.
        NotSupportedError: float8.
    """
    name = "arrays.gradient"
    given = {"spacing": spacing} if isinstance(spacing, (AccelRef, np.ndarray)) else {}
    x, *coordinates = await placed(name, x=x, **given)
    axes = axes_of(name, x.shape, axis)
    lengths = [x.shape[one] for one in axes]
    if min(lengths, default=2) < 2 or any(c.shape != (n,) for c in coordinates for n in lengths):
        told = f"two samples, and spacing a coordinate for each, got shape {x.shape}"
        raise ValueError(f"{name}: an axis must have {told}")
    more: Sequence[ExpressionArgument] = coordinates or [float(cast("float", spacing))]
    pairs = zip(axes, lengths, strict=True)
    found = [await _gradient(x.ndim, one, not given)(x, n - 1, *more, shape=x.shape) for one, n in pairs]
    return found[0] if len(found) == 1 else tuple(found)


@functools.cache
def _gradient(ndim: int, axis: int, is_even: bool) -> Elementwise[AccelRef]:
    before, at, after = (
        f"x[{', '.join(place if one == axis else f'i({one})' for one in range(ndim))}]"
        for place in ("l", f"i({axis})", "r")
    )
    text = f"l = maximum(i({axis}) - 1, 0); r = minimum(i({axis}) + 1, last);"
    if is_even:
        text += f"y = ({after} - {before}) / (c * where(r - l == 2, 2.0, 1.0))"
    else:
        # Of second order, too, where the distances differ.
        text += (
            f"s = c[i({axis})] - c[l]; d = c[r] - c[i({axis})]; y = where(r - l == 2, ({after} * s / d -"
            f" {before} * d / s + {at} * (d / s - s / d)) / (s + d), ({after} - {before}) / (s + d))"
        )
    return _elementwise("gradient", text, "x", "last", "c")


async def interp(
    x: Operand,
    xp: Operand,
    fp: Operand,
    *,
    left: ExpressionArgument | None = None,
    right: ExpressionArgument | None = None,
) -> AccelRef:
    """Interpolate between samples by straight lines, as `numpy.interp` does: a search, and one launch.

    Args:
        x: Where values are wanted.
        xp: Coordinates of the samples: a vector in ascending order, which is not checked.
        fp: The samples, as many.
        left: What is below the first coordinate; None for the first sample.
        right: What is above the last one; None for the last sample.

    Returns:
        Values of the shape of `x`: float64, as NumPy's, and complex128 where `fp` is complex.

    Raises:
        TypeError: An argument is no array, or `x` or `xp` is complex.
        ValueError: `xp` is no vector with elements, or `fp` is not as long.
        NotSupportedError: float8.
    """
    name = "arrays.interp"
    x, xp, fp = await placed(name, x=x, xp=xp, fp=fp)
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        told = f"of one length, got shapes {xp.shape} and {fp.shape}"
        raise ValueError(f"{name}: xp and fp must be vectors {told}")
    at = await searchsorted(xp, x, side="right")
    ends = fp[0] if left is None else left, fp[-1] if right is None else right
    return await _INTERPOLATED(x, at, xp, fp, *ends, xp.size - 1)


# At the last coordinate, and behind it, there is no next one.
_INTERPOLATED = Elementwise[AccelRef](
    "x0 = xp[at - 1]; f0 = fp[at - 1]; t = (float64(x) - x0) / (float64(xp[at]) - x0);"
    "inside = where(t == 0 or at > last, f0, f0 + (fp[at] - f0) * t);"
    "y = where(x < xp[0], left, where(x > xp[last], right, where(x == x, inside, x)))",
    inputs=("x", "at", "xp", "fp", "left", "right", "last"), operation="arrays.interp", library=LIBRARY,
)  # fmt: skip


async def nan_to_num(
    x: ExpressionArgument,
    *,
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
    out: AccelRef | None = None,
) -> AccelRef:
    """Replace NaN and infinite elements, as `numpy.nan_to_num` does.

    Args:
        x: Numbers. Whole ones stay as they are. The parts of complex ones are replaced each by itself.
        nan: What NaN becomes.
        posinf: What infinity becomes; None for the largest number of the dtype.
        neginf: What minus infinity becomes; None for the least number of the dtype.
        out: Array to write to; it may be `x`.

    Returns:
        The numbers, of the dtype of `x`.

    Raises:
        TypeError: `x` is no array.
        ValueError: `out` has another shape, or shares memory with `x` and is not the same array.
        NotSupportedError: float8.
    """
    given = {name: float(one) for name, one in (("high", posinf), ("low", neginf)) if one is not None}
    # The number next to infinity is the largest one.
    high, low = (name if name in given else "nextafter({0}, 0.0)" for name in ("high", "low"))
    part = "where({0} != {0}, other, where({0} == inf, " + f"{high}, where({{0}} == -inf, {low}, {{0}})))"
    parts = part.format("r"), part.format("i")
    texts = {
        "float": f"y = {part.format('x')}",
        "complex": f"r = real(x); i = imag(x); y = where(isfinite(x), x, {parts[0]} + 1j * {parts[1]})",
    }
    kind = DType.of(x.dtype).kind if isinstance(x, (AccelRef, np.ndarray)) else "float"
    if kind not in texts:
        # There is nothing to replace, and a number to do it with would change the dtype.
        return await _elementwise("nan_to_num", "y = where(x == x, x, x)", "x")(x, out=out)
    made = _elementwise("nan_to_num", texts[kind], "x", "other", *given)
    return await made(x, float(nan), *given.values(), out=out)


async def polyval(p: Operand, x: ExpressionArgument) -> AccelRef:
    """Compute a polynomial at each element, as `numpy.polyval` does: one launch, by Horner's rule.

    Args:
        p: The coefficients, a vector: that of the highest power first.
        x: Where it is computed.

    Returns:
        The values, of the dtype that `p` and `x` are promoted to.

    Raises:
        TypeError: `p` is no array.
        ValueError: `p` is no vector, or has more than some 500 elements.
        NotSupportedError: float8.
    """
    if getattr(p, "ndim", 1) != 1:
        raise ValueError(f"arrays.polyval: p must be a vector, got shape {p.shape}")
    steps = "".join(f"; y = y * x + p[{number}]" for number in range(1, len(p)))
    return await _elementwise("polyval", f"y = 0 * x + p[0]{steps}", "p", "x")(p, x)


async def trapezoid(
    y: Operand, x: Operand | None = None, *, dx: float = 1.0, axis: int = -1, keepdims: bool = False
) -> AccelRef:
    """Integrate samples by the trapezoidal rule, as `numpy.trapezoid` does: one launch.

    Args:
        y: The samples.
        x: Their coordinates: of the shape of `y`, or a vector along the axis.
        dx: The distance of neighbours, where `x` is not given.
        axis: The axis.
        keepdims: Whether it stays, with one element.

    Returns:
        The integrals, computed in float64 and rounded once to the dtype of `y`, at least a floating one.

    Raises:
        TypeError: An argument is no array.
        ValueError: There is no such axis, or `x` has another shape.
        NotSupportedError: float8.
    """
    name = "arrays.trapezoid"
    y, *coordinates = await placed(name, y=y, **({} if x is None else {"x": x}))
    place = axis_of(name, y.spec, axis)
    first, second = ((*(slice(None),) * place, part) for part in (slice(None, -1), slice(1, None)))
    between: list[ExpressionArgument] = [0.0, float(dx)]
    for given in coordinates:
        if given.shape not in (y.shape, y.shape[place : place + 1]):
            told = f"the shape {y.shape} of y, or be a vector along the axis, got {given.shape}"
            raise ValueError(f"{name}: x must have {told}")
        spread = (*(1,) * place, -1, *(1,) * (y.ndim - 1 - place))
        whole = given if given.shape == y.shape else given.reshape(spread)
        between = [whole[first], whole[second]]
    return await _TRAPEZOID(y[first], y[second], *between, axis=place, keepdims=keepdims)


async def unwrap(x: Operand, *, axis: int = -1, period: float = 6.283185307179586) -> AccelRef:
    """Take jumps of more than half a period from angles, as `numpy.unwrap` does: three launches.

    Args:
        x: The angles, floating.
        axis: The axis along which they follow each other.
        period: What is added or taken, a multiple of it.

    Returns:
        The angles, without jumps.

    Raises:
        TypeError: `x` is no array, complex, or of whole numbers.
        ValueError: There is no such axis.
        NotSupportedError: float8.
    """
    [x] = await placed("arrays.unwrap", x=x)
    place = axis_of("arrays.unwrap", x.spec, axis)
    jumps = await _unwrapped(x.ndim, place)(x, float(period), shape=x.shape)
    return await add(x, await cumulative_sum(jumps, axis=place))


@functools.cache
def _unwrapped(ndim: int, axis: int) -> Elementwise[AccelRef]:
    before = ", ".join(f"maximum(i({one}) - 1, 0)" if one == axis else f"i({one})" for one in range(ndim))
    at = ", ".join(f"i({one})" for one in range(ndim))
    text = (
        f"d = x[{at}] - x[{before}]; h = period / 2; m = (d + h) % period - h;"
        "m = where(m == -h and d > 0, h, m); y = where(abs(d) < h, 0, m - d)"
    )
    return _elementwise("unwrap", text, "x", "period")


async def vander(x: Operand, n: int | None = None, *, increasing: bool = False) -> AccelRef:
    """Make the matrix of powers of a vector, as `numpy.vander` does: one launch.

    Args:
        x: The vector.
        n: How many powers, from 0 on; None for as many as elements.
        increasing: Whether power 0 comes first, and not last.

    Returns:
        A matrix with a row for each element, of the dtype of `x`.

    Raises:
        TypeError: `x` is no array.
        ValueError: `x` is no vector, or `n` is negative.
        NotSupportedError: float8.
    """
    [x] = await placed("arrays.vander", x=x)
    if x.ndim != 1:
        raise ValueError(f"arrays.vander: x must be a vector, got shape {x.shape}")
    count = x.size if n is None else n
    text = "x ** i(1)" if increasing else "x ** (count - 1 - i(1))"
    more = () if increasing else (count,)
    made = _elementwise("vander", text, "x", *(() if increasing else ("count",)), dtype=x.dtype)
    return await made(x[:, None], *more, shape=(x.size, count))
