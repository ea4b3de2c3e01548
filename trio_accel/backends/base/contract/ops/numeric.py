"""Specifications of products, transforms, random numbers and expressions, which are written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, TypeAlias

from ..dtypes import DType, Ints
from ._array import ArraySpec, contiguous_strides, exact, packed, reads, scalar, updates, writes
from ._signature import check_one_dtype, common_shape, refuse_shapes
from ._spec import OperationSpec, specification

__all__ = [
    "FFT_DTYPES",
    "PHILOX_ROW",
    "RANDOM_DTYPES",
    "Distribution",
    "ExpressionSpec",
    "FftDirection",
    "FftKind",
    "FftNorm",
    "FftSpec",
    "FusedFftSpec",
    "MatmulSpec",
    "PhiloxSpec",
    "Reduce",
    "Side",
    "Transpose",
    "in_between",
    "product_shape",
    "transformed_shape",
]

Transpose = Literal["N", "T", "C"]
"""As it is, transposed, or transposed and conjugated: the BLAS's letters."""

Side = Literal["L", "R"]
"""Whether a matrix is the left or the right factor."""


@specification
class MatmulSpec(OperationSpec):
    """``out = a @ b`` with the shape rules of `numpy.matmul` for operands with one or more axes.

    All three have one dtype. ``out`` is C-contiguous and overlaps neither operand.
    """

    a: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        a, b, out = self.a, self.b, self.out
        shape = product_shape(name, a.shape, b.shape)
        if out.shape != shape:
            refuse_shapes(name, self, f"out must have the shape {shape} of the product", a=a, b=b, out=out)
        if a.dtype is not b.dtype or a.dtype is not out.dtype:
            check_one_dtype(name, self, a=a, b=b, out=out)


FftKind: TypeAlias = Literal["c2c", "r2c", "c2r"]
FftDirection: TypeAlias = Literal["forward", "inverse"]
FftNorm: TypeAlias = Literal["backward", "ortho", "forward"]

FFT_DTYPES: Mapping[FftKind, Mapping[DType, DType]] = {
    "c2c": {DType.complex64: DType.complex64, DType.complex128: DType.complex128},
    "r2c": {DType.float32: DType.complex64, DType.float64: DType.complex128},
    "c2r": {DType.complex64: DType.float32, DType.complex128: DType.float64},
}
"""By the kind of a transform: the dtype of its result by that of its source."""


@specification
class _TransformFields(OperationSpec):
    """Fields of a transform; see `FftSpec`."""

    kind: FftKind = exact()
    direction: FftDirection = exact()
    lengths: Ints = exact()
    axes: Ints = exact()
    norm: FftNorm = exact()


@specification
class FftSpec(_TransformFields):
    """A transform along one axis or several, batched over the others.

    The last of `axes` is the halved axis. Complex kinds of several axes are transforms along each of them. Of
    the real kinds, only the last axis is real, and the others are complex. So a backend with a library for up
    to three axes runs the axes in groups, one after the other: r2c ends, and c2r begins, with plain complex
    transforms along the first ones.

    Attributes:
        kind: ``"c2c"``, ``"r2c"`` (half spectrum) or ``"c2r"``, in the vendors' terms.
        direction: ``"forward"`` (exponent -) or ``"inverse"`` (exponent +). If a library has the real kinds
            in one direction only, the other direction is its conjugate.
        lengths: Length of the transform along each of `axes`, at least 1: ``source`` is cut or padded with
            zeros to it. Along a halved axis, ``n // 2 + 1`` elements represent n.
        axes: Axes of the transform: at least one, distinct, not negative.
        norm: The scaled direction, as in `numpy.fft`.
    """

    source: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        kind, source, out, axes, lengths = self.kind, self.source, self.out, self.axes, self.lengths
        if (
            not axes
            or len(axes) != len(lengths)
            or len(set(axes)) != len(axes)
            or not 0 <= min(axes) <= max(axes) < len(source.shape)
            or min(lengths) < 1
        ):
            rule = f"axes={axes} must be distinct axes of source, each with one of lengths={lengths} above 0"
            refuse_shapes(name, self, rule, source=source, out=out)
        shape = transformed_shape(source.shape, axes, lengths, is_halved=kind == "r2c")
        if out.shape != shape:
            rule = f"out must have shape {shape} for axes={axes} and lengths={lengths}"
            refuse_shapes(name, self, rule, source=source, out=out)
        if FFT_DTYPES[kind].get(source.dtype) is not out.dtype:
            transform = f"{self.direction} {kind} transform of {source.dtype} to {out.dtype}"
            raise TypeError(f"{name}: FftSpec: a {transform} does not exist")


Distribution: TypeAlias = Literal["bits", "uniform", "normal", "exponential", "lognormal", "integers"]

_REALS = (DType.float32, DType.float64)

RANDOM_DTYPES: Mapping[Distribution, tuple[DType, ...]] = {
    "bits": (DType.uint32,),
    **dict.fromkeys(("uniform", "normal", "exponential", "lognormal"), _REALS),
    "integers": (DType.int64,),
}
"""The dtypes of the numbers of each distribution."""

PHILOX_ROW = 1 << 16
"""Subsequences of the Philox sequence: so many counters make a row."""


@specification
class PhiloxSpec(OperationSpec):
    """Numbers of a Philox-4x32-10 sequence (Salmon et al., SC 2011), in the order of cuRAND.

    Four 32-bit words come from one counter. Counter ``c`` of the sequence has the first half
    ``row + c // 65536`` and the second half ``c % 65536``; the key is the seed. Of every four float64 or
    int64 values, the first two come from one counter, and the others from the counter of the next row.

    Attributes:
        distribution: ``"bits"`` (uint32 words), ``"uniform"`` (over ``low`` to ``low + width``,
            from numbers above 0 up to 1), ``"normal"`` (mean ``low``, standard deviation ``width``,
            by Box and Muller), ``"exponential"`` (mean ``width``: minus the logarithms of uniform numbers),
            ``"lognormal"`` (the exponentials of normal numbers) or ``"integers"`` (int64 from ``low`` on,
            below ``low + width``, of at most 2**32: the upper half of the product with two words).
        start: The 64-bit key and the first row, which is even, packed by `PHILOX_START`.
        low: Lower bound, or mean.
        width: Width, or standard deviation.
    """

    distribution: Distribution = exact()
    start: bytes = packed()
    low: float = scalar()
    width: float = scalar()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        allowed = RANDOM_DTYPES.get(self.distribution, ())
        if self.out.dtype not in allowed or not self.out.is_contiguous:
            names = ", ".join(map(str, allowed))
            raise TypeError(
                f"{name} {self.distribution} makes contiguous arrays of {names}, not {self.out.dtype}"
            )


@specification
class ExpressionSpec(OperationSpec):
    """A program of arrays and numbers: of each element, with reductions along axes, or with stores.

    Attributes:
        program: The steps and the arguments, encoded by `encode_program` of
            `trio_accel.backends.base.expressions`.
        axes: The reduced axes of `arrays`, in order.
        arrays: Arrays that are read element by element, broadcast to one shape by strides of zero. With
            reductions, and with stores, there is at least one.
        loaded: Arrays that elements are loaded from, not broadcast; an array may be in both fields.
        results: The results, in C order. They have the shape of the arrays; or the reduced shape, with or
            without the reduced axes, if the result reads elements only by reductions.
        stored: Arrays that elements are stored to. Values for one place come in any order. Their arguments
            follow the arguments of `loaded`.
        scalars: Numbers, 16 bytes for each.
    """

    program: str = exact()
    axes: Ints = exact()
    arrays: tuple[ArraySpec, ...] = reads(variadic=True)
    loaded: tuple[ArraySpec, ...] = reads(variadic=True)
    results: tuple[ArraySpec, ...] = writes(variadic=True)
    stored: tuple[ArraySpec, ...] = updates(variadic=True)
    scalars: bytes = packed()

    @property
    def shape(self) -> Ints:
        """Shape of the element-wise arrays, or of the results without these."""
        return (self.arrays or self.results)[0].shape


@specification
class FusedFftSpec(_TransformFields):
    """A program, a transform of its result, and a program of the transform's result.

    Attributes:
        kind: See `FftSpec` for this, `direction`, `lengths`, `axes` and `norm`.
        dtype: Name with the dtype of the transform's source.
        shape: Shape of the transform's source.
        prolog: The program of each element, as in `ExpressionSpec`.
        has_prolog: 0 if the source is the only one of `arrays` unchanged, with the dtype of the transform.
        arrays: Arrays that the prolog reads element by element, broadcast to `shape`.
        loaded: Arrays that it loads elements from.
        scalars: Its numbers.
        epilog: The program of the transform's result, which is the first array that it reads.
        has_epilog: 0 if the transform's result is the result.
        more_arrays: The other arrays that it reads, broadcast to the shape of the result.
        more_loaded: Arrays that it loads elements from.
        more_scalars: Its numbers.
    """

    dtype: str = exact()
    shape: Ints = exact()
    prolog: str = exact()
    has_prolog: int = exact()
    arrays: tuple[ArraySpec, ...] = reads(variadic=True)
    loaded: tuple[ArraySpec, ...] = reads(variadic=True)
    scalars: bytes = packed()
    epilog: str = exact()
    has_epilog: int = exact()
    more_arrays: tuple[ArraySpec, ...] = reads(variadic=True)
    more_loaded: tuple[ArraySpec, ...] = reads(variadic=True)
    more_scalars: bytes = packed()
    out: ArraySpec = writes()

    def parts(self, has_prolog: object, has_epilog: object) -> tuple[ExpressionSpec, FftSpec, ExpressionSpec]:
        """Return the prolog, the transform and the epilog; arrays between them have blocks below 0.

        Args:
            has_prolog: Whether the prolog is computed; otherwise the transform reads the array itself.
            has_epilog: Whether the epilog is computed; otherwise the transform writes the result itself.
        """
        source = in_between(-1, DType(self.dtype), self.shape) if has_prolog else self.arrays[0]
        shape = transformed_shape(self.shape, self.axes, self.lengths, is_halved=self.kind == "r2c")
        result = in_between(-2, FFT_DTYPES[self.kind][DType(self.dtype)], shape) if has_epilog else self.out
        return (
            ExpressionSpec(self.prolog, (), self.arrays, self.loaded, (source,), (), self.scalars),
            FftSpec(self.kind, self.direction, self.lengths, self.axes, self.norm, source, result),
            ExpressionSpec(
                self.epilog,
                (),
                (result, *self.more_arrays),
                self.more_loaded,
                (self.out,),
                (),
                self.more_scalars,
            ),
        )

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        if not self.has_prolog and len(self.arrays) != 1:
            raise ValueError(f"{name}: FusedFftSpec: without a prolog there is one array to transform")
        _, transform, _ = self.parts(self.has_prolog, self.has_epilog)
        transform.check_shapes(name)
        for shape, arrays in (
            (self.shape, self.arrays),
            (transform.out.shape, (*self.more_arrays, self.out)),
        ):
            if any(array.shape != shape for array in arrays):
                raise ValueError(f"{name}: FusedFftSpec: arrays of an expression must have its shape {shape}")


def in_between(block: int, dtype: DType, shape: Ints) -> ArraySpec:
    """Describe an intermediate array without memory of its own, and without gaps."""
    return ArraySpec(block, 0, dtype, shape, contiguous_strides(shape, dtype.itemsize))


Reduce: TypeAlias = Literal["set", "add", "multiply", "min", "max"]
"""How a value is combined with the element at its place: it takes its place, or is added to it, and so on."""


@lru_cache
def transformed_shape(shape: Ints, axes: Ints, lengths: Ints, *, is_halved: bool) -> Ints:
    """Return the shape of a Fourier transform along valid axes; `is_halved` is for the kind r2c."""
    extents = list(shape)
    for axis, length in zip(axes, lengths, strict=True):
        extents[axis] = length
    if is_halved:
        extents[axes[-1]] = lengths[-1] // 2 + 1
    return tuple(extents)


@lru_cache
def product_shape(name: str, a: Ints, b: Ints) -> Ints:
    """Shape of a product by the rules of `numpy.matmul`.

    Raises:
        ValueError: The shapes of the operands do not fit.
    """
    if not a or not b:
        scalar = "a" if not a else "b"
        raise ValueError(f"{name}: {scalar} must have at least one axis, got an array without axes; use scal")
    rows, columns = a[:-1][-1:], b[1:] if len(b) == 1 else b[-1:]
    inner = b[0] if len(b) == 1 else b[-2]
    if a[-1] != inner:
        raise ValueError(
            f"{name}: the last axis of a and the {'only' if len(b) == 1 else 'last but one'} axis of b must "
            f"have the same length, got a of shape {a} and b of shape {b}"
        )
    stack = common_shape(a[:-2], b[:-2])
    if stack is None:
        raise ValueError(
            f"{name}: the leading axes of a and b must broadcast, got a of shape {a} and b of shape {b}"
        )
    return stack + rows + columns
