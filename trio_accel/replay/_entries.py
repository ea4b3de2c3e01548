"""Launches as entries of a journal, and operations that ask them again.

An entry of a launch has the data that a worker would get. Ids of blocks belong to the recorded device: a
replay makes a new block for each allocation. A chain's recipe is written once, step by step as
specifications, and an entry has its number. The arrays in a stranger's journal are checked against their
blocks before anything is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from ..backends.base import DType, HostArray
from ..backends.base.contract.ops import (
    ArraySpec,
    ChainSpec,
    CopyFromHostSpec,
    CopySpec,
    CopyToHostSpec,
    GraphNode,
    GraphRecipe,
    OperationSpec,
    graph_recipe,
    map_arrays,
)
from ..backends.base.contract.program_definition import ProgramDefinition
from ..devices import Launch, Operation, Planned, Planner
from ..devices.wire._protocol import ENUM, TUPLE
from ..devices.wire._specs import HostEncoder, decode_array, decode_spec, encode_spec, resolve, result_of
from ._journal import Entry, JournalError

PROGRAMS = "trio_accel.programs:ProgramActor"
PACKAGE = "trio_accel"
# The errors of launches without any effect that a replay could compare.
NEVER_DONE = frozenset(
    {"ContextLostError", "ContextPoisonedError", "DeviceLostError", "InputFailedError", "Cancelled"}
    | {"NotExecutedError", "QueueFullError", "OutOfMemoryError", "LibraryOpenError", "ActorStoppedError"}
    # An operation that did not end in time does not end in a replay.
    | {"CompletionTimeoutError"}
)
# The maximum steps of a recipe, including nested recipes, because a few entries could name very many.
_MOST_STEPS = 100_000
_REPLAYED_PROGRAMS = 1_000_000
# The maximum bytes of the status words of an operation, and of all recipe steps, because an entry only has
# their size.
_MAX_WORDS_BYTES = 1 << 26
Blocks: TypeAlias = dict[int, Any]
"""Blocks of a replay by their ids in the journal."""


class Recipes:
    """The recipes of a journal being written.

    Args:
        append: Stores an entry.
        contents: Whether to store numbers of the program.
    """

    def __init__(self, append: Callable[[Entry], object], *, contents: bool) -> None:
        self._append, self._contents = append, contents
        self._numbers: dict[bytes, int] = {}

    def encode(self, spec: OperationSpec, host: HostEncoder) -> Entry:
        """Make plain values of a specification, with the number of its recipe in place of that."""
        plain = encode_spec(spec if self._contents else _blanked(spec), host, result_of)
        index = _RECIPE_PLACES[type(spec)]
        if index < 0:
            return plain
        return *plain[: index + 1], self._number(cast("bytes", plain[index + 1])), *plain[index + 2 :]

    def _number(self, recipe: bytes) -> int:
        number = self._numbers.get(recipe)
        if number is None:
            nodes = [
                (node.operation, node.library, self.encode(node.spec, result_of))
                for node in graph_recipe(recipe).nodes
            ]
            number = self._numbers[recipe] = len(self._numbers)
            self._append(("recipe", number, tuple(nodes)))
        return number


# Any, because strict types know only a part of a NumPy scalar's type.
_FRACTIONS: Any = (float, complex, np.inexact)


def _blanked(spec: OperationSpec) -> OperationSpec:
    """Return a specification without numbers of the program: sizes and names stay."""
    described, values = spec.descriptor(), list[Any]()
    for field, value in zip(described.fields, described.values(spec), strict=True):
        if field.role.is_packed:
            values.append(bytes(len(value)))
        elif isinstance(value, _FRACTIONS) or field.role.number is not None:
            values.append(type(value)(1))
        else:
            values.append(value)
    blank_spec: OperationSpec = described.make(values)
    return blank_spec


class _RecipePlaces(dict[type[OperationSpec], int]):
    """The position of the recipe among the fields of a specification; -1 without one."""

    def __missing__(self, cls: type[OperationSpec]) -> int:
        names = [field.name for field in cls.descriptor().fields]
        index = self[cls] = names.index("recipe") if "recipe" in names else -1
        return index


_RECIPE_PLACES: Mapping[type[OperationSpec], int] = _RecipePlaces()


class Decoded:
    """The recipes and large arrays of a journal being read.

    Attributes:
        recipes: Recipes by number.
        blobs: Contents of large arrays by number, in parts.
        programs: Whether code named by the journal may run.
        words_bytes: The total bytes of the steps' status words.
    """

    def __init__(self, *, programs: bool, words_bytes: int = 0) -> None:
        self.recipes: dict[int, bytes] = {}
        self.blobs: dict[int, list[bytes]] = {}
        self.programs, self.words_bytes = programs, words_bytes
        # The number of steps in each recipe, including its nested recipes.
        self._sizes: dict[int, int] = {}

    def add(self, number: int, nodes: Iterable[Entry]) -> None:
        """Read a recipe, which may use earlier ones."""
        size = 0
        graph_nodes: list[GraphNode] = []
        for operation, library, plain in nodes:
            spec = self.spec(plain, self._words_of_step)
            spec.descriptor().check(f"recipe {number}, {operation!r:.80}", spec)
            graph_nodes.append(GraphNode(str(operation), str(library), spec))
            index = _RECIPE_PLACES[type(spec)]
            size += 1 if index < 0 else 1 + self._sizes[plain[index + 1]]
        if size > _MOST_STEPS:
            raise JournalError(f"recipe {number} has {size} steps, at most {_MOST_STEPS} are allowed")
        self._sizes[number], self.recipes[number] = size, GraphRecipe(graph_nodes).encode()

    def _words_of_step(self, plain: Any) -> HostArray:
        if plain[0] != "result":
            raise JournalError("a step of a recipe has a host array")
        words = _words(plain, _MAX_WORDS_BYTES - self.words_bytes)
        self.words_bytes += words.nbytes
        return words

    def spec(self, plain: Entry, host: Callable[[Any], HostArray]) -> OperationSpec:
        """Make a specification of plain values.

        Raises:
            JournalError: It belongs to a module that this process has not imported, runs code, or is not a
                specification.
        """
        try:
            self.check_module(plain[0])
            self._check_enums((TUPLE, *plain[1:]))
            cls: Any = resolve(str(plain[0]), OperationSpec)
            self._check_code(cls)
            index = _RECIPE_PLACES[cls] + 1
            if index:
                plain = *plain[:index], self._recipe(plain[index]), *plain[index + 1 :]
            return decode_spec(plain, host)
        except JournalError:
            raise
        except Exception as error:
            raise JournalError(f"{plain!r:.80} in the journal cannot be read: {error!r:.200}") from error

    def _check_code(self, cls: Any) -> None:
        if cls.runs_code and not self.programs:
            raise JournalError(
                f"the journal has a {cls.__name__}, which runs code that the journal names; give "
                "programs=True if you trust it"
            )

    def _recipe(self, number: Any) -> bytes:
        recipe = self.recipes.get(number)
        if recipe is None:
            raise JournalError(
                f"recipe {number!r:.20} is used before it is made, as by one that names itself"
            )
        return recipe

    def _check_enums(self, plain: Any) -> None:
        if plain[0] == ENUM:
            self.check_module(plain[1])
        elif plain[0] == TUPLE:
            for value in plain[1:]:
                if type(value) is tuple and value:
                    self._check_enums(value)

    def check_module(self, path: str) -> None:
        """Refuse a module that would be imported only because the journal names it.

        Raises:
            JournalError: The module would be imported.
        """
        module = path.partition(":")[0]
        if module in sys.modules or self.programs:
            return
        if module.partition(".")[0] != PACKAGE or "__main__" in module:
            raise JournalError(
                f"the journal uses the module {module!r:.80}, which this program has not imported; import "
                "it, or give programs=True if you trust the journal"
            )

    def check_library(self, library: str, label: str) -> None:
        """Refuse a library that runs code of the journal.

        Reading the definition of a program runs code already, so only a stream's name may follow the path.

        Raises:
            JournalError: It would.
        """
        path, _, text = library.partition("?")
        self.check_module(path)
        if not self.programs and text and (path == PROGRAMS or not text.isidentifier()):
            raise JournalError(
                f"{label} is of a program, which runs code that the journal names; give programs=True if you "
                "trust it"
            )

    def array(self, plain: Any) -> HostArray:
        """Make an array of plain values.

        Raises:
            JournalError: It is none.
        """
        try:
            name, shape, content = plain
            if type(content) is int:
                content = b"".join(self.blobs[content])
            return decode_array((name, shape, content))
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"a host array of the journal cannot be read: {error}") from error


@attrs.define(eq=False)
class LaunchEntry:
    """An entry of a launch.

    Attributes:
        decoded: The recipes and large arrays of its recording.
        number: The number of the operation.
        name: The name of the operation.
        library: The import path of its library actor.
        spec: The specification, as plain values.
        allocations: Ids and bytes of the blocks that are allocated first.
        staged: Copies of operands, as plain values.
        view_copies: Copies of results to views.
        outputs: Ids of the written blocks.
        uses: Existing arguments, and the ids of their blocks.
        results: The host arrays that it has filled; None if the journal lacks them.
        failure: Class and text of its error; None if it has not failed.
        contents: Contents of blocks before it, by their ids; None for an unreadable block.
    """

    decoded: Decoded
    number: int
    name: str
    library: str
    spec: Entry
    allocations: tuple[tuple[int, int], ...]
    staged: tuple[Entry, ...]
    view_copies: tuple[Entry, ...]
    outputs: tuple[int, ...]
    uses: tuple[tuple[str, int], ...]
    results: tuple[Entry, ...] | None = None
    failure: tuple[str, str] | None = None
    contents: dict[int, tuple[int, Entry | None]] = attrs.field(factory=dict[Any, Any])

    @property
    def is_of_program(self) -> bool:
        """Whether a program of the user's own ran it."""
        return self.library.partition("?")[0] == PROGRAMS

    @property
    def label(self) -> str:
        """Its place in texts of errors."""
        return f"operation {self.number}"

    @property
    def blocks(self) -> set[int]:
        """Ids of all its blocks."""
        used = [block for _, block in self.uses]
        return {*[block for block, _ in self.allocations], *self.outputs, *used, *self.contents}


def _words(plain: Any, max_bytes: int) -> HostArray:
    """Make zeroed status words, as in a worker.

    Raises:
        JournalError: There are too many.
    """
    dtype: np.dtype[Any] = DType(plain[1]).dtype
    shape: tuple[int, ...] = plain[2]
    words = np.zeros(shape, dtype)
    if words.nbytes > max_bytes:
        raise JournalError(
            f"status words of the shape {shape!r:.60} take {words.nbytes} bytes, more than {max_bytes}"
        )
    return words


class Again(Operation[Any, "Again"]):
    """A launch of a journal, asked again.

    Attributes:
        entry: The launch.
        results: Host arrays that it fills.
        spec: Its specification for this device, once it is planned.
    """

    library = ""
    not_recorded = "a replay is not recorded by a graph"

    def __init__(self, entry: LaunchEntry, blocks: Blocks) -> None:
        self.entry, self._decoded, self._blocks = entry, entry.decoded, blocks
        self.results: list[HostArray] = []
        self.spec: OperationSpec | None = None
        vars(self)["library"] = self._library()
        self._keep: list[HostArray] = []
        self._blank: list[HostArray] = []

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.entry.name

    def _library(self) -> str:
        """The library, with the blocks of this device in the definition of a program."""
        path, _, text = self.entry.library.partition("?")
        if path != PROGRAMS:
            return self.entry.library
        definition = ProgramDefinition.decode(text)
        arrays = tuple([self._placed(array) for array in definition.arrays])
        # The number differs from the numbers of open programs on this device.
        number = definition.number + _REPLAYED_PROGRAMS
        return f"{path}?{attrs.evolve(definition, number=number, arrays=arrays).encode()}"

    def check(self) -> None:
        """Refuse a launch that must not run, if everything that it uses exists.

        Raises:
            JournalError: It must not be.
        """
        for plain in (self.entry.spec, *self.entry.staged, *self.entry.view_copies):
            self.moved(plain)

    def _placed(self, array: ArraySpec) -> ArraySpec:
        block = self._block(array.block)
        array_spec = ArraySpec(block.id, array.offset, array.dtype, array.shape, array.strides)
        check_inside(self.entry.label, array_spec, block.nbytes)
        return array_spec

    def _block(self, number: int) -> Any:
        block = self._blocks.get(number)
        if block is None:
            raise JournalError(f"{self.entry.label} uses block {number!r:.40}, which nothing has made")
        return block

    def moved(self, plain: Entry) -> Any:
        """Make a specification for blocks of this device.

        Raises:
            JournalError: It cannot be made, or an array exceeds its block.
        """
        spec = self._decoded.spec(plain, self._host)
        moved_spec: Any = _mapped(spec, self._placed)
        moved_spec.descriptor().check(self.entry.name, moved_spec)
        if _RECIPE_PLACES[type(moved_spec)] >= 0:
            sizes = [self._block(base.block).nbytes for base in spec_arrays(spec)]
            if isinstance(moved_spec, ChainSpec):
                self._check_ends(moved_spec, sizes)
            self._check_recipe(moved_spec.recipe, spec_arrays(moved_spec), sizes)
        return moved_spec

    def _check_ends(self, chain: ChainSpec, sizes: Sequence[int]) -> None:
        """Check the positions of a chain's host arrays and of its result."""
        label = self.entry.label
        if chain.host_data:
            given_spec = attrs.evolve(
                chain.written[-1], dtype=DType.uint8, shape=(len(chain.host_data),), strides=(1,)
            )
            check_inside(label, given_spec, sizes[-1])
        if chain.result:
            position, _, nbytes = chain.result
            if not 0 <= position < len(sizes) or chain.words is None or nbytes > chain.words.nbytes:
                raise JournalError(f"{label}: the position of the result of a chain is missing")
            check_inside(label, chain.result_at(), sizes[position])

    def _check_recipe(self, recipe: bytes, arrays: Sequence[ArraySpec], sizes: Sequence[int]) -> None:
        """Compare the arrays of all steps with the blocks of the chain's arrays."""
        label = self.entry.label

        def placed(array: ArraySpec) -> ArraySpec:
            if not 0 <= array.block < len(arrays):
                raise JournalError(f"{label}: a step uses array {array.block}, there is none")
            base = arrays[array.block]
            array_spec = ArraySpec(
                base.block, base.offset + array.offset, array.dtype, array.shape, array.strides
            )
            check_inside(label, array_spec, sizes[array.block])
            return array_spec

        for node in graph_recipe(recipe).nodes:
            described = node.spec.descriptor()
            inner: Any = described.make([map_arrays(value, placed) for value in described.values(node.spec)])
            if _RECIPE_PLACES[type(inner)] >= 0:
                nested = [sizes[array.block] for array in spec_arrays(node.spec)]
                self._check_recipe(inner.recipe, spec_arrays(inner), nested)

    def _host(self, plain: Any) -> HostArray:
        kind = plain[0]
        if kind == "value":
            array = self._decoded.array(plain[1])
        elif kind == "blank":
            # The memory is untouched until its shape is compared with the shape of an array.
            array = np.zeros(plain[1][1], DType(plain[1][0]).dtype)
            self._blank.append(array)
        else:
            is_words = kind == "result"
            array = _words(plain, _MAX_WORDS_BYTES) if is_words else np.empty(plain[2], DType(plain[1]).dtype)
            self.results.append(array)
        self._keep.append(array)
        return array

    def _zeros(self, number: int) -> CopyFromHostSpec:
        block = self._block(number)
        zeros = np.zeros(block.nbytes, np.uint8)
        self._keep.append(zeros)
        return CopyFromHostSpec(zeros, ArraySpec(block.id, 0, DType.uint8, zeros.shape, (1,)))

    def plan(self, planner: Planner) -> Planned[Again]:
        """Make the launch for blocks of this device."""
        entry, blocks = self.entry, self._blocks
        self.results, self._keep, self._blank = [], [], []
        for number, nbytes in entry.allocations:
            blocks[number] = planner.memory(nbytes)
        outputs = [self._block(number) for number in entry.outputs]
        uses = [(argument, self._block(number)) for argument, number in entry.uses]
        self.spec = spec = self.moved(entry.spec)
        staged: Any = tuple([self.moved(copy) for copy in entry.staged])
        view_copies: Any = [self.moved(copy) for copy in entry.view_copies]
        if not all(isinstance(copy, (CopyFromHostSpec, CopySpec)) for copy in (*staged, *view_copies)):
            raise JournalError(f"{entry.label}: staged operations must be copies")
        for host in self._blank:
            _fill(host)
        views = tuple([(copy.out, copy.source) for copy in view_copies])
        if entry.is_of_program:
            # At the end of a stream, and if it retains its result, a program does not write its array.
            staged = (*[self._zeros(number) for number, nbytes in entry.allocations if nbytes], *staged)
        planner.take(outputs, uses, staged, views, self._keep)
        return Planned(spec, self)


def _mapped(spec: OperationSpec, function: Callable[[ArraySpec], ArraySpec]) -> Any:
    described = spec.descriptor()
    return described.make([map_arrays(value, function) for value in described.values(spec)])


def spec_arrays(spec: Any) -> Sequence[ArraySpec]:
    """Return the arrays of a specification in the order in which its recipe numbers them."""
    arrays: Sequence[ArraySpec] = spec.arrays
    return arrays


def check_inside(label: str, array: ArraySpec, nbytes: int) -> None:
    """Refuse an array that exceeds its block.

    Raises:
        JournalError: The array exceeds it.
    """
    steps = list(zip(array.shape, array.strides, strict=True))
    if any(type(value) is not int or type(step) is not int or value < 0 for value, step in steps):
        raise JournalError(f"{label}: an array has the shape {array.shape!r:.60}")
    if 0 in array.shape:
        return
    low = array.offset + sum(min((extent - 1) * step, 0) for extent, step in steps)
    high = array.offset + sum(max((extent - 1) * step, 0) for extent, step in steps) + array.dtype.itemsize
    if low < 0 or high > nbytes:
        raise JournalError(f"{label}: an array reaches from byte {low} to {high} of a block of {nbytes}")


def _fill(host: HostArray) -> None:
    numbers = np.random.default_rng(0).standard_normal(host.shape)
    with np.errstate(all="ignore"):
        host[...] = np.abs(numbers) if host.dtype.kind in "ub" else numbers


_NAMES = {member.dtype: member.value for member in DType}


def plain_array(array: HostArray, content: bytes | int) -> Entry:
    """Make plain values of a host array: dtype, shape, and its bytes or the number of its parts."""
    return _NAMES[array.dtype], array.shape, content


def _read(array: HostArray) -> Entry:
    return "read", _NAMES[array.dtype], array.shape


def plain_launch(launch: Launch, recipes: Recipes, host: HostEncoder) -> Entry:
    """Make plain values of a launch, without its number.

    Args:
        launch: The launch.
        recipes: The recipes of the journal.
        host: Encodes host arrays that it reads.
    """
    encode, spec, outputs, uses = recipes.encode, launch.spec, list[int](), list[tuple[str, int]]()
    # No comprehensions, which would be calls for each operation.
    for block in launch.outputs:
        outputs.append(block.id)
    for argument, block in launch.uses:
        uses.append((argument, block.id))
    return (
        launch.name,
        launch.library,
        encode(spec, _read if type(spec) is CopyToHostSpec else host),
        launch.allocations,
        tuple([encode(copy, host) for copy in launch.staged]) if launch.staged else (),
        tuple([encode(copy, host) for copy in launch.result_copies]) if launch.result_copies else (),
        tuple(outputs),
        tuple(uses),
    )


def status_words(spec: OperationSpec) -> list[HostArray]:
    """Return the status words of a specification."""
    described, words = spec.described, list[HostArray]()
    for index in described.status:
        if (word := getattr(spec, described.fields[index].name)) is not None:
            words.append(word)
    return words
