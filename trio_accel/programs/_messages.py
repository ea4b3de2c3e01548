"""The operations of programs, and the actor that serves them."""

from __future__ import annotations

import inspect
import math
import operator
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import attrs
import numpy as np

from ..actors import ActorContext
from ..backends.base import DType, Ints, Strs
from ..backends.base.contract.ops import (
    RESULT_WORDS,
    ArraySpec,
    ProgramCall,
    ProgramFetch,
    ProgramNext,
    ProgramResult,
    ProgramReturn,
)
from ..backends.base.contract.program_definition import (
    MOST_PACKED,
    MOST_TEXT,
    ProgramDefinition,
    Tree,
    build,
    flatten,
    packed_of,
    text_of,
    tree_of,
)
from ..backends.base.kit.ranks import MEETING
from ..devices import AccelRef, LibraryActor, Operation, OwnSupervision, Planned, Planner
from ._method import SEVERAL, ProgramMethod
from ._opened import Opened, StateArray
from ._progress import chosen_progress

PATH = "trio_accel.programs:ProgramActor"
"""Its import path; a program's definition is the argument."""


class ProgramActor(LibraryActor):
    """Serves the calls of one program, on a stream of its own.

    A new incarnation has a new instance of the program's class. If calls fail more often than the program's
    intensity allows, only this actor ends.
    """

    library = "program"
    hands_ahead = True

    @classmethod
    def supervision(cls, argument: str) -> OwnSupervision:
        """Return the supervision options from the program's definition."""
        definition = ProgramDefinition.decode(argument)
        return OwnSupervision(
            name=definition.name, intensity=definition.intensity, backoff=definition.backoff
        )

    @classmethod
    def blocks_of(cls, argument: str) -> Ints:
        """Return the blocks of the arrays that its constructor gets."""
        return tuple(dict.fromkeys(array.block for array in ProgramDefinition.decode(argument).arrays))

    @classmethod
    def modules_of(cls, argument: str) -> Strs:
        """Return the module of its class or function."""
        return (ProgramDefinition.decode(argument).target.partition(":")[0],)

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold an instance; after a crash the next one is made when the last call of this one is over."""
        async with super().lifespan(context):
            try:
                yield
            except Exception:
                await self._engine.synchronize(context.path)  # noqa: ASYNC120  # who cancels it needs no error
                raise


MessageT = TypeVar("MessageT", bound="_ProgramMessage")

_Arrays: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"
"""Dtypes and shapes."""
_Specs: TypeAlias = "tuple[ArraySpec, ...]"

# Memory for expected arrays is allocated before it is known to be needed.
_MOST_EXPECTED = 64 << 20
_MOST_KEYS = 256


@attrs.frozen
class CallResult:
    """The report of a call about its result.

    Attributes:
        tree: The tree of the result.
        arrays: Dtypes and shapes of its retained arrays; None if they are as expected.
    """

    tree: Tree
    arrays: list[tuple[str, list[int]]] | None

    @classmethod
    def read(cls, text: bytes) -> CallResult:
        """Read the report from a program's host."""
        return cls(*tree_of(text.decode(errors="surrogatepass")))


@attrs.frozen
class Returned:
    """The result of an undeclared call.

    Attributes:
        result: The report, or the length of its text if that did not fit into the words. 0 at the end of a
            method that yields.
        expected: The arrays made in advance for the result.
        keys: The keys under which such calls are expected.
    """

    result: CallResult | int
    expected: Sequence[AccelRef]
    keys: tuple[object, ...]


class Expectations:
    """Predicts the arrays of undeclared results from earlier calls.

    If a call returns arrays with the same dtypes and shapes twice in a row, they are expected again. So they
    are made in advance for the next call, which is a single operation. A function with a different result
    shape each time never reaches that state.
    """

    def __init__(self) -> None:
        # The arrays of each key, and whether they appeared twice in a row; in order of the last note.
        self._known: dict[object, tuple[_Arrays, bool]] = {}

    def expected(self, keys: Iterable[object]) -> _Arrays:
        """Return the dtypes and shapes of the arrays that a call will return; empty if unknown."""
        for key in keys:
            arrays, is_steady = self._known.get(key, ((), False))
            if is_steady:
                return arrays
        return ()

    def note(self, keys: Iterable[object], arrays: _Arrays) -> None:
        """Record the arrays that a call has returned."""
        entries = self._known
        for key in keys:
            previous, _ = entries.pop(key, (None, False))
            entries[key] = arrays, arrays == previous and _nbytes(arrays) <= _MOST_EXPECTED
        while len(entries) > _MOST_KEYS:
            del entries[next(iter(entries))]


def _nbytes(arrays: _Arrays) -> int:
    return sum(math.prod(shape) * DType(dtype).itemsize for dtype, shape in arrays)


@attrs.define(eq=False, slots=False)
class _ProgramMessage(Operation[ProgramActor, Any]):
    """Base of the messages: each program is a library of its own."""

    path: str
    library: ClassVar[str] = PATH
    not_recorded: ClassVar[str] = "it runs code of a program; ask the program before or after a replay"

    def __attrs_post_init__(self) -> None:
        vars(self)["library"] = self.path


@cache
def message_class(base: type[MessageT], full_name: str) -> type[MessageT]:
    """Return the class of a method's messages, which is its name in statistics and faults."""
    module, _, name = full_name.partition(".")
    cls: Any = type(name, (base,), {"__module__": module, "__doc__": f"A call of {full_name}."})
    return cast("type[MessageT]", cls)


@attrs.define(eq=False, slots=False)
class Ready(_ProgramMessage):
    """A message without a call: it checks that the program exists and its arrays are complete."""

    state: Sequence[StateArray]

    def plan(self, planner: Planner) -> Planned[Any]:
        """Check the arrays."""
        state = tuple([planner.read(array.position, array.ref) for array in self.state])
        return Planned(ProgramCall("", "", b"", "", False, state, (), (), ()))


@attrs.define(eq=False, slots=False)
class MethodCall(_ProgramMessage):
    """A call of a method; replies with its result, or with a `Returned` if that is undeclared.

    Attributes:
        method: The method.
        bound: Its arguments, without `out`.
        opened: The program.
        state: The constructor's arrays that it changes, and one array of each other block of `Opened.state`.
        out: The caller's arrays for declared outputs.
        slot: The slot that retains the result; None if it is declared.
        forget: Slots of results that are no longer wanted.
        expectations: The arrays expected of undeclared results.
        item: The numbers of the stream and of the requested item, for a method that yields.
    """

    method: ProgramMethod
    bound: inspect.BoundArguments
    opened: Opened
    state: Sequence[StateArray]
    out: object = None
    slot: int | None = None
    forget: Ints = ()
    expectations: Expectations = attrs.field(factory=Expectations)
    item: tuple[int, int] | None = None

    def plan(self, planner: Planner) -> Planned[Any]:
        """Check the arguments, and name the outputs if they are declared."""
        method = self.method
        inputs: list[ArraySpec] = []
        updated: list[ArraySpec] = []
        state: list[ArraySpec] = []
        arguments = self._arguments(planner, inputs, updated)
        for array in self.state:
            if array.ref.block.damaged_by is not None:
                self._check_others(planner, array)
            if array.parameter in method.state:
                updated.append(planner.update(array.position, array.ref))
            else:
                state.append(planner.read(array.position, array.ref))
        for array in self.opened.frozen:
            # Frozen arrays need no order, because they are never written to (D113).
            if not array.ref.block.is_usable:
                array.ref.block.check(f"{planner.name}: {array.position}", array.ref.spec)
        planner.keep(self.opened.frozen)
        arrays = tuple(state), tuple(inputs), tuple(updated)
        if method.out is None:
            return self._plan_unknown(planner, arguments, *arrays)
        refs: list[AccelRef] = []
        tree = _outputs(planner, "out", _declared(planner.name, method, self.bound), self.out, refs)
        outputs = tuple([output.spec for output in refs])
        if self.out is not None:
            for output in outputs:
                planner.distinct(
                    "out", output, **{f"input {number}": spec for number, spec in enumerate(inputs)}
                )
        spec = ProgramCall(method.name, *arguments, text_of(tree), method.idempotent, *arrays, outputs)
        if (progress := chosen_progress()) is not None:
            progress.follow(spec.asker)
        return Planned(spec, build(tree, refs), is_checked=True)

    def _check_others(self, planner: Planner, array: StateArray) -> None:
        """Refuse a call if another array of a block is damaged, because `state` has one of each block."""
        for state_array in self.opened.state:
            if state_array.ref.block is array.ref.block and state_array.parameter not in self.method.state:
                state_array.ref.block.check(f"{planner.name}: {state_array.position}", state_array.ref.spec)

    def _plan_unknown(
        self, planner: Planner, arguments: tuple[str, bytes], state: _Specs, inputs: _Specs, updated: _Specs
    ) -> Planned[Any]:
        """Name the arrays expected of an undeclared result."""
        name = self.method.name
        call_key = name, *[(array.dtype, array.shape) for array in (*inputs, *updated)]
        # First the same call including its values, then its arrays only.
        keys = ((hash(arguments), call_key), call_key) if self.item is None else (call_key,)
        refs = [planner.output(shape, DType(dtype)) for dtype, shape in self.expectations.expected(keys)]
        written = tuple([output.spec for output in refs])
        words = planner.status(RESULT_WORDS)
        slot = cast("int", self.slot)
        if self.item is not None and self.item[1]:
            arguments = "", b""  # the generator already got them
        make: Callable[..., ProgramReturn] = ProgramReturn
        if self.item is not None:
            make = partial(ProgramNext, stream=self.item[0], item=self.item[1])
        repeats = self.method.idempotent
        spec = make(name, *arguments, "", repeats, state, inputs, updated, written, slot, self.forget, words)
        if (progress := chosen_progress()) is not None:
            progress.follow(spec.asker)
        return Planned(spec, finish=lambda: Returned(_read(words), refs, keys), is_checked=True)

    def _arguments(
        self, planner: Planner, inputs: list[ArraySpec], updated: list[ArraySpec]
    ) -> tuple[str, bytes]:
        """Return the text of the arguments, and their packed part; their arrays go to the lists."""
        prefix, updates = f"{planner.name}: ", self.method.updates
        trees: dict[str, Tree] = {}
        values: list[object] = []
        # Updated arrays are numbered after the others.
        for name in sorted(self.bound.arguments, key=lambda name: name in updates):
            is_several = self.bound.signature.parameters[name].kind in SEVERAL
            value, depth = self.bound.arguments[name], -1 if is_several else 0
            number = len(inputs) + len(updated)
            trees[name], arrays = arrays_in(f"{prefix}{name}", value, number, values, depth=depth)
            for position, array in arrays:
                argument = position.removeprefix(prefix)
                if name in updates:
                    updated.append(planner.update(argument, array))
                else:
                    inputs.append(planner.read(argument, array))
        tree = call_tree(self.bound.signature, trees)
        if (meeting := MEETING.get()) is not None:
            tree.append(flatten("meeting", meeting, lambda _position, _value: None))
        text = text_of(tree)
        if len(text) > MOST_TEXT:
            raise ValueError(
                f"{prefix}its arguments are {len(text)} characters as text, at most {MOST_TEXT} are allowed; "
                "hand large values over as arrays"
            )
        packed = packed_of(values)
        if len(packed) > MOST_PACKED:
            raise ValueError(
                f"{prefix}the lists among its arguments take {len(packed)} bytes, at most {MOST_PACKED} are "
                "allowed; hand large values over as arrays"
            )
        return text, packed


@attrs.define(eq=False, slots=False)
class TellResult(_ProgramMessage):
    """The `CallResult` of a call, if it was too long for the reply."""

    slot: int
    nbytes: int

    def plan(self, planner: Planner) -> Planned[Any]:
        """Name the words."""
        words = planner.status(-(-self.nbytes // 4))
        text = words.view(np.uint8)[: self.nbytes]
        return Planned(ProgramResult(self.slot, words), finish=lambda: CallResult.read(text.tobytes()))


@attrs.define(eq=False, slots=False)
class Fetch(_ProgramMessage):
    """The arrays of a result; replies with a list."""

    slot: int
    arrays: Sequence[tuple[str, list[int]]]

    def plan(self, planner: Planner) -> Planned[Any]:
        """Name them."""
        outputs = [planner.output(tuple(shape), DType(dtype)) for dtype, shape in self.arrays]
        return Planned(ProgramFetch(self.slot, tuple([output.spec for output in outputs])), outputs)


def _read(words: Any) -> CallResult | int:
    """Read the report of a call; the length of the text if it did not fit, and 0 at the end of a stream."""
    length, text = int(words[0]), words[1:].view(np.uint8)
    return CallResult.read(text[:length].tobytes()) if 0 < length <= text.size else length


def call_tree(signature: inspect.Signature, trees: dict[str, Tree]) -> list[Tree]:
    """Return the tree of a call: a tuple and a dict."""
    bound = inspect.BoundArguments(signature, OrderedDict(trees))
    for name, tree in trees.items():
        kind = signature.parameters[name].kind
        if kind in SEVERAL:
            several = tree[1:]
            bound.arguments[name] = dict(several) if kind is inspect.Parameter.VAR_KEYWORD else several
    return ["t", ["t", *bound.args], ["d", *map(list, bound.kwargs.items())]]


def arrays_in(
    label: str, value: object, first: int = 0, packed: list[object] | None = None, *, depth: int = 0
) -> tuple[Tree, list[tuple[str, Any]]]:
    """Return the tree of a value, and the arrays in it with their places; `first` is the first number."""
    arrays: list[tuple[str, Any]] = []

    def leaf(position: str, item: object) -> int | None:
        if not isinstance(item, (AccelRef, np.ndarray)):
            return None
        arrays.append((position, cast("object", item)))
        return first + len(arrays) - 1

    return flatten(label, value, leaf, packed, depth=depth), arrays


def _declared(name: str, method: ProgramMethod, bound: inspect.BoundArguments) -> object:
    assert method.out is not None
    try:
        return method.out(*bound.args, **bound.kwargs)
    except Exception as error:
        error.add_note(f"in the rule of the outputs of {name}")
        raise


def _outputs(planner: Planner, position: str, declared: object, out: object, refs: list[AccelRef]) -> Tree:
    """Make the tree of declared outputs.

    Args:
        planner: The planner of the call.
        position: The position in the result.
        declared: The result of the rule.
        out: The caller's arrays, or None.
        refs: Collects the arrays.
    """
    if declared is None:
        return None
    pair = _pair(planner.name, declared)
    if pair is not None:
        refs.append(planner.output(*pair, cast("AccelRef | None", out), argument=position))
        return ["a", len(refs) - 1]
    if not isinstance(declared, (dict, list, tuple)):
        raise TypeError(
            f"{planner.name}: the rule of its outputs must return (shape, dtype), None, or a dict, list or "
            f"tuple of these, got {declared!r}"
        )
    items, theirs = _items(cast("_Collection", declared)), dict[object, object]()
    if out is None:
        theirs = dict.fromkeys(items)
    elif isinstance(out, dict if isinstance(declared, dict) else (list, tuple)):
        theirs = _items(cast("_Collection", out))
    if theirs.keys() != items.keys():
        raise TypeError(f"{planner.name}: {position} must be nested like the declared outputs")
    trees = {
        key: _outputs(planner, f"{position}[{key!r}]", item, theirs[key], refs) for key, item in items.items()
    }
    if isinstance(declared, dict):
        return ["d", *map(list, trees.items())]
    return ["l" if isinstance(declared, list) else "t", *trees.values()]


_Collection: TypeAlias = "dict[object, object] | Sequence[object]"


def _items(values: _Collection) -> dict[object, object]:
    """Return the items of a collection, by keys or by indices."""
    return values if isinstance(values, dict) else dict(enumerate(values))


def _pair(name: str, declared: object) -> tuple[Ints, DType] | None:
    """Shape and dtype of one declared output; None if it is a collection."""
    if not isinstance(declared, tuple) or len(cast("tuple[object, ...]", declared)) != 2:
        return None
    shape, dtype = cast("tuple[Any, Any]", declared)
    if dtype is None or isinstance(dtype, (dict, list, tuple)):
        return None
    is_several = isinstance(cast("object", shape), (list, tuple))
    extents = cast("Sequence[Any]", shape if is_several else (shape,))
    try:
        sizes = tuple([operator.index(extent) for extent in extents])
    except TypeError:
        text = f"{name}: an output must be declared as (shape, dtype), got {declared!r}"
        raise TypeError(text) from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"{name}: the shape of an output has a negative size: {sizes}")
    try:
        return sizes, dtype if isinstance(dtype, DType) else DType.of(dtype)
    except TypeError as error:
        raise TypeError(f"{name}: an output is declared as {declared!r}: {error}") from None
