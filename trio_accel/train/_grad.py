"""Gradients of functions of own operations: the calls that a function makes are its tape (D197)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from .. import arrays as _arrays
from .. import linalg, nn, tensor
from ..backends.base import DType, NotSupportedError
from ..devices import AccelRef, Call
from ._rules import CONSTANT, ELEMENTS, RULES, summed_to

__all__ = ["grad", "value_and_grad"]

# The types of functions tell what calls become when they are awaited.
arrays: Any = _arrays
_ROOMS: dict[str, Any] = {"arrays": arrays, "linalg": linalg, "nn": nn, "tensor": tensor}

Nested: TypeAlias = "AccelRef | Mapping[str, Nested] | Sequence[Nested]"
"""An array, or a dict or list of these."""


def value_and_grad(f: Callable[..., Any]) -> Callable[..., Awaitable[tuple[AccelRef, Any]]]:
    """Make a function of the value and the gradients of a function of own operations.

    `f` is called once. It composes calls, awaits none, and returns one without axes. Value and gradients are
    computed as one request. What changes an array in place, or writes to `out`, has no gradient.

    Args:
        f: Called with the parameters and the other arguments: ``f(parameters, *arguments)``. The parameters
            are an array on a device, or dicts and lists of these; in `f` they are calls, so views of them
            are, too.

    Returns:
        An async function with the same arguments. It returns the value, an array without axes, and the
        gradients, nested as the parameters are. They have the shapes and dtypes of the parameters, and are
        zeros where the value does not depend on one. A parameter that is not floating has None. If all have
        one dtype, value and gradients are views of one array, in the order of the parameters.

    Raises:
        NotSupportedError: `f` has asked for an operation that has no gradient here, which is named: nothing
            was launched. Or a parameter is complex.
        ValueError: The value has axes, or depends on no parameter.
        TypeError: `f` returns no call, the value is not floating, or a parameter is no array on a device.
    """

    async def run(parameters: Nested, *args: Any, **kwargs: Any) -> tuple[AccelRef, Any]:
        tape = _Tape()
        try:
            joined = tape.joined(f(_with(parameters, tape.leaf), *args, **kwargs))
        except BaseException:
            tape.close()
            raise
        found = iter(_parted(await joined, tape.layouts))
        # Those of another dtype than the widest are arrays of their own.
        several = [
            one if one is None or one.dtype == dtype else await one.cast(dtype) for one, dtype in found
        ]
        rest = iter(several[1:])
        return several[0], _with(parameters, lambda _: next(rest))

    return run


def grad(f: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Make a function of the gradients alone; see `value_and_grad`."""
    both = value_and_grad(f)

    async def run(parameters: Nested, *args: Any, **kwargs: Any) -> Any:
        return (await both(parameters, *args, **kwargs))[1]

    return run


def _with(nested: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested arrays with each of them changed."""
    if isinstance(nested, Mapping):
        return {name: _with(one, change) for name, one in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [_with(one, change) for one in nested]
    return change(nested)


def _parted(flat: AccelRef, layouts: Sequence[tuple[DType, tuple[int, ...], int]]) -> list[tuple[Any, DType]]:
    """Return arrays that lie behind one another, with their dtypes; None for those without elements."""
    place, found = 0, list[tuple[Any, DType]]()
    for dtype, shape, size in layouts:
        is_there = dtype.kind == "float"
        found.append((flat[place : place + size].reshape(shape) if is_there else None, dtype))
        place += size if is_there else 0
    return found


class _Tape:
    """The calls of a value and of its gradients.

    Attributes:
        layouts: Dtypes, shapes and sizes of the value, and of the parameters in their order.
    """

    def __init__(self) -> None:
        self.layouts: list[tuple[DType, tuple[int, ...], int]] = []
        self._leaves: list[Any] = []
        # All that would tell of its end, if an error came before it is awaited.
        self._made: list[Any] = []

    def close(self) -> None:
        """Let all calls end."""
        for call in self._made:
            call.close()

    def leaf(self, ref: AccelRef) -> Any:
        """Return a parameter as a call: nothing would know what views of an array are views of."""
        if not isinstance(ref, AccelRef):
            told = f"arrays on a device, in dicts and lists, got {type(ref).__name__}"
            raise TypeError(f"value_and_grad: parameters must be {told}")
        if ref.dtype.kind == "complex":
            raise NotSupportedError("value_and_grad: parameters must be real, got a complex array")
        self.layouts.append((ref.dtype, ref.shape, ref.size))
        self._leaves.append(self._noted(arrays.reshape(ref, ref.shape)))
        return self._leaves[-1]

    def joined(self, value: Any) -> Any:
        """Return one call of the value and all gradients, each flat, behind one another."""
        if not isinstance(value, Call):
            raise TypeError(f"value_and_grad: the function must return a call, got {type(value).__name__}")
        # The layouts of all calls are found with that of the last.
        shape, dtype = self._noted(value).shape, value.dtype
        if shape:
            raise ValueError(f"value_and_grad: the value must have no axes, got shape {shape}")
        if dtype.kind != "float":
            raise TypeError(f"value_and_grad: the value must be floating, got {dtype}")
        self.layouts.insert(0, (dtype, (), 1))
        dtypes = {one for one, _, _ in self.layouts if one.kind == "float"}
        if len(dtypes) > 1:
            dtype = DType.float64 if DType.float64 in dtypes else DType.float32
        steps = _in_order(value)
        floating = [leaf for leaf in self._leaves if leaf.dtype.kind == "float"]
        used = {*map(id, steps), *map(id, floating)}
        for leaf in self._leaves:
            if id(leaf) not in used:
                leaf.close()
        found = self._backwards(steps, set(map(id, floating)))
        several = [value]
        several += [found[id(leaf)] if id(leaf) in found else arrays.zeros_like(leaf) for leaf in floating]
        owns = [own for own, _, _ in self.layouts if own.kind == "float"]
        return arrays.concat(
            [
                arrays.reshape(one if own == dtype else one.cast(dtype), (-1,))
                for one, own in zip(several, owns, strict=True)
            ]
        )

    def _backwards(self, calls: Sequence[Any], leaves: set[int]) -> dict[int, Any]:
        """Walk from the value to the parameters; returns the gradients by the identities of the calls."""
        depends = set(leaves)
        for call in calls:
            if call.function.name not in CONSTANT and any(id(one) in depends for one in _operands(call)):
                depends.add(id(call))
        if id(calls[-1]) not in depends:
            raise ValueError("value_and_grad: the value depends on no parameter")
        # What has no gradient is refused before a call is made.
        steps = [Step(call, depends) for call in calls if id(call) in depends - leaves]
        slopes: dict[int, Any] = {id(calls[-1]): self._noted(arrays.ones_like(calls[-1]))}
        for step in reversed(steps):
            slope = slopes.pop(id(step.call), None)
            if slope is None:
                continue
            if step.name == "Call.part":
                # The slope of several results is a dict of those of its parts.
                operand, which = step.x, step.which
                before = slopes.setdefault(id(operand), {}).get(which)
                slopes[id(operand)][which] = slope if before is None else self._noted(before + slope)
                continue
            for operand, made in step.gradients(slope):
                before, one = slopes.get(id(operand)), self._noted(made())
                slopes[id(operand)] = one if before is None else self._noted(before + one)
        return slopes

    def _noted(self, call: Any) -> Any:
        self._made.append(call)
        return call


def _in_order(value: Any) -> list[Any]:
    """Return the calls that one is made of, in an order in which each comes behind its operands."""
    order, done, stack = list[Any](), set[int](), [value]
    while stack:
        call = stack[-1]
        missing = [one for one in _operands(call) if isinstance(one, Call) and id(one) not in done]
        if missing and id(call) not in done:
            stack += missing
            continue
        stack.pop()
        if id(call) not in done:
            done.add(id(call))
            order.append(call)
    return order


def _several(one: Any) -> Sequence[Any]:
    return one if isinstance(one, (list, tuple)) else (one,)


def _operands(call: Any) -> list[Any]:
    """List the arguments of a call, with the members of sequences."""
    return [one for given in (*call.args, *(call.named or {}).values()) for one in _several(given)]


@functools.cache
def _parameters(name: str) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function; a method of arrays has `x` and the `rest`."""
    room, _, base = name.partition(".")
    function = getattr(_ROOMS.get(room), base, lambda x, *rest: None)
    return tuple(inspect.signature(function).parameters.values())


def _given(call: Any) -> dict[str, Any]:
    """Return the arguments of a call by name. It has by their places what its function has by name alone."""
    found, args = dict[str, Any](), call.args
    for one in _parameters(call.function.name):
        if one.kind is one.VAR_POSITIONAL:
            found[one.name], args = args, ()
        else:
            found[one.name], args = (args[0] if args else one.default), args[1:]
    return found | (call.named or {})


class Step:
    """A call whose result depends on parameters, as rules see it: its arguments by name are attributes.

    Args:
        call: The call.
        depends: Identities of all calls that depend on parameters.

    Raises:
        NotSupportedError: There is no gradient for an argument that depends on one.

    Attributes:
        call: The call.
        name: The name of its function.
        place: The place of the argument in a sequence, while its gradient is made.
    """

    def __init__(self, call: Any, depends: set[int]) -> None:
        self.call, self.name, self.place = call, call.function.name, 0
        self._shared: Any = None
        self.given = _given(call)
        self._rules = ELEMENTS.get(self.name) or RULES.get(self.name, {})
        self._wanted: list[tuple[str, int, Any]] = []
        for name, given in self.given.items():
            for place, one in enumerate(_several(given)):
                if id(one) in depends:
                    self._wanted.append((name, place, one))
        unknown = sorted({name for name, _, _ in self._wanted} - self._rules.keys())
        if self.name == "Call.part":
            (which,) = self.given["rest"]
            several = call.args[0].ahead
            self.given["which"] = several._fields.index(which) if isinstance(which, str) else which
        elif unknown or not self._rules:
            self.refuse(f"has no gradient{f' for {unknown[0]}' if self._rules else ''}")
        if self.given.get("out") is not None:
            self.refuse("with out= has no gradient")

    def __getattr__(self, name: str) -> Any:
        return self.given[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its result."""
        found: tuple[int, ...] = self.call.shape
        return found

    def refuse(self, why: str) -> NoReturn:
        """Raise the error of what has no gradient."""
        raise NotSupportedError(f"value_and_grad: {self.name} {why}", operation=self.name)

    def shared(self, make: Callable[[], Any]) -> Any:
        """Make a call that gives the gradients of several arguments, once."""
        if self._shared is None:
            self._shared = make()
        return self._shared

    def gradients(self, slope: Any) -> list[tuple[Any, Callable[[], Any]]]:
        """Return the arguments that depend on parameters, and what makes their gradients."""
        return [
            (operand, functools.partial(self._made, name, place, operand, slope))
            for name, place, operand in self._wanted
        ]

    def _made(self, name: str, place: int, operand: Any, slope: Any) -> Any:
        self.place = place
        made = self._rules[name](self, slope)
        if self.name in ELEMENTS:
            made = summed_to(made, self.shape, operand.shape)
        # All results of several have the dtype of what they are made of.
        is_same = isinstance(self.call.ahead, tuple) or operand.dtype == self.call.dtype
        return made if is_same else made.cast(operand.dtype)
