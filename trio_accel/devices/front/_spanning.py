"""What an author of an operation that spans devices writes, and the checks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import attrs

from ...backends.base import AccelDevice, NotSupportedError
from ...backends.base.ops import ArraySpec, CopySpec, OperationSpec, PeerArray, Peers, map_arrays
from ..arrays._blocks import Block
from ..arrays._ref import Device
from ..operations._operation import Operation, PlannedFor, Planner, operation_name

__all__ = ["MultiDeviceOperation", "PartPlanner", "PlannedParts"]

ReplyT = TypeVar("ReplyT")

ReplyT_co = TypeVar("ReplyT_co", covariant=True)


@attrs.define(on_setattr=None)
class PlannedParts(Generic[ReplyT_co]):
    """A validated operation that spans devices: the specification of each device, and the reply.

    Attributes:
        specs: The specification of each device, in the order of `MultiDeviceOperation.devices`.
        reply: The reply, if it is known before the operation runs; None otherwise.
        finish: Makes the reply when all parts are complete and their status words are there. It runs in the
            task that waits; an error of it is raised there.
    """

    specs: Sequence[OperationSpec]
    reply: ReplyT_co | None = None
    finish: Callable[[], ReplyT_co] | None = None

    def result(self) -> ReplyT_co:
        """Return the reply of an operation that is complete."""
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

    def __init__(
        self,
        device: PlannedFor,
        owner: AccelDevice | None,
        part: int,
        operation: MultiDeviceOperation[Any],
        library: str,
    ) -> None:
        super().__init__(device, cast("Operation[Any, Any]", operation))
        self._library = library or self._library
        self._owner = owner
        self.part: int = part

    @property
    def library(self) -> str:
        """Import path of the library actor that runs the part."""
        return self._library

    def block_of(self, array: ArraySpec) -> Block | None:
        """Return the memory of an operand that is on the device; None for another array."""
        return next((block for _, block in self._uses if block.id == array.block), None)

    def moved(self, spec: OperationSpec, blocks: Mapping[int, int], peers: Peers | None) -> OperationSpec:
        """Return the part's specification with other blocks and peers to read from; conversions follow."""
        described, values = spec.descriptor(), list[Any]()

        def place(array: ArraySpec) -> ArraySpec:
            return attrs.evolve(array, block=blocks.get(array.block, array.block))

        for field, value in zip(described.fields, described.values(spec), strict=True):
            if field.is_array and field.role.access == "read":
                values.append(map_arrays(value, place))
            else:
                values.append(peers if field.role.kind == "peers" else value)
        self._staged = tuple(
            [
                CopySpec(place(one.source), one.out) if isinstance(one, CopySpec) else one
                for one in self._staged
            ]
        )
        specification: OperationSpec = described.make(values)
        return specification

    def spoil(self) -> None:
        """Refuse later use of what the part was to write: another one has failed."""
        for block in self._outputs:
            block.spoil(self.name, None)

    def lend(self, array: ArraySpec) -> PeerArray:
        """Lend an array of this device to the kernels of other parts; hand it to `peers` of their planners.

        The specification of this part has the array in a field, too: in one that is written or updated, if
        the others write to it.

        Args:
            array: An array that `read`, `update` or `output` of this planner have returned or named.
        """
        return PeerArray(array, self.part, self._owner)

    def peers(self, *arrays: PeerArray) -> Peers:
        """Take arrays that planners lend, for the `peers` field of this part's specification.

        Args:
            arrays: They may be of this part, too. Kernels see them in this order.
        """
        return Peers(arrays)


def plan_parts(
    name: str,
    operation: MultiDeviceOperation[ReplyT],
    devices: Sequence[tuple[PlannedFor, AccelDevice | None]],
    library: str = "",
) -> tuple[PlannedParts[ReplyT], list[PartPlanner]]:
    """Validate the operation on all devices, and refuse specifications that do not fit these, or each other.

    Args:
        name: Name of the operation.
        operation: The operation.
        devices: The devices in their order, with what the backend has open where the context is here.
        library: Import path of the library actor; without, that of the operation.

    Raises:
        TypeError, ValueError: They do not.
        NotSupportedError, StaleRefError: As for `MultiDeviceOperation.plan`.
    """
    planners = [
        PartPlanner(device, owner, number, operation, library)
        for number, (device, owner) in enumerate(devices)
    ]
    planned = operation.plan(planners)
    if not isinstance(planned, PlannedParts):
        raise TypeError(f"{name}: plan() must return PlannedParts(specs), got {type(planned).__name__}")
    specs = planned.specs
    if len(specs) != len(planners):
        raise ValueError(
            f"{name}: plan() must return one specification per device ({len(planners)}), got {len(specs)}"
        )
    for spec in specs:
        if not isinstance(spec, OperationSpec):
            raise TypeError(f"{name}: plan() must return specifications, got {type(spec).__name__}")
    for peer in lent_by(specs):
        reads, writes = specs[peer.part].blocks()
        if peer.array.block not in reads | writes:
            raise ValueError(
                f"{name}: part {peer.part} lends an array that its own specification, "
                f"{type(specs[peer.part]).__name__}, has in no field"
            )
    return planned, planners


def lent_by(specs: Iterable[OperationSpec]) -> list[PeerArray]:
    """List what the kernels of parts see of other parts."""
    return [peer for spec in specs if (peers := peers_of(spec)) is not None for peer in peers.arrays]


def peers_of(spec: OperationSpec) -> Peers | None:
    """Return the arrays of other devices that a part uses, if any."""
    field = spec.descriptor().peers
    peers: object = getattr(spec, field) if field else None
    # A field of another type is refused with the other fields.
    return peers if isinstance(peers, Peers) else None
