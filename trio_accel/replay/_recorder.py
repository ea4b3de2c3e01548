"""The recorder of a device: it writes launches before they are launched, and results before they are told.

Which order matters:

* A launch is an entry before the device has it. If the entry cannot be written, nothing is launched.
* The content of a block that does not follow from the journal is read, and written, before its first use:
  arrays from before the recording, borrowed ones, and those that a lease or another library has written. A
  hook must not wait, so it refuses the launch, the block is read, and the operation is asked again. For a
  submitted operation, the read is submitted ahead of it.
* What an operation has filled on the host is written before its asker is told. A reply that was given is in
  the journal.
* Large host arrays are written by a thread, in entries of their own, ahead of the launch that refers to them.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import numpy as np
import trio

from ..backends.base import DType, HostArray
from ..backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopySpec,
    CopyToHostSpec,
    FillSpec,
    OperationSpec,
)
from ..devices import AccelRef, Device, Launch, Operation, Phase, Planned, Planner, opened
from ..devices.operations._blocks import Block
from ..devices.operations._hooks import Ask
from ..devices.operations._pending import Pending
from ..devices.wire._specs import encode_array
from ._entries import Recipes, encoded, filled_by, plain_launch
from ._environment import environment
from ._journal import FORMAT, Entry, Journal, JournalError, pack

__all__ = ["Recording", "record"]

_LARGE = 1 << 20
_MEMORY = "trio_accel.devices:MemoryActor"


class ReadBlock(Operation[Any, HostArray]):
    """Read a whole block."""

    library = _MEMORY

    def __init__(self, block: Block) -> None:
        self.block = block
        self.host: HostArray = np.empty(block.nbytes, np.uint8)

    def plan(self, planner: Planner) -> Planned[HostArray]:
        """See `Operation.plan`."""
        planner.take((), (("block", self.block),), keep=(self.host,))
        source = ArraySpec(self.block.id, 0, DType.uint8, self.host.shape, (1,))
        return Planned(CopyToHostSpec(self.host, source), self.host)


class _UnreadError(Exception):
    """Blocks have contents that no entry has."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = blocks


class _LargeError(Exception):
    """Host arrays are to be written by a thread."""

    def __init__(self, arrays: Sequence[HostArray]) -> None:
        super().__init__()
        self.arrays = arrays


@attrs.define(eq=False)
class _Ask:
    """One ask.

    Attributes:
        number: Number of its launch; 0 before that.
        spec: The specification of the launch.
        changed: Blocks that were there before, and that it writes.
        hosts: Numbers of the entries of its large host arrays, by their identities.
        is_own: Whether it is the recorder's, which no entry tells.
    """

    number: int = 0
    spec: OperationSpec | None = None
    changed: tuple[int, ...] = ()
    hosts: dict[int, int] = attrs.field(factory=dict[int, int])
    is_own: bool = False


_ASK: ContextVar[_Ask | None] = ContextVar("trio_accel.replay", default=None)


class Recording:
    """What was recorded so far. Made by `record`.

    Attributes:
        operations: Launches.
        nbytes: Bytes of their entries.
    """

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self.operations: int = 0
        self.nbytes: int = 0

    def __repr__(self) -> str:
        return (
            f"<Recording of {self._recorder.device.path}, {self.operations} operations, {self.nbytes} bytes>"
        )

    async def mark(self, label: str, **arrays: AccelRef) -> None:
        """Keep the numbers of arrays under a label; a replay compares them there.

        Args:
            label: A text that the report shows.
            arrays: Arrays of the device.

        Raises:
            JournalError: The journal cannot be written.
        """
        for name, array in arrays.items():
            if array.device is not self._recorder.device:
                raise ValueError(f"mark: {name} is on {array.device.path}, and another device is recorded")
        await self._recorder.mark(label, arrays)


class _Recorder:
    def __init__(self, device: Any, journal: Journal, *, contents: bool) -> None:
        self.device = device
        self.recording = Recording(self)
        self._journal, self._contents = journal, contents
        self._known: set[int] = set()
        self._recipes = Recipes(self.append, self._small)
        self._hosts = 0
        self._lock = threading.Lock()
        # The launch that a submission has made; its outcome to be comes behind.
        self._submission: _Ask | None = None
        self._open = 0
        self._settled = trio.Event()
        self._error: JournalError | None = None

    def append(self, entry: Entry) -> None:
        """Write an entry.

        Raises:
            JournalError: It cannot be written.
        """
        content = pack(entry)
        try:
            with self._lock:
                self._journal.append(content)
        except Exception as error:
            raise JournalError(f"the journal cannot be written: {error}", device=self.device.name) from error
        self.recording.nbytes += len(content)

    # What the device tells.

    def hook(self, phase: Phase, launch: Launch, /) -> None:
        """Write a launch that was validated."""
        if phase is not Phase.VALIDATE:
            return
        ask = _ASK.get()
        if ask is not None and ask.is_own:
            return
        unread = [block for _, block in launch.uses if block.id not in self._known]
        if unread:
            if ask is not None:
                raise _UnreadError(unread)
            self._submit_reads(unread)
        if ask is None:
            ask = self._submission = _Ask()
        if ask.number:
            # Its context went before it ran, and it was planned again.
            self.append(("failed", ask.number, "NotExecutedError", "it was planned again"))
        self._write(launch, ask)

    def _write(self, launch: Launch, ask: _Ask) -> None:
        large: list[HostArray] = []

        def host(array: HostArray) -> Entry:
            number = ask.hosts.get(id(array))
            if number is not None:
                return "at", number
            if self._contents and array.nbytes > _LARGE and ask is not self._submission:
                large.append(array)
            return self._small(array)

        def read(array: HostArray) -> Entry:
            return "read", DType.of(array.dtype).value, array.shape

        is_read = isinstance(launch.spec, CopyToHostSpec)
        plain = plain_launch(
            launch if self._contents else attrs.evolve(launch, spec=_blanked(launch.spec)),
            self._recipes,
            read if is_read else host,
            host,
        )
        if large:
            raise _LargeError(large)
        self.recording.operations += 1
        number = self.recording.operations
        self.append(("launch", number, *plain))
        ask.number, ask.spec = number, launch.spec
        made = {block for block, _ in launch.allocations}
        self._known |= made
        ask.changed = tuple([block.id for block in launch.outputs if block.id not in made])
        if not isinstance(launch.spec, (CopyFromHostSpec, CopySpec, FillSpec)) and _is_foreign(launch.spec):
            self._known -= {block.id for block in launch.outputs}

    def _small(self, array: HostArray) -> Entry:
        if array.nbytes > _LARGE and self._contents:
            return ("value", ())
        if not self._contents:
            return "blank", DType.of(array.dtype).value, array.shape
        return "value", encode_array(array)

    def around(self, ask: Ask) -> Ask:
        """Ask, and write what came to the host."""

        async def asked(operation: Operation[Any, Any], **unknown: Any) -> Any:
            own = _Ask()
            token = _ASK.set(own)
            try:
                while True:
                    try:
                        reply = await ask(operation, **unknown)
                        await self._filled(own)
                        return reply
                    except _UnreadError as error:
                        unread: Any = error.blocks
                    except _LargeError as error:
                        await self._write_hosts(error.arrays, own)
                        continue
                    except BaseException as error:
                        self._failed(own, error)
                        raise
                    own.is_own = True
                    await self._read(unread, ask)
                    own.is_own = False
            finally:
                _ASK.reset(token)

        return asked

    def submitted(self, operation: Operation[Any, Any], pending: Pending[Any]) -> None:
        """Note the outcome of a submitted operation when it is there."""
        ask, self._submission = self._submission, None
        if ask is None:
            return
        self._open += 1

        def settled() -> None:
            self._open -= 1
            try:
                if pending.error is not None:
                    self._failed(ask, pending.error)
                else:
                    self._keep_filled(ask)
            except JournalError as error:
                self._error = error
            if not self._open:
                self._settled.set()

        pending.when_done(settled)

    def written(self, block: Block) -> None:
        """Read a block again that a lease has written."""
        self._known.discard(block.id)

    # Entries.

    def _failed(self, ask: _Ask, error: BaseException) -> None:
        if not ask.number:
            return
        self.append(("failed", ask.number, type(error).__name__, str(error)[:1000]))
        # Whether it has written them is not known.
        self._known.difference_update(ask.changed)

    def _keep_filled(self, ask: _Ask) -> None:
        arrays = filled_by(ask.spec) if ask.spec is not None and self._contents else []
        if arrays:
            self.append(("result", ask.number, encoded(arrays)))

    async def _filled(self, ask: _Ask) -> None:
        if ask.spec is None or not self._contents:
            return
        arrays = filled_by(ask.spec)
        if sum(array.nbytes for array in arrays) > _LARGE:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._keep_filled, ask)
        elif arrays:
            self._keep_filled(ask)

    async def _write_hosts(self, arrays: Iterable[HostArray], ask: _Ask) -> None:
        for array in arrays:
            self._hosts += 1
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._keep_host, self._hosts, array)
            ask.hosts[id(array)] = self._hosts

    def _keep_host(self, number: int, array: HostArray) -> None:
        self.append(("host", number, encode_array(array)))

    async def _read(self, blocks: Iterable[Block], ask: Ask) -> None:
        for block in blocks:
            if block.id in self._known:
                continue
            try:
                content: HostArray | None = await ask(ReadBlock(block))
            except Exception:  # noqa: BLE001  # it is damaged, and what uses it is told so
                content = None
            if block.id in self._known:
                # Another task has read it meanwhile, and may have changed it since.
                continue
            # No other launch may come between what was read and its entry.
            self._known.add(block.id)
            await trio.to_thread.run_sync(self._keep_content, block, content)

    def _submit_reads(self, blocks: Iterable[Block]) -> None:
        own = _ASK.set(_Ask(is_own=True))
        try:
            for block in blocks:
                pending = self.device.dispatch.submit(ReadBlock(block))
                self._open += 1
                number = self.recording.operations + 1

                def settled(
                    block: Block = block, pending: Pending[HostArray] = pending, number: int = number
                ) -> None:
                    self._open -= 1
                    content = None if pending.error is not None else pending.value
                    try:
                        self._keep_content(block, content, number)
                    except JournalError as error:
                        self._error = error

                pending.when_done(settled)
                self._known.add(block.id)
        finally:
            _ASK.reset(own)

    def _keep_content(self, block: Block, content: HostArray | None, number: int = 0) -> None:
        given = None if content is None or not self._contents else content.tobytes()
        self.append(("content", block.id, block.nbytes, given, number or self.recording.operations + 1))
        self._known.add(block.id)

    async def mark(self, label: str, arrays: dict[str, AccelRef]) -> None:
        own = _ASK.set(_Ask(is_own=True))
        try:
            found = [(name, encode_array(await array.to_host())) for name, array in arrays.items()]
        finally:
            _ASK.reset(own)
        values = [
            (name, value if self._contents else None, ref.block.id, _layout(ref))
            for (name, value), ref in zip(found, arrays.values(), strict=True)
        ]
        self.append(("mark", label, self.recording.operations, tuple(values)))

    async def finish(self) -> None:
        """Wait for the outcomes of what was submitted."""
        while self._open:
            self._settled = trio.Event()
            await self._settled.wait()
        if self._error is not None:
            raise self._error


def _layout(ref: AccelRef) -> Entry:
    spec = ref.spec
    return spec.offset, spec.dtype.value, tuple(map(int, spec.shape)), tuple(map(int, spec.strides))


def _is_foreign(spec: OperationSpec) -> bool:
    """Whether it takes contents from outside of the device, such as memory of another library or device."""
    return type(spec).__name__.startswith(("CopyFrom", "CopyPeer", "Collective"))


def _blanked(spec: OperationSpec) -> OperationSpec:
    """Return a specification without numbers of the program: sizes and names stay."""
    described, values = spec.descriptor(), list[Any]()
    for field, value in zip(described.fields, described.values(spec), strict=True):
        if field.role.kind == "scalar" and isinstance(value, bytes):
            values.append(bytes(len(value)))
        elif field.role.kind == "scalar" and isinstance(value, (float, complex)):
            values.append(type(value)(1))
        else:
            values.append(value)
    made: OperationSpec = described.make(values)
    return made


@asynccontextmanager
async def record(
    device: Device, journal: Journal, *, contents: bool = True
) -> AsyncGenerator[Recording, None]:
    """Record what a device is asked inside the block.

    A launch is in the journal before it is launched, and what came to the host before its asker is told.
    Arrays that are there already are read, and written, when they are used first. NumPy between two
    operations is not recorded: its results are contents of later operations.

    A journal has all numbers that the device was given. With ``contents=False`` it has shapes and dtypes
    alone; a replay takes random numbers, and compares nothing.

    Args:
        device: The device. Two recordings at once are two journals.
        journal: Where the entries go, behind those that it has.
        contents: Whether numbers of the program are kept.

    Raises:
        JournalError: The journal cannot be written. An operation that cannot be recorded is not launched.
    """
    recorder = _Recorder(opened(device), journal, contents=contents)
    recorder.append(("header", FORMAT, environment(device), contents))
    with recorder.device.observed(recorder.hook, recorder.around, recorder.submitted, recorder.written):
        try:
            yield recorder.recording
        finally:
            with trio.CancelScope(shield=True):
                await recorder.finish()
