"""Launches as entries of a journal, and operations that ask them again.

An entry of a launch has what a worker would get. Ids of blocks are those of the recorded device: a replay
gives each allocation a block of its own. A recipe of a chain is written once, step by step as specifications,
and an entry has its number. What a stranger's journal says of arrays is held against their blocks before
anything is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from ..backends.base import DType, HostArray
from ..backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopySpec,
    GraphNode,
    GraphRecipe,
    OperationSpec,
    graph_recipe,
    map_arrays,
)
from ..backends.base.contract.program_definition import ProgramDefinition
from ..devices import Launch, Operation, Planned, Planner
from ..devices.wire._specs import HostEncoder, decode_spec, encode_array, encode_spec, result_of
from ._journal import Entry, JournalError

PROGRAMS = "trio_accel.programs:ProgramActor"
_PACKAGE = "trio_accel"
Blocks: TypeAlias = dict[int, Any]
"""Blocks of a replay by their ids in the journal."""


class Recipes:
    """The recipes of a journal that is written.

    Args:
        append: Keeps an entry.
        host: Encodes a host array.
    """

    def __init__(self, append: Callable[[Entry], object], host: HostEncoder) -> None:
        self._append, self._host = append, host
        self._numbers: dict[bytes, int] = {}

    def encode(self, spec: OperationSpec, host: HostEncoder) -> Entry:
        """Make plain values of a specification, with the number of its recipe in place of that."""
        plain = list(encode_spec(spec, host, result_of))
        place = _recipe_place(spec)
        if place is not None:
            plain[place + 1] = self._number(cast("bytes", plain[place + 1]))
        return tuple(plain)

    def _number(self, recipe: bytes) -> int:
        number = self._numbers.get(recipe)
        if number is None:
            nodes = [
                (node.operation, node.library, self.encode(node.spec, self._host))
                for node in graph_recipe(recipe).nodes
            ]
            number = self._numbers[recipe] = len(self._numbers)
            self._append(("recipe", number, tuple(nodes)))
        return number


def _recipe_place(spec: OperationSpec) -> int | None:
    for place, field in enumerate(spec.descriptor().fields):
        if field.name == "recipe":
            return place
    return None


@attrs.define(eq=False)
class Asked:
    """An entry of a launch.

    Attributes:
        number: Its number.
        name: Name of the operation.
        library: Import path of its library actor.
        spec: Its specification, as plain values.
        allocations: Ids and bytes of the blocks that are made first.
        staged: Copies of operands, as plain values.
        behind: Copies of results to views.
        outputs: Ids of the blocks that are written.
        uses: Arguments that exist already, and the ids of their blocks.
        results: What came to the host; None if nobody knows.
        failure: Class and text of its error; None if it has not failed.
        contents: Contents of blocks before it, by their ids; None for one that could not be read.
    """

    number: int
    name: str
    library: str
    spec: Entry
    allocations: tuple[tuple[int, int], ...]
    staged: tuple[Entry, ...]
    behind: tuple[Entry, ...]
    outputs: tuple[int, ...]
    uses: tuple[tuple[str, int], ...]
    results: tuple[Entry, ...] | None = None
    failure: tuple[str, str] | None = None
    contents: dict[int, tuple[int, bytes | None]] = attrs.field(factory=dict[Any, Any])

    @property
    def blocks(self) -> set[int]:
        """Ids of all its blocks."""
        used = [block for _, block in self.uses]
        return {*[block for block, _ in self.allocations], *self.outputs, *used, *self.contents}


class Decoded:
    """The recipes and host arrays of a journal that is read.

    Attributes:
        nodes: Recipes by their numbers, encoded.
        hosts: Host arrays that have entries of their own.
    """

    def __init__(self, *, programs: bool) -> None:
        self.nodes: dict[int, Sequence[GraphNode]] = {}
        self.hosts: dict[int, HostArray] = {}
        self.programs = programs

    def add(self, number: int, nodes: Iterable[Entry]) -> None:
        """Read a recipe."""
        self.nodes[number] = [
            GraphNode(str(operation), str(library), self.spec(spec, _words_alone))
            for operation, library, spec in nodes
        ]

    def spec(self, plain: Entry, host: Callable[[Any], HostArray]) -> OperationSpec:
        """Make a specification of plain values.

        Raises:
            JournalError: It is of a module that this process has not imported, or is no specification.
        """
        path = plain[0]
        self.check_module(str(path))
        try:
            values = list(plain)
            for place, value in enumerate(values):
                # A recipe is the only field that is a number where bytes belong.
                if place and type(value) is int and self._is_recipe(str(path), place - 1):
                    values[place] = GraphRecipe(self.nodes[value]).encode()
            return decode_spec(tuple(values), host)
        except JournalError:
            raise
        except Exception as error:
            raise JournalError(f"{path!r:.80} in the journal cannot be read: {error!r:.200}") from error

    def check_module(self, path: str) -> None:
        """Refuse a module that would be imported because a journal says so."""
        module = path.partition(":")[0]
        if module.partition(".")[0] != _PACKAGE and module not in sys.modules and not self.programs:
            raise JournalError(
                f"the journal uses the module {module!r:.80}, which this program has not imported; import "
                "it, or give programs=True if you trust the journal"
            )

    @staticmethod
    def _is_recipe(path: str, place: int) -> bool:
        module, _, name = path.partition(":")
        cls: Any = getattr(sys.modules.get(module), name, None)
        fields = cls.descriptor().fields if isinstance(cls, type) and issubclass(cls, OperationSpec) else ()
        return place < len(fields) and fields[place].name == "recipe"


def _words_alone(plain: Any) -> HostArray:
    """Make the status words of a step; a step has no other host array."""
    if plain[0] != "result":
        raise JournalError("a step of a recipe has a host array")
    return np.zeros(plain[2], DType(plain[1]).dtype)


class Again(Operation[Any, "Again"]):
    """A launch of a journal, asked again.

    Attributes:
        entry: The launch.
        results: Host arrays that it fills.
    """

    library = ""
    not_recorded = "a replay is not recorded by a graph"

    def __init__(self, entry: Asked, decoded: Decoded, blocks: Blocks) -> None:
        self.entry, self._decoded, self._blocks = entry, decoded, blocks
        self.results: list[HostArray] = []
        self._name = entry.name
        vars(self)["library"] = self._library()
        self.keep: list[HostArray] = []
        self.spec: OperationSpec | None = None

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._name

    def _library(self) -> str:
        """The library, with the blocks of this device in the definition of a program."""
        path, _, text = self.entry.library.partition("?")
        self._decoded.check_module(path)
        if path != PROGRAMS:
            return self.entry.library
        if not self._decoded.programs:
            raise JournalError(
                f"operation {self.entry.number} is of a program, which runs code that the journal names; "
                "give programs=True if you trust it"
            )
        definition = ProgramDefinition.decode(text)
        arrays = tuple([self._placed(array) for array in definition.arrays])
        again = attrs.evolve(definition, number=definition.number + 1_000_000, arrays=arrays)
        return f"{path}?{again.encode()}"

    def _placed(self, array: ArraySpec) -> ArraySpec:
        block = self._blocks.get(array.block)
        if block is None:
            raise JournalError(
                f"operation {self.entry.number} uses block {array.block}, which nothing has made"
            )
        made = ArraySpec(block.id, array.offset, array.dtype, array.shape, array.strides)
        check_inside(self.entry.number, made, block.nbytes)
        return made

    def moved(self, plain: Entry) -> Any:
        """Make a specification for blocks of this device."""
        spec = self._decoded.spec(plain, self._host)
        described = spec.descriptor()
        values = [map_arrays(value, self._placed) for value in described.values(spec)]
        made: OperationSpec = described.make(values)
        if _recipe_place(made) is not None:
            self._check_recipe(cast("Any", made).recipe, cast("Any", made).arrays)
        return made

    def _check_recipe(self, recipe: bytes, arrays: Sequence[ArraySpec]) -> None:
        """Hold the arrays of all steps against the arrays of the chain."""
        sizes = {block.id: block.nbytes for block in self._blocks.values()}

        def check(array: ArraySpec) -> ArraySpec:
            if not 0 <= array.block < len(arrays):
                raise JournalError(
                    f"operation {self.entry.number}: a step uses array {array.block}, there is none"
                )
            base = arrays[array.block]
            placed = ArraySpec(
                base.block, base.offset + array.offset, array.dtype, array.shape, array.strides
            )
            check_inside(self.entry.number, placed, sizes[base.block])
            return placed

        for node in graph_recipe(recipe).nodes:
            described = node.spec.descriptor()
            placed = [map_arrays(value, check) for value in described.values(node.spec)]
            if (place := _recipe_place(node.spec)) is not None:
                inner = described.make(placed)
                self._check_recipe(placed[place], inner.arrays)

    def _host(self, plain: Any) -> HostArray:
        kind = plain[0]
        if kind == "result":
            made = np.zeros(plain[2], DType(plain[1]).dtype)
            self.results.append(made)
        elif kind == "read":
            made = np.empty(plain[2], DType(plain[1]).dtype)
            self.results.append(made)
        elif kind == "at":
            made = self._decoded.hosts[plain[1]]
        elif kind == "blank":
            made = _random(plain[2], DType(plain[1]))
        else:
            made = array_of(plain[1])
        self.keep.append(made)
        return made

    def plan(self, planner: Planner) -> Planned[Again]:
        """Make the launch for blocks of this device."""
        entry, blocks = self.entry, self._blocks
        self.results, self.keep = [], []
        for number, nbytes in entry.allocations:
            if type(nbytes) is not int or nbytes < 0:
                raise JournalError(f"operation {entry.number}: a block has {nbytes!r:.40} bytes")
            blocks[number] = planner.memory(nbytes)
        try:
            outputs = [blocks[number] for number in entry.outputs]
            uses = [(argument, blocks[number]) for argument, number in entry.uses]
        except KeyError as error:
            raise JournalError(
                f"operation {entry.number} uses block {error}, which nothing has made"
            ) from None
        spec = self.moved(entry.spec)
        staged: Any = tuple([self.moved(copy) for copy in entry.staged])
        behind: Any = [self.moved(copy) for copy in entry.behind]
        if not all(isinstance(copy, (CopyFromHostSpec, CopySpec)) for copy in (*staged, *behind)):
            raise JournalError(f"operation {entry.number}: what is staged must be copies")
        views = tuple([(copy.out, copy.source) for copy in behind])
        planner.take(outputs, uses, staged, views, self.keep)
        self.spec = spec
        return Planned(spec, self)


def check_inside(number: int, array: ArraySpec, nbytes: int) -> None:
    """Refuse an array that reaches beyond its block.

    Raises:
        JournalError: It does.
    """
    steps = list(zip(array.shape, array.strides, strict=True))
    if any(type(value) is not int or type(step) is not int or value < 0 for value, step in steps):
        raise JournalError(f"operation {number}: an array has the shape {array.shape!r:.60}")
    if 0 in array.shape:
        return
    low = array.offset + sum(min((extent - 1) * step, 0) for extent, step in steps)
    high = array.offset + sum(max((extent - 1) * step, 0) for extent, step in steps) + array.dtype.itemsize
    if low < 0 or high > nbytes:
        raise JournalError(
            f"operation {number}: an array reaches from byte {low} to {high} of a block of {nbytes}"
        )


def array_of(plain: Any) -> HostArray:
    """Make an array of what `encode_array` made of it.

    Raises:
        JournalError: It is none.
    """
    try:
        name, shape, content = plain
        return np.frombuffer(content, DType(name).dtype).reshape(shape).copy()
    except (TypeError, ValueError) as error:
        raise JournalError(f"a host array of the journal cannot be read: {error}") from error


def _random(shape: Sequence[int], dtype: DType) -> HostArray:
    made = np.random.default_rng(0).standard_normal(tuple(shape))
    with np.errstate(all="ignore"):
        return np.asarray(np.abs(made) if dtype.dtype.kind in "ub" else made).astype(dtype.dtype)


def plain_launch(launch: Launch, recipes: Recipes, host: HostEncoder, copied: HostEncoder) -> Entry:
    """Make plain values of a launch, but for its number.

    Args:
        launch: The launch.
        recipes: The recipes of the journal.
        host: Encodes host arrays of the specification.
        copied: Encodes those of copies ahead of it.
    """
    return (
        launch.name,
        launch.library,
        recipes.encode(launch.spec, host),
        tuple(launch.allocations),
        tuple([recipes.encode(copy, copied) for copy in launch.staged]),
        tuple([recipes.encode(copy, copied) for copy in launch.behind]),
        tuple([block.id for block in launch.outputs]),
        tuple([(argument, block.id) for argument, block in launch.uses]),
    )


def filled_by(spec: OperationSpec) -> list[HostArray]:
    """Return the host arrays that an operation fills: what it reads, and its status words."""
    fields = spec.descriptor().fields
    words = [getattr(spec, field.name) for field in fields if field.role.kind == "status"]
    host: Any = getattr(spec, "host", None)
    is_read = not isinstance(spec, CopyFromHostSpec) and isinstance(host, np.ndarray)
    return [*([host] if is_read else []), *[each for each in words if each is not None]]


def encoded(arrays: Iterable[HostArray]) -> tuple[Entry, ...]:
    """Make plain values of host arrays."""
    return tuple([encode_array(np.ascontiguousarray(array)) for array in arrays])
