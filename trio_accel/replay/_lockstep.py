"""Journals replayed on two devices in lockstep: the first operation that differs, and its first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ..actors import must_be_count
from ..backends.base import NotSupportedError, OutOfMemoryError
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
from ..devices import Device
from ..devices.operations._blocks import Block
from ._bare import MEMORY, Bare, NewBlock, read_block, write_block
from ._compare import Tolerance, difference
from ._entries import Again, LaunchEntry
from ._journal import Entry, JournalError, RecordingJournal, is_ended, left_out
from ._load import Mark, Outside, load
from ._replay import Player, changes_of, check_replay, compare_filled, compare_mark, name_of, rerun, viewed
from ._report import Failure, Report, Skipped, note

__all__ = ["lockstep"]


def _written(spec: OperationSpec) -> list[tuple[str, ArraySpec]]:
    """Return the arrays that a specification writes, by their names."""
    named_arrays: list[tuple[str, ArraySpec]] = []
    described = spec.descriptor()
    for field, value in zip(described.fields, described.values(spec), strict=True):
        if not field.is_array or field.role.access == "read":
            continue
        arrays: list[ArraySpec] = []
        map_arrays(value, arrays.append)
        names = (
            [field.name] if len(arrays) == 1 else [f"{field.name}[{index}]" for index in range(len(arrays))]
        )
        named_arrays += zip(names, arrays, strict=True)
    return named_arrays


def _results(spec: Any) -> list[tuple[str, ArraySpec]]:
    """Return the arrays that a launch writes, without memory between the results of a chain's steps."""
    if isinstance(spec, ChainSpec):
        return [entry for entry in _written(spec) if entry[1] is not spec.written[-1]]
    if isinstance(spec, GraphSpec):
        return [entry for step in graph_recipe(spec.recipe).bind(spec.arrays) for entry in _written(step)]
    return _written(spec)


class _Chain:
    """A chain that is replayed step by step on one device."""

    def __init__(self, asked: LaunchEntry, player: Player) -> None:
        self.nodes: Sequence[GraphNode] = ()
        self._asked, self._player = asked, player
        self._again = Again(asked, player.blocks)
        self._spec: Any = None
        self._blocks: dict[int, Block] = {}

    async def begin(self) -> None:
        """Make its blocks, and write its host arrays."""
        player, asked = self._player, self._asked
        for number, nbytes in asked.allocations:
            block = player.blocks[number] = await player.device.ask(NewBlock(nbytes))
            await player.device.ask(write_block(block, np.zeros(nbytes, np.uint8)))
        spec = self._spec = self._again.moved(asked.spec)
        self._blocks = {block.id: block for block in map(player.blocks.__getitem__, asked.blocks)}
        self.nodes = graph_recipe(spec.recipe).nodes
        await self._copy(asked.staged)
        if isinstance(spec, ChainSpec) and spec.host_data:
            target, content = spec.written[-1], np.frombuffer(spec.host_data, np.uint8)
            await player.device.ask(write_block(self._blocks[target.block], content, target.offset))

    async def run(self, node: GraphNode) -> list[tuple[str, ArraySpec]]:
        """Run a step; return the arrays that it writes, by name."""
        spec, recipe = self._spec, GraphRecipe([node])
        step_spec = GraphSpec(recipe.encode(), False, spec.read, spec.updated, spec.written)
        await self._player.device.ask(
            Bare(self._asked.library, step_spec, self._blocks, None, name=node.operation)
        )
        (placed,) = recipe.bind(spec.arrays)
        return _written(placed)

    async def end(self) -> None:
        """Copy results to views."""
        await self._copy(self._asked.view_copies)

    async def _copy(self, copies: Sequence[Entry]) -> None:
        for plain in copies:
            spec = self._again.moved(plain)
            keep = [spec.host] if isinstance(spec, CopyFromHostSpec) else []
            await self._player.device.ask(Bare(MEMORY, spec, self._blocks, None, keep=keep))


async def lockstep(
    journal: RecordingJournal,
    reference: Device,
    candidate: Device,
    *,
    isolated: bool = True,
    steps: bool = True,
    programs: bool = False,
    max_differences: int = 1,
    until: int | None = None,
    tolerance: Tolerance | None = None,
) -> Report:
    """Run each operation of a journal on two devices, and compare all written arrays, and marks.

    To find operations that are not deterministic, open the same device twice. A mark differs only if
    differences are inherited, because otherwise the candidate has the reference's numbers.

    Args:
        journal: The journal.
        reference: A device.
        candidate: Another device, of any backend.
        isolated: Whether the candidate continues with the reference's numbers, so that no difference is
            inherited.
        steps: Whether chains are compared step by step, because a later step may hide a difference.
        programs: See `replay`.
        max_differences: The number of differences that ends the comparison; at least 1.
        until: See `replay`.
        tolerance: See `replay`.

    Raises:
        TypeError: An option has another type.
        ValueError: Both devices are the same, or `max_differences` or `until` is below 1.
        JournalError, OutOfMemoryError: See `replay`.
    """
    if reference is candidate:
        raise ValueError("lockstep: the devices must be two; open the device twice")
    check_replay("lockstep", until, tolerance, isolated=isolated, steps=steps, programs=programs)
    must_be_count("lockstep: max_differences", max_differences)
    loaded, began = load(journal, programs=programs), time.perf_counter()
    report = Report(left_out=left_out(journal), is_ended=is_ended(journal))
    report.environment = changes_of(loaded, candidate)
    players = Player(loaded, reference), Player(loaded, candidate)
    pair = _Lockstep(players, report, tolerance, isolated)
    try:
        for step in loaded.until(until):
            if isinstance(step, Mark):
                await compare_mark(step, players[1], report, tolerance, players[0])
                continue
            for player in players:
                player.begin(step)
            if isinstance(step, Outside):
                report.outside.append(step.name)
            elif steps and _is_chain(step):
                await pair.chain(step)
            else:
                await pair.launch(step)
            if len(report.differences) >= max_differences:
                del report.differences[max_differences:]
                break
    finally:
        for player in players:
            await player.close()  # noqa: ASYNC102  # it is shielded
    report.seconds = time.perf_counter() - began
    return report


def _is_chain(step: LaunchEntry) -> bool:
    return str(step.spec[0]).rpartition(":")[2] in ("ChainSpec", "GraphSpec") and step.failure is None


@attrs.frozen
class _Lockstep:
    """Launches on two devices.

    Attributes:
        players: The devices.
        report: The differences.
        tolerance: The tolerance between elements.
        isolated: Whether the second device continues with the numbers of the first.
    """

    players: tuple[Player, Player]
    report: Report
    tolerance: Tolerance | None
    isolated: bool

    async def launch(self, step: LaunchEntry) -> None:
        """Run a launch as a whole."""
        report, peer_report = self.report, Report()
        ours, theirs = (
            await rerun(step, self.players[0], report),
            await rerun(step, self.players[1], peer_report),
        )
        report.failures += [failure for failure in peer_report.failures if failure not in report.failures]
        report.skipped += [skip for skip in peer_report.skipped if skip not in report.skipped]
        if ours is None or theirs is None:
            # A block that only the second device has is useless.
            for number, _ in step.allocations:
                for player in self.players:
                    player.blocks.pop(number, None)
            return
        assert ours.spec is not None
        compare_filled(step, ours.spec, ours.results, theirs.results, report, self.tolerance)
        await self._compare(step, _results(ours.spec), _results(theirs.spec))

    async def chain(self, step: LaunchEntry) -> None:
        """Run a chain step by step."""
        report = self.report
        if reason := max([await player.give(step) for player in self.players]):
            report.skipped.append(Skipped(step.number, step.name, reason))
            return
        chains = [_Chain(step, player) for player in self.players]
        try:
            for chain in chains:
                await chain.begin()
            report.operations += 1
            count = len(chains[0].nodes)
            for number, (node, peer_node) in enumerate(zip(chains[0].nodes, chains[1].nodes, strict=True), 1):
                written = await chains[0].run(node), await chains[1].run(peer_node)
                named = f"{step.name}, step {number} of {count}, {node.operation}"
                await self._compare(step, *written, named=named, node_number=number)
            for chain in chains:
                await chain.end()
        except (JournalError, OutOfMemoryError):
            raise
        except NotSupportedError as error:
            report.skipped.append(Skipped(step.number, step.name, name_of(error)))
        except Exception as error:  # noqa: BLE001  # the report has it
            report.failures.append(Failure(step.number, step.name, "", name_of(error)))

    async def _compare(
        self,
        step: LaunchEntry,
        ours: list[tuple[str, ArraySpec]],
        theirs: list[tuple[str, ArraySpec]],
        *,
        named: str = "",
        node_number: int = 0,
    ) -> None:
        """Compare arrays of two devices; if they differ, copy the first device's arrays to the second."""
        blocks = [
            {block.id: block for block in map(player.blocks.__getitem__, step.blocks & player.blocks.keys())}
            for player in self.players
        ]
        device, peer = [player.device for player in self.players]
        for (argument, array), (_, peer_array) in zip(ours, theirs, strict=True):
            content = await device.ask(read_block(blocks[0][array.block]))
            peer_content = await peer.ask(read_block(block := blocks[1][peer_array.block]))
            mismatch = difference(
                viewed(content, array),
                viewed(peer_content, peer_array),
                self.tolerance,
                number=step.number,
                operation=named or step.name,
                argument=argument,
                step=node_number,
            )
            note(self.report, mismatch)
            if self.isolated and not np.array_equal(content, peer_content):
                await peer.ask(write_block(block, content))
