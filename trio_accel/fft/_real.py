"""Cosine and sine transforms: an expression before a Fourier transform, and one after it.

Types II and III are a real transform of the same length (J. Makhoul, "A fast cosine transform in one and two
dimensions", 1980). Type I is a transform of the extended array. Type IV is a complex transform of half the
length, or of twice the length if it is odd. A sine transform is a cosine transform with signs changed, or in
reverse.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

import attrs
import numpy as np

from ..actors import arguments_of
from ..backends.base import DType, Ints
from ..backends.base.contract.ops import FftNorm
from ..devices import AccelRef, Operand, bounded_integer, composed, device_of
from ..expressions import Elementwise, Out, intermediates, on_device
from ._functions import (
    all_whole,
    axes_of,
    axis_of,
    check_floating,
    check_norm,
    check_out,
    extent_of,
    fft,
    irfft,
    rfft,
)

__all__ = ["TransformType", "dct", "dctn", "dst", "dstn", "idct", "idctn", "idst", "idstn"]

TransformType: TypeAlias = Literal[1, 2, 3, 4]
"""Which symmetry an array has at its ends; see `scipy.fft.dct`."""

# For each type the elements that a Fourier transform takes, and the elements of the result, by the index `j`
# along the axis, of which there are `n`. `x` is the array, and `v` the result of the Fourier transform.
# `edge` multiplies elements at the ends, so that the matrix of the transform is orthogonal.
_COSINES = {
    1: (
        "y = x[j if j < n else 2 * n - 2 - j] * (edge if j % (n - 1) == 0 else 1)",
        "y = scale * real(v[j]) / (edge if j % (n - 1) == 0 else 1)",
    ),
    2: (
        "y = x[2 * j if 2 * j < n else 2 * n - 1 - 2 * j]",
        (
            "k = minimum(j, n - j); t = pi / 2 * j / n; s = sin(t) if 2 * j <= n else -sin(t);"
            "y = 2 * scale / (edge if j == 0 else 1) * (cos(t) * real(v[k]) + s * imag(v[k]))"
        ),
    ),
    3: (
        (
            "a = x[j] * (edge if j == 0 else 1); b = x[n - j] if j > 0 else 0; t = pi / 2 * j / n;"
            "y = cos(t) * a + sin(t) * b + 1j * (sin(t) * a - cos(t) * b)"
        ),
        "y = scale * v[j // 2 if j % 2 == 0 else n - 1 - j // 2]",
    ),
    4: (
        (
            "a = x[2 * j]; b = x[n - 1 - 2 * j]; t = pi * j / n;"
            "y = cos(t) * a + sin(t) * b + 1j * (cos(t) * b - sin(t) * a)"
        ),
        (
            "k = j // 2 if j % 2 == 0 else (n - 1 - j) // 2; t = pi / 4 * (4 * k + 1) / n;"
            "c = cos(t) * real(v[k]) + sin(t) * imag(v[k]); s = sin(t) * real(v[k]) - cos(t) * imag(v[k]);"
            "y = 2 * scale * (c if j % 2 == 0 else s)"
        ),
    ),
}
_SIGN = " * (1 - 2 * (j % 2))"
_SINES = {
    1: (
        "y = 0 if j % (n + 1) == 0 else x[j - 1] if j <= n else -x[2 * n + 1 - j]",
        "y = -scale * imag(v[j + 1])",
    ),
    2: (
        f"{_COSINES[2][0]} * (1 if 2 * j < n else -1)",
        re.sub(r"\bj\b", "(n - 1 - j)", _COSINES[2][1]),
    ),
    3: (
        _COSINES[3][0].replace("x[j]", "x[n - 1 - j]").replace("x[n - j]", "x[j - 1]"),
        _COSINES[3][1] + _SIGN,
    ),
    4: (_COSINES[4][0].replace("a = x", "b = x").replace("b = x[n", "a = x[n"), _COSINES[4][1] + _SIGN),
}
# The elements of type IV where the length is odd.
_ODD = (
    ("t = pi / 2 * j / n; y = (cos(t) - 1j * sin(t)) * x[{}]"),
    ("t = pi / 4 * (2 * j + 1) / n; y = 2 * scale * (cos(t) * real(v[j]) + sin(t) * imag(v[j]))"),
)
_INVERSE: dict[TransformType, TransformType] = {1: 1, 2: 3, 3: 2, 4: 4}
_OPPOSITE: dict[FftNorm, FftNorm] = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


@attrs.frozen
class _RealTransform:
    """A transform along any axis."""

    name: str
    is_sine: bool
    type: TransformType
    norm: FftNorm
    is_orthogonal: bool

    async def __call__(self, x: AccelRef, axis: int, out: Out = None) -> AccelRef:
        """Transform along an axis with a checked length."""
        if x.dtype.kind == "complex":
            return await self._of_parts(x, axis, out)
        n = x.shape[axis]
        count, is_complex, transformed = self._steps(n)
        numbers = {"n": n, "edge": self._edge, "scale": self._scale(n)}
        prolog, epilog = self._texts(n)
        wide = "complex64" if x.dtype is DType.float32 else "complex128"
        with intermediates() as track:
            source = await _in_three(x, axis, track)
            rows, _, *columns = source.shape
            preprocess = _expression(self.name, prolog, wide if is_complex else x.dtype.value, source.ndim)
            postprocess = _expression(self.name, epilog, x.dtype.value, source.ndim)
            ready = track(
                await preprocess(shape=(rows, count, *columns), **_read(preprocess, numbers, x=source))
            )
            spectrum = track(await transformed(ready, 1))
            result = out.reshape(source.shape) if out is not None and out.spec.is_contiguous else None
            result = await postprocess(
                shape=source.shape, out=result, **_read(postprocess, numbers, v=spectrum)
            )
            if out is None or out.spec.is_contiguous:
                return result.reshape(x.shape) if out is None else out
            return await _COPY(track(result).reshape(x.shape), out=out)

    def _texts(self, n: int) -> tuple[str, str]:
        if self.type == 4 and n % 2:
            return _ODD[0].format("n - 1 - j" if self.is_sine else "j"), _ODD[1] + _SIGN * self.is_sine
        return (_SINES if self.is_sine else _COSINES)[self.type]

    def _steps(self, n: int) -> tuple[int, bool, Callable[[AccelRef, int], Awaitable[AccelRef]]]:
        """Return how many elements a Fourier transform takes, whether they are complex, and the transform."""
        if self.type < 3:
            return self._length(n) // (1 if self.type == 1 else 2), False, lambda a, axis: rfft(a, axis=axis)
        if self.type == 3:
            return n // 2 + 1, True, lambda a, axis: irfft(a, n, axis, "forward")
        if n % 2:
            return n, True, lambda a, axis: fft(a, 2 * n, axis)
        return n // 2, True, lambda a, axis: fft(a, axis=axis)

    def _length(self, n: int) -> int:
        """Return the length of the array with all that its symmetry adds."""
        return 2 * (n if self.type > 1 else n + 1 if self.is_sine else n - 1)

    def _scale(self, n: int) -> float:
        length = self._length(n)
        return {"backward": 1.0, "ortho": 1 / math.sqrt(length), "forward": 1 / length}[self.norm]

    @property
    def _edge(self) -> float:
        return math.sqrt(2) if self.is_orthogonal else 1.0

    async def _of_parts(self, x: AccelRef, axis: int, out: Out) -> AccelRef:
        """Transform the real and the imaginary parts."""
        with intermediates() as track:
            parts = [track(await self(track(await part(x)), axis)) for part in (_REAL, _IMAGINARY)]
            return await _COMPLEX(*parts, out=out)


def _read(expression: Elementwise[AccelRef], numbers: dict[str, Any], **arrays: Any) -> dict[str, Any]:
    """Return the arguments that an expression reads."""
    return {name: value for name, value in {**numbers, **arrays}.items() if name in expression.inputs}


async def _in_three(x: AccelRef, axis: int, track: Callable[[AccelRef], AccelRef]) -> AccelRef:
    """View an array, or a copy, with three axes, or two if the last would be 1: kernels for all shapes."""
    flat = x if x.spec.is_contiguous else track(await x.copy())
    columns = math.prod(x.shape[axis + 1 :])
    return flat.reshape((math.prod(x.shape[:axis]), x.shape[axis], columns)[: 2 if columns == 1 else 3])


@functools.cache
def _expression(name: str, text: str, dtype: str, axes: int) -> Elementwise[AccelRef]:
    """Make an expression along the second of two or three axes."""
    suffix = ", i(2)" if axes == 3 else ""
    text = re.sub(r"\b([xv])\[([^]]*)\]", rf"\1[i(0), \2{suffix}]", f"j = i(1); {text}")
    return Elementwise(text, dtypes=dtype, operation=f"fft.{name}")


_REAL, _IMAGINARY, _COMPLEX, _COPY = (
    Elementwise[AccelRef](text, operation="fft.dct") for text in ("real(x)", "imag(x)", "x + 1j * y", "x")
)
_FITTED = "y = x[minimum(j, n - 1)] if j < n else 0"


async def _along(
    name: str,
    a: Operand,
    lengths: Sequence[int],
    axes: Ints,
    out: Out,
    *,
    type: TransformType,  # noqa: A002  # SciPy's name
    norm: FftNorm | None,
    orthogonalize: bool | None,
) -> AccelRef:
    """Check what all functions check, and transform along one axis after the other."""
    kind = type
    if cast("object", kind) not in _INVERSE or isinstance(kind, bool):
        raise ValueError(f"{name}: type must be 1, 2, 3 or 4, got {kind!r}")
    check_norm(name, norm)
    min_length = 2 if kind == 1 and "dct" in name else 1
    if min(lengths) < min_length:
        raise ValueError(
            f"{name}: type {kind} takes at least {min_length} elements along an axis, got {lengths}"
        )
    chosen: FftNorm = norm or "backward"
    is_orthogonal = chosen == "ortho" if orthogonalize is None else orthogonalize
    if name.startswith("i"):
        kind, chosen = _INVERSE[kind], _OPPOSITE[chosen]
    shape = list(a.shape)
    for axis, length in zip(axes, lengths, strict=True):
        shape[axis] = length
    check_out(name, out, shape, DType.of(a.dtype))
    transform = _RealTransform(name, "dst" in name, kind, chosen, is_orthogonal)
    with intermediates() as track:
        result = track(await device_of(name, out).put(a)) if isinstance(a, np.ndarray) else on_device(a)
        for position, (axis, length) in enumerate(zip(axes, lengths, strict=True), 1):
            fitted = await fit(name, result, axis, length, track)
            is_last = position == len(axes)
            result = await transform(fitted, axis, out if is_last else None)
            if not is_last:
                track(result)
    return result


async def fit(
    name: str, x: AccelRef, axis: int, length: int, track: Callable[[AccelRef], AccelRef]
) -> AccelRef:
    """Cut an axis, or pad it with zeros."""
    extent = x.shape[axis]
    if length <= extent:
        return x[(*(slice(None),) * axis, slice(length))]
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    if not x.size:
        return track(await x.device.zeros(shape, x.dtype))
    source = await _in_three(x, axis, track)
    rows, _, *columns = source.shape
    fitted = _expression(name, _FITTED, x.dtype.value, source.ndim)
    return track(await fitted(x=source, n=extent, shape=(rows, length, *columns))).reshape(shape)


async def _one_axis(name: str, a: Operand, n: int | None, axis: int, out: Out, **how: Any) -> AccelRef:
    """Check the arguments of a function along one axis."""
    device_of(name, a, out)
    check_floating(name, "a", a)
    axis_index = axis_of(name, "axis", bounded_integer(name, "axis", axis), a)
    length = (
        extent_of(name, axis_index, a) if n is None else bounded_integer(name, "n", n, "an integer or None")
    )
    return await _along(name, a, [length], (axis_index,), out, **how)


async def _several(
    name: str,
    a: Operand,
    s: int | Sequence[int] | None,
    axes: int | Sequence[int] | None,
    out: Out,
    **how: Any,
) -> AccelRef:
    """Check the arguments of a function along several axes."""
    device_of(name, a, out)
    check_floating(name, "a", a)
    requested_lengths = all_whole(name, "s", s)
    axis_indices = axes_of(name, a, all_whole(name, "axes", axes), requested_lengths)
    lengths = [
        extent_of(name, axis, a) if n in (None, -1) else n
        for axis, n in zip(axis_indices, requested_lengths or (None,) * len(axis_indices), strict=True)
    ]
    return await _along(name, a, lengths, axis_indices, out, **how)


@composed
async def dct(
    a: Operand,
    type: TransformType = 2,  # noqa: A002  # SciPy's name
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    orthogonalize: bool | None = None,
    out: Out = None,
) -> AccelRef:
    """Discrete cosine transform along one axis, as `scipy.fft.dct`.

    It is made of expressions and a Fourier transform: three launches. Factors are computed in float64, and
    rounded with each step.

    Args:
        a: Array of float32, float64, complex64 or complex128; real and imaginary parts are transformed apart.
        type: 1, 2, 3 or 4; see `scipy.fft.dct`.
        n: Length of the transform; the axis is cut or padded with zeros to it. By default its length.
        axis: Axis to transform; the others are a batch.
        norm: ``"backward"`` (default), ``"ortho"`` or ``"forward"``, as in SciPy.
        orthogonalize: Whether elements at the ends are scaled so that the matrix of the transform is
            orthogonal with ``"ortho"``. None for whether `norm` is that.
        out: Array of the result's shape and dtype to write to; it may be `a`. By default a new one.

    Returns:
        The coefficients: the shape of `a` with `n` elements along `axis`, in its dtype.

    Raises:
        ValueError: A length is below 1, or below 2 for type 1; the type or norm is unknown; an axis is out of
            range; or `out` does not fit.
        TypeError: The array is not on a device, or its dtype is not supported.
    """
    return await _one_axis("dct", a, n, axis, out, type=type, norm=norm, orthogonalize=orthogonalize)


@arguments_of(dct, _one_axis, "idct")
def idct() -> None:
    """Inverse discrete cosine transform along one axis, as `scipy.fft.idct`.

    See `dct` for arguments, result and errors; `type` is the type of the inverted transform.
    """


@arguments_of(dct, _one_axis, "dst")
def dst() -> None:
    """Discrete sine transform along one axis, as `scipy.fft.dst`.

    See `dct` for arguments, result and errors; type 1 also takes a single element.
    """


@arguments_of(dct, _one_axis, "idst")
def idst() -> None:
    """Inverse discrete sine transform along one axis, as `scipy.fft.idst`.

    See `dst` for arguments, result and errors; `type` is the type of the inverted transform.
    """


@composed
async def dctn(
    a: Operand,
    type: TransformType = 2,  # noqa: A002  # SciPy's name
    s: int | Sequence[int] | None = None,
    axes: int | Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    orthogonalize: bool | None = None,
    out: Out = None,
) -> AccelRef:
    """Discrete cosine transform along several axes, as `scipy.fft.dctn`: one after the other.

    See `dct` for arguments, result and errors, and as in `fftn`:

    Args:
        a: See `dct`.
        type: See `dct`.
        s: Length of the transform along each of `axes`, or along a single one; -1 is the length that `a` has
            there. By default the shape of `a`. Without `axes` it is for the last axes.
        axes: Axis to transform, or several distinct ones. By default all, or the last ``len(s)``.
        norm: See `dct`.
        orthogonalize: See `dct`.
        out: See `dct`.
    """
    return await _several("dctn", a, s, axes, out, type=type, norm=norm, orthogonalize=orthogonalize)


@arguments_of(dctn, _several, "idctn")
def idctn() -> None:
    """Inverse discrete cosine transform along several axes, as `scipy.fft.idctn`.

    See `dctn` for arguments, result and errors; `type` is the type of the inverted transform.
    """


@arguments_of(dctn, _several, "dstn")
def dstn() -> None:
    """Discrete sine transform along several axes, as `scipy.fft.dstn`.

    See `dctn` for arguments, result and errors; type 1 also takes a single element.
    """


@arguments_of(dctn, _several, "idstn")
def idstn() -> None:
    """Inverse discrete sine transform along several axes, as `scipy.fft.idstn`.

    See `dstn` for arguments, result and errors; `type` is the type of the inverted transform.
    """
