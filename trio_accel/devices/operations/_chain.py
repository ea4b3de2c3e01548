"""Chains: a call and all its operands in execution order, with the key of their structure."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from struct import pack
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np
import trio

from ...backends.base import ArraySpec, DType, HostArray
from ..base._refusals import OnDevice
from ._pending import Pending

__all__ = ["ArrayFunction", "Chain", "arguments_of"]

Layouts: TypeAlias = "ArraySpec | Sequence[Layouts]"
"""The layout of an array, or of several."""

SliceT = TypeVar("SliceT")
Slices: TypeAlias = Generator[None, None, SliceT]
"""Work with a result that yields now and then, so that its caller may let other tasks run."""

# A chain is planned in one turn of the loop. A program that builds a longer one forgot to await.
_MAX_CALLS = 4096
_TOO_LONG = f"a chain has at most {_MAX_CALLS} calls: await one in between"
# Values of these types are compared as they are in the key of a chain. Values of other types do not have a
# key, and such a chain runs step by step.
_INTEGERS = frozenset({int})
_PLAIN = frozenset({type(None), bool, int, str, bytes, type(...), object})
_SEVERAL = frozenset({list, tuple})
# Brackets around the members of a sequence, and before names, by which a key distinguishes lists from tuples.
_OPENED: dict[type[Any], object] = {list: object(), tuple: object()}
_CLOSED = object()

# Functions that take a number as a 0-d array of the other operand's dtype, with bit-identical results.
_OF_NUMBERS = frozenset({"arrays.add", "arrays.divide", "arrays.multiply", "arrays.subtract"})


def _is_one_operation(function: ArrayFunction) -> bool:
    return function.how != "awaitable" and function.ask is None


@attrs.frozen(eq=False)
class ArrayFunction:
    """A function of arrays, as its calls use it.

    Attributes:
        name: Its name, such as ``"linalg.matmul"``.
        make: Called with the arguments, after all calls among them have run.
        how: The kind of the value that `make` returns: a message for a device, an awaitable, or the result.
        ask: Sends a message; None for the device of the arguments.
        refuse: Replaces the error of a call by the function's own, if any.
        is_direct: Whether a single call runs directly. A function with several operations, or with a long
            plan, is a chain of one step, so that the plan is cached.
        expand: Returns the calls that compute it, given its arguments; None if `make` computes it. It runs
            when a chain is recorded, and not for later chains with the same key.
        slices: Does the same as `expand`, and yields now and then, because it may take seconds; None for a
            short one.
        is_fixed: Whether `expand` may be used for look-ahead and recording, because its calls depend on
            nothing but its arguments.
        takes_hosts: Whether it copies host arrays to the device, so that no other function sees their
            elements.
        result_on_host: Describes the result, such as "item gives a number of the host", if it is not on a
            device; empty if it is, or if the function determines it.
        rule: Composes the gradients of a call from the call and its gradient; None without a rule of the
            program's own.
        number: Identifies it in keys, because a table of plans must not keep functions of the program.
        memo: The results of caches of this function, which end with it.
    """

    name: str
    make: Callable[..., Any]
    how: Literal["message", "awaitable", "value"] = "message"
    ask: Callable[[Any], Awaitable[Any]] | None = None
    refuse: Callable[[Exception, tuple[Any, ...], Mapping[str, Any]], object] | None = None
    is_direct: bool = attrs.field(default=attrs.Factory(_is_one_operation, takes_self=True))
    expand: Callable[..., Any] | None = attrs.field(default=None, kw_only=True)
    slices: Callable[..., Slices[Any]] | None = attrs.field(default=None, kw_only=True)
    is_fixed: bool = attrs.field(default=True, kw_only=True)
    takes_hosts: bool = attrs.field(default=False, kw_only=True)
    result_on_host: str = attrs.field(default="", kw_only=True)
    rule: Callable[[Any, Any], Any] | None = attrs.field(default=None, kw_only=True)
    number: int = attrs.field(factory=itertools.count().__next__, init=False, repr=False)
    memo: dict[Any, Any] = attrs.field(factory=dict[Any, Any], init=False, repr=False)


class Asked(Protocol):
    """The device that runs calls."""

    @property
    def ask(self) -> Callable[[Any], Awaitable[Any]]:
        """See `Device.ask`."""
        ...

    def submit(self, operation: Any, /) -> Pending[Any]:
        """See `Device.submit`."""
        ...

    def ask_chain(self, chain: Chain, /) -> Awaitable[Any]:
        """Run the calls of a chain as one request."""
        ...

    def look_ahead(self, step: ChainStep, /) -> Layouts:
        """Return the layout of a call's result, without a launch."""
        ...


NO_DEVICE = "no operand is on a device"
"""A part of the error of operands that are all on the host."""

METHODS: dict[str, ArrayFunction] = {}
"""The functions of operators and methods, by name; the layers above add them."""

DEVICE_OF: list[Callable[..., Any]] = []
"""Returns the device of operands. A list, because the module of devices is in a layer above."""


READS_HOSTS: list[Callable[[Any], bool]] = []
"""Returns whether an expansion may read the elements of a call's host arrays; `gradients` adds it."""


class ChainStep:
    """A call, as a chain uses it.

    Attributes:
        function: The function.
        args: The positional arguments.
        named: The keyword arguments, or None.
        layouts: The layout of its result, or of several results, if known.
        planned_by: The device that found the layout; not set before.
        spent: The class of used calls.
        fresh: The class of unused calls.
    """

    __slots__ = ("args", "function", "layouts", "named", "planned_by")
    function: ArrayFunction
    args: tuple[Any, ...]
    named: Mapping[str, Any] | None
    layouts: Layouts | None
    planned_by: Asked
    spent: ClassVar[type[ChainStep]]
    fresh: ClassVar[type[ChainStep]]


async def _gathered(*results: Any) -> tuple[Any, ...]:
    await trio.lowlevel.checkpoint()
    return results


GATHER = ArrayFunction("gather", _gathered, "awaitable")
"""Returns the results of several calls; see `gather`."""


class Chain:
    """A call and all its operands, in an order in which they can run.

    Args:
        call: The last call.
        is_spent: Whether this uses the calls, which is possible once.
        ends: The `id` of each call that is an operand of the chain, but not one of its steps.

    Attributes:
        steps: The calls, each after its operands.
        key: Identifies the structure: functions, arguments, layouts of arrays, and which arrays are the same.
            None if an argument cannot be compared.
        refs: The device arrays among the arguments, in the order of the key.
        hosts: The host arrays, each once.
        new_hosts: The host arrays that its expansion has made, if they follow from the key.
        numbers: Numbers that are passed like host arrays, each with the index of its step. All other numbers
            are in the key.
        has_expansions: Whether steps must be expanded before the chain can run.
        is_fixed: Whether all chains with the key expand to the same structure: no step has an expansion rule
            of the program, or a host array with elements that a rule may read.

    Raises:
        RuntimeError: A call was already used, and blocking code has not retained its result.
        ValueError: The chain has too many calls.
    """

    __slots__ = ("has_expansions", "hosts", "is_fixed", "key", "new_hosts", "numbers", "refs", "steps")

    def __init__(self, call: Any, *, is_spent: bool = True, ends: Iterable[int] = ()) -> None:
        self.steps: list[ChainStep] = []
        steps, indexes, stack, opened = self.steps, dict.fromkeys(ends, -1), [call], set[int]()
        spent = ChainStep.spent
        while stack:
            step = stack[-1]
            depth = len(stack)
            # `arguments_of` returns the same for the usual call, with one more Python call.
            args, named = step.args, step.named
            for argument in (
                args if named is None and _SEVERAL.isdisjoint(map(type, args)) else arguments_of(step)
            ):
                kind: Any = type(argument)  # pyright: ignore[reportUnknownVariableType]
                if kind is spent:
                    # Read the step again, with the retained result as its operand.
                    _take_results(step)
                    del stack[depth:]
                    break
                if isinstance(argument, ChainStep) and id(argument) not in indexes:
                    stack.append(argument)
            else:
                if len(stack) > depth:
                    if id(step) in opened:
                        # Its operands were above it on the stack, so all of them are known by now.
                        raise ValueError(f"{step!r} is an operand of itself; take it out of the list in it")
                    opened.add(id(step))
                    # The first operand runs first, as in an expression of Python.
                    stack[depth:] = stack[: depth - 1 : -1]
                    continue
                stack.pop()
                if id(step) not in indexes:
                    indexes[id(step)] = len(steps)
                    steps.append(step)
        if len(steps) > _MAX_CALLS:
            raise ValueError(_TOO_LONG)
        for step in steps if is_spent else ():
            step.__class__ = spent
        self.refs: list[Any] = []
        self.hosts: list[HostArray] = []
        self.new_hosts: Sequence[HostArray] = ()
        self.numbers: list[tuple[int, float]] = []
        self.has_expansions: bool = False
        self.is_fixed: bool = True
        self.key: tuple[object, ...] | None = self._read(indexes)

    def expanded(self) -> Chain:
        """Return the chain with each step replaced by the calls of its `ArrayFunction.expand`.

        Raises:
            Exception: A function raised it. The steps are spent.
        """
        return at_once(self.expansion())

    def expansion(self) -> Slices[Chain]:
        """Do the same as `expanded`, and yield now and then. At its end, the steps are spent."""
        expansions: dict[int, Any] = {}
        *_, last_step = steps = self.steps
        try:
            self.let_use(is_spent=False)
            for step in steps:
                args, named = replaced(step, expansions)
                step.args, step.named = args, named or None
                function = step.function
                if function.expand is not None:
                    expansions[id(step)] = (
                        function.expand(*args, **named)
                        if function.slices is None
                        else (yield from function.slices(*args, **named))
                    )
                    step.args, step.named = (), None
            return Chain(expansions.get(id(last_step), last_step))
        except BaseException:
            for call in expansions.values():
                call.silence()
            raise
        finally:
            self.let_use(is_spent=True)

    def let_use(self, *, is_spent: bool) -> None:
        """Let the steps be operands of further calls, or no longer."""
        kind = ChainStep.spent if is_spent else ChainStep.fresh
        for step in self.steps:
            step.__class__ = kind

    def replace_hosts(self, arrays: Mapping[int, HostArray]) -> None:
        """Read other host arrays from now on: replacements by the `id` of an array."""
        if arrays:
            for step in self.steps:
                args, named = replaced(step, arrays)
                step.args, step.named = args, named or None
            self.hosts = [arrays.get(id(host), host) for host in self.hosts]

    def take_steps(self, expanded: Chain, new_hosts: Sequence[HostArray] = ()) -> None:
        """Take over the steps of this chain's expansion, and the host arrays that it has made."""
        self.steps, self.new_hosts, self.has_expansions = expanded.steps, new_hosts, False

    @property
    def follows_from_key(self) -> bool:
        """Whether all chains with the key expand to the same structure, also by its functions' parameters."""
        return self.is_fixed or (
            all(step.function.is_fixed for step in self.steps)
            and bool(READS_HOSTS)
            and not any(map(READS_HOSTS[0], self.steps))
        )

    def without_numbers(self) -> tuple[tuple[object, ...] | None, list[tuple[int, float]]]:
        """Return a key without the numbers that can be passed as arguments, and these numbers."""
        self.refs, self.hosts, numbers = [], [], list[tuple[int, float]]()
        return self._read({id(step): index for index, step in enumerate(self.steps)}, numbers), numbers

    def _read(
        self, indexes: Mapping[int, int], handed: list[tuple[int, float]] | None = None
    ) -> tuple[object, ...] | None:
        """Collect the arguments, and return the key. It omits the numbers added to `handed`."""
        key: list[object] = []
        refs, hosts, blocks, numbers = self.refs, self.hosts, dict[Any, int](), dict[int, int]()
        is_keyed = True
        for step in self.steps:
            function = step.function
            key.append(function.number)
            if function.expand is not None:
                self.has_expansions = True
            is_fixed = function.is_fixed
            # `arguments_of` returns the same for the usual call, with one more Python call.
            args, named = step.args, step.named
            for argument in (
                args if named is None and _SEVERAL.isdisjoint(map(type, args)) else arguments_of(step)
            ):
                kind: Any = type(argument)  # pyright: ignore[reportUnknownVariableType]
                if isinstance(argument, ChainStep):
                    key.append(indexes[id(argument)])
                elif isinstance(argument, OnDevice):
                    array: Any = argument  # pyright: ignore[reportUnknownVariableType]
                    spec, block = array.spec, array.block
                    key += id(spec.dtype), spec.shape, spec.strides, spec.offset, block.nbytes
                    key.append(blocks.setdefault(block.id, len(blocks)))
                    refs.append(argument)
                elif kind is np.ndarray:
                    is_fixed = is_fixed and function.takes_hosts
                    number = numbers.setdefault(id(argument), len(hosts))
                    key += argument.shape, argument.dtype, number
                    if number == len(hosts):
                        hosts.append(argument)
                elif handed is not None and kind is float and takes_number(step):
                    key.append(float)
                    handed.append((indexes[id(step)], argument))
                else:
                    # The bits are compared, because the sign of a NaN counts, and its text does not show it.
                    identity = (
                        argument
                        if kind in _PLAIN
                        else pack("d", argument)
                        if kind is float
                        else pack("2d", argument.real, argument.imag)
                        if kind is complex
                        else told_by(argument)
                    )
                    key += kind, identity
                    is_keyed = is_keyed and identity is not NotImplemented
            self.is_fixed = self.is_fixed and is_fixed
        return tuple(key) if is_keyed else None

    def let_go(self) -> None:
        """Drop the arguments, because the program may keep the calls in variables."""
        for step in self.steps:
            step.args, step.named = (), None

    @property
    def device(self) -> Asked:
        """The device of the first device array.

        Raises:
            TypeError: There is none.
        """
        if self.refs:
            device: Asked = self.refs[0].device
            return device
        return asked(
            self.steps[-1].function.name,
            (),
            {"": [argument for step in self.steps for argument in arguments_of(step)]},
        )


def unplanned(step: ChainStep) -> list[ChainStep]:
    """Return a call and all its operands whose layouts are not known, each after its operands.

    Raises:
        RuntimeError: A call was already used, and blocking code has not retained its result.
        ValueError: The chain has too many calls, or a call is an operand of itself.
    """
    steps, stack, opened, planned = list[ChainStep](), [step], set[int](), set[int]()
    while stack:
        current = stack[-1]
        if any(type(argument) is ChainStep.spent for argument in arguments_of(current)):
            _take_results(current)
        operands = [
            argument
            for argument in arguments_of(current)
            if isinstance(argument, ChainStep) and argument.layouts is None and id(argument) not in planned
        ]
        if not operands:
            stack.pop()
            if id(current) not in planned:
                planned.add(id(current))
                steps.append(current)
        elif id(current) in opened:
            raise ValueError(f"{current!r} is an operand of itself; take it out of the list in it")
        else:
            opened.add(id(current))
            # The first operand runs first, as in an expression of Python.
            stack += reversed(operands)
        if len(steps) > _MAX_CALLS:
            raise ValueError(_TOO_LONG)
    return steps


def device_of_call(step: ChainStep) -> Asked:
    """Return the device of the nearest device array among a call's operands, and their operands.

    Raises:
        TypeError: There is none.
    """
    visited, level = set[int](), [step]
    while level:
        operands = list[ChainStep]()
        for current in level:
            for argument in arguments_of(current):
                has_device = isinstance(argument, OnDevice) and not isinstance(argument, ChainStep)
                device: Asked | None = getattr(argument, "device" if has_device else "planned_by", None)
                if device is not None:
                    return device
                if isinstance(argument, ChainStep) and id(argument) not in visited:
                    visited.add(id(argument))
                    operands.append(argument)
        level = operands
    return Chain(step, is_spent=False).device


def at_once(slices: Slices[SliceT]) -> SliceT:
    """Return the result of work without a pause."""
    try:
        while True:
            next(slices)
    except StopIteration as done:
        result: SliceT = done.value
        return result


def refuse_results(name: str, args: Iterable[object]) -> None:
    """Refuse another call's result without operators: several arrays, or elements on the host."""
    for argument in args:
        kind = type(argument)
        if issubclass(kind, (tuple, np.ndarray)):
            use = "take one of its arrays" if issubclass(kind, tuple) else "use it as an array of NumPy"
            problem = f"an operand is of type {kind.__name__}"
            raise TypeError(f"{name}: {problem}; await the call that returns it first, and {use}") from None


def replaced(step: ChainStep, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with those in `values` replaced by their values."""

    def substitute(argument: Any) -> Any:
        if type(argument) in _SEVERAL:
            return type(argument)([values.get(id(item), item) for item in argument])
        return values.get(id(argument), argument)

    return tuple(map(substitute, step.args)), {
        name: substitute(argument) for name, argument in (step.named or {}).items()
    }


def asked(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Asked:
    """Return the device of the first device array.

    Raises:
        TypeError: There is none.
    """
    device: Asked = DEVICE_OF[0](name, *_flat((*args, *named.values())))
    return device


def arguments_of(step: ChainStep) -> list[Any]:
    """List the arguments of a call, and the members of sequences among them."""
    named = step.named
    return _flat(step.args if named is None else (*step.args, _CLOSED, *named, *named.values()))


def _flat(arguments: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for argument in arguments:
        if type(argument) in _SEVERAL:
            flat += _OPENED[type(argument)], *argument, _CLOSED
        else:
            flat.append(argument)
    return flat


def takes_number(step: ChainStep) -> bool:
    """Return whether a call's function can take a number as a 0-d array with bit-identical results."""
    # A number inside a sequence is not an operand.
    is_one = step.named is None and step.function.name in _OF_NUMBERS
    return is_one and _SEVERAL.isdisjoint(map(type, step.args))


def identity_of(argument: Any) -> object:
    """Return a value that identifies any argument but an array or call, as `Chain` does in its key."""
    if type(argument) in (float, complex):
        return pack("2d", argument.real, argument.imag)
    return argument if type(argument) in _PLAIN else told_by(argument)


def told_by(argument: Any) -> object:
    """Return a value that identifies an argument; NotImplemented if none exists."""
    value: Any = argument
    if isinstance(argument, DType):
        # Hashing a DType takes longer than everything else here.
        return id(value)
    if isinstance(argument, slice):
        bounds = value.start, value.stop, value.step
        return (*map(type, bounds), *bounds) if _PLAIN.issuperset(map(type, bounds)) else NotImplemented
    if isinstance(argument, np.generic):
        return value.dtype, value.tobytes()
    is_tuple = type(argument) is tuple
    if is_tuple and _INTEGERS.issuperset(map(type, value)):
        # A pair in a list, such as the widths of a padding.
        return value
    return value if isinstance(argument, (np.dtype, type)) else NotImplemented


def host_use(call: object) -> str:
    """Return how a program awaits a call with a result on the host; an empty text for other objects."""
    if not isinstance(call, ChainStep) or not call.function.result_on_host:
        return ""
    return f"await call.{call.function.name.rpartition('.')[2]}()"


def explain_hosts(step: ChainStep, error: TypeError) -> None:
    """Name the `await` that a call lacks if its operands are results on the host.

    Raises:
        TypeError: `error` reports that no operand is on a device, and an operand is such a result.
    """
    uses = [use for argument in arguments_of(step) if (use := host_use(argument))]
    if uses and NO_DEVICE in str(error):
        name, arguments = step.function.name, ", ".join([uses[0], *["..."] * (len(step.args) > 1)])
        result: Any = next(argument for argument in arguments_of(step) if host_use(argument))
        raise TypeError(
            f"{name}: {result.function.result_on_host}; await it first: {name}({arguments})"
        ) from None


def _take_results(step: ChainStep) -> None:
    """Replace the spent calls among a step's arguments by their results.

    Raises:
        RuntimeError: A call has no result; see `retained_result`.
    """
    results = {
        id(argument): retained_result(argument)
        for argument in arguments_of(step)
        if type(argument) is ChainStep.spent
    }
    args, named = replaced(step, results)
    step.args, step.named = args, named or None


def retained_result(call: Any) -> Any:
    """Return the result of a spent call, which code that blocks retains.

    Raises:
        RuntimeError: It was not retained: the call was awaited, or was an operand of another call.
    """
    if not hasattr(call, "kept"):
        raise spent_error(call)
    return call.kept


def spent_error(call: ChainStep) -> RuntimeError:
    return RuntimeError(
        f"{call!r} was awaited before, or in another call; keep its result in a name before: y = await y, or "
        "in blocking code y = b.wait(y); or await both calls at once: await ta.gather(a, b)"
    )
