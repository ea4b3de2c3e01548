"""Products with fused computations before and after them in one launch, as in cuBLASLt (D163)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, cast, overload

import numpy as np

from ..backends.base import ALWAYS_HELD, DType, DTypeLike, ops
from ..backends.base.contract.ops import Precision
from ..devices import (
    AccelRef,
    Call,
    Operand,
    Operation,
    Planned,
    Planner,
    message_of,
    operation,
    refuse_value,
)
from ..expressions import Out
from ._actor import BlasLtActor

__all__ = [
    "FusedMatmul",
    "FusedMatmulGrad",
    "FusedMatmulResult",
    "FusedSumsResult",
    "fused_matmul",
    "fused_matmul_grad",
    "fused_matmul_sums",
]

_Activation: TypeAlias = Literal["relu", "gelu"]
_Scale: TypeAlias = "float | Operand | None"
_MIN_FLOAT32, _MAX_FLOAT32 = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)
_FLOAT8 = (DType.float8_e4m3fn, DType.float8_e5m2)


class FusedMatmulResult(NamedTuple):
    """A product after an activation, with the values for its gradient; see `fused_matmul`."""

    out: AccelRef
    """The result."""
    aux: AccelRef
    """For `fused_matmul_grad`: of relu bits, of gelu its arguments, in padded rows."""


class FusedSumsResult(NamedTuple):
    """A product, and sums that are the gradient of a bias."""

    out: AccelRef
    """The product."""
    sums: AccelRef
    """The sums."""


def _plan_product(message: Any, planner: Planner) -> Planned[Any]:
    """Plan a product with an activation; `_plan` has the common part of all three."""
    if message.activation not in (None, "relu", "gelu"):
        refuse_value(planner.name, "activation", (None, "relu", "gelu"), message.activation)
    if message.return_aux and message.activation is None:
        refuse_value(planner.name, "return_aux", (False,), message.return_aux)
    aux_field = "saved" if message.return_aux else ""
    return _plan(message, planner, message.activation or "none", aux_field, FusedMatmulResult)


def _plan_grad(message: Any, planner: Planner) -> Planned[Any]:
    """Plan a product with the derivative of an activation."""
    epilogue: ops.FusedEpilogue = "relu_grad" if message.activation == "relu" else "gelu_grad"
    return _plan(message, planner, epilogue, "sums" if message.return_sums else "", FusedSumsResult)


def _plan_sums(message: Any, planner: Planner) -> Planned[Any]:
    """Plan a product with one operand's sums."""
    return _plan(message, planner, "sum_a" if message.of == "a" else "sum_b", "sums", FusedSumsResult)


def _plan(
    message: Any, planner: Planner, epilogue: ops.FusedEpilogue, aux_field: str, reply: Any
) -> Planned[Any]:
    """Plan by hand, because no line of shapes expresses dtypes by options, or optional arrays.

    Args:
        message: The message.
        planner: Its planner.
        epilogue: See `FusedMatmulSpec`.
        aux_field: The field of the second result; empty for none.
        reply: Makes the reply of both.
    """
    name = planner.name
    a, b = planner.read("a", message.a), planner.read("b", message.b)
    if ops.differ_in_dtype(a.dtype, b.dtype):
        planner.refuse_dtypes(a=a, b=b)
    *stack, m, n = shape = ops.fused_shape(name, a, b)
    out_dtype = getattr(message.out, "dtype", None) if message.dtype is None else DType.of(message.dtype)
    dtypes = ops.fused_dtypes(name, a.dtype, b.dtype, out_dtype)
    arrays = {"aux": planner.read("aux", message.aux)} if epilogue.endswith("grad") else {}
    for field in ("c", "bias"):
        if getattr(message, field, None) is not None:
            arrays[field] = planner.read(field, getattr(message, field))
    factors = _factors(message, planner, arrays, dtypes)
    out = planner.output(shape, dtypes.out, message.out)
    if message.out is not None:
        # Each element of c is read before it is written.
        distinct_arrays = {
            field: array for field, array in arrays.items() if field != "c" or array != out.spec
        }
        planner.distinct("out", out.spec, a=a, b=b, **distinct_arrays)
    answer: Any = out
    if aux_field == "saved":
        dtype = DType.uint8 if epilogue == "relu" else dtypes.c
        answer = reply(out, planner.output((*stack, m, ops.aux_columns(epilogue, n)), dtype))
    elif aux_field:
        answer = reply(out, planner.output((*stack, m if epilogue == "sum_a" else n), dtypes.bias))
    if aux_field:
        arrays[aux_field] = answer[1].spec
    optional_arrays: dict[str, Any] = {**ops.NO_ARRAYS, **arrays}
    numbers = epilogue, message.precision, int(message.autotune), *factors
    spec = ops.FusedMatmulSpec(*numbers, a, b, out=out.spec, **optional_arrays)
    spec.check_shapes(name)
    return Planned(spec, answer, is_checked=True)


def _factors(
    message: Any, planner: Planner, arrays: dict[str, ops.ArraySpec], dtypes: ops.FusedDtypes
) -> tuple[float, float]:
    """Take alpha, beta and the scales: numbers become a part of alpha, arrays stay arrays."""
    name, product = planner.name, 1.0
    for argument in ("scale_a", "scale_b", "scale_out"):
        scale: _Scale = getattr(message, argument, None)
        if scale is None:
            continue
        if not isinstance(scale, (AccelRef, np.ndarray)):
            _check_scale(name, argument, scale)
            if argument != "scale_out":
                product *= cast("float", scale)  # a call was awaited
                continue
            # This scale is applied after the activation, so it is not a part of alpha.
            scale = np.array(scale, np.float32)
        arrays[argument] = planner.read(argument, scale)
    alpha = _factor(planner, "alpha", message.alpha, dtypes)
    if product != 1:
        if DType.of(message.a.dtype) not in _FLOAT8:
            raise TypeError(f"{name}: scale_a and scale_b are for float8, got {message.a.dtype}; use alpha")
        alpha = _factor(planner, "alpha times the scales", alpha * product, dtypes)
    beta = _factor(planner, "beta", message.beta, dtypes) if "c" in arrays else 0.0
    for argument, factor in (("alpha", alpha), ("beta", beta)) if dtypes.out is DType.int32 else ():
        if not (factor.is_integer() and abs(factor) < 2**31):
            raise ValueError(f"{name}: {argument} must be an int32 integer, got {factor!r}")
    return alpha, beta


def _factor(planner: Planner, argument: str, value: object, dtypes: ops.FusedDtypes) -> float:
    """Require a factor; nearly always it is an ordinary one."""
    if type(value) is float and -ALWAYS_HELD <= value <= ALWAYS_HELD:
        return value
    return planner.factor(argument, value, dtypes.factor).real


def _check_scale(name: str, argument: str, scale: object) -> None:
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.floating, np.integer)):
        raise TypeError(f"{name}: {argument} must be a number or an array, got {type(scale).__name__}")
    # The library's rule: a number that float32 rounds to 0 would make zeros of all.
    if not _MIN_FLOAT32 <= scale <= _MAX_FLOAT32:
        raise ValueError(f"{name}: {argument} must be a finite number above 0 of float32, got {scale!r}")


class _FusedOptions(TypedDict, total=False):
    """The options that products and gradients have in common."""

    alpha: float
    scale_a: _Scale
    scale_b: _Scale
    dtype: DTypeLike | None
    precision: Precision
    autotune: bool
    out: AccelRef | None


class _ProductOptions(_FusedOptions, total=False):
    beta: float
    scale_out: _Scale


@overload
def fused_matmul(
    a: Operand,
    b: Operand,
    c: Operand | None = None,
    bias: Operand | None = None,
    activation: _Activation | None = None,
    *,
    return_aux: Literal[False] = False,
    **options: Unpack[_ProductOptions],
) -> Call[AccelRef]: ...
@overload
def fused_matmul(
    a: Operand,
    b: Operand,
    c: Operand | None = None,
    bias: Operand | None = None,
    activation: _Activation | None = None,
    *,
    return_aux: Literal[True],
    **options: Unpack[_ProductOptions],
) -> Call[FusedMatmulResult]: ...
@operation(actor=BlasLtActor, plan=_plan_product)
async def fused_matmul(
    a: Operand,
    b: Operand,
    c: Operand | None = None,
    bias: Operand | None = None,
    activation: _Activation | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    scale_a: _Scale = None,
    scale_b: _Scale = None,
    scale_out: _Scale = None,
    dtype: DTypeLike | None = None,
    precision: Precision = "ieee",
    return_aux: bool = False,
    autotune: bool = False,
    out: Out = None,
) -> AccelRef | FusedMatmulResult:
    """Compute ``activation(alpha * a @ b + beta * c + bias)`` in one launch (cuBLASLt ``cublasLtMatmul``).

    All is added and applied in the type of the sums, and rounded once.

    Args:
        a: Array of shape (..., m, k). Both operands are of float16, bfloat16, float32, float64 or int8; or of
            float8, and one of them may be float8_e5m2.
        b: Array of shape (..., k, n); the stacks broadcast.
        c: Array with the shape of the result, and its dtype; bfloat16 for a result of float8.
        bias: Vector of shape (n,), or one for each product, (..., n); with the dtype of `c`. It is float32
            for a result of int8, and bfloat16 for products of float8 with a float32 result.
        activation: ``"relu"``, or ``"gelu"`` by the hyperbolic tangent: `nn.gelu` with
            ``approximate="tanh"``.
        alpha: Factor of the product.
        beta: Factor of `c`.
        scale_a: Factor of a float8 `a`'s elements: a number above 0, which becomes a part of `alpha`; or an
            array of float32, with shape () or (..., m, 1); or one number for each 128 elements along k, with
            shape (..., m, k / 128), or (..., m / 128, k / 128), rounded up. The numbers of an array are not
            checked: zeros make zeros.
        scale_b: The same for `b`, with shape (), (..., 1, n), (..., k / 128, n) or (..., k / 128, n / 128).
            Both have the same number of factors along k. CUDA does not support both with blocks of 128 by
            128.
        scale_out: Factor of a float8 result before it is rounded: a number above 0, or an array of float32
            with shape ().
        dtype: Dtype of the result; by default the dtype of the operands, but bfloat16 for float8 and int32
            for int8.
        precision: ``"ieee"``: in the type of the elements, also for all sums. For float32: ``"tf32"`` and
            ``"bf16"`` round the elements to 11 and 8 digits; ``"bf16x9"`` is nine products of bfloat16, as
            accurate as float32. For float64: ``"fixed_point"``, products of int8, as accurate as float64 for
            elements of similar size. For float8: ``"fast"``, with sums of about 14 digits. A backend may be
            more accurate.
        return_aux: Whether to return the values for `fused_matmul_grad` also.
        autotune: Whether the backend measures which of its algorithms is the fastest, at the first product of
            these layouts; by default the library decides.
        out: Array to write to, which may be `c`; by default a new one.

    Returns:
        The result, of shape (..., m, n). float8 and int8 are saturated, int32 wraps around.

    Raises:
        TypeError: Products of these dtypes are not supported; or `precision` or a scale is for other dtypes.
        ValueError: `dtype` cannot hold a factor.
        NotSupportedError: The library or the card does not support the product, dtype or precision.
    """
    ...


@overload
def fused_matmul_grad(
    a: Operand,
    b: Operand,
    aux: Operand,
    activation: _Activation,
    *,
    return_sums: Literal[False] = False,
    **options: Unpack[_FusedOptions],
) -> Call[AccelRef]: ...
@overload
def fused_matmul_grad(
    a: Operand,
    b: Operand,
    aux: Operand,
    activation: _Activation,
    *,
    return_sums: Literal[True],
    **options: Unpack[_FusedOptions],
) -> Call[FusedSumsResult]: ...
@operation(actor=BlasLtActor, plan=_plan_grad)
async def fused_matmul_grad(
    a: Operand,
    b: Operand,
    aux: Operand,
    activation: _Activation,
    *,
    alpha: float = 1.0,
    scale_a: _Scale = None,
    scale_b: _Scale = None,
    dtype: DTypeLike | None = None,
    precision: Precision = "ieee",
    return_sums: bool = False,
    autotune: bool = False,
    out: Out = None,
) -> AccelRef | FusedSumsResult:
    """Compute ``alpha * a @ b`` times the derivative of an activation, with the gradient of its bias.

    Let ``y = fused_matmul(x, w, bias=bias, activation="relu", return_aux=True)``, and let `grad` be the
    gradient of ``y @ v``. Then ``fused_matmul_grad(grad, v.T, aux, "relu", return_sums=True)`` returns the
    gradients of ``x @ w`` and the bias.

    Args:
        a: See `fused_matmul`, as for all arguments without a description here.
        b: Array of shape (..., k, n).
        aux: The values that `fused_matmul` has returned for a product with this shape and dtype.
        activation: The activation.
        alpha: Factor of the product.
        scale_a: Scale of a float8 `a`.
        scale_b: Scale of a float8 `b`.
        dtype: Dtype of the result.
        precision: How float32 is multiplied.
        return_sums: Whether to return the column sums also, with shape (..., n).
        autotune: Whether the backend measures its algorithms.
        out: Array to write to; by default a new one.

    Returns:
        The result, of shape (..., m, n).

    Raises:
        TypeError, ValueError, NotSupportedError: As of `fused_matmul`.
    """
    ...


@operation(actor=BlasLtActor, plan=_plan_sums)
async def fused_matmul_sums(
    a: Operand,
    b: Operand,
    of: Literal["a", "b"],
    *,
    alpha: float = 1.0,
    dtype: DTypeLike | None = None,
    precision: Precision = "ieee",
    autotune: bool = False,
    out: AccelRef | None = None,
) -> FusedSumsResult:
    """Compute ``alpha * a @ b``, and sums of an operand along the axis that the product adds along.

    With ``x.T`` and `grad` it returns the gradient of the weights of ``x @ w + bias``, and the gradient of
    the bias.

    Args:
        a: See `fused_matmul`, as for all arguments without a description here.
        b: Array of shape (..., k, n).
        of: ``"a"``: sums of the rows of `a`, with shape (..., m); ``"b"``: sums of the columns of `b`, (...,
            n).
        alpha: Factor of the product.
        dtype: Dtype of the result.
        precision: How float32 and float64 are multiplied.
        autotune: Whether the backend measures its algorithms.
        out: Array to write to; by default a new one.

    Returns:
        The product, and the sums.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `fused_matmul`.
    """
    ...


FusedMatmul: Callable[..., Operation[BlasLtActor, AccelRef | FusedMatmulResult]] = message_of(fused_matmul)
FusedMatmulGrad: Callable[..., Operation[BlasLtActor, AccelRef | FusedSumsResult]] = message_of(
    fused_matmul_grad
)
