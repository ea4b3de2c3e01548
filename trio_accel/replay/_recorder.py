"""The recorder of a device: it writes launches before they are launched, and results before they are replied.

The order matters:

* A launch is written before the device gets it. If the entry cannot be written, nothing is launched.
* Some contents of blocks do not follow from the journal: arrays from before the recording, borrowed arrays,
  and arrays written by a lease or by another library. They are written before their first use. A hook must
  not wait, so it refuses the launch, the block is read, and the operation is requested again. For a submitted
  operation, the read is submitted before it.
* Host arrays filled by an operation are written before its caller gets the reply. So every received reply is
  in the journal.
* A thread writes large contents, in parts, so that neither they nor their lock block the loop. Only a
  submitted operation writes in the loop, because it cannot wait.

The decision on all of it is D224.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from hashlib import blake2b
from pathlib import Path
from pickle import dumps
from typing import Any

import attrs
import numpy as np
import trio

from ..actors import TaskEvent, run_in_thread
from ..backends.base import HostArray
from ..backends.base.contract.ops import CopyToHostSpec, KernelDefinition
from ..backends.base.contract.program_definition import ProgramDefinition
from ..devices import AccelRef, Device, Launch, Operation, opened
from ..devices.front._memory import ToHost
from ..devices.operations._blocks import Block, BorrowedBlock
from ..devices.operations._hooks import Ask
from ..devices.operations._pending import Pending
from ._bare import read_block
from ._entries import NEVER_DONE, PACKAGE, PROGRAMS, Recipes, plain_array, plain_launch, status_words
from ._environment import environment
from ._journal import FORMAT, PROTOCOL, Entry, FileJournal, JournalError, RecordingJournal

__all__ = ["Recording", "record"]

_LARGE_BYTES = 1 << 20


class _UnwrittenError(Exception):
    """The journal of a recorder lacks contents, which a hook must not wait for."""

    def __init__(
        self, recorder: _DeviceRecorder, blocks: Sequence[Block] = (), arrays: Sequence[HostArray] = ()
    ) -> None:
        super().__init__()
        self.recorder, self.blocks, self.arrays = recorder, blocks, arrays


@attrs.define(eq=False)
class _Ask:
    """One request.

    Attributes:
        recorder: The recorder; a device may have several.
        outer: The surrounding request of another recorder or device.
        number: The number of its launch; 0 before that.
        outputs: The blocks that it writes.
        allocations: Ids and bytes of the blocks that it allocates.
        filled: The host arrays that it fills.
        blobs: The numbers of its large host arrays, by identity.
        is_own: Whether it is the recorder's own request, which is not written.
        is_over: Whether it has ended. A task that began during it may still use it.
        is_submitted: Whether it was submitted.
    """

    recorder: _DeviceRecorder
    outer: _Ask | None = None
    number: int = 0
    outputs: Sequence[Block] = ()
    allocations: Sequence[tuple[int, int]] = ()
    filled: Sequence[HostArray] = ()
    blobs: dict[int, int] | None = None
    is_own: bool = False
    is_over: bool = False
    is_submitted: bool = False


_ASK: ContextVar[_Ask | None] = ContextVar("trio_accel.replay", default=None)


class Recording:
    """The progress of a recording. Made by `record`.

    Attributes:
        operations: The number of launches.
        nbytes: Bytes of the entries.
    """

    def __init__(self, recorder: _DeviceRecorder) -> None:
        self._recorder = recorder
        self.operations: int = 0
        self.nbytes: int = 0

    def __repr__(self) -> str:
        return (
            f"<Recording of {self._recorder.device.path}, {self.operations} operations, {self.nbytes} bytes>"
        )

    async def mark(self, label: str, **arrays: AccelRef) -> None:
        """Store the numbers of arrays under a label; a replay compares them there.

        Args:
            label: A text that the report shows.
            arrays: Arrays of the device.

        Raises:
            ValueError: An array is on another device.
            JournalError: The journal cannot be written.
        """
        for name, array in arrays.items():
            if array.device is not self._recorder.device:
                raise ValueError(
                    f"mark: {name} must be on {self._recorder.device.path}, got {array.device.path}"
                )
        await self._recorder.mark(label, arrays)


class _DeviceRecorder:
    def __init__(self, device: Any, journal: RecordingJournal, *, contents: bool) -> None:
        self.device = device
        self.recording = Recording(self)
        self._journal, self._contents = journal, contents
        # The blocks with contents that follow from the journal, and the blocks being read.
        self._known: set[int] = set()
        self._reading: dict[int, TaskEvent] = {}
        self._recipes = Recipes(self.append, contents=contents)
        self._blobs = itertools.count(1)
        self._modules: set[str] = set()
        self._lock = threading.Lock()
        # The launch of the submission in progress.
        self._submission: _Ask | None = None
        self._open = 0
        self._settled = TaskEvent()
        self._error: JournalError | None = None

    def append(self, entry: Entry) -> None:
        """Write an entry.

        Raises:
            JournalError: It cannot be written.
        """
        content = dumps(entry, PROTOCOL)
        try:
            with self._lock:
                self._journal.append(content)
        except Exception as error:
            raise JournalError(f"the journal cannot be written: {error}", device=self.device.name) from error
        self.recording.nbytes += len(content)

    # Callbacks of the device.

    def validated(self, launch: Launch, /) -> None:
        """Write a validated launch."""
        ask = _ASK.get()
        while ask is not None and not ask.is_own and (ask.is_over or ask.recorder is not self):
            ask = ask.outer
        if ask is None:
            self._refused()
            ask = self._submission = _Ask(self, is_submitted=True)
        elif ask.is_own:
            return
        # No comprehension here and below: each would be a call for each operation.
        known_ids, unread, borrowed = self._known, list[Block](), list[int]()
        for _, block in launch.uses:
            if block.id not in known_ids:
                unread.append(block)
            if type(block) is BorrowedBlock:
                borrowed.append(block.id)
        if unread and ask.is_submitted:
            self._submit_reads(unread)
        elif unread:
            raise _UnwrittenError(self, unread)
        if ask.number:
            # Its context was lost before it ran, and it was planned again.
            self.append(("failed", ask.number, "NotExecutedError", "it was planned again"))
        self._write(launch, ask)
        # Another device may write to these at any time.
        known_ids.difference_update(borrowed)

    def _write(self, launch: Launch, ask: _Ask) -> None:
        number, spec, known_ids = self.recording.operations + 1, launch.spec, self._known
        filled: Sequence[HostArray] = ()
        if spec.is_from_outside:
            self.append(("outside", number, launch.name))
            known_ids.difference_update([block.id for block in launch.outputs])
        else:
            large: list[HostArray] = []
            plain = plain_launch(launch, self._recipes, partial(self._host, ask, large))
            if large:
                raise _UnwrittenError(self, arrays=large)
            if launch.library not in self._modules:
                self._note_modules(launch)
            self.append(("launch", number, *plain))
            if type(spec) is CopyToHostSpec:
                filled = (spec.host,)
            elif spec.described.has_status:
                filled = status_words(spec)
            for block_id, _ in launch.allocations:
                known_ids.add(block_id)
        self.recording.operations = ask.number = number
        ask.filled = filled if self._contents else ()
        ask.outputs, ask.allocations = launch.outputs, launch.allocations

    def _host(self, ask: _Ask, large: list[HostArray], array: HostArray) -> Entry:
        if not self._contents:
            return "blank", plain_array(array, b"")
        if array.nbytes <= _LARGE_BYTES:
            return "value", plain_array(array, array.tobytes())
        blob = (ask.blobs or {}).get(id(array))
        if blob is None and not ask.is_submitted:
            large.append(array)
            return "value", ()
        return "value", plain_array(array, self._blob(array) if blob is None else blob)

    def around(self, ask: Ask) -> Ask:
        """Make a request, and write the host arrays that the operation has filled."""

        async def asked(operation: Operation[Any, Any], **unknown: Any) -> Any:
            request = _Ask(self, _ASK.get())
            token = _ASK.set(request)
            try:
                while True:
                    try:
                        reply = await ask(operation, **unknown)
                    except _UnwrittenError as error:
                        if error.recorder is not self:
                            self._failed(request, error)
                            raise
                        unwritten = error
                    except BaseException as error:
                        self._failed(request, error)
                        raise
                    else:
                        if request.filled:
                            await self._write_filled(request)
                        return reply
                    await self._write_hosts(unwritten.arrays, request)
                    request.is_own = True
                    await self._read(unwritten.blocks)
                    request.is_own = False
            finally:
                request.is_over = True
                # The frames of an error must not keep memory.
                request.outputs = request.filled = ()
                request.outer = None
                _ASK.reset(token)

        return asked

    def submitted(self, pending: Pending[Any], /) -> None:
        """Write the outcome of a submitted operation when it has ended."""
        ask, self._submission = self._submission, None
        if ask is None:
            return

        def settled() -> None:
            if pending.error is not None:
                self._failed(ask, pending.error)
            elif ask.filled:
                self._keep_filled(ask)

        self._when_done(pending, settled)

    def _refused(self) -> None:
        """Record that another recorder refused the last submission."""
        ask, self._submission = self._submission, None
        if ask is not None:
            self._failed(ask, _UnwrittenError(self))

    def _when_done(self, pending: Pending[Any], call: Any) -> None:
        self._open += 1

        def settled() -> None:
            self._open -= 1
            try:
                call()
            except JournalError as error:
                self._error = error
            if not self._open:
                self._settled.set()

        pending.when_done(settled)

    def written(self, block: Block) -> None:
        """Read a block again after a lease has written to it."""
        self._known.discard(block.id)
        self._reading.pop(block.id, None)

    # Entries.

    def _failed(self, ask: _Ask, error: BaseException) -> None:
        if not ask.number:
            return
        new_blocks = [block for block in ask.outputs if block.id in dict(ask.allocations)]
        is_done = isinstance(error, Exception) and any(
            not (block.damages or block.is_unmade) for block in new_blocks
        )
        is_refused = isinstance(error, (_UnwrittenError, JournalError))
        if is_done and not is_refused and type(error).__name__ not in NEVER_DONE:
            # The reply was refused, but the operation itself may be fine.
            if ask.filled:
                self._keep_filled(ask)
            return
        # It is unknown whether the outputs were written.
        self._known.difference_update([block.id for block in ask.outputs])
        name = "NotExecutedError" if is_refused else type(error).__name__
        # A cancellation must not be replaced by another error.
        try:
            self.append(("failed", ask.number, name, str(error)[:1000]))
        except JournalError as failed:
            self._error = failed

    async def _write_filled(self, ask: _Ask) -> None:
        nbytes = 0
        for array in ask.filled:
            nbytes += array.nbytes
        if nbytes > _LARGE_BYTES:
            await _in_thread(self._keep_filled, ask)
        else:
            self._keep_filled(ask)

    def _keep_filled(self, ask: _Ask) -> None:
        arrays: list[Entry] = []
        for array in ask.filled:
            arrays.append(self._encode(array))  # noqa: PERF401  # a comprehension would be a call
        self.append(("result", ask.number, tuple(arrays)))

    def _encode(self, array: HostArray) -> Entry:
        is_large = array.nbytes > _LARGE_BYTES
        return plain_array(array, self._blob(array) if is_large else array.tobytes())

    def _blob(self, array: HostArray) -> int:
        """Write a large array in parts; return its number."""
        number = next(self._blobs)
        flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        content = memoryview(flat)
        for start in range(0, len(content), _LARGE_BYTES):
            self.append(("part", number, bytes(content[start : start + _LARGE_BYTES])))
        return number

    async def _write_hosts(self, arrays: Iterable[HostArray], ask: _Ask) -> None:
        ask.blobs = ask.blobs or {}
        for array in arrays:
            ask.blobs[id(array)] = await _in_thread(self._blob, array)

    async def _read(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if (event := self._reading.get(block.id)) is not None:
                await event.wait()
            elif block.id not in self._known:
                over = self._reading[block.id] = TaskEvent()
                try:
                    await self._read_one(block)
                    # A lease may have written meanwhile.
                    if self._reading.get(block.id) is over:
                        self._known.add(block.id)
                finally:
                    if self._reading.get(block.id) is over:
                        del self._reading[block.id]
                    over.set()

    async def _read_one(self, block: Block) -> None:
        try:
            content: HostArray | None = await self.device.dispatch.ask(read_block(block))
        except Exception:  # noqa: BLE001  # it is damaged, which its user learns from the device
            content = None
        if block.nbytes > _LARGE_BYTES:
            await _in_thread(self._keep_content, block, content)
        else:
            self._keep_content(block, content)

    def _submit_reads(self, blocks: Iterable[Block]) -> None:
        token = _ASK.set(_Ask(self, is_own=True))
        number = self.recording.operations + 1
        try:
            for block in blocks:
                pending = self.device.dispatch.submit(read_block(block))

                def settled(block: Block = block, pending: Pending[HostArray] = pending) -> None:
                    content = None if pending.error is not None else pending.value
                    self._keep_content(block, content, number)

                self._when_done(pending, settled)
                self._known.add(block.id)
        finally:
            _ASK.reset(token)

    def _keep_content(self, block: Block, content: HostArray | None, next_number: int = 0) -> None:
        encoded = None if content is None or not self._contents else self._encode(content)
        self.append(
            ("content", block.id, block.nbytes, encoded, next_number or self.recording.operations + 1)
        )

    def _note_modules(self, launch: Launch) -> None:
        """Write the source digests of the user's modules that a launch names."""
        path, _, text = launch.library.partition("?")
        if path == PROGRAMS:
            path = ProgramDefinition.decode(text).target
        definition = getattr(launch.spec, "definition", None)
        paths = [path, type(launch.spec).__module__]
        if isinstance(definition, str) and launch.spec.runs_code:
            paths.append(KernelDefinition.decode(definition).cpu or PACKAGE)
        else:
            self._modules.add(launch.library)
        for module in {name.partition(":")[0] for name in paths} - self._modules:
            self._modules.add(module)
            if module.partition(".")[0] != PACKAGE:
                self.append(("module", module, module_digest(module)))

    async def mark(self, label: str, arrays: dict[str, AccelRef]) -> None:
        token = _ASK.set(_Ask(self, is_own=True))
        try:
            copies = [(name, await self.device.dispatch.ask(ToHost(ref))) for name, ref in arrays.items()]
        finally:
            _ASK.reset(token)
        after = self.recording.operations
        values = [
            (
                name,
                await _in_thread(self._encode, host) if self._contents else None,
                ref.block.id,
                _layout(ref),
            )
            for (name, host), ref in zip(copies, arrays.values(), strict=True)
        ]
        self.append(("mark", label, after, tuple(values)))

    async def finish(self) -> None:
        """Wait for the outcomes of submitted operations, and end a journal in a file.

        Raises:
            JournalError: An outcome or the end could not be written.
        """
        self._refused()
        while self._open:
            self._settled = TaskEvent()
            await self._settled.wait()
        if self._error is not None:
            raise self._error
        if isinstance(self._journal, FileJournal):
            try:
                self._journal.close()
            except OSError as error:
                raise JournalError(
                    f"the journal cannot be ended: {error}", device=self.device.name
                ) from error


async def _in_thread(function: Any, *arguments: Any) -> Any:
    with trio.CancelScope(shield=True):
        return await run_in_thread(function, *arguments)


def _layout(ref: AccelRef) -> Entry:
    spec = ref.spec
    return spec.offset, spec.dtype.value, tuple(map(int, spec.shape)), tuple(map(int, spec.strides))


def module_digest(module: str) -> str:
    """Return a digest of a module's source without importing it; empty if there is none.

    Python would import the package of a module to find it, so modules of packages that are not imported have
    no digest either.
    """
    package = module.rpartition(".")[0]
    if package and package not in sys.modules:
        return ""
    try:
        spec = importlib.util.find_spec(module)
        origin = None if spec is None else spec.origin
        return blake2b(Path(origin).read_bytes(), digest_size=16).hexdigest() if origin else ""
    except (ImportError, OSError, ValueError):
        return ""


@asynccontextmanager
async def record(
    device: Device, journal: RecordingJournal, *, contents: bool = True
) -> AsyncGenerator[Recording, None]:
    """Record the operations of a device inside the block.

    A launch is in the journal before it is launched, and host results before their caller gets the reply.
    Existing arrays are read, and written, at their first use. NumPy code between two operations is not
    recorded: its results are contents of later operations.

    A journal has all numbers that the device was given. With ``contents=False`` it only has shapes and
    dtypes; a replay uses random numbers, and compares nothing. Texts of code remain: constants of
    expressions, and arguments of programs.

    Args:
        device: The device. Two concurrent recordings need two journals.
        journal: The journal, to which entries are appended.
        contents: Whether to store numbers of the program.

    Raises:
        TypeError: `contents` is not a bool.
        JournalError: The journal cannot be written. An operation that cannot be recorded is not launched.
    """
    if contents is not True and contents is not False:
        raise TypeError(f"record: contents must be True or False, got {contents!r}")
    recorder = _DeviceRecorder(opened(device), journal, contents=contents)
    recorder.append(("header", FORMAT, environment(device), contents))
    with recorder.device.recorded(recorder):
        try:
            yield recorder.recording
        except BaseException:
            # Raise the error of the block, not the error of the journal.
            with suppress(JournalError), trio.CancelScope(shield=True):
                await recorder.finish()
            raise
        with trio.CancelScope(shield=True):
            await recorder.finish()
