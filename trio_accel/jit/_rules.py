"""Rules of a launch: functions of its arguments, and the extents that they give."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

from ..backends.base.ops import Dim3

__all__ = ["Extents", "Rule", "cdiv", "check_block", "check_grid", "check_shared", "extents", "shape_of"]

Extents: TypeAlias = "int | Sequence[int] | Callable[..., int | Sequence[int]]"
"""One to three numbers along x, y and z, or a rule that gives them: a function that names arguments of the
kernel as its own parameters. It gets arrays as `ArraySpec` (shape, size, ndim, dtype), scalars as numbers."""

_AXES = 3
# As the driver has them for every device.
_MOST_THREADS = 1024
_MOST_BLOCK = (1024, 1024, 64)
_MOST_GRID = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up: how many blocks of ``b`` cover ``a`` elements.

    >>> cdiv(1000, 256)
    4
    """
    return -(-a // b)


class Rule:
    """A number, or several, that may follow from the arguments.

    Args:
        what: What it is for: ``"grid"``, ``"block"``, ``"shared"`` or ``"shape of y"``.
        given: The value, or the function.
        names: What a function may ask for.

    Raises:
        ValueError: The function names something else.
        TypeError: What it names cannot be told.

    Attributes:
        constant: The value, where it is one.
    """

    __slots__ = ("_asked", "_function", "_what", "constant")

    def __init__(self, what: str, given: Any, names: Collection[str]) -> None:
        self._what = what
        self._function: Callable[..., Any] | None = given if callable(given) else None
        self.constant: Any = None if callable(given) else given
        self._asked: tuple[str, ...] = ()
        if self._function is not None:
            self._asked = _asked_by(what, self._function, names)

    def value(self, arguments: Mapping[str, Any]) -> Any:
        """What it says of the arguments of a launch."""
        if self._function is None:
            return self.constant
        try:
            return self._function(**{name: arguments[name] for name in self._asked})
        except Exception as error:
            error.add_note(f"in the rule of the kernel for its {self._what}")
            raise


def _asked_by(what: str, function: Callable[..., Any], names: Collection[str]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: it cannot be told which arguments {function!r} takes: {error}") from error
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return tuple(names)
    asked = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    unknown = [
        each.name for each in parameters if each.name in asked and each.name not in names
        and each.default is each.empty
    ]  # fmt: skip
    if unknown:
        raise ValueError(
            f"{what}: its rule asks for {', '.join(unknown)}; there are {', '.join(names) or 'no arguments'}"
        )
    return tuple(name for name in asked if name in names)


def extents(name: str, what: str, given: Any) -> Dim3:
    """One to three whole numbers as three.

    Raises:
        TypeError, ValueError: Something else.
    """
    if type(given) is int:
        return given, 1, 1
    try:
        is_several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        several = cast("Sequence[Any]", given if is_several else (given,))
        numbers = [operator.index(each) for each in several]
    except TypeError:
        numbers = []
    if not 1 <= len(numbers) <= _AXES:
        raise TypeError(f"{name}: {what} must be a whole number, or one to three of them, got {given!r}")
    x, y, z = (*numbers, 1, 1)[:_AXES]
    return x, y, z


def shape_of(name: str, parameter: str, given: Any) -> tuple[int, ...]:
    """The shape that a rule gives an output."""
    try:
        is_several = isinstance(given, Sequence) and not isinstance(given, str)
        several = cast("Sequence[Any]", given if is_several else (given,))
        shape = tuple(operator.index(each) for each in several)
    except TypeError:
        shape = (-1,)
    if any(extent < 0 for extent in shape):
        raise ValueError(
            f"{name}: the shape of {parameter} must be whole numbers of at least 0, got {given!r}"
        )
    return shape


def check_grid(name: str, grid: Dim3, cluster: Dim3 | None, *, may_be_empty: bool) -> None:
    """Refuse a grid that no device launches.

    Raises:
        ValueError: It is empty or too large, or its blocks do not fill clusters.
    """
    x, y, z = grid
    if x < 1 or y < 1 or z < 1:
        if may_be_empty and min(grid) == 0:
            return
        hint = "; to launch nothing then, declare the kernel with skip_empty=True" if min(grid) == 0 else ""
        raise ValueError(f"{name}: the grid must have at least one block along each axis, got {grid}{hint}")
    if x > _MOST_GRID[0] or y > _MOST_GRID[1] or z > _MOST_GRID[2]:
        raise ValueError(f"{name}: the grid must have at most {_MOST_GRID} blocks along x, y, z, got {grid}")
    if cluster is not None and any(all_ % each for all_, each in zip(grid, cluster, strict=True)):
        raise ValueError(f"{name}: the grid must be whole clusters of {cluster} blocks, got {grid}")


def check_block(name: str, block: Dim3) -> None:
    """Refuse a block that no device runs.

    Raises:
        ValueError: It is empty or too large.
    """
    if min(block) < 1:
        raise ValueError(f"{name}: a block must have at least one thread along each axis, got {block}")
    if math.prod(block) > _MOST_THREADS or any(a > b for a, b in zip(block, _MOST_BLOCK, strict=True)):
        raise ValueError(
            f"{name}: a block must have at most {_MOST_THREADS} threads, and {_MOST_BLOCK} along x, y, z, "
            f"got {block}, which is {math.prod(block)}"
        )


def check_shared(name: str, given: Any) -> int:
    """Bytes of dynamic shared memory.

    Raises:
        TypeError: No whole number.
        ValueError: A negative one.
    """
    try:
        shared = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: shared must be a whole number of bytes, got {given!r}") from None
    if not 0 <= shared < 1 << 31:
        raise ValueError(f"{name}: shared must be at least 0 bytes, and below 2**31, got {shared}")
    return shared
