"""Specification of matrix products with fused element-wise functions, as in cuBLASLt."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import attrs

from ..dtypes import DType, Ints
from ._array import ArraySpec, exact, reads, scalar, writes
from ._signature import refuse_shapes
from ._spec import OperationSpec, specification
from .numeric import product_shape

__all__ = [
    "NO_ARRAYS",
    "SCALED_BLOCK",
    "FusedDtypes",
    "FusedEpilogue",
    "FusedMatmulSpec",
    "Precision",
    "ScaleKind",
    "aux_columns",
    "differ_in_dtype",
    "fused_dtypes",
    "fused_shape",
]

FusedEpilogue: TypeAlias = Literal["none", "relu", "gelu", "relu_grad", "gelu_grad", "sum_a", "sum_b"]
"""What is done after the product: see `FusedMatmulSpec`."""

Precision: TypeAlias = Literal["ieee", "tf32", "bf16", "bf16x9", "fixed_point", "fast"]
"""How products are computed: in the type of the elements, or in shorter ones; of float8, with short sums."""

ScaleKind: TypeAlias = Literal["one", "rows", "vectors", "blocks"]
"""One scale for an operand; for each row (of b, each column); for 128 elements of a row; for 128 by 128."""

SCALED_BLOCK = 128
"""How many elements along an axis have one scale."""

_FLOAT8 = (DType.float8_e4m3fn, DType.float8_e5m2)


class FusedDtypes(NamedTuple):
    """The dtypes that belong to certain dtypes of the operands and the result.

    Attributes:
        out: The dtype of the result.
        c: The dtype of the array to add, and of the arguments of `gelu`.
        bias: The dtype of the bias, and of summed gradients.
        factor: The dtype of the factors.
        compute: The dtype in which a host computes everything, rounding once.
    """

    out: DType
    c: DType
    bias: DType
    factor: DType
    compute: DType


# The table is made at first use: the hashes of low-precision dtypes import ml_dtypes.
@functools.cache
def _results() -> dict[tuple[DType, DType], tuple[DType, ...]]:
    """Make the table of result dtypes by the dtypes of a and b, the usual one first."""
    f16, bf16, f32 = DType.float16, DType.bfloat16, DType.float32
    e4, e5 = _FLOAT8
    return {
        (f16, f16): (f16, f32),
        (bf16, bf16): (bf16, f32),
        (f32, f32): (f32,),
        (DType.float64, DType.float64): (DType.float64,),
        (e4, e4): (bf16, f16, f32, e4),
        (e4, e5): (bf16, f16, f32, e4, e5),
        (e5, e4): (bf16, f16, f32, e4, e5),
        (DType.int8, DType.int8): (DType.int32, DType.int8, f32),
    }


_DTYPES_BY_NUMBERS: dict[tuple[int, int, int], FusedDtypes] = {}

_MOST_CHECKED = 4096
# Keys of plans with arrays known to fit.
_CHECKED: set[tuple[object, ...]] = set()


def differ_in_dtype(a: DType, b: DType) -> bool:
    """Return whether operands have no product only because their dtypes differ."""
    results = _results()
    return a is not b and (a, b) not in results and (a, a) in results and (b, b) in results


def fused_dtypes(name: str, a: DType, b: DType, out: DType | None) -> FusedDtypes:
    """Find the dtypes of a product.

    Args:
        name: Name of the operation, for the message.
        a: Dtype of the left operand.
        b: Dtype of the right operand.
        out: Dtype of the result; None for the usual one.

    Raises:
        TypeError: The dtypes have no product.
    """
    # The key holds identities: a member's hash takes longer than all the rest.
    key = id(a), id(b), id(out)
    dtypes = _DTYPES_BY_NUMBERS.get(key)
    if dtypes is None:
        dtypes = _DTYPES_BY_NUMBERS[key] = _find_dtypes(name, a, b, out)
    return dtypes


def _find_dtypes(name: str, a: DType, b: DType, out: DType | None) -> FusedDtypes:
    results = _results().get((a, b))
    if results is None:
        pairs = ", ".join(
            str(first) if first is second else f"{first} and {second}" for first, second in _results()
        )
        raise TypeError(
            f"{name}: products are not available for dtypes {a} and {b}; available: {pairs} (use cast())"
        )
    out = results[0] if out is None else out
    if out not in results:
        allowed = ", ".join(map(str, results))
        raise TypeError(f"{name}: dtype {out}: products of {a} and {b} are of {allowed}")
    c = bias = DType.bfloat16 if out in _FLOAT8 else out
    if a in _FLOAT8 and out is DType.float32:
        bias = DType.bfloat16
    elif out is DType.int8:
        bias = DType.float32
    factor = DType.float64 if a is DType.float64 else DType.float32
    return FusedDtypes(out, c, bias, factor, DType.float64 if a is DType.int8 else factor)


def fused_shape(name: str, a: ArraySpec, b: ArraySpec) -> Ints:
    """Return the shape of a matrix product.

    Raises:
        ValueError: The operands are not matrices, or do not fit.
    """
    if min(a.ndim, b.ndim) < 2:
        raise ValueError(f"{name}: a and b must be matrices, got shapes {a.shape} and {b.shape}")
    return product_shape(name, a.shape, b.shape)


def aux_columns(epilogue: FusedEpilogue, columns: int) -> int:
    """Return the row length of the array that an activation leaves for its gradient.

    They are bits in bytes for relu, 128 at a time; for gelu values, 8 at a time.
    """
    return -(-columns // 128) * 16 if epilogue.startswith("relu") else -(-columns // 8) * 8


NO_ARRAYS: Mapping[str, ArraySpec | None] = dict.fromkeys(
    ("c", "bias", "aux", "scale_a", "scale_b", "scale_out", "saved", "sums")
)
"""The arrays that a fused product may be without."""


@specification
class FusedMatmulSpec(OperationSpec):
    """``out = scale_out * f(alpha * scale_a * a @ (b * scale_b) + beta * c + bias)``, rounded once.

    The epilogue is f, or another computation:

    * ``"none"``, ``"relu"``, ``"gelu"`` (by the hyperbolic tangent). The last two write to `saved` what their
      gradients need: relu a bit for each element, which is not set if the argument is at most 0, the lowest
      bit of a byte first; gelu the argument.
    * ``"relu_grad"``, ``"gelu_grad"``: the product is multiplied by the derivative, given `aux`, which is
      such a `saved`. `sums` are the column sums of the result.
    * ``"sum_a"``, ``"sum_b"``: `sums` are sums of a or b along the axis that the product adds along.

    Float8 and int8 results are saturated. `fused_dtypes` has the dtypes.

    Attributes:
        epilogue: See above.
        precision: How the products are computed.
        is_tuned: 1 if a backend must measure which of its algorithms is the fastest.
        alpha: Factor of the product.
        beta: Factor of `c`.
        a: ``(..., m, k)``.
        b: ``(..., k, n)``; the stacks broadcast.
        c: An array with the shape of `out`, which may be `out`.
        bias: ``(n,)`` or ``(..., n)``.
        aux: ``(..., m, aux_columns(n))``: uint8, or see `FusedDtypes`.
        scale_a: Of float8 only, float32: ``()``, ``(..., m, 1)``, ``(..., m, k / 128)`` or
            ``(..., m / 128, k / 128)``, rounded up.
        scale_b: ``()``, ``(..., 1, n)``, ``(..., k / 128, n)`` or ``(..., k / 128, n / 128)``; with as many
            numbers along k as `scale_a`.
        scale_out: ``()``, float32, if the result is float8.
        out: ``(..., m, n)``.
        saved: An array with the shape and dtype of `aux`.
        sums: ``(..., n)``, or ``(..., m)`` for ``"sum_a"``.
        key: The key of its plan, once its shapes were checked.
    """

    epilogue: FusedEpilogue = exact()
    precision: Precision = exact()
    is_tuned: int = exact()
    alpha: float = scalar()
    beta: float = scalar()
    a: ArraySpec = reads()
    b: ArraySpec = reads()
    c: ArraySpec | None = reads(optional=True)
    bias: ArraySpec | None = reads(optional=True)
    aux: ArraySpec | None = reads(optional=True)
    scale_a: ArraySpec | None = reads(optional=True)
    scale_b: ArraySpec | None = reads(optional=True)
    scale_out: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()
    saved: ArraySpec | None = writes(optional=True)
    sums: ArraySpec | None = writes(optional=True)
    key: tuple[object, ...] = attrs.field(init=False, default=(), eq=False, repr=False)

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        # Each call checks its shapes, mostly of known layouts, and a full check takes as long as a launch.
        key = self.key = self.descriptor().plan_key(self)
        if key in _CHECKED:
            return
        self._check_all(name)
        if len(_CHECKED) >= _MOST_CHECKED:
            _CHECKED.clear()
        _CHECKED.add(key)

    @property
    def scale_kinds(self) -> tuple[ScaleKind, ScaleKind]:
        """The kinds of the scales for a and b."""
        m, n = self.a.shape[-2], self.b.shape[-1]
        of_a = () if self.scale_a is None else self.scale_a.shape[-2:]
        of_b = () if self.scale_b is None else self.scale_b.shape[-2:]
        return _scale_kind(of_a, m), _scale_kind(of_b[::-1], n)

    def _check_all(self, name: str) -> None:
        a, b, out, epilogue = self.a, self.b, self.out, self.epilogue
        shape = fused_shape(name, a, b)
        if out.shape != shape:
            refuse_shapes(name, self, f"out must have the shape {shape} of the product", a=a, b=b, out=out)
        dtypes = fused_dtypes(name, a.dtype, b.dtype, out.dtype)
        *stack, m, n = shape
        bits = DType.uint8 if epilogue.startswith("relu") else dtypes.c
        rows, summed = (*stack, m, aux_columns(epilogue, n)), (*stack, m if epilogue == "sum_a" else n)
        expected: dict[str, tuple[DType, *tuple[Ints, ...]]] = {
            "c": (dtypes.c, shape),
            "bias": (dtypes.bias, (n,), summed),
            "aux": (bits, rows),
            "saved": (bits, rows),
            "sums": (dtypes.bias, summed),
            "scale_a": (DType.float32, *_scale_shapes(a.shape)),
            "scale_b": (DType.float32, *_scale_shapes((*b.shape[:-2], n, b.shape[-2]), is_turned=True)),
            "scale_out": (DType.float32, ()),
        }
        for field, (dtype, *shapes) in expected.items():
            array: ArraySpec | None = getattr(self, field)
            if array is not None and array.shape not in shapes:
                choices = " or ".join(map(str, dict.fromkeys(shapes)))
                raise ValueError(f"{name}: {field} must have shape {choices}, got {array.shape}")
            if array is not None and array.dtype is not dtype:
                advice = f"write await {field}.cast('{dtype}')"
                raise TypeError(f"{name}: {field} must have dtype {dtype}, got {array.dtype}; {advice}")
        allowed = _PRECISIONS.get(self.precision, (a.dtype,))
        if a.dtype not in allowed:
            choices = " and ".join(map(str, allowed))
            raise TypeError(f"{name}: precision {self.precision!r} is for {choices}, got {a.dtype}")
        self._check_scales(name)
        if a.dtype is DType.int8:
            self._check_whole(name)

    def _check_whole(self, name: str) -> None:
        """Refuse features that an integer result lacks.

        cuBLASLt makes the values for a gradient from rounded numbers, and gelu after a bias gave wrong
        results.
        """
        out, epilogue, features = self.out.dtype, self.epilogue, ""
        if out is DType.int32 and (epilogue != "none" or self.bias is not None):
            features = "neither bias nor activation, and no gradients"
        elif out is DType.int8 and (epilogue not in ("none", "relu") or self.saved is not None):
            features = "bias and relu alone"
        if features:
            raise TypeError(f"{name}: of int8 there are products to {out} with {features}; use float32")

    def _check_scales(self, name: str) -> None:
        scales = (self.scale_a, -1), (self.scale_b, -2)
        # The number of elements along k.
        along = [scale.shape[axis] if scale.ndim else None for scale, axis in scales if scale is not None]
        if along and self.a.dtype not in _FLOAT8:
            raise TypeError(f"{name}: scale_a and scale_b are for float8, got {self.a.dtype}; use alpha")
        if self.scale_out is not None and self.out.dtype not in _FLOAT8:
            raise TypeError(f"{name}: scale_out is for a result of float8, got {self.out.dtype}; use alpha")
        if along not in ([], [None]) and (len(along) < 2 or along[0] != along[1]):
            raise ValueError(
                f"{name}: scale_a has one number for each row of a if scale_b has one for each column of b, "
                f"and for each {SCALED_BLOCK} elements along k if it has, got shapes "
                f"{[scale.shape for scale, _ in scales if scale is not None]}"
            )


def _scale_shapes(shape: Ints, *, is_turned: bool = False) -> list[Ints]:
    """List the allowed shapes of an operand's scales: one, for rows, for parts of rows, for blocks."""
    *stack, m, k = shape
    rows, along = -(-m // SCALED_BLOCK), -(-k // SCALED_BLOCK)
    pairs = ((m, 1), (m, along), (rows, along))
    return [(), *((*stack, *(pair[::-1] if is_turned else pair)) for pair in pairs)]


def _scale_kind(shape: Ints, rows: int) -> ScaleKind:
    """Return the kind of scales by their number along the rows and along k."""
    if not shape:
        return "one"
    if shape[0] != rows:
        return "blocks"
    return "rows" if shape[1] == 1 else "vectors"


_PRECISIONS = {
    **dict.fromkeys(("tf32", "bf16", "bf16x9"), (DType.float32,)),
    "fixed_point": (DType.float64,),
    "fast": _FLOAT8,
}
