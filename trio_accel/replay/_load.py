"""A loaded journal: its launches in order, checked before anything runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import attrs

from ..backends.base.contract.program_definition import ProgramDefinition
from ._entries import NEVER_DONE, Again, Decoded, LaunchEntry
from ._journal import Entry, JournalError, RecordingJournal, is_ended, left_out, read
from ._report import NO_END

__all__ = ["listing"]


@attrs.frozen
class Mark:
    """A mark: arrays with their names, contents, blocks and layouts.

    Attributes:
        label: Its text.
        values: Name, contents or None, number of the block, and layout of each array.
        decoded: The recipes and large arrays of its recording.
    """

    label: str
    values: tuple[Entry, ...]
    decoded: Decoded


@attrs.frozen
class Outside:
    """An operation with results from outside.

    Attributes:
        number: The number of the operation.
        name: The name of the operation.
    """

    number: int
    name: str


Steps: TypeAlias = "list[LaunchEntry | Mark | Outside]"


@attrs.define(eq=False)
class Loaded:
    """A loaded journal.

    Attributes:
        steps: Launches and marks in order.
        environment: The environment of the recording.
        modules: Digests of the user's modules that launches name.
        over: For each launch number, the blocks that are unused after it.
    """

    steps: Steps
    environment: Mapping[str, str]
    modules: Mapping[str, str]
    over: Mapping[int, Sequence[int]]

    def until(self, last_number: int | None) -> Iterator[LaunchEntry | Mark | Outside]:
        """Yield the steps up to a launch."""
        for step in self.steps:
            if last_number is not None and not isinstance(step, Mark) and step.number > last_number:
                return
            yield step


class _Reader:
    """Reads the entries of a journal, by a method for each kind."""

    def __init__(self, *, programs: bool) -> None:
        self._programs = programs
        self._decoded = Decoded(programs=programs)
        # The last number of the recordings before this one, which are in the same journal.
        self._before = 0
        self._steps: Steps = []
        self._environment: Mapping[str, str] = {}
        self._modules: dict[str, str] = {}
        self._asked: dict[int, LaunchEntry] = {}
        self._contents: list[tuple[int, int, int, Any]] = []

    def take(self, entry: Entry) -> None:
        """Process an entry; unknown kinds, which later versions may have, are ignored."""
        method = getattr(self, f"_on_{entry[0]}", None)
        if method is not None:
            method(*entry[1:])

    def _on_header(self, _format: int, environment: Iterable[tuple[str, str]], _contents: object) -> None:
        self._decoded = Decoded(programs=self._programs, words_bytes=self._decoded.words_bytes)
        self._before = max((step.number for step in self._steps if not isinstance(step, Mark)), default=0)
        self._environment = dict(environment)

    def _on_module(self, name: str, digest: str) -> None:
        self._modules[name] = digest

    def _on_recipe(self, number: int, nodes: Iterable[Entry]) -> None:
        self._decoded.add(number, nodes)

    def _on_part(self, number: int, content: bytes) -> None:
        self._decoded.blobs.setdefault(number, []).append(content)

    def _on_launch(self, number: int, name: str, library: str, *values: Any) -> None:
        number += self._before
        launch = self._asked[number] = LaunchEntry(self._decoded, number, name, library, *values)
        is_plain = (type(number), type(name), type(library)) == (int, str, str)
        if not is_plain or any(type(part) is not tuple for part in values):
            raise JournalError(f"operation {number!r:.20} of the journal cannot be read: {launch!r:.200}")
        for block, nbytes in launch.allocations:
            if type(block) is not int or type(nbytes) is not int or nbytes < 0:
                raise JournalError(
                    f"{launch.label} of the journal makes block {block!r:.20} of {nbytes!r:.20} bytes"
                )
        # Check this first, because later code may read the definition of a program.
        self._decoded.check_library(library, f"{launch.label}, {name},")
        self._steps.append(launch)

    def _on_outside(self, number: int, name: str) -> None:
        self._steps.append(Outside(number + self._before, name))

    def _on_content(self, block: int, nbytes: int, content: Any, next_number: int) -> None:
        self._contents.append((next_number + self._before, block, nbytes, content))

    def _on_result(self, number: int, arrays: tuple[Entry, ...]) -> None:
        self._asked[number + self._before].results = arrays

    def _on_failed(self, number: int, name: str, text: str) -> None:
        # Some have results from outside, and no launch.
        if launch := self._asked.get(number + self._before):
            launch.failure = name, text

    def _on_mark(self, label: str, _after: int, values: tuple[Entry, ...]) -> None:
        self._steps.append(Mark(label, values, self._decoded))

    def loaded(self) -> Loaded:
        """Return the loaded journal; contents may follow the launches that need them."""
        numbers = sorted(self._asked)
        for next_number, block, nbytes, content in sorted(self._contents, key=itemgetter(0)):
            # An operation with results from outside may have used it first.
            for number in numbers[bisect_left(numbers, next_number) :][:1]:
                self._asked[number].contents[block] = nbytes, content
        loaded = Loaded(self._steps, self._environment, self._modules, self._over())
        _check(loaded)
        return loaded

    def _over(self) -> dict[int, list[int]]:
        """Find the last launch that needs each block; a later allocation replaces it."""
        last_uses: dict[int, int] = {}
        number = 0
        for step in self._steps:
            if isinstance(step, Mark):
                used = {value[2] for value in step.values}
            else:
                number = step.number
                used = step.blocks | _of_program(step) if isinstance(step, LaunchEntry) else set[int]()
            last_uses.update(dict.fromkeys(used, number))
        over: dict[int, list[int]] = {}
        for block, launch_number in last_uses.items():
            over.setdefault(launch_number, []).append(block)
        return over


def _of_program(step: LaunchEntry) -> set[int]:
    if not step.is_of_program:
        return set()
    return {array.block for array in ProgramDefinition.decode(step.library.partition("?")[2]).arrays}


def _check(loaded: Loaded) -> None:
    """Refuse forbidden launches before any runs.

    Raises:
        JournalError: An array exceeds its block, or forbidden code would run.
    """
    blocks: dict[int, Any] = {}
    for step in loaded.steps:
        if not isinstance(step, LaunchEntry):
            continue
        is_done = step.failure is None or step.failure[0] not in NEVER_DONE
        new_blocks = [(block, nbytes) for block, (nbytes, _) in step.contents.items()]
        new_blocks += step.allocations if is_done else ()
        blocks.update({block: SimpleNamespace(id=block, nbytes=nbytes) for block, nbytes in new_blocks})
        # An operation that uses the result of a skipped one is also skipped.
        if is_done and all(block in blocks for _, block in step.uses):
            Again(step, blocks).check()


def listing(journal: RecordingJournal) -> Iterator[str]:
    """Yield a line for each operation of a journal, with its failure, and for each mark. Nothing of it runs.

    Args:
        journal: The journal.

    Raises:
        JournalError: It is none.
    """
    lines, line_indices = list[str](), dict[object, int]()
    for kind, *values in read(journal):
        if kind == "header":
            lines += [f"{name}: {value}" for name, value in values[1]]
            line_indices.clear()
        elif kind in ("launch", "outside"):
            line_indices[values[0]] = len(lines)
            lines.append(f"{values[0]} {values[1]}{', from outside' if kind == 'outside' else ''}")
        elif kind == "failed" and values[0] in line_indices:
            lines[line_indices[values[0]]] += f": {values[1]}: {values[2]}"
        elif kind == "mark":
            lines.append(f"mark {values[0]!r}: {', '.join([str(value[0]) for value in values[2]])}")
    if nbytes := left_out(journal):
        lines.append(f"left out: an incomplete last entry of {nbytes} bytes")
    elif not is_ended(journal):
        lines.append(NO_END)
    yield from lines


def load(journal: RecordingJournal, *, programs: bool) -> Loaded:
    """Read a journal, and refuse what must not run, before anything runs.

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
