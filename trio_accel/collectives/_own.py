"""Operations of a program's own that run on all ranks of a world, with arrays that all of them lend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, cast

from ..backends.base import NotSupportedError
from ..devices import AccelRef, LibraryActor, Operation, Planned, Planner
from ..devices.base._refusals import what_to_do
from ..devices.engine._library import APART
from ..devices.operations._blocks import Block
from ._call import Arrays, PartCall, Turns

MakesMessage: TypeAlias = "Callable[..., Operation[Any, Any]]"


class OwnCall(PartCall):
    """One call of `World.run`.

    Args:
        turns: The turns of its world.
        operation: Makes the message of a rank.
        arrays: For each of its arguments, one array of each rank.
    """

    def __init__(self, turns: Turns, operation: MakesMessage, arrays: Sequence[Arrays]) -> None:
        super().__init__(turns, "run")
        if not callable(cast("object", operation)):
            raise TypeError(f"{self.name}: operation must be callable, got {type(operation).__name__}")
        ranks = range(self._size)
        lists = [self.checked(f"arrays[{number}]", one, ranks) for number, one in enumerate(arrays)]
        self._operation = operation
        self._lent: list[AccelRef] = [array for one in lists for array in one]

    async def run(self) -> list[Any]:
        """Run it on all ranks; returns their replies."""
        return [*(await self.each(self._lent, self._reply)).values()]

    async def _reply(self, rank: int, arrays: list[AccelRef]) -> Any:
        lists = [arrays[start : start + self._size] for start in range(0, len(arrays), self._size)]
        message: object = self._operation(rank, *lists)
        if not isinstance(message, Operation) or not isinstance(getattr(message, "library", None), str):
            told = f"{type(message).__name__}{what_to_do(message, is_array=False)}"
            raise TypeError(
                f"{self.name}: operation must return a message that names its library, got {told}"
            )
        changed = self.changed[rank] = list[Block]()
        lent = [one.block for one in self._lent]
        return await self._devices[rank].ask(_PartOperation(message, lent, changed))


class _PartOperation(Operation[LibraryActor, Any]):
    """The message of one rank, for an actor of its own with the library of the message.

    Args:
        message: The message.
        lent: What all ranks lend.
        changed: Takes what it writes that was there before.
    """

    not_recorded: ClassVar[str] = "ranks meet when it runs; ask the world before or after a replay"
    library: ClassVar[str] = "of the message"

    def __init__(self, message: Operation[Any, Any], lent: Sequence[Block], changed: list[Block]) -> None:
        self._message = message
        self._lent = lent
        self._changed = changed
        # The instance has a library of its own, in place of the class's.
        vars(self)["library"] = f"{message.library}{APART}"

    @property
    def operation(self) -> str:
        """The message's operation."""
        return self._message.operation

    def plan(self, planner: Planner) -> Planned[Any]:
        """Plan the message, and refuse to write to what others read.

        Raises:
            ValueError: It does.
            NotSupportedError: Its library has no second actor.
        """
        if "?" in self._message.library:
            raise NotSupportedError(
                f"{planner.name}: {self._message.library} is a library of one actor, which no world can ask; "
                "ask its device",
                operation=planner.name,
            )
        planned = self._message.plan(planner)
        if any(block is one for block in planner.changed for one in self._lent):
            raise ValueError(
                f"{planner.name}: it writes to an array that ranks read meanwhile; have it make a new one, "
                "or write to another"
            )
        self._changed[:] = planner.changed
        return planned
