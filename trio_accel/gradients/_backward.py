"""Calls backwards: from the gradient of a value to the gradients of its operands.

`backward` visits the calls from the last to the first. The rule of a call yields a gradient for each of its
operands, and three properties hold for all rules, so that no rule has to ensure them:

* `as_operand` is the only way of a gradient into an operand. It sums over broadcast axes, drops the
  imaginary part for a real operand, and casts to the operand's dtype.
* `pulled` gives each place of a composition a leaf of its own, so that an array that is passed twice gets two
  gradients, and not their sum twice.
* `bound` replaces host arrays by placeholders on the device, because rules compose calls of operands.

A rule belongs to a public function (`rule_of`). A private expression in a composition may have the same
name, but other arguments, and is derived from its own text.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import attrs
import numpy as np

from .. import arrays as _arrays
from ..backends.base import ArraySpec, DType, NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call, Chain, arguments_of
from ..devices.operations._chain import READS_HOSTS, Slices, at_once
from ._complex import COMPLEX
from ._elementwise import ADVICE, PULLED, Rule, slopes_of, summed_to
from ._memo import memoized

__all__ = [
    "RULES",
    "Make",
    "OneOfSeveral",
    "as_operand",
    "backward",
    "backward_in_slices",
    "bound",
    "hosts_on_device",
    "is_operand",
    "is_public",
    "itself",
    "named_args",
    "operand_names",
    "parameters_of",
    "part_of",
    "pulled",
    "put_like",
    "refuse",
    "rule_of",
]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays

Make: TypeAlias = Callable[[Any, Any], Iterator[Rule]]
"""A rule: yields arguments of a call with their gradients, by the gradient of its result."""

RULES: dict[str, Make] = {}
"""Rules by the names of functions: the modules of rules add them."""

# Rooms and functions that make complex numbers of real ones, and types of such numbers.
_COMPLEX = ("fft.", "signal.", "linalg.eig.", "linalg.eigvals.", "linalg.schur.", "linalg.sqrtm.")
_NUMBERS = frozenset({complex, np.complex64, np.complex128})


def refuse(name: str, reason: str) -> NotSupportedError:
    """Return the error for a function without a gradient."""
    return NotSupportedError(f"{name} has no gradient, because {reason}; {ADVICE}", operation=name)


def backward(
    value: Any, leaves: Sequence[Any], seed: Any, calls: list[Any], *, is_exact: bool = False
) -> list[Any]:
    """Return the gradient of each leaf by the gradient of a value; see `backward_in_slices`."""
    return at_once(backward_in_slices(value, leaves, seed, calls, is_exact=is_exact))


def backward_in_slices(
    value: Any, leaves: Sequence[Any], seed: Any, calls: list[Any], *, is_exact: bool = False
) -> Slices[list[Any]]:
    """Return the gradient of each leaf by the gradient of a value, and yield after each call.

    Args:
        value: A call, with one result or several.
        leaves: The calls to compute gradients for.
        seed: The gradient of `value`: of several results a list.
        calls: All calls that are made are added, so that they can end without a warning.
        is_exact: Whether leaves are complex, so that dtypes are checked.
    """
    order, depends, is_complex = _order(value, leaves)
    is_exact = is_exact or is_complex or any(leaf.dtype.kind == "complex" for leaf in leaves)
    slopes: dict[int, Any] = {id(value): seed} if id(value) in depends else {}
    for call in reversed(order):
        if id(call) not in slopes:
            # Only functions without a gradient use it.
            continue
        g, several = slopes.pop(id(call)), part_of(call)
        if several is not None:
            # The rule of the call gets a gradient for each result, and None for an unused one.
            _add_parts(slopes, several, {call.args[1]: g}, calls)
            continue
        operands = [argument for argument in arguments_of(call) if id(argument) in depends]
        if _has_no_elements(g) or all(map(_is_empty, operands)):
            # Rules need not know what they do with no elements, because zeros are right.
            _silence(g)
            continue
        makers = list(_gradients(call, g, is_exact=is_exact))
        # An operand may be there twice.
        missing = [id(operand) for operand in operands]
        for operand, _ in makers:
            if id(operand) in missing:
                missing.remove(id(operand))
        active = [(operand, make) for operand, make in makers if id(operand) in depends]
        _add_slopes(slopes, [(operand, make) for operand, make in active if not _is_empty(operand)], calls)
        if missing:
            raise _left_out(call, missing)
        yield
    return [slopes[id(leaf)] if id(leaf) in slopes else arrays.zeros_like(leaf) for leaf in leaves]


@attrs.frozen(eq=False)
class OneOfSeveral:
    """Makes the gradient of an operand, perhaps together with others.

    Attributes:
        requested: The numbers of all operands whose gradients are requested.
        number: The number of this one.
        make: Makes the gradient of an operand by its number, once all requested ones are known.
    """

    requested: list[int]
    number: int
    make: Callable[[int], Any]

    def note_request(self) -> None:
        """Note that this gradient is requested."""
        self.requested.append(self.number)

    def __call__(self) -> Any:
        """Return the gradient."""
        return self.make(self.number)


def _silence(g: Any) -> None:
    """Let the gradient of a call's result, or of all its results, end unused without a warning."""
    several: list[Any] = list(g) if isinstance(g, list) else [g]
    for part in several:
        if isinstance(part, Call):
            part.silence()


def _has_no_elements(g: Any) -> bool:
    """Return whether the gradient of a call's result, or of all its results, has no elements."""
    if not isinstance(g, list):
        return 0 in g.shape
    parts: list[Any] = [part for part in g if part is not None]
    return all(0 in part.shape for part in parts)


def _is_empty(operand: Any) -> bool:
    """Return whether an operand with one layout has no elements."""
    layouts = operand.spec if isinstance(operand, AccelRef) else operand.layouts
    return isinstance(layouts, ArraySpec) and 0 in layouts.shape


def as_operand(slope: Any, operand: Any) -> Any:
    """Return a gradient with the shape and dtype of its operand, or of the operand's layout."""
    if slope.shape != operand.shape:
        slope = summed_to(slope, operand.shape)
    dtype = operand.dtype
    if slope.dtype != dtype:
        if slope.dtype.kind == "complex" and dtype.kind != "complex":
            slope = arrays.real(slope)
        if slope.dtype != dtype:
            slope = slope.cast(dtype)
    return slope


def _add_slopes(slopes: dict[int, Any], makers: Sequence[Rule], calls: list[Any]) -> None:
    """Make gradients, and add them to the gradients that their operands already have."""
    for _, make in makers:
        if isinstance(make, OneOfSeveral):
            make.note_request()
    for operand, make in makers:
        slope = make()
        if isinstance(slope, list):
            _add_parts(slopes, operand, dict(enumerate(slope)), calls)
        elif slope is not None:
            slope = as_operand(slope, operand)
            total = slopes.get(id(operand))
            calls.append(slope if total is None else total + slope)
            slopes[id(operand)] = calls[-1]


def _add_parts(slopes: dict[int, Any], call: Any, gradients: Mapping[int, Any], calls: list[Any]) -> None:
    """Add gradients for some results of a call."""
    parts = slopes.setdefault(id(call), [None] * len(call))
    for index, g in gradients.items():
        if g is not None:
            slope = as_operand(g, call.layouts[index])
            calls.append(slope if parts[index] is None else parts[index] + slope)
            parts[index] = calls[-1]


def part_of(call: Any) -> Any:
    """Return the call with several results that a call is a part of; None for other calls."""
    if call.function.name != "AccelRef.__getitem__":
        return None
    # This also finds the layout of its operand.
    assert call.spec is not None
    of: Any = call.args[0]
    return None if isinstance(of.layouts, ArraySpec) else of


def _left_out(call: Any, operands: Sequence[int]) -> NotSupportedError:
    """Return the error for a call with operands that its rule has no gradient for."""
    name = call.function.name
    args = named_args(call).items() if not name.startswith("AccelRef.") else ()
    if any(parameter == "out" and id(argument) in operands for parameter, argument in args):
        return refuse(name, "it writes to an array that the value depends on; leave out= away")
    names = ", ".join(parameter for parameter, argument in args if id(argument) in operands)
    return NotSupportedError(f"{name} has no gradient by {names or 'an argument'}; {ADVICE}", operation=name)


def _order(value: Any, leaves: Sequence[Any]) -> tuple[list[Any], set[int], bool]:
    """Return the calls that depend on leaves, in order; all their ids; and whether numbers may be complex."""
    depends, order = set(map(id, leaves)), list[Any]()
    if id(value) in depends:
        return order, depends, False
    chain = Chain(value, is_spent=False, ends=list(depends))
    while chain.has_expansions:
        _compose(chain.steps)
        chain = Chain(value, is_spent=False, ends=list(depends))
    # Comprehensions make no calls of their own.
    dtypes = [ref.spec.dtype for ref in chain.refs]
    is_complex = DType.complex64 in dtypes or DType.complex128 in dtypes
    is_complex = is_complex or "c" in [array.dtype.kind for array in chain.hosts]
    for call in chain.steps:
        name, arguments = call.function.name, arguments_of(call)
        is_complex = (
            is_complex or f"{name}.".startswith(_COMPLEX) or not _NUMBERS.isdisjoint(map(type, arguments))
        )
        is_smooth = not depends.isdisjoint(map(id, arguments)) and not _is_step(call)
        # Some of several results may be integers.
        if is_smooth and (part_of(call) is None or is_operand(call)):
            depends.add(id(call))
            order.append(call)
    return order, depends, is_complex


def _compose(steps: Sequence[Any]) -> None:
    """Compose calls now instead of when they are recorded, because their compositions have gradients."""
    for step in steps:
        if step.function.expand is not None:
            composed = step.function.expand(*step.args, **step.named or {})
            # The call itself warns if it is never awaited.
            composed.silence()
            step.function, step.args, step.named = _COMPOSED, (composed,), None


def _of_composed(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], partial(itself, g)


def _is_step(call: Any) -> bool:
    """Return whether small changes of its arguments do not change the result of a call."""
    name = call.function.name
    # The sign of a complex number is its direction.
    return name in STEP_NAMES and not (name == "arrays.sign" and call.dtype.kind == "complex")


def _gradients(call: Any, g: Any, *, is_exact: bool) -> Iterator[Rule]:
    """Return the arguments of a call with their gradients, by the gradient of its result."""
    name = call.function.name
    rule = rule_of(call.function) or call.function.rule
    if rule is not None:
        if is_exact and "." in name and name in RULES and name not in COMPLEX and _has_complex(call, g):
            raise refuse(name, "its rule is for real numbers, and these are complex")
        return rule(call, g)
    if name in REASONS:
        raise refuse(name, REASONS[name])
    slopes = slopes_of(call, g, is_exact=is_exact)
    if slopes is None:
        slopes = next(filter(None, (make(call, g) for make in KINDS)), None)
    if slopes is None:
        raise refuse(name, "no rule is defined for it")
    return slopes


def _has_complex(call: Any, g: Any) -> bool:
    """Return whether a call reads complex numbers, or makes some."""
    slopes: list[Any] = list(g) if isinstance(g, list) else [g]
    kinds = [slope.dtype.kind for slope in slopes if slope is not None]
    for argument in arguments_of(call):
        if type(argument) is complex:
            return True
        dtype: Any = getattr(argument, "dtype", None)
        if dtype is not None:
            kinds.append(dtype.kind)
    return not {"complex", "c"}.isdisjoint(kinds)


@memoized
def rule_of(function: ArrayFunction) -> Make | None:
    """Return the rule of a public function, but not for a private expression with its name."""
    rule = RULES.get(function.name)
    return rule if rule is None or is_public(function) else None


def is_public(function: ArrayFunction) -> bool:
    """Return whether a function is the public one with its name, or there is no other one."""
    asked = _asked_of(function.name)
    return asked is None or asked is function


def _asked_of(name: str) -> ArrayFunction | None:
    """Return the public function with a name, as its calls use it; None if there is none."""
    room, _, base = name.partition(".")
    if not base or room == "AccelRef":
        return None
    # Its module has made it, and a program's function has another room.
    public = getattr(sys.modules.get(f"trio_accel.{room}"), base, None)
    return getattr(public, "asked", None)


KINDS: list[Callable[[Any, Any], Iterator[Rule] | None]] = []
"""Rules of kinds of functions, which return None for others: `_reductions` adds its own."""
REASONS: dict[str, str] = {}
"""The functions without a gradient, and why; `_words` adds them."""
STEP_NAMES: set[str] = set()
"""The functions whose results do not change with small changes of their arguments; `_words` adds them."""


def pulled(f: Callable[..., Any], operands: Sequence[Any], g: Any) -> list[Any]:
    """Return the gradients of operands through a composition of calls with the same result as another call.

    Args:
        f: Returns a call of the operands; for several results a call of `gather`.
        operands: The operands.
        g: The gradient of the result; a list for several results.
    """
    # Each place has a leaf of its own, because a leaf that two places shared would get the total of both, and
    # the caller adds one gradient for each place.
    leaves = [arrays.reshape(operand, operand.shape) for operand in operands]
    for leaf in leaves:
        leaf.silence()  # in advance, because `f` may refuse
    value = f(*leaves)
    # Only a part of it may be needed.
    value.silence()
    is_exact = any(leaf.dtype.kind == "complex" for leaf in leaves)
    calls: list[Any] = []
    slopes = backward(value, leaves, g, calls, is_exact=is_exact)
    # A caller may only need the gradients of some operands.
    for slope in (*slopes, *calls):
        if isinstance(slope, Call):
            slope.silence()
    return slopes


PULLED.append(pulled)


def _gathered(call: Any, g: Any) -> Iterator[Rule]:
    for operand, slope in zip(call.args, g, strict=True):
        yield operand, partial(itself, slope)


def itself(slope: Any) -> Any:
    """Return a known gradient."""
    return slope


RULES["gather"] = _gathered
_COMPOSED = ArrayFunction("gradients.composed", itself, "value", rule=_of_composed)


@functools.cache
def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    room, _, base = name.partition(".")
    return inspect.signature(getattr(import_module(f"trio_accel.{room}"), base)).parameters


def bound(call: Any, like: Any = None) -> dict[str, Any]:
    """Return the arguments of a call by their names, with their defaults, but for `out`.

    Host arrays among the operands are put on the device of `like`, which is the call itself by default.
    """
    parameters = parameters_of(call.function.name)
    args = {name: parameter.default for name, parameter in parameters.items()} | named_args(call)
    args.pop("out", None)
    hosts = {name: value for name, value in args.items() if _has_host(value)}
    if not hosts:
        return args
    names = operand_names(call.function.name)
    # The call itself is on its device; an operand may be a call of host arrays.
    device_array = call if like is None else like
    return args | {name: put_like(value, device_array) for name, value in hosts.items() if name in names}


def hosts_on_device(call: Any, operands: Sequence[Any]) -> list[Any]:
    """Return operands of a call, with host arrays put on its device, because rules compose calls of them."""
    return [put_like(operand, call) for operand in operands]


async def _placed(host: Any, like: AccelRef | Sequence[AccelRef]) -> AccelRef:
    if isinstance(host, AccelRef):
        # A recorded chain has replaced the host array by a placeholder.
        return host
    ref = like if isinstance(like, AccelRef) else like[0]
    return await ref.device.put(host)


_PLACED = ArrayFunction("gradients.placed", _placed, "awaitable", takes_hosts=True)


def _has_host(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_host, value))
    return isinstance(value, np.ndarray)


def put_like(value: Any, like: Any) -> Any:
    """Put a host array, or the host arrays of a sequence, on the device of another array or call."""
    if isinstance(value, (list, tuple)):
        return type(value)([put_like(item, like) for item in value])
    if not isinstance(value, np.ndarray):
        return value
    placed: Call[AccelRef] = Call(_PLACED, (value, like))
    placed.silence()
    return placed


@functools.cache
def operand_names(name: str) -> frozenset[str]:
    """Return the parameters of a function that are operands by their annotations."""
    return frozenset(
        key
        for key, parameter in parameters_of(name).items()
        if _OPERAND.search(str(parameter.annotation)) is not None
    )


def _reads_hosts(call: Any) -> bool:
    """Return whether a rule may read the elements of a call's host arrays.

    An operand by its annotation is placed on the device before a rule sees it, and expressions read only the
    dtypes of their arguments.
    """
    function: ArrayFunction = call.function
    if function.takes_hosts or not any(map(_has_host, (*call.args, *(call.named or {}).values()))):
        return False
    name, asked = function.name, _asked_of(function.name)
    if asked is None or asked is not function:
        return function.how != "message"
    if len(call.args) > len(parameters_of(name)):
        return True
    names = operand_names(name)
    return any(_has_host(value) and name not in names for name, value in named_args(call).items())


READS_HOSTS.append(_reads_hosts)
_OPERAND = re.compile(r"\b(Operand|AccelRef|ExpressionArgument)\b")


def named_args(call: Any) -> dict[str, Any]:
    """Return the given arguments of a call by their names."""
    # A declared operation has all of its arguments by position.
    by_place = zip(parameters_of(call.function.name), call.args, strict=False) if call.args else ()
    return dict(by_place) | dict(call.named or {})


def is_operand(argument: Any) -> bool:
    """Return whether an argument may have a gradient."""
    return isinstance(argument, (Call, AccelRef)) and argument.dtype.kind in ("float", "complex")
