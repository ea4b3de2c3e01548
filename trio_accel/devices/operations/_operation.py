"""Operations: the messages that devices serve, and their path to a launch."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from functools import lru_cache
from numbers import Number
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeAlias, TypeVar, cast

import attrs
import numpy as np
from trio.lowlevel import TrioToken, current_task, current_trio_token

from ...actors import Request, actor_path_of, unknown_option
from ...backends.base import (
    ALWAYS_HELD,
    CopyFromForeignSpec,
    DType,
    HostArray,
    InputFailedError,
    Ints,
    NotSupportedError,
    check_conversion,
    factor,
    function_of,
    host_array,
)
from ...backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopySpec,
    CopyToHostSpec,
    OperationSpec,
    StatusArray,
    contiguous_strides,
    map_arrays,
)
from ...backends.base.kit.kept_plans import KeptPlan
from ..base._refusals import refuse_dtypes, what_to_do
from ..base._statistics import LaunchTimes
from ..base._views import check_apart, overlaps
from ..base._waits import Arrival
from ._blocks import Block, BlockTable, Damage, in_turn
from ._calls import Call
from ._faults import FaultHit, Faults
from ._pending import Pending, ReplyT, ReplyT_co
from ._ref import AccelRef, DeviceRequest

__all__ = ["Launch", "Operand", "Operation", "Planned", "Planner", "operation_name", "refuse_recording"]

# The name of this package.
_PACKAGE = __name__.partition(".")[0]
# Attributes of operation classes: that a device serves it, and its name.
_ADMITTED, _NAME = "_trio_accel_admitted", "_trio_accel_name"
# NumPy's limit.
_MAX_AXES = 64

LibraryT_contra = TypeVar("LibraryT_contra", contravariant=True)

Operand: TypeAlias = AccelRef | Call[AccelRef] | HostArray
"""An operand: an array on the device, a call of one, or a NumPy array, which is copied there."""


@attrs.define(on_setattr=None)
class Planned(Generic[ReplyT_co]):
    """A validated operation: the backend's specification, and the reply.

    Attributes:
        spec: The specification for the backend.
        reply: The reply, if it is known before the operation runs; None otherwise.
        finish: Makes the reply after the operation has completed, from its status words. It runs in the
            waiting task, which gets its error.
        is_checked: Whether the plan has checked all fields, so that `OperationSpec.check_shapes` is not
            needed.
    """

    spec: OperationSpec
    reply: ReplyT_co | None = None
    finish: Callable[[], ReplyT_co] | None = None
    is_checked: bool = False

    def result(self) -> ReplyT_co:
        """Return the reply of a completed operation."""
        if self.finish is not None:
            return self.finish()
        reply: Any = self.reply
        return reply  # type: ignore[no-any-return]  # `cast` would be a call for each operation


class Operation(DeviceRequest[LibraryT_contra, ReplyT_co]):
    """The base of device messages: attrs classes, which you pass to `Device.ask`.

    Do not change an operation after it is made. Those of this package are not frozen, because that would cost
    more time than making one.

    Attributes:
        library: The import path of the library actor, ``"package.module:Class"``.
        not_recorded: The reason why a graph's step cannot ask it; empty if it can.
        armed: Makes its launch without a planner; None except for operations of steps.
        frame: The template of its message to a worker, which it shares with other operations; None if the
            whole launch determines the template.
    """

    __slots__ = ()
    not_recorded: ClassVar[str] = ""
    armed: Armed | None = None
    frame: LaunchFrame | None = None

    @property
    def operation(self) -> str:
        """The capability and class, such as ``"linalg.Matmul"``."""
        # As `operation_name`, with a Python call less.
        name: str | None = type(self).__dict__.get(_NAME)
        return operation_name(type(self)) if name is None else name

    @property
    def shown_name(self) -> str:
        """The function, such as ``"linalg.matmul"``, or the operation if it has no function."""
        return function_of(self.operation)

    def plan(self, planner: Planner) -> Planned[ReplyT_co]:
        """Validate the operation and lower it to a specification. Runs in the caller's task.

        Raises:
            TypeError, ValueError: An argument is wrong; the message names it.
            StaleRefError: An array is no longer valid.
            NotSupportedError: The operation does not exist.
        """
        raise NotSupportedError(f"{type(self).__name__} lowers to no operation specification")


class Armed(Protocol):
    """Makes the launch of an operation from data that an earlier operation has stored."""

    def launch(self, message: Any, state: Any, /) -> tuple[Launch, Planned[Any]] | None:
        """Make the launch; return None if a planner has to check the operation."""
        ...


def _is_operation(cls: type[object]) -> bool:
    library: object = getattr(cls, "library", None)
    is_operation = Operation in cls.__mro__ and isinstance(library, str)
    if is_operation:
        # The class knows it from now on, because a table of classes would keep those of the program.
        setattr(cls, _ADMITTED, True)
    return is_operation


def operation_name(cls: type[object]) -> str:
    """Return the capability and class name of an operation."""
    name: str | None = vars(cls).get(_NAME)
    if name is None:
        name = _name_of(cls)
        if Operation in cls.__mro__:
            setattr(cls, _NAME, name)
    return name


def _name_of(cls: type[object]) -> str:
    package = cls.__module__.split(".")
    if package[0] == _PACKAGE:
        # trio_accel.linalg._matmul -> linalg, trio_accel.devices.front._memory -> devices
        return f"{package[1]}.{cls.__name__}"
    # A user's own module keeps its last public part.
    public = [part for part in package if not part.startswith("_")] or package
    return f"{public[-1]}.{cls.__name__}"


@attrs.define(eq=False)
class LaunchFrame:
    """The common part of several launches' messages to a worker, once the worker has received it.

    Attributes:
        table: The templates of that worker.
        plan: The template in this table.
        nbytes: The size of the last allocated block, which is the only size that may differ.
    """

    table: object = None
    plan: KeptPlan[str] | None = None
    nbytes: int = 0


@attrs.define(eq=False, on_setattr=None)
class Launch(Request[Any, None]):
    """A validated operation for a library actor, in this process or in a worker.

    Do not change a launch after it is made. This is not enforced, because that would take as long as making
    one.

    Attributes:
        name: The name of the operation.
        spec: The specification for the backend.
        reads: The blocks that it reads, including staged operands.
        writes: The blocks that it changes.
        allocations: The ids and sizes of the blocks to make first.
        staged: Copies and conversions of operands, which are enqueued before `spec`.
        result_copies: Copies of results to views, which are enqueued after `spec`.
        outputs: The written blocks; they are damaged if it does not finish.
        uses: The existing arguments and their blocks, which are checked again at the launch.
        keep: Other objects that must live until its completion: new blocks, and host arrays of the program.
        library: The import path of the library actor.
        fault: An injected fault.
        number: Its position among the requests of the device; 0 if these are not counted.
        arrivals: The arrivals that must be over before it is launched.
        times: The times of its launch and completion in the worker, if requested.
        is_in_flight: Whether the backend has it.
        is_forgotten: Whether it has ended and released its arrays.
        damaged: The blocks that it has damaged.
        turn: Its number among all planned launches.
        is_overwriting: Whether its in-place changes depend only on its other arguments.
        frame: See `Operation.frame`.
    """

    name: str
    spec: OperationSpec
    reads: frozenset[int]
    writes: frozenset[int]
    allocations: tuple[tuple[int, int], ...]
    staged: tuple[CopyFromHostSpec | CopySpec, ...]
    result_copies: tuple[CopySpec, ...]
    outputs: Sequence[Block]
    uses: Sequence[tuple[str, Block]]
    keep: Sequence[object]
    library: str = ""
    fault: FaultHit | None = None
    number: int = 0
    arrivals: Sequence[Arrival] = ()
    times: LaunchTimes | None = attrs.field(default=None, init=False)
    is_in_flight: bool = attrs.field(default=False, init=False)
    is_forgotten: bool = attrs.field(default=False, init=False)
    damaged: frozenset[int] = attrs.field(default=frozenset(), init=False)
    turn: int = attrs.field(factory=in_turn)
    is_overwriting: bool = False
    frame: LaunchFrame | None = attrs.field(default=None, init=False)

    def advice(self, *, is_kept: bool) -> str:
        """Return advice after a loss in flight. With `is_kept`, the arrays have survived the loss."""
        if isinstance(self.spec, CopyToHostSpec):
            return "read the array again"
        if self.new_blocks.issuperset(output.id for output in self.outputs):
            is_put = isinstance(self.spec, (CopyFromHostSpec, CopyFromForeignSpec))
            return "put the array again" if is_put else "its result was not made; ask again"
        if is_kept and self.reads.isdisjoint(self.writes):
            return "ask again, which overwrites what it has damaged"
        remedy = "make the arrays that it was to change again"
        return f"{remedy}{', or overwrite what it was to change' * is_kept}, then ask again"

    @property
    def may_repeat(self) -> bool:
        """Whether it may run again after a loss although it changes arrays in place."""
        return self.is_overwriting or self.spec.is_idempotent

    @property
    def new_blocks(self) -> set[int]:
        """The ids of its new blocks."""
        return {number for number, _ in self.allocations}

    @property
    def has_arrived(self) -> bool:
        """Whether every arrival that it needs is over."""
        return not self.arrivals or all(arrival.is_over for arrival in self.arrivals)

    def _read(self, block: int) -> list[ArraySpec]:
        """List the arrays of a block that it reads, including staged copies."""
        read = [array for spec in (self.spec, *self.staged) for array in spec.inputs()]
        return [array for array in read if array.block == block]

    def _written(self, block: int, *, only_overwritten: bool) -> list[ArraySpec]:
        """List the arrays of a written block; with `only_overwritten`, without those that it also reads."""
        written = [*self.spec.outputs(), *[copy.out for copy in self.result_copies]]
        updated = self.spec.inputs() if only_overwritten else ()
        return [array for array in written if array.block == block and array not in updated]

    def mark_damaged(self, error: BaseException | None, only: Collection[int] | None = None) -> None:
        """Mark the arrays that it was to write as damaged, because it did not finish.

        Args:
            error: Its error.
            only: The ids of the blocks; None for all.
        """
        new_blocks = self.new_blocks
        sound = self.reads - new_blocks if self.spec.is_idempotent else ()
        for output in self.outputs:
            if output.id in sound:
                continue
            if only is None or output.id in only:
                output.mark_damaged(
                    self.name, error, self._written(output.id, only_overwritten=False), self.turn
                )
                output.is_unmade = output.is_unmade or output.id in new_blocks
                self.damaged |= {output.id}

    def heal(self, error: BaseException | None) -> None:
        """Mark the arrays that it has overwritten as undamaged, unless it has failed."""
        for output in self.outputs:
            if error is None and output.damaged_by is not None:
                output.heal(self._written(output.id, only_overwritten=True), self.turn)

    def check_inputs(self) -> None:
        """Refuse arrays damaged or released while the operation was queued.

        Arrays that it only overwrites may be damaged.

        Raises:
            InputFailedError: The operation that should have written an argument failed.
            StaleRefError: An argument was released or lost.
        """
        for argument, used in self.uses:
            # Blocks of an earlier generation were already refused, and every launch has its context.
            if not used.is_released and used.damaged_by is None:
                continue
            if used.damaged_by is None:
                used.check(f"{self.name}: {argument}")
                continue
            damage = self.damage_of(used)
            if damage is None:
                continue
            failed = InputFailedError(
                f"{argument} was to be written by {function_of(damage.by)}, which failed; make it again, "
                "then ask again"
            )
            failed.__cause__ = damage.failure
            raise failed

    def damage_of(self, block: Block) -> Damage | None:
        """Return the damage to a read block's arrays, or to a block without memory."""
        if block.is_unmade:
            return block.damages[0]
        return next(filter(None, map(block.damage_of, self._read(block.id))), None)

    def without_fault(self) -> Launch:
        """Return a copy for another run, without an injected fault. Both share the memory."""
        return self if self.fault is None or self.fault.comes_again else attrs.evolve(self, fault=None)

    def forget(self) -> None:
        """Release everything, because the operation has ended.

        Errors live on, in the tree and in the program, with frames that refer to the launch. They must not
        keep its arrays alive.
        """
        if self.is_forgotten:
            return
        self.is_forgotten = True
        # Other launches may use the same.
        self.outputs = self.uses = self.keep = ()
        if self.fault is not None:
            self.fault.give_back()

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.name

    @property
    def shown_name(self) -> str:
        """The name of the operation's function."""
        return function_of(self.name)


class PlannedFor(Protocol):
    """The device for which an operation is planned."""

    path: str
    blocks: BlockTable
    faults: Faults


class OperationRecording(Protocol):
    """Records the operations of a task."""

    @property
    def is_over(self) -> bool:
        """Whether it records no more. Later operations of its tasks are launched."""
        ...

    is_ahead: ClassVar[bool]
    """Whether it only determines layouts, so that nothing else may change."""

    async def ask(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> ReplyT:
        """Record an operation; see `Device.ask`.

        Raises:
            NotSupportedError: A graph cannot contain it.
        """
        ...

    def submit(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> Pending[ReplyT]:
        """Record an operation; see `Device.submit`."""
        ...


RECORDING: ContextVar[OperationRecording | None] = ContextVar("trio_accel.recording", default=None)
"""The recorder of a task's operations, even after its end."""


def recording_now() -> OperationRecording | None:
    """Return the recorder of this task's operations; None if they are launched."""
    recording = RECORDING.get()
    return None if recording is None or recording.is_over else recording


def is_looking_ahead() -> bool:
    """Return whether this task's operations are planned only for the layout of a result."""
    recording = recording_now()
    return recording is not None and recording.is_ahead


def refuse_recording(verb: str, instead: str) -> None:
    """Refuse an action that a graph's step cannot perform.

    Raises:
        NotSupportedError: The operations of this task are recorded.
    """
    if recording_now() is not None:
        raise NotSupportedError(f"{verb}: a graph cannot record it; {instead}", operation=verb)


class AskedDevice(Protocol):
    """The device that runs an operation."""

    token: TrioToken

    def check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run than the token's."""


def admit(
    device: AskedDevice, operation: object, verb: str, unknown: Collection[str]
) -> OperationRecording | None:
    """Refuse operations that a device does not serve, and options that it does not have.

    Returns:
        The recorder of this task's operations, if they are recorded instead of launched.

    Raises:
        TypeError: `operation` is not an operation, or does not name its library actor.
        RuntimeError: The device belongs to another Trio run.
    """
    if unknown:
        raise unknown_option(verb, next(iter(unknown)), ())
    cls = type(operation)
    if _ADMITTED not in cls.__dict__ and not _is_operation(cls):
        if not issubclass(cls, Operation):
            advice = what_to_do(operation, is_array=False)
            raise TypeError(f"{verb}: {operation!r} is not an operation of a device{advice}")
        raise TypeError(
            f"{verb}: {cls.__name__} does not say which library actor serves it; "
            "give the class an attribute library = 'package.module:Class'"
        )
    try:
        is_own_run = current_trio_token() is device.token
    except RuntimeError:
        # The current thread does not run Trio.
        is_own_run = False
    if not is_own_run:
        device.check_run(verb)
    recording = RECORDING.get()
    return None if recording is None or recording.is_over else recording


def _copying(argument: str, ref: AccelRef, device: Any) -> str:
    """Return how to copy an array to a device; devices of `ta.blocking` have systems of their own."""
    if ref.device.system is device.system:
        return f"await {argument}.copy_to(device)"
    return f"await {argument}.copy_to(device), or from b2 to b: b.wait(b.device.put(b2.get({argument})))"


class Planner:
    """Checks operands and makes outputs while an operation is planned.

    Attributes:
        name: The name of the operation.
        is_recording: Whether the operation is recorded for a graph instead of launched.
        is_overwriting: Whether it may run again after a loss although it updates arrays; see `Launch`.
    """

    is_recording: ClassVar[bool] = False
    is_overwriting: bool = False
    # Set if it changes a damaged array that it may partly overwrite.
    _spoiled: tuple[tuple[str, Block], ...] = ()

    def __init__(self, device: PlannedFor, operation: Operation[Any, Any]) -> None:
        self.name: str = operation.operation
        self._device = device
        self._table = device.blocks
        self._library = operation.library
        # Most operations have at most one of these.
        self._allocations: tuple[tuple[int, int], ...] = ()
        self._staged: tuple[CopyFromHostSpec | CopySpec, ...] = ()
        # The views to write to, each with the contiguous memory that is written instead.
        self._views: tuple[tuple[ArraySpec, ArraySpec], ...] = ()
        self._outputs: list[Block] = []
        self._uses: list[tuple[str, Block]] = []
        self._keep: list[object] = []
        # The argument name of each host array, by its block on the device.
        self._hosts: dict[int, str] | None = None

    def read(self, argument: str, operand: Operand) -> ArraySpec:
        """Use an operand for reading. A NumPy array is first copied to the device."""
        if type(operand) is AccelRef or isinstance(operand, AccelRef):
            block, table = operand.block, self._table
            # `_use` finds the same, with one more Python call for each operand.
            if (
                block.table is table
                and not block.is_released
                and block.damaged_by is None
                and block.generation >= table.valid_since
            ):
                self._uses.append((argument, block))
            else:
                self._use(argument, operand, is_read=True)
            return operand.spec
        if not isinstance(value := cast("object", operand), np.ndarray):
            description = f"{type(value).__name__}{what_to_do(value)}"
            if self.name == "linalg.Matmul" and isinstance(value, Number):
                description += "; await linalg.scal(alpha, x) multiplies by a number in place"
            elif hasattr(value, "__dlpack__"):
                description += "; copy it to the device first: await device.put(x)"
            raise TypeError(
                f"{self.name}: {argument} must be an AccelRef or a NumPy array, got {description}"
            )
        if type(operand) is not np.ndarray:
            operand = host_array(f"{self.name}: {argument}", operand)
        staged = self._new(operand.shape, self.dtype(argument, operand.dtype))
        self._staged += (CopyFromHostSpec(operand, staged.spec),)
        self._keep.append(operand)
        self._hosts = {**(self._hosts or {}), staged.spec.block: argument}
        return staged.spec

    def convert(self, source: ArraySpec, dtype: DType) -> ArraySpec:
        """Convert an operand on the device before the operation, into temporary memory.

        Values are converted as by `AccelRef.cast`.

        Raises:
            TypeError: The conversion from complex to real would drop the imaginary parts.
        """
        check_conversion(self.name, self._argument(source), source.dtype, dtype)
        converted = self._new(source.shape, dtype)
        self._staged += (CopySpec(source, converted.spec),)
        return converted.spec

    def update(self, argument: str, operand: AccelRef) -> ArraySpec:
        """Use an array to change in place."""
        self._change(argument, operand)
        return operand.spec

    def copied(self, argument: str, operand: Operand) -> AccelRef:
        """Make a new array as a copy of an operand, to be changed in place.

        The copy is made before each run, so the operation may run again after a loss.
        """
        source = self.read(argument, operand)
        array = self.output(source.shape, source.dtype)
        self._staged += (CopySpec(source, array.spec),)
        return array

    def output(
        self, shape: Ints, dtype: DType, out: AccelRef | None = None, *, argument: str = "out"
    ) -> AccelRef:
        """Make the written array, or take the caller's if it has this shape and dtype.

        The operation writes to contiguous memory. For a view with other strides this is temporary memory,
        which `launch` puts into the specification, before it is copied to the view after the operation.
        """
        if out is None:
            new = self._new(shape, dtype)
            self._outputs.append(new.block)
            return new
        self._change(argument, out)
        if out.shape != shape or out.dtype is not dtype:
            raise ValueError(
                f"{self.name}: {argument} must have shape {shape} and dtype {dtype}, "
                f"got shape {out.shape} and dtype {out.dtype}"
            )
        if not out.spec.is_contiguous:
            self._views += ((out.spec, self._new(shape, dtype).spec),)
        return out

    def reuse(self, array: AccelRef) -> AccelRef:
        """Use an array that an earlier launch of this caller has made, to be made again in place.

        Its contents are not needed, so the operation may run again after a loss as if the array were new.

        Args:
            array: An array that `output` has made for an operation that this caller has already launched.
        """
        block = array.block
        self._allocations += ((block.id, block.nbytes),)
        self._outputs.append(block)
        self._keep.append(block)
        return array

    def memory(self, nbytes: int) -> Block:
        """Make new memory, which is not an output by itself."""
        return self._new((nbytes,), DType.uint8).block

    def take(
        self,
        outputs: Sequence[Block],
        uses: Sequence[tuple[str, Block]],
        staged: tuple[CopyFromHostSpec | CopySpec, ...] = (),
        views: tuple[tuple[ArraySpec, ArraySpec], ...] = (),
        keep: Sequence[object] = (),
    ) -> None:
        """Take over the parts of a launch that another planner has made, for blocks of this device.

        Args:
            outputs: The written blocks.
            uses: The existing arguments and their blocks.
            staged: Copies of operands, which are enqueued first.
            views: The views to write to, each with the contiguous memory to write instead.
            keep: The host arrays that must live until completion.
        """
        self._staged += staged
        self._views += views
        self._outputs += outputs
        self._uses += uses
        self._keep += [*outputs, *[block for _, block in uses], *keep]

    def status(self, count: int) -> StatusArray:
        """Make the status words of an operation, for a `status` field of its specification.

        Args:
            count: The number of words, such as one for each matrix of a stack.
        """
        return np.zeros(count, np.int32)

    def factor(self, argument: str, value: object, dtype: DType) -> complex:
        """Check a factor for arrays of a dtype, and return it as a Python number.

        Raises:
            TypeError: It is not a number, it is complex for real arrays, or the dtype is an integer type.
            ValueError: It is outside the range of the dtype.
        """
        # Large numbers, and other types than float, need a closer check.
        if type(value) is float and dtype.is_inexact and -ALWAYS_HELD <= value <= ALWAYS_HELD:
            return value
        return factor(self.name, argument, value, dtype)

    def keep(self, item: object) -> None:
        """Keep an object alive until the operation has completed.

        A cancelled caller waits for the operation, because that may use host memory. But it does not wait for
        array references in a tuple.
        """
        self._keep.append(item)

    def dtype(self, argument: str, like: np.dtype[Any]) -> DType:
        """Return the dtype of a host operand."""
        try:
            return DType.of(like)
        except TypeError as error:
            raise TypeError(f"{self.name}: {argument}: {error}") from None

    def refuse_dtypes(self, **arrays: ArraySpec | None) -> NoReturn:
        """Refuse operands with different dtypes, with advice on their conversion.

        Raises:
            TypeError: Always.
        """
        hosts = {
            name for name, array in arrays.items() if getattr(array, "block", None) in (self._hosts or ())
        }
        refuse_dtypes(
            self.name, {name: array.dtype for name, array in arrays.items() if array is not None}, hosts
        )

    def distinct(self, argument: str, written: ArraySpec, **operands: ArraySpec) -> None:
        """Refuse a written array that shares memory with another. A new array never does."""
        if self._allocations and written.block == self._allocations[-1][0]:
            return
        for name, operand in operands.items():
            if overlaps(written, operand):
                raise ValueError(
                    f"{self.name}: {argument} must not share memory with {name}; give one of them as a copy()"
                )

    @property
    def changed(self) -> list[Block]:
        """The existing blocks to write."""
        new_blocks = {number for number, _ in self._allocations}
        return [block for block in self._outputs if block.id not in new_blocks]

    def launch(self, planned: Planned[Any]) -> Launch:
        """Combine the planned parts into a launch.

        Raises:
            TypeError, ValueError: No library can work with a field of the specification, or the plan returned
                another type.
        """
        if not isinstance(planned, Planned):
            raise TypeError(
                f"{self.name}: plan() must return Planned(spec, reply), got {type(planned).__name__}"
                + ("; plan() is a plain function, not an async one" if inspect.iscoroutine(planned) else "")
            )
        spec = planned.spec
        described = spec.described
        view_copies: tuple[CopySpec, ...] = ()
        if self._views:
            spec, view_copies = self._without_views(spec)
        if not planned.is_checked:
            described.check(self.name, spec)
        reads, writes = described.blocks(spec)
        for staged in self._staged:
            reads |= staged.blocks()[0]
        for copy in view_copies:
            writes |= copy.blocks()[1]
        faults = self._device.faults
        launch = Launch(
            self.name,
            spec,
            reads,
            writes,
            self._allocations,
            self._staged,
            view_copies,
            self._outputs,
            self._uses,
            self._keep,
            self._library,
            faults.take(self.name) if faults.waiting else None,
        )
        if self.is_overwriting:
            launch.is_overwriting = True
        for argument, block in self._spoiled:
            # The operation may overwrite damaged arrays; its specification determines which.
            if (damage := launch.damage_of(block)) is not None:
                raise block.damage_error(f"{self.name}: {argument}", damage)
        return launch

    def planned_memory(self) -> tuple[tuple[tuple[int, int], ...], list[Block], list[object]]:
        """Return the blocks to make first, the written blocks, and the objects kept alive so far."""
        return self._allocations, self._outputs, self._keep

    def _without_views(self, spec: OperationSpec) -> tuple[OperationSpec, tuple[CopySpec, ...]]:
        """Replace views by contiguous memory in the specification; return it with the copies to the views."""
        described, values, packed = spec.descriptor(), list[Any](), dict(self._views)
        for field, value in zip(described.fields, described.values(spec), strict=True):
            is_written = field.is_array and field.role.access != "read"
            values.append(map_arrays(value, lambda array: packed.get(array, array)) if is_written else value)
            if is_written and field.role.access == "update":
                updated: list[ArraySpec] = []
                map_arrays(value, updated.append)
                self._staged += tuple(
                    [CopySpec(array, packed[array]) for array in updated if array in packed]
                )
        return described.make(values), tuple([CopySpec(array, view) for view, array in self._views])

    def _change(self, argument: str, ref: AccelRef) -> None:
        """Use an array to change."""
        self._use(argument, ref, is_read=False)
        if ref.block.frozen_by:
            ref.block.check_writable(f"{self.name}: {argument}")
        if not ref.spec.is_contiguous:
            check_apart(f"{self.name}: {argument}", ref.spec)
        self._outputs.append(ref.block)

    def _use(self, argument: str, ref: AccelRef, *, is_read: bool) -> None:
        if type(ref) is not AccelRef and not isinstance(ref, AccelRef):
            raise TypeError(
                f"{self.name}: {argument} must be an AccelRef, got {type(ref).__name__}{what_to_do(ref)}"
            )
        block = ref.block
        if block.is_released:
            block.check(f"{self.name}: {argument}")
        if block.table is not self._table:
            raise ValueError(
                f"{self.name}: {argument} is on {ref.device.path}, this runs on {self._device.path}; "
                f"copy it there: {_copying(argument, ref, self._table.device)}"
            )
        if not block.is_usable:
            if is_read or block.is_lost:
                block.check(f"{self.name}: {argument}", ref.spec)
            else:
                self._spoiled = (*self._spoiled, (argument, block))
        self._uses.append((argument, block))

    def _argument(self, source: ArraySpec) -> str:
        """Return the argument name of an operand."""
        for argument, block in self._uses:
            if block.id == source.block:
                return argument
        return (self._hosts or {}).get(source.block, "an operand")

    def _new(self, shape: Ints, dtype: DType) -> AccelRef:
        if len(shape) > _MAX_AXES:
            raise ValueError(f"{self.name}: shape must have at most {_MAX_AXES} axes, got {len(shape)}")
        strides, nbytes = _layout(shape, dtype.itemsize)
        if not nbytes and math.prod(extent or 1 for extent in shape) * dtype.itemsize > sys.maxsize:
            # Memory with elements is refused later; this memory is empty.
            raise ValueError(f"{self.name}: shape {shape} of {dtype} is larger than any memory")
        table = self._table
        number, spec = table.next(nbytes)
        if spec is None or spec.shape != shape or spec.dtype is not dtype:
            spec = ArraySpec(number, 0, dtype, shape, strides)
        block = Block(table, nbytes, table.availability.generation, number, spec)
        ref = AccelRef(block, spec)
        table.makers[number] = actor_path_of(current_task()), nbytes
        self._allocations += ((number, nbytes),)
        self._keep.append(block)
        return ref


@lru_cache
def _layout(shape: Ints, itemsize: int) -> tuple[Ints, int]:
    """Return the strides and bytes of a new array."""
    extents = tuple(map(int, shape))
    return contiguous_strides(extents, itemsize), math.prod(extents) * itemsize
