"""Operations that span several devices: what an author writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import attrs

from ...backends.base import AccelDevice, NotSupportedError
from ...backends.base.ops import ArraySpec, OperationSpec, PeerArray, Peers
from ..arrays._ref import Device
from ._operation import Launch, Operation, Planned, PlannedFor, Planner, operation_name

__all__ = [
    "MultiDeviceOperation",
    "PartPlanner",
    "PlannedParts",
    "check_parts",
    "launch_of",
    "peers_of",
]

ReplyT_co = TypeVar("ReplyT_co", covariant=True)


@attrs.define(on_setattr=None)
class PlannedParts(Generic[ReplyT_co]):
    """A validated operation that spans devices: what each of them runs, and what the asker gets.

    Attributes:
        specs: What the backend runs on each device, in the order of `MultiDeviceOperation.devices`.
        reply: The reply, if it is known before the operation runs; None otherwise.
        finish: Makes the reply when all parts are complete and their status words are there. It runs in the
            task that waits; what it raises is raised there.
    """

    specs: Sequence[OperationSpec]
    reply: ReplyT_co | None = None
    finish: Callable[[], ReplyT_co] | None = None

    def result(self) -> ReplyT_co:
        """The reply of an operation that is complete."""
        return cast("ReplyT_co", self.reply) if self.finish is None else self.finish()


class MultiDeviceOperation(Generic[ReplyT_co]):
    """Base of operations that span devices, such as an all-reduce: attrs classes, asked by `ask_across`.

    None is to be changed once it is made. Each device runs one part of it, in its library actor, as it runs
    an `Operation`.

    Attributes:
        library: Import path of the library actor on each device, ``"package.module:Class"``.
    """

    __slots__ = ()
    library: ClassVar[str]

    @property
    def operation(self) -> str:
        """Its name; see `Operation.operation`."""
        return operation_name(type(self))

    @property
    def devices(self) -> Sequence[Device]:
        """The devices that take part, each once; usually those of its arrays."""
        raise NotSupportedError(f"{type(self).__name__} does not say which devices take part")

    def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[ReplyT_co]:
        """Validate the operation and lower it to one specification per device. Runs in the caller's task.

        Args:
            planners: One for each device, in the order of `devices`: it takes the operands of that device
                and makes its outputs.

        Raises:
            TypeError, ValueError: A wrong argument; the message names it.
            StaleRefError: An array that must not be used.
            NotSupportedError: The operation does not exist.
        """
        raise NotSupportedError(f"{type(self).__name__} lowers to no operation specifications")


class PartPlanner(Planner):
    """A `Planner` for one of the devices that an operation spans.

    Attributes:
        part: Number of the device among those of the operation.
    """

    __slots__ = ("_owner", "part")

    def __init__(
        self, device: PlannedFor, owner: AccelDevice, part: int, operation: MultiDeviceOperation[Any]
    ) -> None:
        super().__init__(device, cast("Operation[Any, Any]", operation))
        self._owner = owner
        self.part: int = part

    def lend(self, array: ArraySpec) -> PeerArray:
        """Lend an array of this device to the kernels of other parts; hand it to `peers` of their planners.

        The specification of this part has the array in a field, too: in one that is written or updated, if
        the others write to it.

        Args:
            array: What `read`, `update` or `output` of this planner have returned or named.
        """
        return PeerArray(array, self.part, self._owner)

    def peers(self, *arrays: PeerArray) -> Peers:
        """Take arrays that planners lend, for the `peers` field of this part's specification.

        Args:
            arrays: They may be of this part, too. Kernels see them in this order.
        """
        return Peers(arrays)


def check_parts(name: str, planned: PlannedParts[Any], owners: Sequence[AccelDevice]) -> None:
    """Refuse specifications that do not fit the devices, or each other.

    Args:
        name: Name of the operation.
        planned: What `MultiDeviceOperation.plan` has returned.
        owners: The open device of each part.

    Raises:
        TypeError, ValueError: They do not.
        NotSupportedError: A device cannot reach the memory of another one.
    """
    count = len(owners)
    if not isinstance(planned, PlannedParts):
        raise TypeError(f"{name}: plan() must return PlannedParts(specs), got {type(planned).__name__}")
    specs = planned.specs
    if len(specs) != count:
        raise ValueError(
            f"{name}: plan() must return one specification per device ({count}), got {len(specs)}"
        )
    for spec in specs:
        if not isinstance(spec, OperationSpec):
            raise TypeError(f"{name}: plan() must return specifications, got {type(spec).__name__}")
    for spec, owner in zip(specs, owners, strict=True):
        peers = peers_of(spec)
        for peer in () if peers is None else peers.arrays:
            owner.check_peer(owners[peer.part])
            reads, writes = specs[peer.part].blocks()
            if peer.array.block not in reads | writes:
                raise ValueError(
                    f"{name}: part {peer.part} lends an array that its own specification, "
                    f"{type(specs[peer.part]).__name__}, has in no field"
                )


def peers_of(spec: OperationSpec) -> Peers | None:
    """The arrays of other devices that a part uses, if any."""
    field = spec.descriptor().peers
    peers: object = getattr(spec, field) if field else None
    # What is something else is refused with the other fields.
    return peers if isinstance(peers, Peers) else None


def launch_of(planner: PartPlanner, spec: OperationSpec) -> Launch:
    """Put what was planned for one device together; raises as `Planner.launch` does."""
    return planner.launch(Planned(spec))
