"""Journals asked again: on one device, compared with what was recorded, or on two in lockstep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from ..backends.base import DType, HostArray, NotSupportedError, OutOfMemoryError
from ..backends.base.contract.ops import (
    ArraySpec,
    ChainSpec,
    CopyFromHostSpec,
    GraphNode,
    GraphRecipe,
    GraphSpec,
    OperationSpec,
    graph_recipe,
    map_arrays,
)
from ..devices import Device, Operation, Planned, Planner
from ..devices.operations._blocks import Block
from ._compare import Difference, Tolerance, difference
from ._entries import PROGRAMS, Again, Asked, Blocks, Decoded, array_of
from ._environment import environment
from ._journal import Entry, Journal, JournalError, read
from ._recorder import ReadBlock

__all__ = ["Change", "Failure", "Report", "Skipped", "lockstep", "replay"]

# A launch that ended with one of these did nothing that a replay could compare.
_NEVER_DONE = frozenset(
    {"ContextLostError", "ContextPoisonedError", "DeviceLostError", "InputFailedError", "Cancelled"}
    | {"NotExecutedError", "QueueFullError", "OutOfMemoryError", "LibraryOpenError", "ActorStoppedError"}
)
_MEMORY = "trio_accel.devices:MemoryActor"


@attrs.frozen
class Skipped:
    """An operation that was not asked again.

    Attributes:
        number: Its number.
        operation: Its name.
        why: The reason.
    """

    number: int
    operation: str
    why: str


@attrs.frozen
class Failure:
    """An operation that ended otherwise than it was recorded.

    Attributes:
        number: Its number.
        operation: Its name.
        recorded: Class and text of the error that was recorded; empty if there was none.
        found: The same of this run.
    """

    number: int
    operation: str
    recorded: str
    found: str


@attrs.frozen
class Change:
    """Something of the environment that is not as it was.

    Attributes:
        name: What.
        recorded: Its value then.
        found: Its value now.
    """

    name: str
    recorded: str
    found: str


@attrs.define(kw_only=True)
class Report:
    """The result of a replay. As a text, it begins with the first difference.

    Attributes:
        operations: Operations that were asked again.
        compared: Arrays that were compared.
        differences: Arrays that differ, in order.
        skipped: Operations that were not asked again.
        failures: Operations that ended otherwise.
        environment: What has changed since the recording.
        seconds: How long it took.
    """

    operations: int = 0
    compared: int = 0
    differences: list[Difference] = attrs.field(factory=list[Difference])
    skipped: list[Skipped] = attrs.field(factory=list[Skipped])
    failures: list[Failure] = attrs.field(factory=list[Failure])
    environment: list[Change] = attrs.field(factory=list[Change])
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, and nothing ended otherwise."""
        return not (self.differences or self.failures)

    def __str__(self) -> str:
        lines = [f"first difference: {self.differences[0]}"] if self.differences else ["no difference"]
        lines += [f"{one.name}: recorded {one.recorded}, here {one.found}" for one in self.environment]
        lines.append(
            f"{self.operations} operations, {self.compared} arrays compared, {len(self.differences)} differ, "
            f"{len(self.failures)} operations ended otherwise, {len(self.skipped)} were skipped, in "
            f"{self.seconds:.1f} s"
        )
        counts = Counter(one.operation for one in self.differences)
        lines += [f"  differ: {count} of {name}" for name, count in counts.most_common()]
        lines += [
            f"  operation {one.number}, {one.operation}: recorded {one.recorded or 'no error'}, here "
            f"{one.found or 'no error'}"
            for one in self.failures
        ]
        reasons = Counter((one.operation, one.why) for one in self.skipped)
        lines += [f"  skipped: {count} of {name}: {why}" for (name, why), count in reasons.most_common()]
        return "\n".join(lines)


@attrs.frozen
class _Mark:
    label: str
    values: tuple[Entry, ...]


_Steps: TypeAlias = "list[Asked | _Mark]"


@attrs.define(eq=False)
class _Loaded:
    """A journal that was read.

    Attributes:
        decoded: Its recipes and host arrays.
        steps: Launches and marks in their order.
        environment: That of the recording.
        over: Ids of the blocks that nothing uses behind a launch, by its number.
    """

    decoded: Decoded
    steps: _Steps
    environment: Mapping[str, str]
    over: Mapping[int, Sequence[int]]


class _Reader:
    """Reads the entries of a journal, by a method for each kind."""

    def __init__(self, *, programs: bool) -> None:
        self.decoded = Decoded(programs=programs)
        self.steps: _Steps = []
        self.environment: Mapping[str, str] = {}
        self._asked: dict[int, Asked] = {}
        self._contents: list[tuple[int, int, bytes | None, int]] = []

    def take(self, entry: Entry) -> None:
        """Take an entry; one of a kind that is not known is one of a later version, and left out."""
        method = getattr(self, f"_on_{entry[0]}", None)
        if method is not None:
            method(*entry[1:])

    def _on_header(self, _format: int, environment: Iterable[tuple[str, str]], _contents: object) -> None:
        self.environment = dict(environment)

    def _on_recipe(self, number: int, nodes: Iterable[Entry]) -> None:
        self.decoded.add(number, nodes)

    def _on_host(self, number: int, plain: Entry) -> None:
        self.decoded.hosts[number] = array_of(plain)

    def _on_launch(self, *values: Any) -> None:
        launch = self._asked[values[0]] = Asked(*values)
        path = launch.library.partition("?")[0]
        self.decoded.check_module(path)
        if path == PROGRAMS and not self.decoded.programs:
            raise JournalError(
                f"operation {launch.number}, {launch.name}, is of a program, which runs code that the "
                "journal names; give programs=True if you trust it"
            )
        self.steps.append(launch)

    def _on_content(self, block: int, nbytes: int, content: bytes | None, before: int) -> None:
        self._contents.append((block, nbytes, content, before))

    def _on_result(self, number: int, arrays: tuple[Entry, ...]) -> None:
        self._asked[number].results = arrays

    def _on_failed(self, number: int, name: str, text: str) -> None:
        self._asked[number].failure = name, text

    def _on_mark(self, label: str, _after: int, values: tuple[Entry, ...]) -> None:
        self.steps.append(_Mark(label, values))

    def loaded(self) -> _Loaded:
        """Return what was read; contents may have come behind the launches that they belong to."""
        for block, nbytes, content, before in self._contents:
            if before in self._asked:
                self._asked[before].contents[block] = nbytes, content
        # The last launch that needs each block, by the block; an allocation begins another one.
        last: dict[int, int] = {}
        number = 0
        for step in self.steps:
            number = step.number if isinstance(step, Asked) else number
            used = step.blocks if isinstance(step, Asked) else {value[2] for value in step.values}
            last.update(dict.fromkeys(used, number))
        over: dict[int, list[int]] = {}
        for block, at in last.items():
            over.setdefault(at, []).append(block)
        return _Loaded(self.decoded, self.steps, self.environment, over)


def _load(journal: Journal, *, programs: bool) -> _Loaded:
    """Read a journal, and refuse what it must not do, before anything runs.

    Raises:
        JournalError: It is none, or must not run.
    """
    reader = _Reader(programs=programs)
    try:
        for entry in read(journal):
            reader.take(entry)
        return reader.loaded()
    except JournalError:
        raise
    except Exception as error:
        raise JournalError(f"the journal cannot be read: {error!r:.200}") from error


class WriteBlock(Operation[Any, Block]):
    """Write bytes to a block, or to a new one."""

    library = _MEMORY

    def __init__(self, content: HostArray, block: Block | None = None, offset: int = 0) -> None:
        self.content, self.block, self.offset = content, block, offset

    def plan(self, planner: Planner) -> Planned[Block]:
        """See `Operation.plan`."""
        block = planner.memory(self.content.nbytes) if self.block is None else self.block
        uses = () if self.block is None else (("block", block),)
        planner.take((block,), uses, keep=(self.content,))
        out = ArraySpec(block.id, self.offset, DType.uint8, self.content.shape, (1,))
        return Planned(CopyFromHostSpec(self.content, out), block)


class _Player:
    """The launches of a journal on one device."""

    def __init__(self, loaded: _Loaded, device: Device) -> None:
        self.loaded, self.device = loaded, device
        self.blocks: Blocks = {}
        self._over: Sequence[int] = ()

    async def give(self, asked: Asked) -> str:
        """Write contents that do not follow from the journal; returns why that cannot be, if so."""
        for number, (nbytes, content) in asked.contents.items():
            known = self.blocks.get(number)
            if content is None and known is None:
                array = np.random.default_rng(number).integers(0, 64, nbytes).astype(np.uint8)
                self.blocks[number] = await self.device.ask(WriteBlock(array))
            elif content is not None:
                if len(content) != nbytes:
                    raise JournalError(f"block {number} has {nbytes} bytes, its content has {len(content)}")
                array = np.frombuffer(content, np.uint8)
                same = known if known is not None and known.nbytes == nbytes else None
                self.blocks[number] = await self.device.ask(WriteBlock(array, same))
        missing = [number for _, number in asked.uses if number not in self.blocks]
        return f"block {missing[0]} was made by an operation that was skipped" if missing else ""

    async def ask(self, asked: Asked) -> Again:
        return await self.device.ask(Again(asked, self.loaded.decoded, self.blocks))

    async def content(self, number: int) -> HostArray:
        return await self.device.ask(ReadBlock(self.blocks[number]))

    def begin(self, asked: Asked) -> None:
        """Drop what only the launch before has used, and marks behind that."""
        for number in self._over:
            self.blocks.pop(number, None)
        self._over = self.loaded.over.get(asked.number, ())


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def _changes(loaded: _Loaded, device: Device) -> list[Change]:
    here = dict(environment(device))
    names = dict.fromkeys([*loaded.environment, *here])
    return [
        Change(name, loaded.environment.get(name, "nothing"), here.get(name, "nothing"))
        for name in names
        if loaded.environment.get(name) != here.get(name)
    ]


async def replay(
    journal: Journal,
    device: Device,
    *,
    programs: bool = False,
    until: int | None = None,
    tolerance: Tolerance | None = None,
) -> Report:
    """Ask all operations of a journal again, in order, and compare what came to the host, and marks.

    Args:
        journal: The journal. It may be a stranger's: it runs no code unless `programs` says so, and reads and
            writes no memory but that of its own arrays.
        device: Where, of any backend.
        programs: Whether programs of the journal run, and modules are imported that it names.
        until: The last operation.
        tolerance: How far elements may be apart; None for the same bits.

    Raises:
        JournalError: It is no journal, or something in it must not run.
        OutOfMemoryError: The device has less memory than was used; the message has the number of the
        operation.
    """
    loaded, report, began = _load(journal, programs=programs), Report(), time.perf_counter()
    report.environment = _changes(loaded, device)
    player = _Player(loaded, device)
    for step in _until(loaded.steps, until):
        if isinstance(step, _Mark):
            await _compare_mark(step, player, report, tolerance)
            continue
        player.begin(step)
        again = await _once(step, player, report)
        if again is not None and step.results is not None:
            for place, (plain, found) in enumerate(zip(step.results, again.results, strict=False)):
                report.compared += 1
                named = "host" if len(step.results) == 1 else f"host {place}"
                one = difference(
                    array_of(plain),
                    found,
                    tolerance,
                    number=step.number,
                    operation=step.name,
                    argument=named,
                )
                report.differences += [] if one is None else [one]
    report.seconds = time.perf_counter() - began
    return report


def _until(steps: _Steps, until: int | None) -> Iterator[Asked | _Mark]:
    for step in steps:
        if until is not None and isinstance(step, Asked) and step.number > until:
            return
        yield step


async def _once(step: Asked, player: _Player, report: Report) -> Again | None:
    """Ask a launch again; None if that was not done, or has failed."""
    failed = step.failure
    if failed is not None and failed[0] in _NEVER_DONE:
        report.skipped.append(
            Skipped(step.number, step.name, f"it ended with {failed[0]} when it was recorded")
        )
        return None
    if why := await player.give(step):
        report.skipped.append(Skipped(step.number, step.name, why))
        return None
    recorded = "" if failed is None else f"{failed[0]}: {failed[1]:.200}"
    try:
        again = await player.ask(step)
    except (JournalError, OutOfMemoryError) as error:
        error.message = f"operation {step.number}, {step.name}: {error.message}"
        raise
    except NotSupportedError as error:
        if recorded.partition(":")[0] != "NotSupportedError":
            report.skipped.append(Skipped(step.number, step.name, _name(error)))
    except Exception as error:  # noqa: BLE001  # it is told in the report
        if failed is None or failed[0] != type(error).__name__:
            report.failures.append(Failure(step.number, step.name, recorded, _name(error)))
    else:
        report.operations += 1
        if failed is not None:
            report.failures.append(Failure(step.number, step.name, recorded, ""))
        return again
    return None


async def _compare_mark(mark: _Mark, player: _Player, report: Report, tolerance: Tolerance | None) -> None:
    for name, plain, number, layout in mark.values:
        if plain is None or number not in player.blocks:
            continue
        offset, dtype, shape, strides = layout
        spec = ArraySpec(number, offset, DType(dtype), shape, strides)
        report.compared += 1
        one = difference(
            array_of(plain),
            _viewed(await player.content(number), spec),
            tolerance,
            number=0,
            operation=mark.label,
            argument=name,
        )
        report.differences += [] if one is None else [one]


def _viewed(content: HostArray, spec: ArraySpec) -> HostArray:
    whole: HostArray = np.ndarray(spec.shape, spec.dtype.dtype, content.data, spec.offset, spec.strides)
    return np.ascontiguousarray(whole)


def _written(spec: OperationSpec) -> list[tuple[str, ArraySpec]]:
    """Return the arrays that a specification writes, by their names."""
    found: list[tuple[str, ArraySpec]] = []
    described = spec.descriptor()
    for field, value in zip(described.fields, described.values(spec), strict=True):
        if not field.is_array or field.role.access == "read":
            continue
        arrays: list[ArraySpec] = []

        def note(array: ArraySpec, into: list[ArraySpec] = arrays) -> ArraySpec:
            into.append(array)
            return array

        map_arrays(value, note)
        names = [field.name] if len(arrays) == 1 else [f"{field.name}[{at}]" for at in range(len(arrays))]
        found += zip(names, arrays, strict=True)
    return found


class _Step(Operation[Any, None]):
    """One step of a chain, as a chain of one."""

    library = ""

    def __init__(self, library: str, name: str, spec: GraphSpec, blocks: Mapping[int, Block]) -> None:
        vars(self)["library"] = library
        self._name, self._spec, self._blocks = name, spec, blocks

    @property
    def operation(self) -> str:
        """Name of the step."""
        return self._name

    def plan(self, planner: Planner) -> Planned[None]:
        """See `Operation.plan`."""
        changed = [self._blocks[array.block] for array in (*self._spec.updated, *self._spec.written)]
        uses = [(f"array {at}", self._blocks[array.block]) for at, array in enumerate(self._spec.arrays)]
        planner.take(list(dict.fromkeys(changed)), uses)
        return Planned(self._spec, None)


class _Chain:
    """A chain that is played step by step on one device."""

    def __init__(self, asked: Asked, player: _Player) -> None:
        self.asked, self.player = asked, player
        self._again = Again(asked, player.loaded.decoded, player.blocks)
        self.nodes: Sequence[GraphNode] = ()
        self.spec: Any = None

    async def begin(self) -> None:
        """Make its blocks, and write what it was given."""
        player = self.player
        for number, nbytes in self.asked.allocations:
            player.blocks[number] = await player.device.ask(WriteBlock(np.zeros(nbytes, np.uint8)))
        self.spec = self._again.moved(self.asked.spec)
        self.nodes = graph_recipe(self.spec.recipe).nodes
        if isinstance(self.spec, ChainSpec) and self.spec.given:
            last = self.spec.written[-1]
            block = next(one for one in player.blocks.values() if one.id == last.block)
            given = np.frombuffer(self.spec.given, np.uint8)
            await player.device.ask(WriteBlock(given, block, last.offset))

    async def run(self, node: GraphNode) -> list[tuple[str, ArraySpec]]:
        """Run a step; returns the arrays that it writes, by their names."""
        spec, recipe = self.spec, GraphRecipe([node])
        one = GraphSpec(recipe.encode(), False, spec.read, spec.updated, spec.written)
        blocks = {block.id: block for block in self.player.blocks.values()}
        await self.player.device.ask(_Step(self.asked.library, node.operation, one, blocks))
        (placed,) = recipe.bind(spec.arrays)
        return _written(placed)


async def lockstep(
    journal: Journal,
    reference: Device,
    candidate: Device,
    *,
    alone: bool = True,
    steps: bool = True,
    programs: bool = False,
    most: int = 1,
    tolerance: Tolerance | None = None,
) -> Report:
    """Ask each operation of a journal on two devices, and compare all that it writes.

    The same device opened twice names what is not deterministic.

    Args:
        journal: The journal.
        reference: A device.
        candidate: Another one, of any backend.
        alone: Whether the candidate goes on with the reference's numbers, so that no difference is inherited.
        steps: Whether chains are compared step by step, because a later step may hide a difference.
        programs: See `replay`.
        most: How many differences end it.
        tolerance: See `replay`.

    Raises:
        ValueError: Both are one device.
        JournalError, OutOfMemoryError: See `replay`.
    """
    if reference is candidate:
        raise ValueError("lockstep: the devices must be two; open the device twice")
    loaded, report, began = _load(journal, programs=programs), Report(), time.perf_counter()
    report.environment = _changes(loaded, candidate)
    players = _Player(loaded, reference), _Player(loaded, candidate)
    for step in loaded.steps:
        if isinstance(step, _Mark):
            continue
        for player in players:
            player.begin(step)
        if steps and _is_chain(step):
            await _chain_in_lockstep(step, players, report, tolerance, alone=alone)
        else:
            await _launch_in_lockstep(step, players, report, tolerance, alone=alone)
        if len(report.differences) >= most:
            del report.differences[most:]
            break
    report.seconds = time.perf_counter() - began
    return report


def _is_chain(step: Asked) -> bool:
    return str(step.spec[0]).rpartition(":")[2] in ("ChainSpec", "GraphSpec") and step.failure is None


_Pair: TypeAlias = tuple[_Player, _Player]


async def _launch_in_lockstep(
    step: Asked, players: _Pair, report: Report, tolerance: Tolerance | None, *, alone: bool
) -> None:
    other = Report()
    found = [await _once(step, player, into) for player, into in zip(players, (report, other), strict=True)]
    report.failures += [one for one in other.failures if one not in report.failures]
    report.skipped += [one for one in other.skipped if one not in report.skipped]
    if None in found:
        return
    ours, theirs = (cast("Any", one) for one in found)
    for at, (one, two) in enumerate(zip(ours.results, theirs.results, strict=True)):
        _note(
            report,
            difference(one, two, tolerance, number=step.number, operation=step.name, argument=f"host {at}"),
        )
    await _compare(step, players, _written(ours.spec), _written(theirs.spec), report, tolerance, alone=alone)


async def _chain_in_lockstep(
    step: Asked, players: _Pair, report: Report, tolerance: Tolerance | None, *, alone: bool
) -> None:
    if any([await player.give(step) for player in players]):
        report.skipped.append(Skipped(step.number, step.name, "it uses what was skipped"))
        return
    chains = [_Chain(step, player) for player in players]
    for chain in chains:
        await chain.begin()
    report.operations += 1
    for number, (one, two) in enumerate(zip(chains[0].nodes, chains[1].nodes, strict=True), 1):
        before = len(report.differences)
        written = await chains[0].run(one), await chains[1].run(two)
        named = f"{step.name}, step {number} of {len(chains[0].nodes)}, {one.operation}"
        await _compare(step, players, *written, report, tolerance, alone=alone, named=named, at=number)
        if len(report.differences) > before and not alone:
            return


async def _compare(
    step: Asked,
    players: _Pair,
    ours: list[tuple[str, ArraySpec]],
    theirs: list[tuple[str, ArraySpec]],
    report: Report,
    tolerance: Tolerance | None,
    *,
    alone: bool,
    named: str = "",
    at: int = 0,
) -> None:
    """Compare arrays of two devices; if they differ, the second gets those of the first."""
    for (argument, one), (_, two) in zip(ours, theirs, strict=True):
        blocks = [_block(player, array.block) for player, array in zip(players, (one, two), strict=True)]
        contents = [
            await player.device.ask(ReadBlock(block)) for player, block in zip(players, blocks, strict=True)
        ]
        report.compared += 1
        found = difference(
            _viewed(contents[0], one),
            _viewed(contents[1], two),
            tolerance,
            number=step.number,
            operation=named or step.name,
            argument=argument,
            step=at,
        )
        _note(report, found)
        if alone and contents[0].tobytes() != contents[1].tobytes():
            await players[1].device.ask(WriteBlock(contents[0], blocks[1]))


def _block(player: _Player, number: int) -> Block:
    block: Block = next(one for one in player.blocks.values() if one.id == number)
    return block


def _note(report: Report, one: Difference | None) -> None:
    report.differences += [] if one is None else [one]
