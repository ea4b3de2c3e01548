"""Calls that are made again: gradients that compute values again by `checkpoint`, and traced bodies."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from .. import arrays as _arrays
from ..backends.base import NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call, Chain, arguments_of, gather
from ..devices.operations._chain import METHODS, READS_HOSTS, identity_of, replaced
from ..devices.operations._operation import recording_now
from ._backward import is_operand, pulled
from ._elementwise import Rule

__all__ = ["checkpoint"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays


def checkpoint(f: Callable[..., Any]) -> Callable[..., Call[Any]]:
    """Make a function whose gradient computes its intermediate results again, as `jax.checkpoint`.

    The intermediate results of `f` need no memory between the value and the gradient; the gradient takes the
    time of another value.

    Args:
        f: Composes calls, awaits none, and returns one. Its arguments are arrays, numbers, and dicts, lists
            and tuples of these.

    Returns:
        A function with the arguments of `f`, to call within a function that is derived.

    Raises:
        TypeError: `f` does not return a call.
    """
    # All calls whose arguments are nested alike share a function, because it is part of a plan's key. Their
    # leaves are arguments of the call, so that numbers are in the key as well, by their bits.
    functions = dict[Any, ArrayFunction]()

    def call(*args: Any, **named: Any) -> Call[Any]:
        leaves = list[Any]()
        structure = structure_of((args, named), leaves)
        if structure not in functions:
            name = getattr(f, "__qualname__", type(f).__name__)
            functions[structure] = ArrayFunction(
                f"checkpoint({name})",
                _first,
                "value",
                takes_hosts=True,
                rule=partial(_by_another_value, f, structure),
            )
        value = f(*args, **named)
        if not isinstance(value, Call):
            raise TypeError(f"checkpoint: the function must return a call, got {type(value).__name__}")
        return Call(functions[structure], (value, leaves))

    return call


def _first(value: Any, _: object) -> Any:
    return value


@attrs.frozen
class Place:
    """The place of a leaf among nested arguments, or of a body's input."""

    index: int


def structure_of(nested: Any, leaves: list[Any]) -> Any:
    """Return how arguments are nested, as a hashable value, and append their leaves to a list."""
    if not isinstance(nested, (AccelRef, Call)):
        if isinstance(nested, Mapping):
            return dict, tuple([(name, structure_of(item, leaves)) for name, item in nested.items()])
        if isinstance(nested, (list, tuple)):
            return type(nested), tuple([structure_of(item, leaves) for item in nested])
    leaves.append(nested)
    return Place(len(leaves) - 1)


def refilled(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return nested arguments from how they are nested and their leaves."""
    if isinstance(structure, Place):
        return leaves[structure.index]
    kind, items = structure
    if kind is dict:
        return {name: refilled(item, leaves) for name, item in items}
    return kind([refilled(item, leaves) for item in items])


def _by_another_value(f: Callable[..., Any], structure: Any, call: Any, g: Any) -> Iterator[Rule]:
    value, leaves = call.args
    positions = [position for position, leaf in enumerate(leaves) if is_operand(leaf)]

    def compose(*operands: Any) -> Any:
        moved = list(leaves)
        for position, operand in zip(positions, operands, strict=True):
            moved[position] = operand
        args, named = refilled(structure, moved)
        return f(*args, **named)

    slopes = functools.cache(lambda: pulled(compose, [leaves[position] for position in positions], g))
    # The operands get their gradients by the other value.
    yield value, lambda: None
    for number, position in enumerate(positions):
        yield leaves[position], partial(_part, slopes, number)


def leaf_of(array: Any, shape: Sequence[int]) -> Any:
    leaf = arrays.reshape(array, tuple(shape))
    leaf.silence()
    return leaf


@attrs.frozen(eq=False)
class TracedStep:
    """A call of a body.

    Attributes:
        function: The function.
        args: The positional arguments, with a `Place` for an input, and an `Earlier` for the result of a
            step.
        named: The keyword arguments, or None.
    """

    function: ArrayFunction
    args: tuple[Any, ...]
    named: Mapping[str, Any] | None = None


@attrs.frozen(eq=False)
class TracedBody:
    """Calls that can be made again, of other arrays.

    Attributes:
        steps: The calls, in order.
        outputs: A place or an earlier result for each output.
        reads_hosts: Whether a rule may read the elements of host arrays among the inputs.
    """

    steps: Sequence[TracedStep]
    outputs: Sequence[Any]
    reads_hosts: bool = False

    def calls(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the calls of the outputs, for arrays or calls as inputs."""
        computed = list[Any]()

        def of(argument: Any) -> Any:
            if type(argument) is Place:
                return inputs[argument.index]
            if type(argument) is Earlier:
                return computed[argument.index]
            if type(argument) in (list, tuple):
                return type(argument)([of(item) for item in argument])
            return argument

        for step in self.steps:
            named = step.named and {name: of(value) for name, value in step.named.items()}
            call: Any = Call(step.function, tuple(map(of, step.args)), named)
            computed.append(call)
        for call in computed:
            # Some are for other outputs.
            call.silence()
        return [of(output) for output in self.outputs]

    @classmethod
    def of_call(cls, function: ArrayFunction, args: tuple[Any, ...], results: int) -> TracedBody:
        """Return the body that is one call, with all its results as outputs."""
        parts: list[Any] = [TracedStep(METHODS["__getitem__"], (Earlier(0), k)) for k in range(results)]
        return cls([TracedStep(function, args), *parts], [Earlier(k + 1) for k in range(results)])

    def key(self) -> tuple[object, ...] | None:
        """Return what identifies its structure; None if an argument cannot be compared."""
        key: list[object] = [*self.outputs]
        steps: Sequence[Any] = self.steps
        for step in steps:
            key.append(step.function.number)
            for argument in arguments_of(step):
                is_input = type(argument) in (Place, Earlier)
                identity = argument if is_input else identity_of(argument)
                if identity is NotImplemented:
                    return None
                key += type(argument), identity
        return tuple(key)


@attrs.frozen
class Earlier:
    """The result of an earlier step of a body."""

    index: int


def traced(outputs: Sequence[Any], leaves: Sequence[Any]) -> tuple[TracedBody, list[Any]]:
    """Return the calls between leaves and outputs as a body, and its inputs after the leaves."""
    positions: dict[int, Any] = {id(leaf): Place(index) for index, leaf in enumerate(leaves)}
    constants, steps, shared_inputs = list[Any](), list[Any](), dict[Any, Place]()
    reads_hosts = False

    def place_of(operand: Any) -> Any:
        if id(operand) not in positions:
            # A function often selects the same part of a parameter in several places.
            shared_input = shared_inputs.setdefault(_equality(operand), Place(len(leaves) + len(constants)))
            positions[id(operand)] = shared_input
            if shared_input.index == len(leaves) + len(constants):
                constants.append(operand)
            else:
                operand.silence()
        return positions[id(operand)]

    calls = [output for output in outputs if isinstance(output, Call) and id(output) not in positions]
    gathered = gather(*calls)
    gathered.silence()
    chain = Chain(gathered, is_spent=False, ends=list(positions))
    depends = set(positions)
    for step in chain.steps[:-1]:
        if depends.isdisjoint(map(id, arguments_of(step))):
            continue
        depends.add(id(step))
        reads_hosts = reads_hosts or READS_HOSTS[0](step)
        operands = {
            id(argument): place_of(argument)
            for argument in arguments_of(step)
            if isinstance(argument, (Call, AccelRef, np.ndarray))
        }
        args, named = replaced(step, operands)
        positions[id(step)] = Earlier(len(steps))
        steps.append(TracedStep(step.function, args, named or None))
    return TracedBody(steps, [place_of(output) for output in outputs], reads_hosts), constants


def _equality(operand: Any) -> Any:
    """Return a value that equal views of one operand share."""
    if not isinstance(operand, Call) or operand.function is not METHODS["__getitem__"]:
        return id(operand)
    of, index = operand.args
    identity = [(type(part), identity_of(part)) for part in (index if type(index) is tuple else (index,))]
    is_known = all(value is not NotImplemented for _, value in identity)
    return (id(of), type(index), *identity) if is_known else id(operand)


def layout_recorder(name: str) -> Any:
    """Return the recorder that only wants layouts; None if the requests of a function run.

    Raises:
        NotSupportedError: The calls are recorded as one request or as a step, and then run step by step.
    """
    recorder: Any = recording_now()
    if recorder is None or getattr(recorder, "is_ahead", False):
        return recorder
    raise NotSupportedError(
        f"{name} takes several requests, so it is in no graph",
        operation=name,
    )


def _part(several: Callable[[], Any], index: int) -> Any:
    return several()[index]
