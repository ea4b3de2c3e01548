"""Sets of elements, and comparisons of whole arrays: made of sorts, searches and selections."""

from __future__ import annotations

from ..devices import AccelRef, Operand
from ..devices.operations._calls import composed
from ..expressions import Elementwise, Reduction, Rowwise, promoted_dtype
from ._checks import check_number, check_real, flag, placed
from ._joins import concat
from ._numeric import CLOSE
from ._selection import compress, unique_values
from ._sorting import searchsorted, sort
from ._views import reshape

__all__ = [
    "allclose", "array_equal", "intersect1d", "isin", "setdiff1d", "setxor1d", "union1d",
]  # fmt: skip

# A load behind the last element takes the last one, which is another one then.
_FOUND = Elementwise[AccelRef](
    "(x2[at] == x1) != others", inputs=("x2", "at", "x1", "others"),
    operation="arrays.isin",
)  # fmt: skip
_EQUAL = Reduction(
    "x1 == x2 or equal_nan and x1 != x1 and x2 != x2", "all", inputs=("x1", "x2", "equal_nan"),
    operation="arrays.array_equal",
)  # fmt: skip
_ALL_CLOSE = Rowwise(
    f"{CLOSE}; z = all(y)", ("x1", "x2", "rtol", "atol", "equal_nan"), precision="float32",
    operation="arrays.allclose",
)  # fmt: skip


@composed
async def array_equal(x1: Operand, x2: Operand, *, equal_nan: bool = False) -> bool:
    """Tell whether two arrays have the same shape and the same elements: one launch, and the host reads it.

    Args:
        x1: An array.
        x2: Another one; dtypes are promoted as NumPy does.
        equal_nan: Whether NaN equals NaN.

    Returns:
        Whether they do.

    Raises:
        TypeError: An argument is no array, or none is on a device.
        NotSupportedError: float8.
    """
    name = "arrays.array_equal"
    x1, x2 = await placed(name, x1=x1, x2=x2)
    if x1.shape != x2.shape:
        return False
    return bool(await (await _EQUAL(x1, x2, flag(name, "equal_nan", equal_nan))).item())


@composed
async def allclose(
    x1: Operand, x2: Operand, *, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Tell whether all elements are close, by the rule of `isclose`: one launch, and the host reads it.

    Arguments are those of `isclose`; at least one is an array of a device, and they broadcast.

    Returns:
        Whether they are.

    Raises:
        TypeError: An argument is no array or number, or none is on a device.
        ValueError: The shapes do not broadcast.
        NotSupportedError: float8.
    """
    equal_nan = flag("arrays.allclose", "equal_nan", equal_nan)
    within = [
        float(check_number("arrays.allclose", argument, one, is_real=True))
        for argument, one in (("rtol", rtol), ("atol", atol))
    ]
    message = _ALL_CLOSE.compute(x1, x2, *within, equal_nan)
    return bool(await (await _ALL_CLOSE.ask(message)).item())


@composed
async def isin(x1: Operand, x2: Operand, *, invert: bool = False) -> AccelRef:
    """Tell which elements are among others, as the array API standard's ``isin`` does: a sort and a search.

    Args:
        x1: Elements that are looked for.
        x2: Elements that these may be among, of any shape. NaN is equal to nothing.
        invert: Whether to tell which are not.

    Returns:
        Truth values, of the shape of `x1`.

    Raises:
        TypeError: An argument is no array, or complex, or the standard has no promotion of both dtypes;
            signed numbers are found among uint64, though.
        NotSupportedError: See `sort`.
    """
    x1, x2 = await placed("arrays.isin", x1=x1, x2=x2)
    invert = flag("arrays.isin", "invert", invert)
    check_real("arrays.isin", x1=x1.spec, x2=x2.spec)
    if {x1.dtype.kind, x2.dtype.kind} != {"int", "uint"}:
        promoted_dtype("arrays.isin", {"x1": x1.dtype, "x2": x2.dtype})
    if not x2.size:
        return await x1.device.full(x1.shape, invert, "bool")
    ordered = await sort(await reshape(x2, -1))
    return await _FOUND(ordered, await searchsorted(ordered, x1), x1, invert)


@composed
async def intersect1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements that both arrays have, each once and in ascending order.

    Args:
        x1: Elements, of any shape.
        x2: Elements, of any shape.

    Returns:
        A vector, of the dtype of `x1`. It is a view of an array as large as `x1`.

    Raises:
        TypeError, NotSupportedError: As of `isin` and `unique_values`.
    """
    x1, x2 = await placed("arrays.intersect1d", x1=x1, x2=x2)
    once = await unique_values(x1)
    return await compress(await isin(once, x2), once)


@composed
async def setdiff1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements of the first array that the second has not, each once and in ascending order.

    NaN is equal to nothing, so each one of the first is there. Arguments and errors are those of
    `intersect1d`.
    """
    x1, x2 = await placed("arrays.setdiff1d", x1=x1, x2=x2)
    once = await unique_values(x1)
    return await compress(await isin(once, x2, invert=True), once)


@composed
async def setxor1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements that just one of the arrays has, each once and in ascending order.

    Arguments and errors are those of `intersect1d`; the dtype is the promoted one.
    """
    x1, x2 = await placed("arrays.setxor1d", x1=x1, x2=x2)
    return await sort(await concat([await setdiff1d(x1, x2), await setdiff1d(x2, x1)]))


@composed
async def union1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements that one of the arrays has, each once and in ascending order.

    Arguments and errors are those of `intersect1d`; the dtype is the promoted one.
    """
    x1, x2 = await placed("arrays.union1d", x1=x1, x2=x2)
    return await unique_values(await concat([x1, x2], axis=None))
