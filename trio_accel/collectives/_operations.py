"""The work of a rank in a collective: messages for its device, made of arrays that all ranks lend.

They serve collectives by mapped arrays, and a program's own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import attrs

from ..backends.base import DType, NotSupportedError
from ..backends.base.contract.ops import JoinSpec
from ..devices import AccelRef, LibraryActor, Operation, PeerCopyActor, Planned, Planner
from ..devices.operations._blocks import Block
from ..expressions import Elementwise

__all__ = ["CollectiveActor", "Reduction"]

Reduction: TypeAlias = Literal["sum", "prod", "min", "max", "mean"]
"""How the elements of all ranks become one. Ranks come in their order: ``((x0 + x1) + x2) + ...``.
By mapped arrays, float16 and bfloat16 are computed in float32, and rounded once."""

REDUCTIONS: dict[str, str] = {
    "sum": "({} + {})",
    "prod": "({} * {})",
    "min": "minimum({}, {})",
    "max": "maximum({}, {})",
    "mean": "({} + {})",
}
_LOW_PRECISION = (DType.float16, DType.bfloat16)
_LOW = (DType.float8_e4m3fn, DType.float8_e5m2)


class CollectiveActor(LibraryActor):
    """Serves the sums, products and extremes of collectives, on a stream of its own."""

    library = "arrays"


@functools.lru_cache(256)
def expression_of(name: str, reduction: str, count: int, dtype: DType) -> Elementwise[AccelRef]:
    """Make the expression that reduces `count` arrays, in their order, to one of their dtype.

    Raises:
        ValueError, TypeError, NotSupportedError: The reduction is unknown, or does not support the dtype.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if dtype in _LOW:
        raise NotSupportedError(f"{name}: {dtype} is not computed with; convert the arrays by cast() first")
    is_ordered, is_divided = reduction in ("min", "max"), reduction == "mean"
    if (is_ordered and dtype.kind == "complex") or (is_divided and dtype.kind not in ("float", "complex")):
        kinds = "floating or complex" if is_divided else "real"
        raise TypeError(f"{name}: {reduction} needs {kinds} arrays, got {dtype}")
    names = [f"x{number}" for number in range(count)]
    # Round only once, at the end.
    terms = [f"float32({name})" for name in names] if dtype in _LOW_PRECISION else names
    text = functools.reduce(REDUCTIONS[reduction].format, terms)
    if reduction == "mean":
        text = f"{text} / {count}"
    library = f"{__package__}:{CollectiveActor.__name__}"
    return Elementwise[AccelRef](
        text, inputs=names, dtypes=dtype, operation=f"collectives.{reduction}", library=library
    )


@attrs.frozen(eq=False)
class Join(Operation[PeerCopyActor, AccelRef]):
    """Join arrays along the first axis.

    Attributes:
        arrays: Arrays with the same dtype, and the same shape except for the first axis.
    """

    library: ClassVar[str] = "trio_accel.devices:PeerCopyActor"
    arrays: Sequence[AccelRef]

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Name the result."""
        sources = [planner.read(f"arrays[{index}]", array) for index, array in enumerate(self.arrays)]
        first = sources[0]
        shape = sum(source.shape[0] for source in sources), *first.shape[1:]
        out = planner.output(shape, first.dtype)
        return Planned(JoinSpec(0, tuple(sources), 0, out.spec), out)


@attrs.define(eq=False, slots=False)
class OfRanks(Operation[LibraryActor, Any]):
    """Base of the messages that an instance sends to a library of its own, in place of the class's."""

    path: str
    not_recorded: ClassVar[str] = "ranks meet when it runs; ask the world before or after a replay"
    library: ClassVar[str] = "of the instance"

    def __attrs_post_init__(self) -> None:
        vars(self)["library"] = self.path


@attrs.define(eq=False, slots=False)
class PartOperation(OfRanks):
    """The message of one rank, for an actor of its own with the library of the message.

    Attributes:
        message: The message.
        lent: The arrays that all ranks lend.
        changed: Collects the existing arrays that the message changes.
    """

    message: Operation[Any, Any]
    lent: Sequence[Block]
    changed: list[Block]

    @property
    def operation(self) -> str:
        """The message's operation."""
        return self.message.operation

    def plan(self, planner: Planner) -> Planned[Any]:
        """Plan the message, and refuse to write to arrays that other ranks read.

        Raises:
            ValueError: The message writes to such an array.
            NotSupportedError: The library is limited to one actor.
        """
        if "?" in self.message.library:
            raise NotSupportedError(
                f"{planner.name}: {self.message.library} is a library of one actor, which no world can ask; "
                "ask its device",
                operation=planner.name,
            )
        planned = self.message.plan(planner)
        if any(block is lent_block for block in planner.changed for lent_block in self.lent):
            raise ValueError(
                f"{planner.name}: it would overwrite an array while other ranks read it; let it "
                "return a new array, or write to another one"
            )
        self.changed[:] = planner.changed
        return planned
