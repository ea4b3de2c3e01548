"""Functions of elements by their names in expressions, with the values of NumPy's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import numpy_function

from ._device import refuse
from ._views import carrier, turned, wrapped

T = torch.Tensor


def _by_parts(function: Callable[[T, T], T]) -> Callable[[T, T], T]:
    """Add complex numbers by their parts, because PyTorch multiplies an infinite one by 1, which is NaN."""

    def added(a: T, b: T) -> T:
        if not a.is_complex():
            return function(a, b)
        parts = (torch.view_as_real(value.resolve_conj()) for value in (a, b))
        return torch.view_as_complex(function(*parts))

    return added


def _int_quotient(a: T, b: T) -> T:
    # Zero and -1 end the process by a signal on some processors.
    safe = (
        torch.where((b == 0) | (b == -1), torch.ones_like(b), b)
        if b.dtype is not torch.uint8
        else b.clamp(min=1)
    )
    made = torch.div(a, safe, rounding_mode="floor")
    if b.dtype is not torch.uint8:
        made = torch.where(b == -1, -a, made)
    return torch.where(b == 0, torch.zeros_like(made), made)


def _uint64_quotient(a: T, b: T) -> T:
    """Divide numbers whose bits are those of uint64."""
    half = (a >> 1) & ((1 << 63) - 1)
    safe = torch.where(b <= 0, torch.ones_like(b), b)
    made = torch.div(half, safe, rounding_mode="floor") << 1
    made = made + (turned(a - made * safe) >= turned(safe)).to(torch.int64)
    made = torch.where(b < 0, (turned(a) >= turned(b)).to(torch.int64), made)
    return torch.where(b == 0, torch.zeros_like(made), made)


def _floor_divide(a: T, b: T) -> T:
    if not a.is_floating_point():
        return _int_quotient(a, b)
    quotient = a / b
    made = torch.floor_divide(a, b)
    return torch.where(torch.isinf(a) | torch.isinf(b) | (b == 0), quotient, made)


def _remainder(a: T, b: T) -> T:
    if a.is_floating_point():
        made = torch.remainder(a, b)
        return torch.where(made == 0, torch.copysign(made, b), made)
    return torch.where(b == 0, torch.zeros_like(a), a - _int_quotient(a, b) * b)


def _fmod(a: T, b: T) -> T:
    if a.is_floating_point():
        return torch.fmod(a, b)
    made = _remainder(a, b)
    # Of numbers with a sign the remainder has that of the first.
    return torch.where((made != 0) & ((made < 0) != (a < 0)), made - b, made)


def _power(a: T, b: T) -> T:
    if a.is_floating_point() or a.is_complex():
        return torch.pow(a, b)
    a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    made, base, left = torch.ones_like(a), a.clone(), b.clamp(min=0)
    while bool((left > 0).any()):
        made = torch.where((left & 1) != 0, made * base, made)
        base, left = base * base, left >> 1
    if b.dtype is torch.uint8:
        return made
    inverse = torch.where(a.abs() == 1, torch.where((b & 1) != 0, a, torch.ones_like(a)), torch.zeros_like(a))
    return torch.where(b < 0, inverse, made)


def _shifted(a: T, b: T, dtype: DType, *, is_left: bool) -> T:
    bits, a, b = 8 * dtype.itemsize, a.to(torch.int64), b.to(torch.int64)
    is_near, count = (b >= 0) & (b < bits), b.clamp(0, bits - 1)
    if is_left:
        made = torch.where(is_near, a << count, torch.zeros_like(a))
    elif dtype is DType.uint64:
        kept = torch.where(count == 0, -1, (torch.ones_like(count) << (64 - count.clamp(min=1))) - 1)
        made = torch.where(is_near, (a >> count) & kept, torch.zeros_like(a))
    else:
        made = torch.where(is_near, a >> count, torch.where(a < 0, -1, 0))
    return wrapped(made, dtype).to(carrier(dtype))


def _greater(a: T, b: T) -> T:
    return a | b if a.dtype is torch.bool else torch.where((a > b) | (a != a), a, b)  # noqa: PLR0124  # NaN


def _less(a: T, b: T) -> T:
    return a & b if a.dtype is torch.bool else torch.where((a < b) | (a != a), a, b)  # noqa: PLR0124  # NaN


def _greater_number(a: T, b: T) -> T:
    return a | b if a.dtype is torch.bool else torch.where((a > b) | (b != b), a, b)  # noqa: PLR0124  # NaN


def _less_number(a: T, b: T) -> T:
    return a & b if a.dtype is torch.bool else torch.where((a < b) | (b != b), a, b)  # noqa: PLR0124  # NaN


def _gcd(a: T, b: T) -> T:
    # Of the least integer, the divisor is negative on cards.
    return torch.gcd(a, b).abs()


def _lcm(a: T, b: T) -> T:
    """Return the multiple that wraps around, of which cards take the absolute value."""
    divisor = _gcd(a, b)
    share = torch.div(a.abs(), torch.where(divisor == 0, 1, divisor), rounding_mode="trunc").abs()
    return torch.where(divisor == 0, 0, share * b.abs())


def _sign(a: T) -> T:
    if a.dtype is torch.bool:
        return a
    made = torch.sgn(a)
    return torch.where(torch.isnan(a), a, made) if a.is_floating_point() else made


def _rint(a: T) -> T:
    return torch.complex(a.real.round(), a.imag.round()) if a.is_complex() else torch.round(a)


def _sqrt(a: T) -> T:
    """Round the root correctly, because that of MKL, which PyTorch calls, is off by a bit at times."""
    if a.dtype is torch.float32:
        return torch.sqrt(a.double()).float()
    root = torch.sqrt(a)
    if a.dtype is not torch.float64 or a.device.type != "cpu":
        return root
    # Dekker's product: the error of the square, of halves of the digits.
    high = root * 134217729.0
    high = high - (high - root)
    low, square = root - high, root * root
    error = ((high * high - square) + 2 * high * low) + low * low
    better = root + ((a - square) - error) / (2 * root)
    return torch.where(torch.isfinite(better) & (a > 1e-290), better, root)


def _cbrt(a: T) -> T:
    wide = a.double()
    root = torch.copysign(wide.abs().pow(1 / 3), wide)
    better = root - (root * root * root - wide) / (3 * root * root)
    return torch.where(torch.isfinite(better) & (wide != 0), better, root).to(a.dtype)


def _erfcinv(a: T) -> T:
    found: T = torch.special.ndtri(a.double() / 2) / -math.sqrt(2)
    return found


def _tgamma(a: T) -> T:
    wide = a.double()
    made = torch.exp(torch.lgamma(wide))
    is_negative = (wide < 0) & (torch.floor(wide).remainder(2) != 0)
    made = torch.where(is_negative, -made, made)
    is_pole = (wide < 0) & (wide == torch.floor(wide))
    made = torch.where(is_pole | torch.isneginf(wide), torch.nan, made)
    # Small whole numbers have whole results.
    made = torch.where((wide == torch.floor(wide)) & (wide > 0) & (wide < 19), made.round(), made)
    return torch.where(wide == 0, torch.copysign(torch.full_like(wide, torch.inf), wide), made)


def _nextafter(a: T, b: T) -> T:
    if a.dtype in (torch.float32, torch.float64):
        made = torch.nextafter(a, b)
    else:
        bits = a.view(torch.int16)
        step = torch.where((b > a) == (a > 0), 1, -1).to(torch.int16)
        made = (bits + step).view(a.dtype)
        least = torch.ones_like(bits).view(a.dtype)
        made = torch.where(a == 0, torch.copysign(least, b), made)
        made = torch.where(torch.isnan(a) | torch.isnan(b), torch.nan, made)
    return torch.where(a == b, b, made)


def _log1p(a: T) -> T:
    made = torch.log1p(a)
    if a.is_complex():
        is_near = torch.maximum(a.real.abs(), a.imag.abs()) < 0.5
        small = 0.5 * torch.log1p(a.imag * a.imag + a.real * a.real + 2 * a.real)
        made = torch.complex(torch.where(is_near, small, made.real), made.imag)
    return made


def _expm1(a: T) -> T:
    if not a.is_complex():
        return torch.expm1(a)
    half = torch.sin(a.imag / 2)
    return torch.complex(
        torch.expm1(a.real) * torch.cos(a.imag) - 2 * half * half, torch.exp(a.real) * torch.sin(a.imag)
    )


def _by_double(function: Callable[[T], T]) -> Callable[[T], T]:
    """Compute a function in float64, where PyTorch's of float32 has fewer digits than SciPy's."""
    return lambda a: function(a.double()).to(a.dtype)


def _logical(name: str) -> Callable[..., T]:
    return getattr(torch, f"logical_{name}")  # type: ignore[no-any-return]


def _imag(a: T) -> T:
    return a.imag if a.is_complex() else torch.zeros_like(a)


def _same(a: T) -> T:
    return a


_PLAIN = (
    *(
        "floor",
        "ceil",
        "trunc",
        "isnan",
        "isinf",
        "isfinite",
        "signbit",
        "copysign",
        "exp",
        "exp2",
        "log",
        "log2",
    ),
    *(
        "log10",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "tanh",
        "arcsin",
        "arccos",
        "arctan",
        "arcsinh",
        "arccosh",
        "arctanh",
    ),
)

_FUNCTIONS: dict[str, Callable[..., T]] = {
    "add": _by_parts(torch.add), "subtract": _by_parts(torch.subtract), "multiply": torch.multiply,
    "divide": torch.true_divide,
    "negative": torch.negative, "positive": _same, "stop_gradient": _same, "absolute": torch.abs,
    "fabs": torch.abs, "sign": _sign, "square": torch.square, "reciprocal": torch.reciprocal, "power": _power,
    "maximum": _greater, "minimum": _less, "fmax": _greater_number, "fmin": _less_number,
    "conjugate": lambda a: a.conj().resolve_conj(), "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor, "invert": torch.bitwise_not,
    "gcd": _gcd, "lcm": _lcm, "floor_divide": _floor_divide, "remainder": _remainder, "fmod": _fmod,
    "where": torch.where, "real": torch.real, "imag": _imag, "arctan2": torch.atan2, "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg, "radians": torch.deg2rad, "degrees": torch.rad2deg,
    "logaddexp": torch.logaddexp, "cbrt": _cbrt, "rint": _rint, "less": torch.lt, "less_equal": torch.le,
    "greater": torch.gt, "greater_equal": torch.ge, "equal": torch.eq, "not_equal": torch.ne,
    "log1p": _log1p, "expm1": _expm1, "nextafter": _nextafter, "hypot": torch.hypot,
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"), "erf": _by_double(torch.erf), "erfc": _by_double(torch.erfc),
    "erfinv": _by_double(torch.erfinv), "erfcinv": _by_double(_erfcinv),
    "erfcx": _by_double(torch.special.erfcx), "lgamma": _by_double(torch.lgamma),
    "tgamma": _by_double(_tgamma), "bessel_i0": _by_double(torch.special.i0),
    "bessel_i1": _by_double(torch.special.i1), "sqrt": _sqrt,
    **{name: getattr(torch, name) for name in _PLAIN},
}  # fmt: skip

_MIRRORED = {
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
    "equal": "equal",
    "not_equal": "not_equal",
}
"""Comparisons, and the same with the operands exchanged."""
# PyTorch's functions of complex numbers differ from NumPy's at infinities and on branch cuts.
_COMPLEX = {
    *("exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sqrt", "power", "reciprocal", "divide"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "sign"),
    *("arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh"),
}
_ORDERED = {"less", "less_equal", "greater", "greater_equal", "maximum", "minimum", "fmax", "fmin"}
_ROUNDING = {"floor", "ceil", "trunc", "rint"}


def apply(name: str, dtype: DType, given: Sequence[T], dtypes: Sequence[DType]) -> T:  # noqa: PLR0911
    """Compute a function of elements in their carriers.

    Args:
        name: The function.
        dtype: The type of the result.
        given: The operands.
        dtypes: Their types.
    """
    if name in ("left_shift", "right_shift"):
        return _shifted(given[0], given[1], dtype, is_left=name == "left_shift")
    if DType.uint64 in dtypes and len(set(dtypes)) > 1 and name in _MIRRORED:
        return _compared(name, given, is_second=dtypes[1] is DType.uint64)
    if dtypes[0] is DType.uint64 and (special := _of_uint64(name, dtype, given)) is not None:
        return special
    if dtypes[0] is DType.bool and name in ("add", "multiply"):
        return given[0] | given[1] if name == "add" else given[0] & given[1]
    if (name in _ROUNDING or name == "conjugate") and not dtype.is_inexact:
        return given[0]
    if dtypes[0].kind in ("uint", "bool") and name in ("absolute", "sign", "square"):
        plain = given[0]
        if name == "sign":
            return (plain != 0).to(plain.dtype)
        return plain if name == "absolute" or plain.dtype is torch.bool else wrapped(plain * plain, dtype)
    function = _FUNCTIONS.get(name)
    if function is None:
        refuse(f"{name} of elements")
    if name in _COMPLEX and given[0].is_complex() and given[0].device.type == "cpu":
        return _by_numpy(name, given)
    made = wrapped(function(*given), dtype) if dtype.kind == "uint" else function(*given)
    return made if made.dtype is carrier(dtype) else made.to(carrier(dtype))


def _by_numpy(name: str, given: Sequence[T]) -> T:
    """Compute a function of complex numbers by NumPy, which has the memory of the processor, too."""
    with np.errstate(all="ignore"):
        made = numpy_function(name)(*(value.resolve_conj().numpy() for value in given))
    return torch.from_numpy(np.asarray(made))


def _compared(name: str, given: Sequence[T], *, is_second: bool) -> T:
    """Compare numbers of uint64 with those of another type of integers."""
    whole, other = given
    if is_second:
        name, whole, other = _MIRRORED[name], other, whole
    other = other.to(torch.int64)
    # Bits of uint64 that are a negative number of int64 are beyond all of these.
    is_above = (whole < 0) | (other < 0)
    if name in ("greater", "greater_equal", "not_equal"):
        return is_above | _FUNCTIONS[name](whole, other)
    return ~is_above & _FUNCTIONS[name](whole, other)


def _of_uint64(name: str, dtype: DType, given: Sequence[T]) -> T | None:  # noqa: PLR0911
    """Compute functions for which the sign of the bits must not count."""
    if name in _ORDERED:
        made = _FUNCTIONS[name](*map(turned, given))
        return turned(made) if dtype is DType.uint64 else made
    if name == "floor_divide":
        return _uint64_quotient(*given)
    if name in ("remainder", "fmod"):
        a, b = given
        return torch.where(b == 0, torch.zeros_like(a), a - _uint64_quotient(a, b) * b)
    if name == "power":
        a, b = torch.broadcast_tensors(*given)
        made = torch.ones_like(a)
        for bit in range(64):
            made = torch.where((b >> bit & 1) != 0, made * a, made)
            a = a * a
        return made
    if name in ("gcd", "lcm"):
        a, b = torch.broadcast_tensors(*given)
        divisor, rest = a, b
        while bool((rest != 0).any()):
            left = divisor - _uint64_quotient(divisor, rest) * rest
            divisor, rest = torch.where(rest == 0, divisor, rest), torch.where(rest == 0, 0, left)
        if name == "gcd":
            return divisor
        return torch.where(divisor == 0, 0, _uint64_quotient(a, divisor) * b)
    return None


def reduced(name: str, value: T, dtype: DType) -> T:
    """Combine the elements along the first axis.

    Args:
        name: The reduction.
        value: The elements in their carrier.
        dtype: The type that they are combined in.
    """
    if name in ("sum", "prod"):
        made = getattr(torch, name)(value, 0, dtype=carrier(dtype))
        return wrapped(made, dtype)
    if name in ("any", "all"):
        return getattr(torch, name)(value, 0)  # type: ignore[no-any-return]
    key = (
        turned(value)
        if dtype is DType.uint64
        else value.to(torch.uint8)
        if value.dtype is torch.bool
        else value
    )
    if name in ("argmin", "argmax"):
        return first_at(key, getattr(torch, f"a{name[3:]}")(key, 0))
    if name in ("nanmin", "nanmax") and key.is_floating_point():
        is_nan = torch.isnan(key)
        far = torch.inf if name == "nanmin" else -torch.inf
        made = getattr(torch, f"a{name[3:]}")(torch.where(is_nan, far, key), 0)
        return torch.where(is_nan.all(0), torch.nan, made).to(key.dtype)
    made = getattr(torch, f"a{name.removeprefix('nan')}")(key, 0)
    return turned(made) if dtype is DType.uint64 else made.to(value.dtype)


def first_at(key: T, value: T) -> T:
    """Return where a value is first along the first axis; PyTorch's `argmax` takes any of equal elements."""
    is_there = key == value
    if key.is_floating_point():
        is_there |= torch.isnan(key)
    places = torch.arange(len(key), device=key.device).reshape(-1, *[1] * (key.dim() - 1))
    return torch.where(is_there, places, len(key)).amin(0)
