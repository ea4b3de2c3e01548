"""A call of a function that gets gradients: its arguments as leaves, its results, and how both are nested."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

from .. import arrays as _arrays
from ..devices import IS_DERIVED, AccelRef, Call, gather, is_traced, what_to_do
from ..devices.operations._calls import SpentCall
from ..devices.operations._chain import retained_result
from ._backward import backward

__all__ = [
    "IS_BATCHED",
    "Gradients",
    "Tape",
    "check_differentiable",
    "mapped",
    "positions_of",
    "turned",
    "unwrapped",
    "visit",
]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays

Gradients: TypeAlias = Any
"""Gradients, nested as the arguments are."""

IS_BATCHED: ContextVar[bool] = ContextVar("IS_BATCHED", default=False)
"""Whether a function of `vmap` is running, whose gradients are derived once for many calls."""


def positions_of(argnums: int | Sequence[int]) -> int | tuple[int, ...]:
    numbers: Any = argnums
    if isinstance(numbers, (list, tuple)) and all(
        type(number) is int for number in cast("list[object]", numbers)
    ):
        return tuple(cast("list[int]", numbers))
    if type(numbers) is not int:
        raise TypeError(f"argnums must be an integer or a list of integers, got {argnums!r}")
    return int(numbers)


class Tape:
    """A call of a function, and the calls of its gradients.

    Attributes:
        name: The function that makes it, for errors.
        refs: The arrays that get gradients.
        leaves: The same as calls.
        is_nested: Whether the gradients are operands: the arguments are calls, or this is in a step or in a
            function that gets gradients.
        has_aux: See `value_and_grad`.
        others: The results of the function without gradients, nested as it has returned them.
        structure: Its value, if that is nested; else None.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        name: str,
        positions: int | tuple[int, ...],
        args: tuple[Any, ...],
        named: Mapping[str, Any],
        *,
        has_aux: bool = False,
        has_several: bool = False,
    ) -> None:
        args = tuple([unwrapped(argument) for argument in args])
        named = {key: unwrapped(argument) for key, argument in named.items()}
        self.name, self.has_aux, self._has_several = name, has_aux, has_several
        self.others: Any = None
        self.structure: Any = None
        self._f, self._positions, self._named = f, positions, named
        self._args = list(args)
        self.refs: list[Any] = []
        for position in (positions,) if isinstance(positions, int) else positions:
            if not -len(args) <= position < len(args):
                raise ValueError(f"{name}: argnums: {position} is out of range for {len(args)} arguments")
            visit(args[position], self.refs.append)
        for ref in self.refs:
            if not isinstance(ref, (AccelRef, Call)):
                raise TypeError(
                    f"{name}: arguments with gradients must be arrays on a device, in dicts and lists, got "
                    f"{type(ref).__name__}{what_to_do(ref)}"
                )
            if isinstance(ref, AccelRef):
                check_differentiable(name, ref)
        has_calls = any(isinstance(ref, Call) for ref in self.refs)
        self.is_nested = has_calls or is_traced() or IS_DERIVED.get()
        self.leaves: list[Any] = []
        self._made: list[Any] = []

    def run(self) -> Any:
        """Call the function; returns its call."""
        args = list(self._args)
        # A position may be selected twice, and then has one leaf with two gradients.
        by_position: dict[int, list[Any]] = {}
        for position in self._all_positions():
            number = position % len(args)
            if number not in by_position:
                refs: list[Any] = []
                visit(args[number], refs.append)
                by_position[number] = [self._leaf(ref) for ref in refs]
                args[number] = with_parts(args[number], iter(by_position[number]))
            self.leaves += by_position[number]
        token = IS_DERIVED.set(True)
        try:
            value: Any = self._f(*args, **self._named)
        finally:
            IS_DERIVED.reset(token)
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"{self.name}: the function must not be async, because it awaits nothing")
        if self.has_aux:
            if not isinstance(value, tuple) or len(value) != 2:
                visit(value, self._made.append)
                raise TypeError(f"{self.name}: with has_aux, the function must return a pair (value, others)")
            value, self.others = value
            self._made += self.calls_of_others()
        if self._has_several and isinstance(value, (Mapping, list, tuple)):
            self.structure = value
            parts = list[Any]()
            visit(value, parts.append)
            value = gather(*parts)
        self._made.append(value)
        if not isinstance(value, Call):
            raise TypeError(f"{self.name}: the function must return a call, got {type(value).__name__}")
        if reason := value.function.result_on_host:
            value.silence()
            method = value.function.name.rpartition(".")[2]
            raise TypeError(
                f"{self.name}: the function must return an array of the device, and {reason}; "
                f"leave .{method}() out"
            )
        return cast("Any", value)

    def _leaf(self, ref: Any) -> Any:
        """Return the call of an argument, which is another call for each of them."""
        # A view of an array is an array, and would not be known as a part of it. A call may be an operand of
        # others, but not stand for two arguments.
        is_known = isinstance(ref, Call) and all(call is not ref for call in self._made)
        leaf = ref if is_known else arrays.reshape(ref, ref.shape)
        self._made.append(leaf)
        return leaf

    def calls_of_others(self) -> list[Any]:
        """Return the arrays and calls among the results without gradients."""
        gathered = list[Any]()
        visit(
            self.others,
            lambda leaf: gathered.append(leaf) if isinstance(leaf, (AccelRef, SpentCall)) else None,
        )
        return gathered

    def with_results(self, results: Sequence[Any]) -> Any:
        """Return the results without gradients, with their calls replaced by computed ones."""
        remaining = iter(results)
        return mapped(
            self.others, lambda leaf: next(remaining) if isinstance(leaf, (AccelRef, SpentCall)) else leaf
        )

    async def compute_value(self, check: Callable[[Any], None]) -> tuple[Any, Any]:
        """Compute the value and the other results only, after checking their call."""
        try:
            call = self.run()
            if self.has_aux or self.structure is not None:
                aux = self.calls_of_others()
                parts = list(call.args) if self.structure is not None else [call]
                call.silence()
                call = gather(*parts, *aux)
                check(call)
                results: Any = await call
                gathered, rest = iter(results[: len(parts)]), self.with_results(results[len(parts) :])
                nested = (
                    next(gathered)
                    if self.structure is None
                    else mapped(self.structure, lambda _: next(gathered))
                )
                return nested, rest
            check(call)
            value: AccelRef = await call
            return value, None
        finally:
            self.close()

    def close(self) -> None:
        """Let calls that were not awaited end without a warning, because an error is enough."""
        for call in self._made:
            if type(call) is Call:
                call.close()

    def nested(self, parts: Iterator[Any]) -> Gradients:
        """Return gradients nested as the arguments are."""
        gradients = [with_parts(self._args[position], parts) for position in self._all_positions()]
        return gradients[0] if isinstance(self._positions, int) else tuple(gradients)

    def _all_positions(self) -> tuple[int, ...]:
        return (self._positions,) if isinstance(self._positions, int) else self._positions

    def parts(self, seed: Any) -> list[Any]:
        """Return the gradient of each leaf, given the gradient of the value."""
        value = self._made[-1]
        self._made.append(seed)
        slopes = backward(value, self.leaves, seed, self._made)
        for call in self._made:
            # A gradient may turn out to be 0, and then does not read all that was made for it.
            if isinstance(call, Call):
                call.silence()
        return slopes


def check_differentiable(name: str, array: Any) -> None:
    if array.dtype.kind not in ("float", "complex"):
        raise TypeError(
            f"{name}: arguments with gradients must be floating or complex, got {array.dtype}; cast it, or "
            "choose others by argnums"
        )


def turned(slope: Any) -> Any:
    """Change the convention of a gradient of complex numbers, from the rules' to JAX's or back."""
    return arrays.conj(slope) if slope.dtype.kind == "complex" else slope


def unwrapped(nested: Any) -> Any:
    """Return nested arrays with the references of a blocking namespace's arrays, and of retained results."""
    if getattr(type(nested), "takes_operators", False):
        return nested.ref
    if type(nested) is SpentCall:
        return retained_result(nested)
    if isinstance(nested, Mapping):
        return {key: unwrapped(item) for key, item in cast("Mapping[str, Any]", nested).items()}
    if type(nested) in (list, tuple):
        return type(nested)([unwrapped(item) for item in nested])
    return nested


def visit(nested: Any, see: Callable[[Any], object]) -> None:
    """Call a function with each of nested arrays."""
    if not isinstance(nested, (AccelRef, Call)) and isinstance(nested, (Mapping, list, tuple)):
        values = cast("Mapping[str, Any]", nested).values() if isinstance(nested, Mapping) else nested
        for item in cast("Sequence[Any]", values):
            visit(item, see)
    else:
        see(nested)


def mapped(nested: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested arrays with each leaf replaced by the result of a function."""
    if not isinstance(nested, (AccelRef, Call)):
        if isinstance(nested, Mapping):
            return {name: mapped(item, change) for name, item in cast("Mapping[str, Any]", nested).items()}
        if isinstance(nested, (list, tuple)):
            items = [mapped(item, change) for item in cast("list[Any]", nested)]
            return items if isinstance(nested, list) else tuple(items)
    return change(nested)


def with_parts(nested: Any, parts: Iterator[Any]) -> Any:
    """Return nested arrays with each of them replaced by the next part."""
    if isinstance(nested, (AccelRef, Call)):
        return next(parts)
    if isinstance(nested, Mapping):
        return {name: with_parts(item, parts) for name, item in cast("Mapping[str, Any]", nested).items()}
    if isinstance(nested, (list, tuple)):
        return [with_parts(item, parts) for item in cast("list[Any]", nested)]
    return next(parts)
