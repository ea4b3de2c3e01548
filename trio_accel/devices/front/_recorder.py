"""Recorders, which record a task's operations instead of launching them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

import attrs
import numpy as np
import trio

from ...backends.base import DType, ForeignArray, NotSupportedError
from ...backends.base.contract.ops import ArraySpec, GraphNode, contiguous_strides
from ..base._views import reach
from ..engine._library import LibraryActor
from ..engine._library_opener import find_actor, load_actor
from ..operations._blocks import Block, BlockTable
from ..operations._faults import Faults
from ..operations._operation import Operation, Planned, PlannedFor, Planner
from ..operations._pending import Pending, ReplyT
from ..operations._ref import AccelRef, Device

_COPIES = "memory"


@attrs.frozen(eq=False)
class Recorded:
    """The recorded operations of a step.

    Attributes:
        nodes: The operations in order. Their arrays have the ids of blocks.
        inputs: The placeholder blocks of the step's arguments, in order.
        constants: The other arrays that the operations use, by block: the usable part of the block, and the
            place of its first use, for errors. They belong to the device, or to a step in which this step was
            recorded.
        output_sizes: The sizes of the blocks that the operations make, by id.
    """

    nodes: Sequence[GraphNode]
    inputs: Sequence[int]
    constants: Mapping[int, tuple[AccelRef, str]]
    output_sizes: Mapping[int, int]


class OperationRecorder:
    """Plans operations for imaginary blocks, and records their launches.

    Attributes:
        path: The path of the device, for errors.
        blocks: The blocks that are never made.
        faults: No faults, because they are for launches.
        device: The blocks of the device.
        outer: The recording of the step in which this one began, if any.
        nodes: The recorded operations.
        constants: See `Recorded`.
        output_sizes: See `Recorded`.
        is_over: Whether the step has ended.
        takes_status: Whether it accepts operations with status words, because these are checked.
        is_ahead: Whether it only determines layouts, so that nothing else may change.
    """

    takes_status: ClassVar[bool] = False
    is_ahead: ClassVar[bool] = False

    def __init__(self, device: Device, state: PlannedFor, outer: OperationRecorder | None) -> None:
        self.path: str = state.path
        self.outer: OperationRecorder | None = outer
        self.blocks: BlockTable = BlockTable(device.name, state.blocks.availability, reuses=False)
        self.blocks.device = device
        self.faults: Faults = Faults()
        self.device: BlockTable = state.blocks
        self.nodes: list[GraphNode] = []
        self.constants: dict[int, tuple[AccelRef, str]] = {}
        self.output_sizes: dict[int, int] = {}
        self.is_over: bool = False
        self._state = state
        # The blocks that somebody references.
        self._named: WeakSet[Block] = WeakSet()
        # The placeholders of the step's arguments, by block.
        self._arguments: dict[int, ArraySpec] = {}

    def stand_in_for(self, shape: tuple[int, ...], dtype: DType) -> AccelRef:
        """Return the placeholder of an array to fill before the recorded operations run."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = self.blocks.new(nbytes)
        self._named.add(block)
        return AccelRef(
            block, ArraySpec(block.id, 0, dtype, shape, contiguous_strides(shape, dtype.itemsize))
        )

    def stand_in(self, array: AccelRef) -> AccelRef:
        """Return the placeholder of another array."""
        array.block.check("capture")
        spec, block = array.spec, self.blocks.new(array.block.nbytes)
        self._named.add(block)
        stand_in = AccelRef(block, attrs.evolve(spec, block=block.id))
        self._arguments[block.id] = stand_in.spec
        return stand_in

    def constant(self, block: Block) -> AccelRef | None:
        """Return the usable part of a block from outside of the step; None for a block of another device."""
        if block.table is self.device:
            return AccelRef(block, ArraySpec(block.id, 0, DType.uint8, (block.nbytes,), (1,)))
        recording = self.outer
        while recording is not None and recording.blocks is not block.table:
            recording = recording.outer
        if recording is None:
            return None
        # If an argument is a view, its base is not usable, because another replay may have only the view.
        argument = recording._arguments.get(block.id)  # noqa: SLF001  # its own class
        start, end = (0, block.nbytes) if argument is None else reach(argument)
        return AccelRef(block, ArraySpec(block.id, start, DType.uint8, (end - start,), (1,)))

    def end(self) -> None:
        """Stop recording, and refuse later use of the recorded arrays."""
        self.is_over = True
        for block in self._named:
            block.release()
        self.blocks.close()

    async def ask(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> ReplyT:
        """Record an operation."""
        await trio.lowlevel.checkpoint()
        actor = await find_actor(operation.library, operation.operation)
        return self._record(device, operation, actor).result()

    def submit(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> Pending[ReplyT]:
        """Record an operation; imports the module of its actor if necessary."""
        actor = load_actor(operation.library, operation.operation)
        pending = Pending(operation.operation, self._record(device, operation, actor))
        pending.settle(None)
        return pending

    def recorded(self, inputs: Sequence[AccelRef] = ()) -> Recorded:
        """Return the operations recorded so far, for a step with these arguments."""
        blocks = tuple([ref.block.id for ref in inputs])
        return Recorded(tuple(self.nodes), blocks, self.constants, self.output_sizes)

    def _record(
        self, device: PlannedFor, operation: Operation[Any, ReplyT], actor: type[LibraryActor]
    ) -> Planned[ReplyT]:
        name = operation.operation
        if device is not self._state:
            self._refuse(name, f"it is asked of {device.path}, and the graph is of {self.path}")
        if operation.not_recorded:
            self._refuse(name, operation.not_recorded)
        if actor.launch is not LibraryActor.launch or actor.launch_now is not LibraryActor.launch_now:
            self._refuse(name, f"its actor, {actor.__qualname__}, launches operations in its own way")
        planner = RecordingPlanner(self, operation)
        planned = operation.plan(planner)
        launch = planner.launch(planned)
        has_status = launch.spec.descriptor().has_status and not self.takes_status
        if planned.finish is not None or has_status:
            self._refuse(
                name,
                "its outcome depends on status words, which the host looks at; ask it outside of the step",
            )
        nodes = [GraphNode(name, _COPIES, copy) for copy in launch.staged]
        nodes.append(GraphNode(name, actor.library, launch.spec))
        nodes += [GraphNode(name, _COPIES, copy) for copy in launch.result_copies]
        for node in nodes:
            self._check(node)
        self.nodes += nodes
        self.output_sizes.update(launch.allocations)
        self._named.update([item for item in launch.keep if isinstance(item, Block)])
        self.constants = {**planner.constants, **self.constants}
        return planned

    def _check(self, node: GraphNode) -> None:
        """Refuse a specification with values that a recipe cannot contain."""
        spec = node.spec
        described = spec.descriptor()
        values = [
            value for number, value in enumerate(described.values(spec)) if number not in described.status
        ]
        if any(isinstance(value, (np.ndarray, ForeignArray)) for value in values):
            reason = "it uses an array of the host; put arrays before, and read results after a replay"
            self._refuse(node.operation, reason)

    def _refuse(self, name: str, reason: str) -> NoReturn:
        device = self.blocks.device_name
        raise NotSupportedError(f"{name}: a graph cannot record it: {reason}", device=device, operation=name)


class RecordingPlanner(Planner):
    """A planner for recorded operations. It accepts arrays of the recording and from outside.

    Attributes:
        constants: The constants from outside; see `Recorded`.
    """

    is_recording = True

    def __init__(self, recording: OperationRecorder, operation: Operation[Any, Any]) -> None:
        super().__init__(recording, operation)
        self._recording = recording
        self.constants: dict[int, tuple[AccelRef, str]] = {}

    def _use(self, argument: str, ref: AccelRef, *, is_read: bool) -> None:
        # Called for each array outside of the planner's own table, and for all changed arrays.
        block = ref.block if isinstance(ref, AccelRef) else None
        is_outside = block is not None and block.table is not self._recording.blocks
        constant = self._recording.constant(block) if block is not None and is_outside else None
        if block is None or constant is None:
            super()._use(argument, ref, is_read=is_read)
            return
        if not block.is_usable:
            block.check(f"{self.name}: {argument}", ref.spec)
        self._uses.append((argument, block))
        if block.id not in self.constants:
            self.constants[block.id] = constant, f"{argument} of {self.name}"


class ChainRecorder(OperationRecorder):
    """A recorder for a chain of calls. The graphs library checks status words when the chain runs."""

    takes_status = True


class LookingAhead(OperationRecorder):
    """A recorder that plans a call's operations only for the layout of its result."""

    is_ahead: ClassVar[bool] = True
    planner: ClassVar[type[RecordingPlanner]] = RecordingPlanner

    async def ask(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> ReplyT:
        """Plan an operation, without a checkpoint."""
        planned = operation.plan(self.planner(self, operation))
        if planned.finish is not None:
            self._refuse(operation.operation, "what it returns depends on what the device computes")
        result = planned.result()
        host: Any = result
        if isinstance(host, np.ndarray) and getattr(operation, "out", None) is None:
            # Functions that check elements see ones, as for a norm, or values of a full-rank matrix.
            host.fill(1)
        return result

    def submit(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> Pending[ReplyT]:
        """Plan an operation without a waiting task."""
        pending = _PlannedCall(operation.operation, operation.plan(self.planner(self, operation)))
        pending.settle(None)
        return pending


class _PlannedCall(Pending[ReplyT]):
    """A planned operation with a result that needs no checkpoint."""

    async def wait(self) -> ReplyT:
        """Return the result."""
        return self.value
