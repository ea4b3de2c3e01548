"""Collectives by a vendor's library, such as NCCL: communicators that are given up and made anew (D162)."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeAlias

import attrs
import trio

from ..actors import ActorError
from ..backends.base import (
    AccelError,
    CompletionTimeoutError,
    ContextLostError,
    DeviceLostError,
    DType,
    LibraryError,
    NotSupportedError,
)
from ..backends.base.contract.ops import (
    CloseCommunicatorSpec,
    CollectiveSpec,
    CommunicatorIdSpec,
    OpenCommunicatorSpec,
)
from ..backends.base.kit.communicators import ABORTED, MISSING, NOT_IN_TIME
from ..devices import (
    AccelRef,
    Device,
    LibraryActor,
    Operation,
    Pending,
    Planned,
    Planner,
    alone_on,
    look_for_answers,
)

__all__ = ["VENDORS", "Communicator", "CommunicatorActor", "CommunicatorControlActor", "Part", "Vendor"]

_logger = logging.getLogger("trio_accel.collectives")

# Words of the name of a communicator: 128 bytes, as NCCL has it.
_NAME = 32
# Seconds for a communicator to be given up by ranks that answer, before another one is opened.
_GIVING_UP = 5.0
# Seconds after an error of the library until it is known whether a rank was lost, which may be its cause.
_TOLD = 0.6
# Seconds between two looks whether a rank was lost whose part is over, or has not begun.
_LOOKED = 0.05
# How often a communicator is made anew for one collective where a rank had a new worker and nobody knew.
_MOST_OPENED = 4
_numbers = itertools.count(1)

Pieces: TypeAlias = tuple[tuple[int, int, int], ...]
Errors: TypeAlias = "Mapping[int, Exception]"


class CommunicatorActor(LibraryActor):
    """Serves collectives by NCCL, on a stream of its own."""

    library = "nccl"


class CommunicatorControlActor(LibraryActor):
    """Gives communicators up, while the other actor, its thread or its stream wait for ranks."""

    library = "nccl"


@attrs.frozen(kw_only=True)
class Vendor:
    """A vendor's library of collectives.

    Attributes:
        title: Its name.
        package: Python package of its bindings.
        missing: Tells that they are not installed.
        actor: Import path of the actor that serves collectives.
        control: Import path of the actor that gives communicators up.
        reductions: By the names of reductions, the dtypes that it has.
        is_apart: Whether each rank must have a device of its own.
    """

    title: str
    package: str
    missing: str
    actor: str
    control: str
    reductions: Mapping[str, frozenset[DType]]
    is_apart: bool = True

    def refusal(self, devices: Sequence[Device]) -> str | None:
        """Tell why these devices cannot have it; None if they can."""
        if len(devices) < 2:
            return "there is one rank"
        for rank, device in enumerate(devices):
            if device.isolation != "process":
                return f"rank {rank}, {device.path}, is inline"
            for other in range(rank if self.is_apart else 0):
                if _hardware(devices[other]) == _hardware(device):
                    return f"ranks {other} and {rank} are on one device, {device.name}"
        if importlib.util.find_spec(self.package) is None:
            return self.missing
        return None


def _hardware(device: Device) -> str:
    return device.info.uuid or device.name


_WHOLE = (DType.int8, DType.uint8, DType.int32, DType.uint32, DType.int64, DType.uint64)
_FLOATING = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
_COMPLEX = (DType.complex64, DType.complex128)
# Extremes of floating numbers are left out: where one is NaN, NCCL takes the other, and NumPy NaN.
_EXTREMES = frozenset({DType.bool, *_WHOLE})

VENDORS: dict[str, Vendor] = {
    "cuda": Vendor(
        title="NCCL",
        package="nccl",
        missing="nccl4py is not installed, which the extras cuda13 and cuda12 have",
        actor=f"{__package__}:{CommunicatorActor.__name__}",
        control=f"{__package__}:{CommunicatorControlActor.__name__}",
        reductions={
            "sum": frozenset({DType.bool, *_WHOLE, *_FLOATING, *_COMPLEX}),
            "prod": frozenset({DType.bool, *_WHOLE, *_FLOATING}),
            "min": _EXTREMES,
            "max": _EXTREMES,
            "mean": frozenset({*_FLOATING, *_COMPLEX}),
        },
    )
}
"""By the name of a backend, the library of collectives that its devices have."""


class _OfCommunicator(Operation[LibraryActor, Any]):
    """Base of the messages: each vendor has actors of its own."""

    not_recorded: ClassVar[str] = "ranks meet when it runs; ask the world before or after a replay"
    library: ClassVar[str] = f"{__package__}:{CommunicatorActor.__name__}"

    def __init__(self, library: str) -> None:
        # In place of that of the class.
        vars(self)["library"] = library


class MakeName(_OfCommunicator):
    """Make the name of a communicator."""

    def plan(self, planner: Planner) -> Planned[bytes]:
        """Take words for it."""
        words = planner.status(_NAME)
        return Planned(CommunicatorIdSpec(words), finish=words.tobytes)


class OpenCommunicator(_OfCommunicator):
    """Open a rank of a communicator."""

    def __init__(self, library: str, number: int, rank: int, size: int, name: bytes) -> None:
        super().__init__(library)
        self._spec = OpenCommunicatorSpec(number, rank, size, name)

    def plan(self, planner: Planner) -> Planned[None]:
        """There are no arrays."""
        return Planned(self._spec)


class CloseCommunicator(_OfCommunicator):
    """Give a rank of a communicator up."""

    def __init__(self, library: str, number: int) -> None:
        super().__init__(library)
        self._spec = CloseCommunicatorSpec(number)

    def plan(self, planner: Planner) -> Planned[None]:
        """There are no arrays."""
        return Planned(self._spec)


@attrs.frozen
class Part:
    """The part of one rank in a collective.

    Attributes:
        kind: As in `CollectiveSpec`, as are the others.
        dtype: Element type of the arrays.
        source: The array that it gives.
        shape: Shape of the array that it gets; None for none.
        reduction: How elements become one.
        root: The rank that gives or gets an array alone.
        sends: Pieces that it gives.
        receives: Pieces that it gets.
    """

    kind: str
    dtype: DType
    source: AccelRef | None = attrs.field(default=None, kw_only=True)
    shape: tuple[int, ...] | None = attrs.field(default=None, kw_only=True)
    reduction: str = attrs.field(default="", kw_only=True)
    root: int = attrs.field(default=0, kw_only=True)
    sends: Pieces = attrs.field(default=(), kw_only=True)
    receives: Pieces = attrs.field(default=(), kw_only=True)


class Meet(_OfCommunicator):
    """Take part in a collective."""

    def __init__(self, library: str, number: int, part: Part) -> None:
        super().__init__(library)
        self._number = number
        self._part = part

    @property
    def operation(self) -> str:
        """As with mapped arrays where elements are reduced."""
        return f"collectives.{self._part.reduction or self._part.kind}"

    def plan(self, planner: Planner) -> Planned[AccelRef | None]:
        """Name the result."""
        part = self._part
        source = None if part.source is None else planner.read("array", part.source)
        out = None if part.shape is None else planner.output(part.shape, part.dtype)
        spec = CollectiveSpec(
            self._number,
            part.kind,
            part.reduction,
            part.root,
            source,
            None if out is None else out.spec,
            part.sends,
            part.receives,
        )
        return Planned(spec, out)


_LOSS, _OTHER = range(2)
_CONSEQUENCES = (MISSING, NOT_IN_TIME, ABORTED)


class RanksFailedError(Exception):
    """What ranks have failed with, by their numbers.

    Attributes:
        rank: The rank that is to blame.
        error: Its error.
        is_opening: Whether the communicator was being opened.
    """

    def __init__(self, errors: Errors, *, is_opening: bool) -> None:
        # A rank that hears of the loss of another one is not to blame.
        self.rank: int = min(errors, key=lambda rank: (_order(errors[rank]), rank))
        self.error: Exception = errors[self.rank]
        super().__init__(f"rank {self.rank}: {self.error}")
        self.is_opening: bool = is_opening

    @property
    def is_stale(self) -> bool:
        """Whether a new communicator may do: a rank had a new worker before, or was late."""
        error = self.error
        if not isinstance(error, LibraryError):
            return False
        return error.code in ((MISSING, ABORTED) if self.is_opening else _CONSEQUENCES)

    @property
    def is_refusal(self) -> bool:
        """Whether the library does not work with these devices: no rank was lost."""
        return self.is_opening and isinstance(self.error, (LibraryError, NotSupportedError))


def _order(error: Exception | None) -> int:
    """Tell how near an error is to the cause of all."""
    if isinstance(error, (ContextLostError, DeviceLostError, CompletionTimeoutError)):
        return _LOSS
    if isinstance(error, LibraryError) and error.code in _CONSEQUENCES:
        return _OTHER + 1 + _CONSEQUENCES.index(error.code)
    return _OTHER


class Communicator:
    """The communicator of a world. It is opened for the first collective, and again when a rank was lost.

    Args:
        vendor: The library.
        devices: The devices, in the order of the ranks.
    """

    def __init__(self, vendor: Vendor, devices: Sequence[Device]) -> None:
        self.vendor: Vendor = vendor
        self._devices = devices
        # Its number, and the generations that have opened it.
        self._number: int | None = None
        self._generations: list[int] = []
        # Ranks are giving up the last one, and what has waited by it ends.
        self._closing: list[Pending[Any]] = []
        self._waiting: list[trio.Event] = []

    def has(self, reduction: str, dtype: DType) -> bool:
        """Tell whether it reduces elements of a dtype so."""
        return dtype in self.vendor.reductions[reduction]

    async def run(self, parts: Mapping[int, Part]) -> dict[int, AccelRef | None]:
        """Run a collective: the parts of all ranks that take part in it.

        Returns:
            What each of them gets.

        Raises:
            RanksFailedError: It failed on a rank. All others have ended it, and have no communicator.
        """
        # Kernels that wait for each other need their devices at the same time: two worlds take turns.
        async with alone_on(self._devices):
            for opened in itertools.count(1):
                try:
                    number = await self._open()
                    asked = {rank: Meet(self.vendor.actor, number, part) for rank, part in parts.items()}
                    return await self._together(number, asked, is_opening=False)
                except RanksFailedError as failed:
                    if not failed.is_stale or opened == _MOST_OPENED:
                        raise
        raise AssertionError

    def _generations_now(self) -> list[tuple[int, bool]]:
        return [(device.generation, device.is_ready) for device in self._devices]

    async def close(self) -> None:
        """Give it up, on all ranks that answer soon."""
        if self._number is not None:
            self._give_up(self._number)
        await self._wait_closed()

    async def _open(self) -> int:
        """Return the number of the communicator that all ranks have open."""
        number = self._number
        states = self._generations_now()
        if number is not None and states == [(generation, True) for generation in self._generations]:
            return number
        await self.close()
        vendor, size = self.vendor, len(self._devices)
        number = next(_numbers)
        # The actors that give up are started first: later they must not have to wait for anything.
        controls: dict[int, _OfCommunicator] = {
            rank: CloseCommunicator(vendor.control, 0) for rank in range(size)
        }
        await self._together(number, controls, is_opening=True)
        made = await self._together(number, {0: MakeName(vendor.actor)}, is_opening=True)
        openers: dict[int, _OfCommunicator] = {
            rank: OpenCommunicator(vendor.actor, number, rank, size, made[0]) for rank in range(size)
        }
        began = trio.current_time()
        await self._together(number, openers, is_opening=True)
        self._number, self._generations = number, [device.generation for device in self._devices]
        taken = trio.current_time() - began
        _logger.info("world: %d ranks have opened a communicator of %s in %.2f s", size, vendor.title, taken)
        return number

    async def _together(
        self, number: int, operations: Mapping[int, Operation[Any, Any]], *, is_opening: bool
    ) -> dict[int, Any]:
        """Ask ranks at the same time. If one fails, or the caller is cancelled, all give the communicator up.

        Nothing else would end what the others wait for.
        """
        errors: dict[int, Exception] = {}
        before = self._generations_now()
        changed, over = trio.Event(), trio.Event()
        left = len(operations)

        def end(rank: int, error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if isinstance(error, Exception):
                errors[rank] = error
            if errors or not left:
                changed.set()
            if not left:
                over.set()

        asked = self._submit(operations, end)
        try:
            await look_for_answers([self._devices[rank] for rank in asked], lambda: not changed.is_set())
            # Its opening waits for a rank that is about to get a worker.
            await self._settled(changed, [] if is_opening else before)
        finally:
            if left or errors:
                self._give_up(number)
                # What survivors wait for ends soon, and nobody waits for that here: only the next opening.
                self._waiting.append(over)
                if min(map(_order, errors.values()), default=_LOSS) == _OTHER:
                    with trio.move_on_after(_TOLD, shield=True):
                        await self._settled(over, before)
        if errors or left:
            for rank in self._lost(before):
                # Its part may not have begun, and waits for the next worker, which has no communicator.
                if _order(errors.get(rank)) != _LOSS:
                    text = "the rank lost its worker while the others waited for it"
                    errors[rank] = ContextLostError(text, device=self._devices[rank].name)
            try:
                raise RanksFailedError(errors, is_opening=is_opening)
            finally:
                # The frames of the error have them: with results, and with other errors and their frames.
                asked.clear()
                errors.clear()
        return {rank: pending.value for rank, pending in asked.items()}

    def _lost(self, before: Sequence[tuple[int, bool]]) -> list[int]:
        """Name the ranks that had a worker, and have another one now, or none."""
        now = self._generations_now()
        return [rank for rank, then in enumerate(before) if then[1] and then != now[rank]]

    async def _settled(self, event: trio.Event, before: Sequence[tuple[int, bool]]) -> None:
        """Wait for an event, or until a rank is lost, whose part may tell nothing of that."""
        while not (event.is_set() or self._lost(before)):
            with trio.move_on_after(_LOOKED):
                await event.wait()

    def _submit(
        self, operations: Mapping[int, Operation[Any, Any]], end: Callable[[int, BaseException | None], None]
    ) -> dict[int, Pending[Any]]:
        """Hand operations over; each is told of when it ends, or could not be handed over.

        Without a task for each: a small collective is as long as what goes on here.
        """
        asked: dict[int, Pending[Any]] = {}
        for rank, operation in operations.items():
            try:
                asked[rank] = self._devices[rank].submit(operation)
            except Exception as error:  # noqa: BLE001  # raised by the caller
                end(rank, error)
        for rank, pending in asked.items():
            pending.when_done(partial(_ended, end, rank, pending))
        return asked

    def _give_up(self, number: int) -> None:
        """Have a communicator given up on all ranks, soon.

        What waits by it ends at once. To give its memory back takes NCCL a second.
        """
        self._number = None
        for device in self._devices:
            with suppress(AccelError, ActorError):
                self._closing.append(device.submit(CloseCommunicator(self.vendor.control, number)))

    async def _wait_closed(self) -> None:
        """Wait until ranks have given up what they are to, and nothing waits for that, for a while."""
        closing, self._closing = self._closing, []
        waiting, self._waiting = self._waiting, []
        with trio.move_on_after(_GIVING_UP, shield=True):
            for pending in closing:
                with suppress(AccelError, ActorError):
                    await pending.wait()
            for over in waiting:
                await over.wait()


def _ended(end: Callable[[int, BaseException | None], None], rank: int, pending: Pending[Any]) -> None:
    end(rank, pending.error)


def pieces(sizes: Sequence[int], ranks: Sequence[int] | None = None) -> Pieces:
    """Tell pieces that lie one behind another: rank, first element, how many; without empty ones.

    Args:
        sizes: Elements of each.
        ranks: Their ranks; None for all in order.
    """
    chosen = range(len(sizes)) if ranks is None else ranks
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple((rank, start, size) for rank, start, size in zip(chosen, starts, sizes, strict=True) if size)
