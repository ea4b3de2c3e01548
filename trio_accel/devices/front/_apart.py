"""Operations that span devices of which some have their contexts in workers (D154)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import attrs

from ...backends.base import ContextLostError, NotSupportedError
from ...backends.base.ops import OperationSpec, PeerArray, Peers, array_key
from ..arrays._ref import AccelRef
from ..base._waits import run_together
from ..engine._library import SPANNING
from ..operations._operation import Operation, Planned, Planner
from ._device import OpenDevice, alone_on, lend
from ._spanning import MultiDeviceOperation, PartPlanner, lent_by, peers_of, plan_parts

__all__ = ["ask_apart"]

ReplyT = TypeVar("ReplyT")
_Arrays: TypeAlias = "Mapping[_Key, AccelRef]"


async def ask_apart(
    name: str, operation: MultiDeviceOperation[ReplyT], devices: Sequence[OpenDevice]
) -> ReplyT:
    """Run the parts as operations of their devices, each of which reads what the others lend.

    Args:
        name: Name of the operation.
        operation: The operation.
        devices: Its devices, in their order.

    Raises:
        Exception: As for `ask_across`.
    """
    library = f"{operation.library}?{SPANNING}"
    states = [(device.state, None) for device in devices]
    async with AsyncExitStack() as stack:
        # One at a time on each device, and in one order on all: a part that waits until an array is not read
        # any more keeps back the parts behind it. So two operations cannot wait for each other.
        await stack.enter_async_context(alone_on(devices))
        # Planned for what is lent, and then again with what each device has of that.
        planned, planners = plan_parts(name, operation, states)
        lent = _lent(name, planned.specs, planners)
        held = await stack.enter_async_context(lend(name, list(lent.values()), devices))
        borrowed = [
            dict(zip(lent, await stack.enter_async_context(held.to(device)), strict=True))
            for device in devices
        ]
        planned, planners = plan_parts(name, operation, states, library)
        parts = [
            _Part(planner, _with_borrowed(planner, spec, arrays))
            for planner, spec, arrays in zip(planners, planned.specs, borrowed, strict=True)
        ]
        complete: list[PartPlanner] = []

        async def run(device: OpenDevice, part: _Part) -> None:
            await device.ask(part)
            complete.append(part.planner)

        try:
            await run_together(partial(run, *each) for each in zip(devices, parts, strict=True))
        except BaseException:
            # What the other parts were to write is spoiled where they have ended.
            for planner in complete:
                planner.spoil()
            raise
    return planned.result()


@attrs.frozen
class _Key:
    """An array that a part lends."""

    part: int
    block: int
    layout: tuple[object, ...]


def _key(peer: PeerArray) -> _Key:
    return _Key(peer.part, peer.array.block, array_key(peer.array))


def _lent(name: str, specs: Sequence[OperationSpec], planners: Sequence[PartPlanner]) -> _Arrays:
    """List what parts lend to others, and refuse what no device could hold for them.

    Raises:
        NotSupportedError: An array that is written, or that is not there yet.
    """
    found: dict[_Key, AccelRef] = {}
    for peer in lent_by(specs):
        if peer.array.block in specs[peer.part].blocks()[1]:
            raise NotSupportedError(
                f"{name}: part {peer.part} lends an array that is written; where a device has its context in "
                'a worker, only what is read can be lent: open the devices with isolation="inline"',
                operation=name,
            )
        block = planners[peer.part].block_of(peer.array)
        if block is None:
            raise NotSupportedError(
                f"{name}: part {peer.part} lends a host array, which takes devices that are all inline; "
                "put it on the device first: await device.put(array)",
                operation=name,
            )
        found[_key(peer)] = AccelRef(block, peer.array)
    return found


def _with_borrowed(planner: PartPlanner, spec: OperationSpec, arrays: _Arrays) -> OperationSpec:
    """Return a part's specification with what its device has borrowed in place of what parts lend.

    That includes what it lends itself. A write to that may have been asked for by now, which waits until
    nothing holds the array any more; so the part must not wait for the write.
    """
    peers = peers_of(spec)
    if peers is not None:
        own = [
            PeerArray(planner.read(f"peers[{number}]", arrays[_key(peer)]), peer.part, None)
            for number, peer in enumerate(peers.arrays)
        ]
        peers = Peers(tuple(own))
    lent = [(key.block, ref) for key, ref in arrays.items() if key.part == planner.part]
    return planner.moved(spec, {block: planner.read("lent", ref).block for block, ref in lent}, peers)


class _Part(Operation[Any, None]):
    """One part, planned with the others, as an operation of its device."""

    library: ClassVar[str] = "of each part"

    def __init__(self, planner: PartPlanner, spec: OperationSpec) -> None:
        self.planner = planner
        self._spec = spec
        self._is_planned = False
        # In place of that of the class.
        vars(self)["library"] = planner.library

    @property
    def operation(self) -> str:
        """That of the whole."""
        return self.planner.name

    def plan(self, planner: Planner) -> Planned[None]:
        """Go on with what was planned."""
        if self._is_planned:
            # An inline device has lost its context before it was launched, and the arrays with it.
            raise ContextLostError(
                f"{self.planner.name}: the context was lost before part {self.planner.part} was launched",
            )
        self._is_planned = True
        planner.go_on_with(self.planner)
        return Planned(self._spec)
