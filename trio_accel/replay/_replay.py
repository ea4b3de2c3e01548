"""Journals replayed on one device, and compared with the recorded results."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import trio

from ..actors import must_be_count
from ..backends.base import DType, HostArray, NotSupportedError, OutOfMemoryError
from ..backends.base.contract.ops import (
    ArraySpec,
    ChainSpec,
    CopyToHostSpec,
    OperationSpec,
    graph_recipe,
)
from ..devices import Device, opened
from ._bare import NewBlock, read_block, write_block
from ._compare import Tolerance, difference
from ._entries import NEVER_DONE, Again, Blocks, LaunchEntry, check_inside
from ._environment import environment
from ._journal import JournalError, RecordingJournal, is_ended, left_out
from ._load import Loaded, Mark, Outside, load
from ._recorder import module_digest
from ._report import Change, Failure, Report, Skipped, note

__all__ = ["replay"]


class Player:
    """The launches of a journal on one device."""

    def __init__(self, loaded: Loaded, device: Device) -> None:
        self.device = device
        self.blocks: Blocks = {}
        self._loaded = loaded
        self._programs: set[str] = set()
        self._over: Sequence[int] = ()

    async def give(self, asked: LaunchEntry) -> str:
        """Write contents that do not follow from the journal; return why the launch cannot run, if so."""
        for number, (nbytes, content) in asked.contents.items():
            block = self.blocks.get(number)
            if content is None and block is not None:
                continue
            if content is None:
                # A device without enough memory refuses the block before the numbers are made.
                self.blocks[number] = block = await self.device.ask(NewBlock(nbytes))
                array = np.random.default_rng(number).integers(0, 64, nbytes, np.uint8)
            else:
                array = asked.decoded.array(content)
                if array.dtype.str != "|u1" or array.shape != (nbytes,):
                    raise JournalError(
                        f"block {number} has {nbytes} bytes, its content is of {array.dtype}, {array.shape}"
                    )
            if block is None or block.nbytes != nbytes:
                block = self.blocks[number] = await self.device.ask(NewBlock(nbytes))
            await self.device.ask(write_block(block, array))
        missing = [number for _, number in asked.uses if number not in self.blocks]
        return f"block {missing[0]} was made by an operation that was skipped" if missing else ""

    async def ask(self, asked: LaunchEntry) -> Again:
        """Run a launch again."""
        launch = Again(asked, self.blocks)
        if asked.is_of_program:
            self._programs.add(launch.library)
        return await self.device.ask(launch)

    async def close(self) -> None:
        """Close the opened programs, and drop all blocks."""
        self.blocks.clear()
        with trio.CancelScope(shield=True):
            for path in self._programs:
                await opened(self.device).close_library(path)

    async def content(self, number: int) -> HostArray:
        """Read a block."""
        return await self.device.ask(read_block(self.blocks[number]))

    def begin(self, step: LaunchEntry | Outside) -> None:
        """Drop blocks that are unused after the previous launch and the marks after it."""
        for number in self._over:
            self.blocks.pop(number, None)
        self._over = self._loaded.over.get(step.number, ())


def check_replay(function: str, until: object, tolerance: object, **switches: object) -> None:
    """Check the options of a replay.

    Raises:
        TypeError: A switch, `until` or `tolerance` has another type.
        ValueError: `until` is below 1.
    """
    for name, value in switches.items():
        if value is not True and value is not False:
            raise TypeError(f"{function}: {name} must be True or False, got {value!r}")
    if until is not None:
        must_be_count(f"{function}: until", until)
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise TypeError(f"{function}: tolerance must be a Tolerance or None, got {tolerance!r}")


def name_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def changes_of(loaded: Loaded, device: Device) -> list[Change]:
    """Compare the environment with the recorded one, and the sources of the user's modules."""
    current = dict(environment(device))
    pairs = {
        name: (loaded.environment.get(name, ""), current.get(name, ""))
        for name in (*loaded.environment, *current)
    }
    pairs |= {f"module {name}": (digest, module_digest(name)) for name, digest in loaded.modules.items()}
    return [
        Change(name, recorded or "nothing", now or "nothing")
        for name, (recorded, now) in pairs.items()
        if recorded != now
    ]


async def replay(
    journal: RecordingJournal,
    device: Device,
    *,
    programs: bool = False,
    until: int | None = None,
    tolerance: Tolerance | None = None,
) -> Report:
    """Run all operations of a journal again, in order, and compare their host results, and marks.

    Args:
        journal: The journal. It may be a stranger's: it runs no code unless `programs` allows it, and
            accesses only the memory of its own arrays.
        device: The device, of any backend.
        programs: Whether to run the journal's programs, and import the modules that it names.
        until: The number of the last operation, from 1 on.
        tolerance: The tolerance between elements; None for equal bits.

    Raises:
        TypeError: An option has another type.
        ValueError: `until` is below 1.
        JournalError: It is not a journal, or contains something that must not run.
        OutOfMemoryError: The device lacks memory; the message has the operation's number.
    """
    check_replay("replay", until, tolerance, programs=programs)
    loaded, began = load(journal, programs=programs), time.perf_counter()
    report = Report(left_out=left_out(journal), is_ended=is_ended(journal))
    report.environment = changes_of(loaded, device)
    player = Player(loaded, device)
    try:
        for step in loaded.until(until):
            if isinstance(step, Mark):
                await compare_mark(step, player, report, tolerance)
                continue
            player.begin(step)
            if isinstance(step, Outside):
                report.outside.append(step.name)
                continue
            launch = await rerun(step, player, report)
            if launch is None or step.results is None:
                continue
            recorded = [step.decoded.array(plain) for plain in step.results]
            assert launch.spec is not None
            compare_filled(step, launch.spec, recorded, launch.results, report, tolerance)
    finally:
        await player.close()  # noqa: ASYNC102  # it is shielded
    report.seconds = time.perf_counter() - began
    return report


def compare_filled(
    step: LaunchEntry,
    spec: OperationSpec,
    ours: Sequence[HostArray],
    theirs: Sequence[HostArray],
    report: Report,
    tolerance: Tolerance | None,
) -> None:
    """Compare the host arrays that a launch has filled."""
    for index, pair in enumerate(zip(ours, theirs, strict=True)):
        lhs, rhs = pair
        # Other words are text, or numbers of errors.
        allowed = tolerance if type(spec) is CopyToHostSpec else None
        if isinstance(spec, ChainSpec) and (array := _result_of_chain(spec)) is not None:
            # Words hold the bytes of the result, and are longer by less than a word.
            nbytes, allowed = spec.result[2], tolerance
            flat = [words.view(np.uint8)[:nbytes].view(array.dtype.dtype) for words in pair]
            lhs, rhs = (part.reshape(array.shape) if array.is_contiguous else part for part in flat)
        argument = "host" if len(ours) == 1 else f"host {index}"
        note(
            report,
            difference(lhs, rhs, allowed, number=step.number, operation=step.name, argument=argument),
        )


def _result_of_chain(spec: ChainSpec) -> ArraySpec | None:
    """Return the array of a chain that is copied to the host."""
    result = None
    for node in graph_recipe(spec.recipe).nodes:
        for array in node.spec.outputs():
            if (array.block, array.offset, array.size * array.dtype.itemsize) == spec.result:
                result = array
    return result


async def rerun(step: LaunchEntry, player: Player, report: Report) -> Again | None:
    """Run a launch again; return None if it was skipped, or has failed."""
    failed = step.failure
    # Later operations need the contents read before an operation without effect.
    reason = await player.give(step)
    if failed is not None and failed[0] in NEVER_DONE:
        reason = f"it ended with {failed[0]} when it was recorded"
    if reason:
        report.skipped.append(Skipped(step.number, step.name, reason))
        return None
    recorded = "" if failed is None else f"{failed[0]}: {failed[1]:.200}"
    try:
        launch = await player.ask(step)
    except (JournalError, OutOfMemoryError) as error:
        error.message = f"operation {step.number}, {step.name}: {error.message}"
        raise
    except NotSupportedError as error:
        if recorded.partition(":")[0] != "NotSupportedError":
            report.skipped.append(Skipped(step.number, step.name, name_of(error)))
    except Exception as error:  # noqa: BLE001  # it is told in the report
        if failed is None or failed[0] != type(error).__name__:
            report.failures.append(Failure(step.number, step.name, recorded, name_of(error)))
    else:
        report.operations += 1
        if failed is not None:
            report.failures.append(Failure(step.number, step.name, recorded, ""))
        return launch
    return None


async def compare_mark(
    mark: Mark, player: Player, report: Report, tolerance: Tolerance | None, reference: Player | None = None
) -> None:
    """Compare the arrays of a mark with a reference's arrays, or with the recorded ones."""
    for name, plain, number, (offset, dtype, shape, strides) in mark.values:
        block = player.blocks.get(number)
        expected = plain if reference is None else reference.blocks.get(number)
        if expected is None or block is None:
            continue
        spec = ArraySpec(number, offset, DType(dtype), shape, strides)
        check_inside(f"mark {mark.label!r:.80}", spec, block.nbytes)
        actual = viewed(await player.content(number), spec)
        if reference is None:
            expected_array = mark.decoded.array(plain)
        else:
            expected_array = viewed(await reference.content(number), spec)
        note(
            report,
            difference(expected_array, actual, tolerance, number=0, operation=mark.label, argument=name),
        )


def viewed(content: HostArray, spec: ArraySpec) -> HostArray:
    view: HostArray = np.ndarray(spec.shape, spec.dtype.dtype, content.data, spec.offset, spec.strides)
    return np.ascontiguousarray(view)
