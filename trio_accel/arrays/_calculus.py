"""Functions of samples: interpolation, derivatives, integrals, polynomials, angles, and averages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..backends.base import DType
from ..devices import AccelRef, Operand, composed
from ..expressions import Contract, Elementwise, ExpressionArgument, Out, Reduction, axes_of
from ._checks import axis_of, bounded_integer, check_number, check_real, placed
from ._elementwise import add
from ._reductions import mean
from ._scans import cumulative_sum
from ._sorting import searchsorted
from ._views import diagonal

__all__ = [
    "average",
    "corrcoef",
    "cov",
    "digitize",
    "gradient",
    "interp",
    "nan_to_num",
    "polyval",
    "trapezoid",
    "unwrap",
    "vander",
]


@functools.cache
def _elementwise(
    name: str, text: str, *inputs: str, precision: str | None = None, dtype: DType | None = None
) -> Elementwise[AccelRef]:
    return Elementwise(text, inputs=inputs, operation=f"arrays.{name}", precision=precision, dtypes=dtype)


_AVERAGE, _CENTRED, _STANDARD, _TRAPEZOID = (
    Reduction(text, inputs=inputs, precision="float64", operation=f"arrays.{name}")
    for name, text, inputs in (
        ("average", "y = sum(x * weights) / sum(weights)", ("x", "weights")),
        ("cov", "y = x - mean(x)", ("x",)),
        # Squares of numbers up to 1 do not overflow.
        ("corrcoef", "d = x - mean(x); y = d / max(abs(d))", ("x",)),
        # Half of a sum may fit where the sum does not.
        (
            "trapezoid",
            "s = y0 + y1; y = sum(where(isfinite(s), s / 2, y0 / 2 + y1 / 2) * (x1 - x0))",
            ("y0", "y1", "x0", "x1"),
        ),
    )
)


def _wide(dtype: DType) -> str:
    """Return the conversion for loaded elements, because integers would wrap around."""
    return "complex128" if dtype.kind == "complex" else "float64"


def _rounded(dtype: DType) -> DType:
    return dtype if dtype.is_inexact else DType.float64


_ASCENDING, _BIN_INDEX = (
    Elementwise[AccelRef](text, inputs=inputs, operation="arrays.digitize")
    for text, inputs in (
        # NaN is last among ascending edges.
        ("b[last - i(0) if b[0] > b[last] or b[0] != b[0] else i(0)]", ("b", "last")),
        ("last + 1 - at if b[0] > b[last] or b[0] != b[0] else at", ("b", "last", "at")),
    )
)


@composed
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
        weights: Weights with the shape of `x`, or a vector of those along the one axis; None for the `mean`.
        keepdims: Whether the axes stay, with one element.

    Returns:
        ``sum(x * weights) / sum(weights)``, computed in float64 and rounded once. It is NaN or infinite where
        the sum of the weights is 0.

    Raises:
        TypeError: An argument is not an array.
        ValueError: An axis out of range, or `weights` has another shape.
        NotSupportedError: float8.
    """
    if weights is None:
        return await mean(x, axis, keepdims=keepdims)
    name = "arrays.average"
    x, weights = await placed(name, x=x, weights=weights)
    if weights.shape != x.shape:
        axes = axes_of(name, x.shape, axis)
        if len(axes) != 1 or weights.shape != (x.shape[axes[0]],):
            requirement = f"the shape {x.shape} of x, or be along one axis, got {weights.shape}"
            raise ValueError(f"{name}: weights must have {requirement}")
        weights = weights.reshape((-1, *(1,) * (x.ndim - 1 - axes[0])))
    return await _AVERAGE.ask(_AVERAGE.compute(x, weights, axis=axis, keepdims=keepdims))


@composed
async def cov(x: Operand, *, correction: int = 1) -> AccelRef:
    """Compute the covariances of variables, as `numpy.cov` does: a launch, and a product of matrices.

    Args:
        x: An array of shape (variables, observations), or the observations of one variable.
        correction: Taken from the count of observations, which is divided by.

    Returns:
        A matrix of all pairs, or of shape (). It has the dtype of `x`, and float64 for integers. The second
        variable of complex ones is conjugated.

    Raises:
        TypeError: `x` is not an array.
        ValueError: More than two axes, or no more observations than `correction`.
        NotSupportedError: float8.
    """
    name = "arrays.cov"
    [x] = await placed(name, x=x)
    if not 0 < x.ndim < 3 or x.shape[-1] <= bounded_integer("arrays.cov", "correction", correction):
        requirement = f"variables and more observations than {correction}, got shape {x.shape}"
        raise ValueError(f"{name}: x must be of {requirement}")
    centred = await _CENTRED.ask(_CENTRED.compute(x.reshape((-1, x.shape[-1])), axis=1))
    covariances = await _products(centred, 1 / (x.shape[-1] - correction))
    return covariances if x.ndim == 2 else covariances.reshape(())


async def _products(centred: AccelRef, alpha: float) -> AccelRef:
    is_complex = centred.dtype.kind == "complex"
    conjugate = await _elementwise("cov", "conj(x)", "x")(centred) if is_complex else centred
    return await centred.device.ask(Contract("ij,kj->ik", centred, conjugate, alpha=alpha))


@composed
async def corrcoef(x: Operand) -> AccelRef:
    """Compute the correlations of variables, as `numpy.corrcoef` does: `cov`, and one launch.

    Args:
        x: An array of shape (variables, observations), real.

    Returns:
        A matrix of all pairs, from -1 to 1; NaN where a variable does not vary.

    Raises:
        TypeError: `x` is not an array, or is complex.
        ValueError: Not two axes, or fewer than two observations.
        NotSupportedError: float8.
    """
    [x] = await placed("arrays.corrcoef", x=x)
    check_real("arrays.corrcoef", x=x.spec)
    if x.ndim != 2:
        raise ValueError(f"arrays.corrcoef: x must have two axes, got shape {x.shape}")
    if x.shape[-1] < 2:
        raise ValueError(
            f"arrays.corrcoef: x must have two observations of each variable, got shape {x.shape}"
        )
    covariances = await _products(await _STANDARD.ask(_STANDARD.compute(x, axis=1)), 1.0)
    variances = diagonal(covariances)
    text = "y = clip(c / sqrt(a) / sqrt(b), -1, 1)"
    return await _elementwise("corrcoef", text, "c", "a", "b", precision="float32")(
        covariances, variances[:, None], variances
    )


@composed
async def digitize(x: Operand, bins: Operand, *, right: bool = False) -> AccelRef:
    """Find the bin of each element, as `numpy.digitize` and `torch.bucketize` do: one search.

    Args:
        x: The elements, real.
        bins: Edges in ascending or descending order. Only a host array's order is checked.
        right: Whether a bin includes its right edge instead of its left one.

    Returns:
        Numbers of bins, of int64: 0 before the first edge, and the count of edges after the last one.

    Raises:
        TypeError: An argument is not an array, or is complex.
        ValueError: `bins` is not a vector, or a host array in no order.
    """
    name, edges = "arrays.digitize", bins
    x, bins = await placed(name, x=x, bins=bins)
    check_real(name, x=x.spec, bins=bins.spec)
    if isinstance(edges, np.ndarray) and edges.ndim == 1:
        falls = bool(len(edges) and (edges[0] > edges[-1] or edges[0] != edges[0]))  # NaN
        if np.any(edges[1:] > edges[:-1] if falls else edges[1:] < edges[:-1]):
            raise ValueError(f"{name}: bins must ascend or descend, got {edges}")
    if bins.ndim != 1:
        raise ValueError(f"{name}: bins must be a vector, got shape {bins.shape}")
    side: Literal["left", "right"] = "left" if right else "right"
    if bins.size < 2:
        return await searchsorted(bins, x, side=side)
    last_index = bins.size - 1
    positions = await searchsorted(await _ASCENDING(bins, last_index, shape=bins.shape), x, side=side)
    return await _BIN_INDEX(bins, last_index, positions, out=positions)


@composed
async def gradient(
    x: Operand, spacing: float | Operand = 1.0, *, axis: int | Sequence[int] | None = None
) -> AccelRef | tuple[AccelRef, ...]:
    """Compute derivatives of samples by central differences, as `numpy.gradient` does.

    At both ends of an axis they are differences of two neighbours. There is a launch for each axis.

    Args:
        x: The samples.
        spacing: The distance of neighbours along each axis; or, for one axis, the vector of its coordinates.
        axis: Axis or axes; None for all.

    Returns:
        The derivatives, with the shape of `x`: one array, or for several axes a tuple of arrays in their
        order. They are computed in float64, and have the dtype of `x`, or float64 for integers.

    Raises:
        TypeError: `x` is not an array, or `spacing` is complex.
        ValueError: An axis out of range, one of fewer than two samples, or coordinates of another shape.
        NotSupportedError: float8.
    """
    name = "arrays.gradient"
    coordinate_args = {"spacing": spacing} if isinstance(spacing, (AccelRef, np.ndarray)) else {}
    x, *coordinates = await placed(name, x=x, **coordinate_args)
    axes = axes_of(name, x.shape, axis)
    if isinstance(axis, Sequence):
        axes = tuple([axes_of(name, x.shape, dimension)[0] for dimension in axis])
    lengths = [x.shape[dimension] for dimension in axes]
    if min(lengths, default=2) < 2 or any(c.shape != (n,) for c in coordinates for n in lengths):
        requirement = f"two samples, and spacing a coordinate for each, got shape {x.shape}"
        raise ValueError(f"{name}: an axis must have {requirement}")
    for coordinate in coordinates:
        check_real(name, spacing=coordinate.spec)
    spacings: Sequence[ExpressionArgument] = coordinates or [
        float(check_number(name, "spacing", spacing, is_real=True))
    ]
    derivatives = [
        await _gradient(x.dtype, x.ndim, dimension, not coordinate_args)(x, n - 1, *spacings, shape=x.shape)
        for dimension, n in zip(axes, lengths, strict=True)
    ]
    return derivatives[0] if len(derivatives) == 1 else tuple(derivatives)


@functools.cache
def _gradient(dtype: DType, ndim: int, axis: int, is_even: bool) -> Elementwise[AccelRef]:
    lower, middle, upper = (
        f"{_wide(dtype)}(x[{', '.join(index if k == axis else f'i({k})' for k in range(ndim))}])"
        for index in ("l", f"i({axis})", "r")
    )
    text = (
        f"l = maximum(i({axis}) - 1, 0); r = minimum(i({axis}) + 1, last); k = where(r - l == 2, 2.0, 1.0);"
        f"a = {lower}; b = {upper}; e = b - a;"
    )
    if is_even:
        # A quotient may fit where the difference does not.
        text += "y = where(isfinite(e), e / k / c, (b / 2 - a / 2) / (c * (k / 2)))"
    else:
        # The ends are also of second order if the distances differ.
        text += (
            f"m = float64(c[i({axis})]); s = m - float64(c[l]); d = float64(c[r]) - m; y = where(k == 2,"
            f" (b * s / d - a * d / s + {middle} * (d / s - s / d)) / (s + d), e / (s + d))"
        )
    return _elementwise("gradient", text, "x", "last", "c", dtype=_rounded(dtype))


@composed
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
        x: The points to interpolate at.
        xp: Coordinates of the samples: a vector in ascending order, which is not checked.
        fp: The samples, one for each coordinate.
        left: The value below the first coordinate; None for the first sample.
        right: The value above the last coordinate; None for the last sample.

    Returns:
        Values with the shape of `x`: float64, as NumPy's, and complex128 where `fp` is complex.

    Raises:
        TypeError: An argument is not an array, or `x` or `xp` is complex.
        ValueError: `xp` is not a vector with elements, or `fp` is not as long.
        NotSupportedError: float8.
    """
    name = "arrays.interp"
    x, xp, fp = await placed(name, x=x, xp=xp, fp=fp)
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        requirement = f"of one length, got shapes {xp.shape} and {fp.shape}"
        raise ValueError(f"{name}: xp and fp must be vectors {requirement}")
    check_real(name, x=x.spec, xp=xp.spec)
    positions = await searchsorted(xp, x, side="right")
    ends = fp[0] if left is None else left, fp[-1] if right is None else right
    return await _interpolated(_wide(fp.dtype))(x, positions, xp, fp, *ends, xp.size - 1)


@functools.cache
def _interpolated(wide: str) -> Elementwise[AccelRef]:
    text = (
        "v = float64(x); x0 = float64(xp[at - 1]); x1 = float64(xp[at]);"
        f"f0 = {wide}(fp[at - 1]); f1 = {wide}(fp[at]);"
        # Distances of finite numbers may overflow; slopes next to infinite numbers follow NumPy.
        "t = where(isfinite(x1 - x0), (v - x0) / (x1 - x0), (v / 2 - x0 / 2) / (x1 / 2 - x0 / 2));"
        "e = where(isfinite(f1 - f0), f0 + (f1 - f0) * t, f0 * (1 - t) + f1 * t);"
        "s = (f1 - f0) / (x1 - x0); y0 = s * (v - x0) + f0; y1 = s * (v - x1) + f1;"
        "z = where(y0 == y0, y0, where(y1 == y1, y1, where(f0 == f1, f0, y0)));"
        "f = isfinite(x0) and isfinite(x1) and isfinite(f0) and isfinite(f1);"
        # The last coordinate has no successor, and neither have points after it.
        "inside = where(v == x0 or at > last, f0, where(f, e, z));"
        "y = where(v < float64(xp[0]), left, where(v > float64(xp[last]), right, where(v == v, inside, v)))"
    )
    return _elementwise("interp", text, "x", "at", "xp", "fp", "left", "right", "last")


@composed
async def nan_to_num(
    x: ExpressionArgument,
    *,
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
    out: Out = None,
) -> AccelRef:
    """Replace NaN and infinite elements, as `numpy.nan_to_num` does.

    Args:
        x: Numbers. Integers are not changed. Both parts of a complex number are replaced independently.
        nan: The replacement of NaN.
        posinf: The replacement of infinity; None for the largest number of the dtype.
        neginf: The replacement of minus infinity; None for the least number of the dtype.
        out: Array to write to; it may be `x`.

    Returns:
        The numbers, with the dtype of `x`.

    Raises:
        TypeError: `x` is not an array.
        ValueError: `out` has another shape, or shares memory with `x` and is not the same array.
        NotSupportedError: float8.
    """
    numbers = {"nan": nan, "posinf": posinf, "neginf": neginf}
    taken = {
        argument: float(check_number("arrays.nan_to_num", argument, number, is_real=True))
        for argument, number in numbers.items()
        if argument == "nan" or number is not None
    }
    names = {"posinf": "high", "neginf": "low"}
    limits = {names[argument]: number for argument, number in taken.items() if argument in names}
    # The number next to infinity is the largest one.
    high, low = (name if name in limits else "nextafter({0}, 0.0)" for name in ("high", "low"))
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
    expression = _elementwise("nan_to_num", texts[kind], "x", "other", *limits)
    return await expression(x, taken["nan"], *limits.values(), out=out)


@composed
async def polyval(p: Operand, x: ExpressionArgument) -> AccelRef:
    """Compute a polynomial at each element, as `numpy.polyval` does: one launch, by Horner's rule.

    Args:
        p: The vector of coefficients, the highest power first.
        x: The points to evaluate at.

    Returns:
        The values, of the dtype that `p` and `x` are promoted to.

    Raises:
        TypeError: `p` is not an array.
        ValueError: `p` is not a vector, or has more than some 500 elements.
        NotSupportedError: float8.
    """
    if getattr(p, "ndim", 1) != 1:
        raise ValueError(f"arrays.polyval: p must be a vector, got shape {p.shape}")
    steps = "".join(f"; y = y * x + p[{number}]" for number in range(1, len(p)))
    return await _elementwise("polyval", f"y = 0 * x + p[0]{steps}", "p", "x")(p, x)


@composed
async def trapezoid(
    y: Operand, x: Operand | None = None, *, dx: float = 1.0, axis: int = -1, keepdims: bool = False
) -> AccelRef:
    """Integrate samples by the trapezoidal rule, as `numpy.trapezoid` does: one launch.

    Args:
        y: The samples.
        x: Their coordinates: with the shape of `y`, or a vector along the axis.
        dx: The distance of neighbours, where `x` is not given.
        axis: The axis.
        keepdims: Whether it stays, with one element.

    Returns:
        The integrals, computed in float64 and rounded once to the dtype of `y`, at least a floating one.

    Raises:
        TypeError: An argument is not an array.
        ValueError: The axis is out of range, or `x` has another shape.
        NotSupportedError: float8.
    """
    name = "arrays.trapezoid"
    y, *coordinates = await placed(name, y=y, **({} if x is None else {"x": x}))
    axis_index = axis_of(name, y.spec, axis)
    first, second = ((*(slice(None),) * axis_index, part) for part in (slice(None, -1), slice(1, None)))
    spacing: list[ExpressionArgument] = [0.0, float(check_number(name, "dx", dx, is_real=True))]
    for coordinate in coordinates:
        if coordinate.shape not in (y.shape, y.shape[axis_index : axis_index + 1]):
            requirement = f"the shape {y.shape} of y, or be a vector along the axis, got {coordinate.shape}"
            raise ValueError(f"{name}: x must have {requirement}")
        spread = (*(1,) * axis_index, -1, *(1,) * (y.ndim - 1 - axis_index))
        points = coordinate if coordinate.shape == y.shape else coordinate.reshape(spread)
        spacing = [points[first], points[second]]
    message = _TRAPEZOID.compute(y[first], y[second], *spacing, axis=axis_index, keepdims=keepdims)
    return await _TRAPEZOID.ask(message)


@composed
async def unwrap(x: Operand, *, axis: int = -1, period: float = 6.283185307179586) -> AccelRef:
    """Take jumps of more than half a period from angles, as `numpy.unwrap` does: three launches.

    Args:
        x: The angles, floating.
        axis: The axis along which they follow each other.
        period: The period; multiples of it are added or subtracted.

    Returns:
        The angles, without jumps.

    Raises:
        TypeError: `x` is not an array, complex, or of integers.
        ValueError: The axis is out of range.
        NotSupportedError: float8.
    """
    [x] = await placed("arrays.unwrap", x=x)
    if x.dtype.kind != "float":
        raise TypeError(f"arrays.unwrap: x must be of real floating numbers, got {x.dtype}")
    axis_index = axis_of("arrays.unwrap", x.spec, axis)
    number = float(check_number("arrays.unwrap", "period", period, is_real=True))
    jumps = await _unwrapped(x.ndim, axis_index)(x, number, shape=x.shape)
    return await add(x, await cumulative_sum(jumps, axis=axis_index))


@functools.cache
def _unwrapped(ndim: int, axis: int) -> Elementwise[AccelRef]:
    previous = ", ".join(
        f"maximum(i({dimension}) - 1, 0)" if dimension == axis else f"i({dimension})"
        for dimension in range(ndim)
    )
    current = ", ".join(f"i({dimension})" for dimension in range(ndim))
    text = (
        f"d = x[{current}] - x[{previous}]; h = period / 2; m = (d + h) % period - h;"
        "m = where(m == -h and d > 0, h, m); y = where(abs(d) < h, 0, m - d)"
    )
    return _elementwise("unwrap", text, "x", "period")


@composed
async def vander(x: Operand, n: int | None = None, *, increasing: bool = False) -> AccelRef:
    """Make the matrix of a vector's powers, as `numpy.vander` does: one launch.

    Args:
        x: The vector.
        n: The number of powers, from 0 on; None for the number of elements.
        increasing: Whether power 0 comes first instead of last.

    Returns:
        A matrix with a row for each element, with the dtype of `x`; of integers and truth values int64, and
        of uint64 float64, as NumPy's.

    Raises:
        TypeError: `x` is not an array.
        ValueError: `x` is not a vector, or `n` is negative.
        NotSupportedError: float8.
    """
    name = "arrays.vander"
    [x] = await placed(name, x=x)
    if x.ndim != 1:
        raise ValueError(f"{name}: x must be a vector, got shape {x.shape}")
    count = x.size if n is None else bounded_integer(name, "n", n)
    if count < 0:
        raise ValueError(f"{name}: n must be at least 0, got {n}")
    # NumPy has powers of integers so.
    wide = x.dtype if x.dtype.is_inexact else DType.float64 if x.dtype is DType.uint64 else DType.int64
    exponent = "i(1)" if increasing else "(count - 1 - i(1))"
    inputs = ("x",) if increasing else ("x", "count")
    taken = "x" if x.dtype is wide else f"{wide}(x)"
    expression = _elementwise("vander", f"{taken} ** {exponent}", *inputs, dtype=wide)
    return await expression(x[:, None], *(() if increasing else (count,)), shape=(x.size, count))
