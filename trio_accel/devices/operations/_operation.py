"""Operations: messages that a device serves, and their way to a launch."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
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
    host_array,
)
from ...backends.base.contract.ops import (
    DESCRIPTORS,
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
# Limit of NumPy.
_MAX_AXES = 64

LibraryT_contra = TypeVar("LibraryT_contra", contravariant=True)

Operand: TypeAlias = AccelRef | Call[AccelRef] | HostArray
"""Operand of an operation: an array on the device, a call of one, or a NumPy array, which is copied there."""


@attrs.define(on_setattr=None)
class Planned(Generic[ReplyT_co]):
    """A validated operation: the backend's specification, and the reply.

    Attributes:
        spec: Specification for the backend.
        reply: The reply, if it is known before the operation runs; None otherwise.
        finish: Makes the reply when the operation is complete and its status words are there. It runs in the
            task that waits; an error of it is raised there.
        is_checked: Whether the plan has checked all fields, and `OperationSpec.check_shapes` is not needed.
    """

    spec: OperationSpec
    reply: ReplyT_co | None = None
    finish: Callable[[], ReplyT_co] | None = None
    is_checked: bool = False

    def result(self) -> ReplyT_co:
        """Return the reply of an operation that is complete."""
        if self.finish is not None:
            return self.finish()
        reply: Any = self.reply
        return reply  # type: ignore[no-any-return]  # `cast` would be a call for each operation


class Operation(DeviceRequest[LibraryT_contra, ReplyT_co]):
    """Base of the messages that devices serve: attrs classes, asked of a `Device`.

    None is to be changed once it is made. Those of this package are not frozen, as that would take longer
    than to make one.

    Attributes:
        library: Import path of the library actor, ``"package.module:Class"``.
        not_recorded: Why the step of a graph cannot ask it; empty where it can.
        armed: Makes its launch without a planner; None for all but the operations of steps.
        frame: The template of its message to a worker, which other operations have, too; None if it is found
            by the whole launch.
    """

    __slots__ = ()
    not_recorded: ClassVar[str] = ""
    armed: Armed | None = None
    frame: LaunchFrame | None = None

    @property
    def operation(self) -> str:
        """Capability and class, such as ``"linalg.Matmul"``."""
        return _name_of(type(self))  # type: ignore[arg-type]  # mypy takes no class for hashable

    def plan(self, planner: Planner) -> Planned[ReplyT_co]:
        """Validate the operation and lower it to a specification. Runs in the caller's task.

        Raises:
            TypeError, ValueError: A wrong argument; the message names it.
            StaleRefError: An array that must not be used.
            NotSupportedError: The operation does not exist.
        """
        raise NotSupportedError(f"{type(self).__name__} lowers to no operation specification")


class Armed(Protocol):
    """What makes the launch of an operation from what an earlier one has kept."""

    def launch(self, message: Any, state: Any, /) -> tuple[Launch, Planned[Any]] | None:
        """Make it; None where a planner has to look more closely."""
        ...


@cache
def _is_operation(cls: Any) -> bool:
    library: object = getattr(cls, "library", None)
    return issubclass(cls, Operation) and isinstance(library, str)


def operation_name(cls: type[object]) -> str:
    """Capability and class name of an operation."""
    return _name_of(cls)  # type: ignore[arg-type]  # mypy takes no class for hashable


@cache
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
    """What the messages of several launches to a worker have in common, once the worker has it.

    Attributes:
        table: The templates of that worker.
        plan: The template among these.
        nbytes: Bytes of the block that is allocated last, the only size that may differ.
    """

    table: object = None
    plan: KeptPlan[str] | None = None
    nbytes: int = 0


@attrs.define(eq=False, on_setattr=None)
class Launch(Request[Any, None]):
    """A validated operation on its way to a library actor: the same inline and in a worker.

    Not to be changed once it is made, which is not enforced: that would take as long as to make it.

    Attributes:
        name: Name of the operation.
        spec: Specification for the backend.
        reads: Blocks that it reads, with those of staged operands.
        writes: Blocks that it changes.
        allocations: Id and bytes of the blocks to make first.
        staged: Copies and conversions of operands, to be enqueued before `spec`.
        behind: Copies of results to views, to be enqueued behind `spec`.
        outputs: Blocks that are written; they are damaged if it does not finish.
        uses: Arguments that exist already, and their blocks: checked again at the launch.
        keep: Other objects that must live until it is complete: new blocks, and host arrays of the program.
        library: Import path of the library actor.
        fault: An injected fault.
        number: Place among the requests of the device; 0 where these are not counted.
        arrivals: Arrivals that must be over before it is launched.
        times: When the worker began to launch it and when it was complete, if that was to be told.
        is_in_flight: Whether the backend has it.
        is_forgotten: Whether it is over and holds nothing any more.
        damaged: Blocks that it has damaged.
        turn: Its number among all that were planned.
        is_overwriting: Whether what it changes in place depends on its other arguments alone.
        frame: See `Operation.frame`.
    """

    name: str
    spec: OperationSpec
    reads: frozenset[int]
    writes: frozenset[int]
    allocations: tuple[tuple[int, int], ...]
    staged: tuple[CopyFromHostSpec | CopySpec, ...]
    behind: tuple[CopySpec, ...]
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
        """Return advice for an operation that was lost in flight; `is_kept`: its arrays are there as ever."""
        if isinstance(self.spec, CopyToHostSpec):
            return "read the array again"
        if self.made.issuperset(output.id for output in self.outputs):
            is_put = isinstance(self.spec, (CopyFromHostSpec, CopyFromForeignSpec))
            return "put the array again" if is_put else "its result was not made; ask again"
        if is_kept and self.reads.isdisjoint(self.writes):
            return "ask again, which overwrites what it has damaged"
        again = "make the arrays that it was to change again"
        return f"{again}{', or overwrite what it was to change' * is_kept}, then ask again"

    @property
    def may_repeat(self) -> bool:
        """Whether it may run again after a loss although it changes arrays in place."""
        return self.is_overwriting or self.spec.is_idempotent

    @property
    def made(self) -> set[int]:
        """Ids of the blocks that are made for it."""
        return {number for number, _ in self.allocations}

    @property
    def has_arrived(self) -> bool:
        """Whether everything that it needs is there, or never will be."""
        return not self.arrivals or all(arrival.is_over for arrival in self.arrivals)

    def _read(self, block: int) -> list[ArraySpec]:
        """List what it reads of a block, with what is copied for it first."""
        read = [one for spec in (self.spec, *self.staged) for one in spec.inputs()]
        return [one for one in read if one.block == block]

    def _written(self, block: int, *, whole: bool) -> list[ArraySpec]:
        """List what it writes of a block, or only what it overwrites."""
        written = [*self.spec.outputs(), *[copy.out for copy in self.behind]]
        updated = self.spec.inputs() if whole else ()
        return [one for one in written if one.block == block and one not in updated]

    def mark_damaged(self, error: BaseException | None, only: Collection[int] | None = None) -> None:
        """Refuse the use of what it was to write: it did not finish.

        Args:
            error: Its error.
            only: Ids of the blocks; None for all.
        """
        made = self.made
        sound = self.reads - made if self.spec.is_idempotent else ()
        for output in self.outputs:
            if output.id in sound:
                continue
            if only is None or output.id in only:
                output.mark_damaged(self.name, error, self._written(output.id, whole=False), self.turn)
                output.is_unmade = output.is_unmade or output.id in made
                self.damaged |= {output.id}

    def heal(self, error: BaseException | None) -> None:
        """Allow the use again of what it has overwritten, now that it is done, unless it has failed."""
        for output in self.outputs:
            if error is None and output.damaged_by is not None:
                output.heal(self._written(output.id, whole=True), self.turn)

    def check_inputs(self) -> None:
        """Refuse arrays that were spoiled or released while the operation was queued.

        What it only overwrites may be spoiled.

        Raises:
            InputFailedError: An argument was to be written by an operation that failed.
            StaleRefError: An argument was released or lost.
        """
        for argument, used in self.uses:
            # Blocks of an earlier generation were refused before, and what is launched has its context.
            if not used.is_released and used.damaged_by is None:
                continue
            if used.damaged_by is None:
                used.check(f"{self.name}: {argument}")
                continue
            damage = self.damage_of(used)
            if damage is None:
                continue
            failed = InputFailedError(
                f"{argument} was to be written by {damage.by}, which failed; make it again, then ask again"
            )
            failed.__cause__ = damage.failure
            raise failed

    def damage_of(self, block: Block) -> Damage | None:
        """Return the damage of what it reads of a block, or of a block that was never made."""
        if block.is_unmade:
            return block.damages[0]
        return next(filter(None, map(block.damage_of, self._read(block.id))), None)

    def without_fault(self) -> Launch:
        """Copy it for another run, without an injected fault; the copy shares the held memory."""
        return self if self.fault is None or self.fault.comes_again else attrs.evolve(self, fault=None)

    def forget(self) -> None:
        """Hold nothing any more: the operation is over.

        Errors live on, in the tree and in the program, with frames that refer to the launch; they
        must not keep its arrays alive.
        """
        if self.is_forgotten:
            return
        self.is_forgotten = True
        # Others may be launched with the same.
        self.outputs = self.uses = self.keep = ()
        if self.fault is not None:
            self.fault.give_back()

    @property
    def operation(self) -> str:
        """Name of the operation that is launched."""
        return self.name


class PlannedFor(Protocol):
    """The device that an operation is planned for."""

    path: str
    blocks: BlockTable
    faults: Faults


class OperationRecording(Protocol):
    """Takes the operations that a task asks."""

    @property
    def is_over(self) -> bool:
        """Whether it takes no more: those of tasks that outlive it are launched."""
        ...

    is_ahead: ClassVar[bool]
    """Whether it only finds layouts, so that nothing else may change."""

    async def ask(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> ReplyT:
        """Record an operation; see `Device.ask`.

        Raises:
            NotSupportedError: A graph cannot have it.
        """
        ...

    def submit(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> Pending[ReplyT]:
        """Record an operation; see `Device.submit`."""
        ...


RECORDING: ContextVar[OperationRecording | None] = ContextVar("trio_accel.recording", default=None)
"""Recorder of the operations of a task; perhaps one that is over."""


def recording_now() -> OperationRecording | None:
    """Return the recorder of this task's operations; None if they are launched."""
    recording = RECORDING.get()
    return None if recording is None or recording.is_over else recording


def is_looking_ahead() -> bool:
    """Return whether the operations of this task are planned for the layout of a result alone."""
    recording = recording_now()
    return recording is not None and recording.is_ahead


def refuse_recording(verb: str, instead: str) -> None:
    """Refuse what a step of a graph cannot do.

    Raises:
        NotSupportedError: The operations of this task are recorded.
    """
    if recording_now() is not None:
        raise NotSupportedError(f"{verb}: a graph cannot record it; {instead}", operation=verb)


class AskedDevice(Protocol):
    """The device that an operation is asked of."""

    token: TrioToken

    def check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run than that of the token."""


def admit(
    device: AskedDevice, operation: object, verb: str, unknown: Collection[str]
) -> OperationRecording | None:
    """Refuse operations that a device does not serve, and options that it does not have.

    Returns:
        The recorder of this task's operations, if they are not to be launched.

    Raises:
        TypeError: It is no operation, or does not name its library actor.
        RuntimeError: The device belongs to another Trio run.
    """
    if unknown:
        raise unknown_option(verb, next(iter(unknown)), ())
    if not _is_operation(type(operation)):  # type: ignore[arg-type]  # mypy takes no class for hashable
        cls = type(operation)
        if not issubclass(cls, Operation):
            told = what_to_do(operation, is_array=False)
            raise TypeError(f"{verb}: {operation!r} is not an operation of a device{told}")
        raise TypeError(
            f"{verb}: {cls.__name__} does not say which library actor serves it; "
            "give the class an attribute library = 'package.module:Class'"
        )
    try:
        is_own_run = current_trio_token() is device.token
    except RuntimeError:
        # There is no run in this thread.
        is_own_run = False
    if not is_own_run:
        device.check_run(verb)
    recording = RECORDING.get()
    return None if recording is None or recording.is_over else recording


class Planner:
    """Checks operands and names outputs while an operation is planned.

    Attributes:
        name: Name of the operation.
        is_recording: Whether the operation is recorded for a graph, and not launched.
        is_overwriting: Whether it may run again after a loss although it updates arrays; see `Launch`.
    """

    is_recording: ClassVar[bool] = False
    is_overwriting: bool = False
    # Set where it changes an array that is spoiled, and a part of that may be overwritten.
    _spoiled: tuple[tuple[str, Block], ...] = ()

    def __init__(self, device: PlannedFor, operation: Operation[Any, Any]) -> None:
        self.name: str = operation.operation
        self._device = device
        self._table = device.blocks
        self._library = operation.library
        # Most operations have none of these, or one.
        self._allocations: tuple[tuple[int, int], ...] = ()
        self._staged: tuple[CopyFromHostSpec | CopySpec, ...] = ()
        # Views to write to, and the memory without gaps that is written in place of them.
        self._views: tuple[tuple[ArraySpec, ArraySpec], ...] = ()
        self._outputs: list[Block] = []
        self._uses: list[tuple[str, Block]] = []
        self._keep: list[object] = []
        # The argument that each host array is, by its block on the device.
        self._hosts: dict[int, str] | None = None

    def read(self, argument: str, operand: Operand) -> ArraySpec:
        """Take an operand that is read; a NumPy array is copied to the device first."""
        if type(operand) is AccelRef or isinstance(operand, AccelRef):
            block, table = operand.block, self._table
            # `_use` finds out the same, with a call for each.
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
        if not isinstance(other := cast("object", operand), np.ndarray):
            told = f"{type(other).__name__}{what_to_do(other)}"
            if self.name == "linalg.Matmul" and isinstance(other, Number):
                told += "; await linalg.scal(alpha, x) multiplies by a number in place"
            elif hasattr(other, "__dlpack__"):
                told += "; copy it to the device first: await device.put(x)"
            raise TypeError(f"{self.name}: {argument} must be an AccelRef or a NumPy array, got {told}")
        if type(operand) is not np.ndarray:
            operand = host_array(f"{self.name}: {argument}", operand)
        staged = self._new(operand.shape, self.dtype(argument, operand.dtype))
        self._staged += (CopyFromHostSpec(operand, staged.spec),)
        self._keep.append(operand)
        self._hosts = {**(self._hosts or {}), staged.spec.block: argument}
        return staged.spec

    def convert(self, source: ArraySpec, dtype: DType) -> ArraySpec:
        """Convert an operand on the device before the operation, to memory that is freed after it.

        Values are converted as `AccelRef.cast` converts them.

        Raises:
            TypeError: Complex to real, which would drop the imaginary parts.
        """
        check_conversion(self.name, self._argument(source), source.dtype, dtype)
        converted = self._new(source.shape, dtype)
        self._staged += (CopySpec(source, converted.spec),)
        return converted.spec

    def update(self, argument: str, operand: AccelRef) -> ArraySpec:
        """Take an array that is changed in place."""
        self._change(argument, operand)
        return operand.spec

    def copied(self, argument: str, operand: Operand) -> AccelRef:
        """Name a new array that begins as a copy of an operand, to be changed in place.

        The copy is made ahead of each run, so the operation may run again after a loss.
        """
        source = self.read(argument, operand)
        made = self.output(source.shape, source.dtype)
        self._staged += (CopySpec(source, made.spec),)
        return made

    def output(
        self, shape: Ints, dtype: DType, out: AccelRef | None = None, *, argument: str = "out"
    ) -> AccelRef:
        """Name the array that is written: a new one, or the caller's if it has this shape and dtype.

        The operation writes to memory without gaps. For a view of other strides that is temporary memory,
        which `launch` puts into the specification, and from which it is copied behind the operation.
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

    def again(self, kept: AccelRef) -> AccelRef:
        """Name an array that an earlier launch of the asker's has made, to be made anew in place.

        Its contents are not needed, so the operation may run again after a loss as if it were new.

        Args:
            kept: An array that `output` has named for an operation whose launch is behind this one's asker.
        """
        block = kept.block
        self._allocations += ((block.id, block.nbytes),)
        self._outputs.append(block)
        self._keep.append(block)
        return kept

    def memory(self, nbytes: int) -> Block:
        """Name new memory, which is no output by itself."""
        return self._new((nbytes,), DType.uint8).block

    def take(
        self,
        outputs: Sequence[Block],
        uses: Sequence[tuple[str, Block]],
        staged: tuple[CopyFromHostSpec | CopySpec, ...] = (),
        views: tuple[tuple[ArraySpec, ArraySpec], ...] = (),
        keep: Sequence[object] = (),
    ) -> None:
        """Take the parts of a launch that another planner has made, for blocks of this device.

        Args:
            outputs: Blocks that are written.
            uses: Arguments that exist already, and their blocks.
            staged: Copies of operands, to be enqueued before it.
            views: Views to write to, and the memory without gaps that is written in place of them.
            keep: Host arrays that must live until it is complete.
        """
        self._staged += staged
        self._views += views
        self._outputs += outputs
        self._uses += uses
        self._keep += [*outputs, *[block for _, block in uses], *keep]

    def status(self, count: int) -> StatusArray:
        """Make the status words of an operation, for a `status` field of its specification.

        Args:
            count: How many: one for each matrix of a stack, for example.
        """
        return np.zeros(count, np.int32)

    def factor(self, argument: str, value: object, dtype: DType) -> complex:
        """Require a number by which arrays of a dtype can be multiplied; returns it as a Python number.

        Raises:
            TypeError: No number; or a complex one for real arrays; or the dtype is one of whole numbers.
            ValueError: It is outside the range of the dtype.
        """
        # Others are looked at more closely: large ones, and what is no float.
        if type(value) is float and dtype.is_inexact and -ALWAYS_HELD <= value <= ALWAYS_HELD:
            return value
        return factor(self.name, argument, value, dtype)

    def keep(self, item: object) -> None:
        """Keep something alive until the operation is complete.

        A cancelled asker waits for the operation, as that may use host memory; but not for references of
        arrays in a tuple.
        """
        self._keep.append(item)

    def dtype(self, argument: str, like: np.dtype[Any]) -> DType:
        """Find the dtype of a host operand."""
        try:
            return DType.of(like)
        except TypeError as error:
            raise TypeError(f"{self.name}: {argument}: {error}") from None

    def refuse_dtypes(self, **arrays: ArraySpec | None) -> NoReturn:
        """Refuse operands that differ in dtype, and say how to convert them.

        Raises:
            TypeError: Always.
        """
        hosts = {name for name, one in arrays.items() if getattr(one, "block", None) in (self._hosts or ())}
        refuse_dtypes(self.name, {name: one.dtype for name, one in arrays.items() if one is not None}, hosts)

    def distinct(self, argument: str, written: ArraySpec, **others: ArraySpec) -> None:
        """Refuse a written array that shares memory with one of the others; a new one does with none."""
        if self._allocations and written.block == self._allocations[-1][0]:
            return
        for name, other in others.items():
            if overlaps(written, other):
                raise ValueError(
                    f"{self.name}: {argument} must not share memory with {name}; give one of them as a copy()"
                )

    @property
    def changed(self) -> list[Block]:
        """Blocks that are written, and were there before."""
        made = {number for number, _ in self._allocations}
        return [block for block in self._outputs if block.id not in made]

    def launch(self, planned: Planned[Any]) -> Launch:
        """Put what was planned together.

        Raises:
            TypeError, ValueError: A field of the specification that no library can work with; or the plan
                returned something else.
        """
        if not isinstance(planned, Planned):
            raise TypeError(
                f"{self.name}: plan() must return Planned(spec, reply), got {type(planned).__name__}"
                + ("; plan() is a plain function, not an async one" if inspect.iscoroutine(planned) else "")
            )
        spec = planned.spec
        described = DESCRIPTORS[type(spec)]
        behind: tuple[CopySpec, ...] = ()
        if self._views:
            spec, behind = self._without_views(spec)
        if not planned.is_checked:
            described.check(self.name, spec)
        reads, writes = described.blocks(spec)
        for staged in self._staged:
            reads |= staged.blocks()[0]
        for copy in behind:
            writes |= copy.blocks()[1]
        faults = self._device.faults
        launch = Launch(
            self.name,
            spec,
            reads,
            writes,
            self._allocations,
            self._staged,
            behind,
            self._outputs,
            self._uses,
            self._keep,
            self._library,
            faults.take(self.name) if faults.waiting else None,
        )
        if self.is_overwriting:
            launch.is_overwriting = True
        for argument, block in self._spoiled:
            # The arrays that the operation overwrites may be spoiled; its specification tells which.
            if (damage := launch.damage_of(block)) is not None:
                raise block.damage_error(f"{self.name}: {argument}", damage)
        return launch

    def made(self) -> tuple[tuple[tuple[int, int], ...], list[Block], list[object]]:
        """Return what it has named by now: blocks to make first, those that are written, and what is kept."""
        return self._allocations, self._outputs, self._keep

    def _without_views(self, spec: OperationSpec) -> tuple[OperationSpec, tuple[CopySpec, ...]]:
        """Have it write to memory without gaps in place of views; returns the copies to these as well."""
        described, values, packed = spec.descriptor(), list[Any](), dict(self._views)
        for field, value in zip(described.fields, described.values(spec), strict=True):
            is_written = field.is_array and field.role.access != "read"
            values.append(map_arrays(value, lambda one: packed.get(one, one)) if is_written else value)
            if is_written and field.role.access == "update":
                ahead: list[ArraySpec] = []
                map_arrays(value, ahead.append)
                self._staged += tuple([CopySpec(one, packed[one]) for one in ahead if one in packed])
        return described.make(values), tuple([CopySpec(one, view) for view, one in self._views])

    def _change(self, argument: str, ref: AccelRef) -> None:
        """Take an array that is changed."""
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
                f"copy it there: await {argument}.copy_to(device)"
            )
        if not block.is_usable:
            if is_read or block.is_lost:
                block.check(f"{self.name}: {argument}", ref.spec)
            else:
                self._spoiled = (*self._spoiled, (argument, block))
        self._uses.append((argument, block))

    def _argument(self, source: ArraySpec) -> str:
        """Return the name of the operand in this place."""
        for argument, block in self._uses:
            if block.id == source.block:
                return argument
        return (self._hosts or {}).get(source.block, "an operand")

    def _new(self, shape: Ints, dtype: DType) -> AccelRef:
        if len(shape) > _MAX_AXES:
            raise ValueError(f"{self.name}: shape must have at most {_MAX_AXES} axes, got {len(shape)}")
        strides, nbytes = _layout(shape, dtype.itemsize)
        if not nbytes and math.prod(extent or 1 for extent in shape) * dtype.itemsize > sys.maxsize:
            # Where there are elements, their memory is refused; here there are none.
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
    """Strides and bytes of a new array."""
    extents = tuple(map(int, shape))
    return contiguous_strides(extents, itemsize), math.prod(extents) * itemsize
