"""Calls for one example, composed again for a batch of examples.

`Batch` visits the calls of a function for one example in order, and composes for each a call that computes
all examples. The batch axis is the first. The record of the function determines the new call (`rule_of`):

* ``"rule"``: a rule of `_batch_rules`, for views and for functions with an insufficient record.
* ``"elements"``: an expression of each element. Operands with fewer axes get axes of length 1 after the batch
  axis, so that they broadcast as they did for one example.
* ``"rows"``: an expression along axes. The axes of the call move by one.
* ``"shapes"``: an operation with a line of shapes. The batch axis becomes a leading axis.
* ``"axes"``: a function of one array with `axis` or `axes`, which move by one.
* ``"composed"``: a function with a gradient that follows from its body, or from a composition with the same
  value. The calls of these are visited instead.

A call that depends on no example stays as it is, and broadcasts. `_check` compares each result with the
shape and the dtype of the example's result, and refuses the function by name if they differ, so that a rule
cannot return axes in another order. A refusal is raised once a rule needs the result.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from .. import arrays as _arrays
from ..backends.base import ArraySpec, NotSupportedError
from ..backends.base.contract.ops import Shapes
from ..devices import AccelRef, ArrayFunction, Call, Chain, arguments_of, gather
from ..devices.operations._chain import GATHER, device_of_call, replaced
from ..expressions import DECLARED, Reduction
from ._backward import REASONS, RULES, bound, named_args, operand_names, parameters_of, put_like
from ._bodies import BODIES, value_by_body
from ._elementwise import defaults_of, elementwise_of
from ._memo import memoized

__all__ = [
    "BATCH_RULES",
    "Batch",
    "BatchRule",
    "Unbatched",
    "along_axes",
    "by_shapes",
    "composed",
    "kind_of",
    "layouts_of",
    "moved_axes",
    "public_of",
    "refuse_batch",
    "remade",
    "shifted",
    "value_of",
]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays

BatchRule: TypeAlias = "Callable[[Batch, Any], Any]"
"""Composes a call for a batch: returns a call, a list of calls for several results, or `Unbatched`."""

BATCH_RULES: dict[str, BatchRule] = {}
"""Rules by the names of functions: the module of rules adds them."""

# Functions of one array along an axis that return other objects than arrays of the device.
_OF_OTHER_RESULTS = frozenset({"signal.cubic_spline", "signal.stft", "signal.welch"})
# The compositions of these functions have the same gradient, but not the same value.
_OF_OTHER_VALUES = frozenset({"ndimage.bilateral_filter"})
# These begin the names of functions, and are not packages.
_NOT_PACKAGES = ("AccelRef", "gradients")
# The rules of these functions do not need all operands.
_LENIENT = frozenset({"gradients.added_along", "gradients.added_at", "gradients.placed"})
_ADVICE = "call it outside of vmap, with an axis for the batch"


@attrs.frozen(eq=False)
class Unbatched:
    """A result that all examples share.

    Attributes:
        value: The result.
    """

    value: Any


class Batch:
    """The calls of a function for one example, and the calls for the batch.

    Args:
        size: The number of examples.
        like: An array on the device of the batch.

    Attributes:
        size: The number of examples.
        like: An array on the device of the batch.
    """

    def __init__(self, size: int, like: Any) -> None:
        self.size: int = size
        self.like: Any = like
        self._batched: dict[int, Any] = {}
        self._unbatched: dict[int, Any] = {}
        self._refused: dict[int, NotSupportedError] = {}
        # Calls are found by `id`, so they must stay alive.
        self._visited: list[Any] = []

    def add(self, example: Any, batched: Any) -> None:
        """Set the value of a call for the batch."""
        self._visited.append(example)
        self._set(example, batched)

    def _set(self, example: Any, batched: Any) -> None:
        self._batched[id(example)] = batched
        for part in batched if isinstance(batched, (list, tuple)) else (batched,):
            if isinstance(part, Call):
                # A later call may not read it.
                part.silence()

    def has(self, operand: Any) -> bool:
        """Return whether an operand differs between examples, or an operand of a sequence."""
        if isinstance(operand, (list, tuple)):
            return any(map(self.has, operand))
        return id(operand) in self._batched or id(operand) in self._refused

    def value(self, operand: Any) -> Any:
        """Return an operand for the batch. If it is the same for all examples, it lacks the batch axis.

        Raises:
            NotSupportedError: A function that makes it is refused.
        """
        if id(operand) in self._refused:
            raise self._refused[id(operand)]
        return self._batched.get(id(operand), self._unbatched.get(id(operand), operand))

    def aligned(self, operand: Any, ndim: int) -> Any:
        """Return an operand that broadcasts in the batch as it broadcasts to `ndim` axes in an example."""
        if isinstance(operand, (list, tuple)):
            return type(operand)([self.aligned(item, ndim) for item in operand])
        value = self.value(operand)
        if not self.has(operand) or len(operand.shape) >= ndim:
            return value
        ones = (1,) * (ndim - len(operand.shape))
        return _silenced(arrays.reshape(value, (self.size, *ones, *operand.shape)))

    def spread(self, operand: Any, ndim: int = 0) -> Any:
        """Return an operand with the batch axis, and at least `ndim` axes after it."""
        if isinstance(operand, (list, tuple)):
            return type(operand)([self.spread(item, ndim) for item in operand])
        if self.has(operand):
            return self.aligned(operand, ndim)
        value = self.value(operand)
        if not isinstance(value, (AccelRef, Call, np.ndarray)):
            return value
        shape = (*(1,) * (ndim - len(value.shape)), *value.shape)
        value = put_like(value, self.like)
        wide = value if len(value.shape) == len(shape) else arrays.reshape(value, shape)
        return _silenced(arrays.broadcast_to(wide, (self.size, *shape)))

    def args(self, step: Any) -> dict[str, Any]:
        """Return a call's arguments by name, with host operands on the device."""
        return bound(step, self.like)

    def run(self, call: Any) -> Any:
        """Compose a call for the batch, and return it; several results may be a list."""
        if isinstance(call, Call):
            # It is not awaited itself.
            call.silence()
        ends = [*self._batched, *self._unbatched, *self._refused]
        for step in Chain(call, is_spent=False, ends=ends).steps:
            self._visited.append(step)
            operands = arguments_of(step)
            if self.has(operands):
                self._visit(step)
            elif any(id(operand) in self._unbatched for operand in operands):
                args, named = replaced(step, self._unbatched)
                self._unbatched[id(step)] = _silenced(Call(step.function, args, named or None))
        return self.value(call)

    def run_as(self, step: Any, call: Any) -> Any:
        """Compose a call in the place of another, whose results have less precise dtypes at times."""
        composed, layouts = self.run(call), layouts_of(step)
        if isinstance(layouts, ArraySpec):
            return _as_dtype(composed, layouts.dtype)
        return [_as_dtype(composed[k], layout.dtype) for k, layout in enumerate(layouts)]

    def _visit(self, step: Any) -> None:
        try:
            result = self._result(step)
            if isinstance(result, Unbatched):
                self._unbatched[id(step)] = result.value
                return
            self._set(step, result)
            if step.function is not GATHER:
                self._check(step, result)
        except NotSupportedError as error:
            # It is raised if the result is needed.
            self._refused[id(step)] = error

    def _result(self, step: Any) -> Any:
        function = step.function
        if function is GATHER:
            return [self.spread(operand) for operand in step.args]
        if function.name == "AccelRef.__getitem__" and not isinstance(layouts_of(step.args[0]), ArraySpec):
            return self.value(step.args[0])[step.args[1]]
        if function.expand is not None:
            return self.run(function.expand(*step.args, **step.named or {}))
        entry = rule_of(function)
        if entry is None:
            reason = REASONS.get(function.name, "its record does not say how it treats further axes")
            raise refuse_batch(function.name, reason)
        kind, rule = entry
        arguments = (
            step.named or {} if kind in ("elements", "rows") or not _room_of(function) else named_args(step)
        )
        for key in ("out", "output") if function.name.startswith("ndimage.") else ("out",):
            if isinstance(arguments.get(key), (AccelRef, Call)):
                raise refuse_batch(function.name, "it writes to an array", f"leave {key}= away")
        if function.name not in _LENIENT:
            for operand in arguments_of(step):
                # Raise the refusal of an operand before the rule composes calls.
                self.value(operand)
        return rule(self, step)

    def _check(self, step: Any, result: Any) -> None:
        """Refuse a result with other shapes or dtypes than the examples' results have together."""
        layouts = layouts_of(step)
        pairs = [(layouts, result)] if isinstance(layouts, ArraySpec) else zip(layouts, result, strict=True)
        for layout, part in pairs:
            spec = layouts_of(part)
            expected = (self.size, *layout.shape), layout.dtype
            if not isinstance(spec, ArraySpec) or (tuple(spec.shape), spec.dtype) != expected:
                raise refuse_batch(step.function.name, "it does not treat a leading axis as a batch")


def _silenced(call: Any) -> Any:
    """Return a call that does not warn, because the rule that asked for it may be refused."""
    if isinstance(call, Call):
        call.silence()
    return call


def refuse_batch(name: str, reason: str, advice: str = _ADVICE) -> NotSupportedError:
    """Return the error for a function without a batch."""
    return NotSupportedError(f"vmap: {name} is not supported, because {reason}; {advice}", operation=name)


def layouts_of(operand: Any) -> Any:
    """Return the layout of an array or call; a sequence for several results."""
    if not isinstance(operand, Call):
        return operand.spec if isinstance(operand, AccelRef) else [layouts_of(part) for part in operand]
    if operand.layouts is None:
        device_of_call(operand).look_ahead(operand)
    return operand.layouts


def _as_dtype(part: Any, dtype: Any) -> Any:
    return part.cast(dtype) if part.dtype != dtype and part.dtype.kind == dtype.kind else part


def shifted(axis: int) -> int:
    """Return an axis of an example as an axis of the batch. A negative one counts from the end of both."""
    number = operator.index(axis)
    return number + 1 if number >= 0 else number


def public_of(step: Any) -> Any:
    """Return the public function of a call."""
    room, _, base = step.function.name.partition(".")
    return _public(room, base)


def remade(step: Any, args: Mapping[str, Any]) -> Any:
    """Call a public function again, with other arguments by name."""
    parameters = parameters_of(step.function.name)
    named = {key: args[key] for key in args if parameters[key].kind is inspect.Parameter.KEYWORD_ONLY}
    return public_of(step)(*[value for key, value in args.items() if key not in named], **named)


def kind_of(function: ArrayFunction) -> str:
    """Return the word for a function's rule, as in the description of this module; empty if there is none."""
    entry = rule_of(function)
    return "" if entry is None else entry[0]


@memoized
def rule_of(function: ArrayFunction) -> tuple[str, BatchRule] | None:
    """Return the word for a function's rule, and the rule."""
    name, room = function.name, _room_of(function)
    key = name.partition("(")[0]
    is_public = room or "." not in key or name.startswith(_NOT_PACKAGES)
    # A name of the program may follow in parentheses.
    own_rule = BATCH_RULES.get(key) if is_public else None
    if own_rule is not None:
        return "rule", own_rule
    elementwise = elementwise_of(function)
    if elementwise is not None:
        parsed = elementwise.elementwise.parsed
        return None if parsed.has_index else ("elements", partial(_elements, frozenset(parsed.loads)))
    rows = _rows_of(function)
    if rows is not None:
        parsed = rows[0].parsed
        return None if parsed.has_index or parsed.loads else ("rows", partial(_along_rows, *rows))
    return _rule_by_signature(name, room) if room else None


def _room_of(function: ArrayFunction) -> str:
    """Return the package of a public function; empty for others, such as private expressions."""
    room, _, base = function.name.partition(".")
    if not base or not room.isidentifier() or room in _NOT_PACKAGES:
        return ""
    public = _public(room, base)
    return room if public is not None and getattr(public, "asked", function) is function else ""


def _public(room: str, base: str) -> Any:
    try:
        return getattr(import_module(f"trio_accel.{room}"), base, None)
    except ModuleNotFoundError:
        # An operation of the program.
        return None


def _rule_by_signature(name: str, room: str) -> tuple[str, BatchRule] | None:
    declaration = getattr(_public(room, name.partition(".")[2]), "declaration", None)
    if declaration is not None and any(map(_has_stacks, declaration.variants.values())):
        return "shapes", partial(_declared, declaration)
    if name not in _OF_OTHER_RESULTS and (parameter := _axis_parameter(name)):
        return "axes", partial(along_axes, parameter)
    value = value_of(name)
    return None if value is None else ("composed", partial(composed, value))


def value_of(name: str) -> Callable[[Any, Any], Any] | None:
    """Return a function that composes the value of a public function's call; None without one."""
    if name in _OF_OTHER_RESULTS:
        return None
    if name in BODIES:
        return value_by_body
    value = None if name in _OF_OTHER_VALUES else getattr(RULES.get(name), "value", None)
    return cast("Callable[[Any, Any], Any] | None", value)


def composed(value: Callable[[Any, Any], Any], batch: Batch, step: Any) -> Any:
    try:
        call = value(step, batch.like)
    except NotSupportedError as error:
        raise refuse_batch(step.function.name, "its gradient does not take these arguments") from error
    try:
        return batch.run_as(step, call)
    except NotSupportedError as error:
        # The name of an inner operation would tell little.
        inner = error.operation or "an operation"
        raise refuse_batch(step.function.name, f"it asks for {inner}, which does not take a batch") from error


# Expressions.


def _elements(loaded: frozenset[str], batch: Batch, step: Any) -> Any:
    """Compute an expression of each element. Loaded arrays must be the same for all examples."""
    expression = elementwise_of(step.function)
    assert expression is not None  # `rule_of` has found it
    arguments = dict(zip(expression.elementwise.inputs, expression.arguments(step), strict=True))
    if any(batch.has(arguments[name]) for name in loaded):
        raise refuse_batch(step.function.name, "it loads elements of an array that differs between examples")
    layouts = layouts_of(step)
    ndim = len((layouts if isinstance(layouts, ArraySpec) else layouts[0]).shape)
    args = tuple([batch.aligned(argument, ndim) for argument in step.args])
    named = {key: batch.aligned(argument, ndim) for key, argument in (step.named or {}).items()}
    if named.get("shape") is not None:
        named["shape"] = (batch.size, *np.atleast_1d(named["shape"]).tolist())
    return Call(step.function, args, named or None)


def _rows_of(function: ArrayFunction) -> tuple[Reduction, Mapping[str, Any], dict[str, Any]] | None:
    """Return the expression along axes of a function, its parameters, and their default values."""
    declared = DECLARED.get(function.number)
    if declared is None:
        reduction = getattr(function.make, "__self__", None)
        defaults = {"axis": None, "keepdims": False}
        return (reduction, {}, defaults) if isinstance(reduction, Reduction) else None
    reduction = getattr(declared, "expression", None)
    if not isinstance(reduction, Reduction):
        return None
    return reduction, inspect.signature(declared).parameters, defaults_of(declared)


def _along_rows(
    reduction: Reduction,
    parameters: Mapping[str, inspect.Parameter],
    defaults: dict[str, Any],
    batch: Batch,
    step: Any,
) -> Any:
    """Compute an expression along the same axes of all examples."""
    inputs = reduction.inputs
    args = defaults | dict(zip(parameters or inputs, step.args, strict=False)) | dict(step.named or {})
    args.pop("out", None)
    ndim = max(len(np.shape(args[name])) for name in inputs)
    is_flat = ndim == 0 or (args["axis"] is None and reduction.parsed.is_index)
    # A 0-d example becomes a row of one element. An index counts the elements in C order.
    args |= {name: batch.aligned(args[name], max(ndim, 1)) for name in inputs}
    if is_flat:
        args |= {name: _flat(args[name]) for name in inputs}
        args |= {"axis": 1} | ({"keepdims": False} if "keepdims" in args else {})
    else:
        args["axis"] = moved_axes(args["axis"], ndim)
    positional = [
        name
        for name in inputs
        if not parameters or parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    named = {name: value for name, value in args.items() if name not in positional}
    result: Any = Call(step.function, tuple([args[name] for name in positional]), named)
    if not is_flat:
        return result
    layouts = layouts_of(step)
    if isinstance(layouts, ArraySpec):
        return arrays.reshape(result, (batch.size, *layouts.shape))
    return gather(
        *[arrays.reshape(result[k], (batch.size, *layout.shape)) for k, layout in enumerate(layouts)]
    )


def _flat(operand: Any) -> Any:
    """Return the examples of an operand as rows."""
    shape = np.shape(operand)
    return arrays.reshape(operand, (shape[0], math.prod(shape[1:]))) if len(shape) > 2 else operand


def moved_axes(axis: Any, ndim: int) -> Any:
    """Return an axis, or several, as axes of the batch; None means all axes of an example."""
    if axis is None:
        return tuple(range(1, ndim + 1))
    return shifted(axis) if np.ndim(axis) == 0 else tuple(map(shifted, axis))


# Operations with lines of shapes.


def _has_stacks(line: Shapes) -> bool:
    """Return whether an array of a line has leading axes, and no array is changed in place."""
    return not line.updated and any(item.stack in ("...", "s...") for item in line.inputs)


def _declared(declaration: Any, batch: Batch, step: Any) -> Any:
    args = named_args(step)
    return by_shapes(declaration.variants[tuple([args[name] for name in declaration.by])], batch, step)


def by_shapes(line: Shapes, batch: Batch, step: Any) -> Any:
    """Put the batch axis before the leading axes of arrays.

    An array that lacks an optional axis gets one of length 1, which results lose again. The batch axis would
    be taken for a leading or an optional axis otherwise.

    Args:
        line: The shapes of the arrays, and of the results.
        batch: The batch.
        step: The call.
    """
    args, name = batch.args(step), step.function.name
    items = {item.name: item for item in line.inputs if args[item.name] is not None}
    stacked = [key for key, item in items.items() if item.stack]
    if any(batch.has(value) for key, value in args.items() if key not in stacked):
        raise refuse_batch(name, f"only {', '.join(stacked)} may differ between examples")
    counts = {key: len(args[key].shape) for key in items}
    is_flat = any(item.optional and counts[key] < len(item.dims) for key, item in items.items())
    missing = {key: item.optional if is_flat else 0 for key, item in items.items()}
    stacks = {key: counts[key] + missing[key] - len(item.dims) for key, item in items.items()}
    deepest = max([stacks[key] for key, item in items.items() if item.stack == "..."], default=0)
    for key, item in items.items():
        if item.stack == "s..." or batch.has(args[key]):
            args[key] = batch.spread(args[key], counts[key] + max(deepest - stacks[key], 0))
        else:
            args[key] = batch.value(args[key])
        if missing[key]:
            args[key] = arrays.reshape(args[key], (*args[key].shape, *(1,) * missing[key]))
    result = remade(step, args)
    if not is_flat:
        return result
    is_single = len(line.outputs) == 1
    parts = [result] if is_single else [result[k] for k in range(len(line.outputs))]
    parts = [
        arrays.reshape(part, tuple(part.shape)[: -item.optional]) if item.optional else part
        for item, part in zip(line.outputs, parts, strict=True)
    ]
    return parts[0] if is_single else parts


# Functions with axes.


def _axis_parameter(name: str) -> str:
    """Return the parameter with the axes, if a function takes a single array; otherwise an empty string."""
    parameters = parameters_of(name)
    axis, axes = parameters.get("axis"), parameters.get("axes")
    has_sequence = any("Sequence[Operand]" in str(note.annotation) for note in parameters.values())
    if has_sequence or len(operand_names(name) - {"out"}) != 1:
        return ""
    if axis is not None and (
        type(axis.default) is int or (axis.default is None and "keepdims" in parameters)
    ):
        return "axis"
    return "axes" if axes is not None and isinstance(axes.default, (tuple, type(None))) else ""


def along_axes(parameter: str, batch: Batch, step: Any) -> Any:
    """Call a function again, with each axis moved by one; None means all axes of an example."""
    args = batch.args(step)
    (name,) = operand_names(step.function.name) - {"out"}
    if any(batch.has(value) for key, value in args.items() if key != name):
        raise refuse_batch(step.function.name, f"only {name} may differ between examples")
    ndim, axes = len(args[name].shape), args[parameter]
    args[name] = batch.aligned(args[name], 1)
    if axes is None and args.get("s") is not None:
        # A transform along as many of the last axes.
        args[parameter] = tuple(range(-len(np.atleast_1d(args["s"])), 0))
    elif axes is None and ndim == 0:
        args |= {parameter: 1} | ({"keepdims": False} if "keepdims" in args else {})
    else:
        args[parameter] = moved_axes(axes, ndim)
    return remade(step, args)
