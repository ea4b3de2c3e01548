"""Functions over names of the array API standard, computed in one launch (D147).

A function is called with its operands, and makes calls of them. These are written as statements of an
expression of rows: the texts that functions are declared by, with other names. What each call makes is found
ahead, by its own plan.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from ..actors import binder
from ..backends.base import DType, NotSupportedError
from ..backends.base import expressions as base
from ..backends.base.contract.ops import ArraySpec, common_shape, contiguous_strides
from ..backends.base.expressions import COUNT, RowExpression
from ..devices import AccelRef, Call, Device, device_of
from ..devices.operations._calls import METHODS, Chain, Function, Operators, SpentCall
from ..expressions import (
    DECLARED,
    ComputeReduction,
    Elementwise,
    Out,
    Reduction,
    Rowwise,
    argument_of,
    reduced,
)
from ._elementwise import clip, clips
from ._namespace import Namespace

__all__ = ["fused"]

_CLIP: Function = cast("Any", clip).asked
DECLARED[_CLIP] = clip
_COPY = METHODS["copy"]
_OPTIONS = ("axis", "keepdims", "dtype")
_WIDEST = DType.float64, DType.complex128
# Names that an argument has not in a text; nor one with "_" in it, which the names of other values have.
_TAKEN = {*base.FUNCTIONS, *base.CONSTANTS, *base.REDUCTIONS, COUNT, "axis", "i", "keepdims", "out", "shape"}
_MOST = 256
_ADVICE = "leave ta.fused off: calls compose, and are one request all the same"

_Launch: TypeAlias = tuple[Any, Mapping[str, Any]]
"""The function that makes the message, and its options."""
_Step: TypeAlias = tuple[Function, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""A function, its arguments by their places and by name. A whole number is the place of a value, and others
are in a tuple: the argument and its type."""

_IS_INSIDE = ContextVar("_IS_INSIDE", default=False)
"""Whether a fused function runs: those that it calls are a part of it."""


def _shape_of(given: Any) -> tuple[int, ...]:
    return getattr(given, "shape", ())


def _is_array(given: object) -> bool:
    return isinstance(given, (Operators, np.ndarray))


def _is_reduction(function: Function) -> bool:
    return hasattr(DECLARED.get(function), "text")


@functools.cache
def _weak(function: Function) -> frozenset[int]:
    """Find the places of parameters whose numbers never widen the result."""
    parameters = inspect.signature(DECLARED.get(function, _is_array)).parameters.values()
    return frozenset([place for place, each in enumerate(parameters) if each.annotation == "float"])


class _Made(Chain):
    """The calls that a function has made, up to its operands.

    Args:
        operation: Name of the function.
        result: The last call.
        given: Names of the function's arguments that are arrays or calls, by their identities.

    Attributes:
        key: A `_Step` for each call.
        operands: Arrays, numbers, and calls from outside of the function.
        names: Names of the operands in a text.

    Raises:
        TypeError: A call has `out`.
        NotSupportedError: A call is no expression.
    """

    __slots__ = ("_given", "_operation", "_places", "names", "operands")

    def __init__(self, operation: str, result: Call[Any], given: Mapping[int, str]) -> None:
        self.operands: list[Any] = []
        self.names: list[str] = []
        self._operation, self._given = operation, given
        # The places of calls count from 0, those of operands from -1 down.
        self._places: dict[int, int] = {}
        super().__init__(result, ends=given)

    def _read(self, places: Mapping[int, int], handed: object = None) -> tuple[_Step, ...]:
        steps: list[_Step] = []
        views: list[SpentCall[Any]] = []
        for step in self.steps:
            function, named = step.function, step.named or {}
            if function.how == "value" and not any(self._places.get(id(each), -1) >= 0 for each in step.args):
                views.append(step)
                continue
            if function not in DECLARED and function is not _COPY:
                raise NotSupportedError(
                    f"{self._operation}: {function.name} is no function of each element, reduction or "
                    f"normalization. Call it before or behind the function, or {_ADVICE}"
                )
            if named.get("out") is not None:
                raise TypeError(
                    f"{self._operation}: out is an argument of the function, and of no step of it"
                )
            weak, is_handed = _weak(function), not _is_reduction(function)
            told = tuple([self._told(each, is_handed, place in weak) for place, each in enumerate(step.args)])
            options = tuple([(name, self._told(each)) for name, each in named.items()])
            self._places[id(step)] = len(steps)
            steps.append((function, told, options))
        for view in views:
            # It is an operand, and is made before the launch.
            view.__class__ = Call
        return tuple(steps)

    def _told(self, value: Any, is_handed: bool = False, is_weak: bool = False) -> Any:
        """Return the place of a value, or the value and its type in a tuple, so that 1 differs from True."""
        if _is_array(value):
            if id(value) not in self._places:
                self._places[id(value)] = self._operand(value, self._given.get(id(value)))
            return self._places[id(value)]
        given: Any = value
        if isinstance(value, complex) or (is_handed and isinstance(value, (int, float, np.generic))):
            argument_of(self._operation, "a number", given)
            return self._operand(given.item() if is_weak and isinstance(value, np.generic) else given)
        known = tuple(given) if isinstance(value, list) else given
        return known, repr(given) if isinstance(value, float) else type(given)

    def _operand(self, value: Any, name: str | None = None) -> int:
        self.operands.append(value)
        self.names.append(name or f"_a{len(self.operands)}")
        return -len(self.operands)


@attrs.frozen
class _Value:
    """A value of a text.

    Attributes:
        text: Its name there.
        spec: Its dtype and shape; None for a Python number.
        is_bare: Whether it was reduced, and has not the axes any more.
    """

    text: str
    spec: ArraySpec | None
    is_bare: bool = False


class _Expression:
    """The expression that a fused function becomes.

    Args:
        operation: Name of the function.
        steps: The functions that it calls.
        names: Names of the operands.

    Attributes:
        function: The function, as its calls know it.
    """

    def __init__(self, operation: str, steps: tuple[_Step, ...], names: tuple[str, ...]) -> None:
        self._operation = operation
        self._steps = steps
        self._names = names
        self._known: dict[tuple[Any, ...], _Launch] = {}
        is_reduced = any(_is_reduction(function) for function, _, _ in steps)
        self.function = Function(operation, self._compute, ask=_ask if is_reduced else None)

    def _compute(self, *operands: Any, out: Out = None) -> Any:
        """Make the message."""
        # The axes of one element decide what the shapes broadcast to.
        signature = tuple(
            [
                (argument_of(self._operation, name, each), *[extent == 1 for extent in _shape_of(each)])
                for name, each in zip(self._names, operands, strict=True)
            ]
        )
        known = self._known.get(signature)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            device = device_of(self._operation, *operands)
            writer = _Writer(self._names, operands)
            try:
                known = self._known[signature] = writer.launch(device, self._operation, self._steps)
            except (TypeError, ValueError, NotSupportedError) as error:
                raise type(error)(f"{self._operation}: {error}") from None
        expression, options = known
        return expression.compute(*operands, out=out, **options)


class _Writer:
    """Writes functions as statements.

    Args:
        names: Names of the operands.
        operands: The operands.
    """

    def __init__(self, names: tuple[str, ...], operands: Sequence[Any]) -> None:
        self._names = names
        self._operands = operands
        self._values: dict[int, _Value] = {}
        self._statements: list[str] = []
        # The functions that reduce, the shapes that they reduce, and along which axes.
        self._stages: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def launch(self, device: Device, operation: str, steps: Sequence[_Step]) -> _Launch:
        """Find one launch that does the steps."""
        # The plan of each step finds what it makes, and refuses wrong arguments.
        calls: dict[int, Any] = {}
        for number, (name, each) in enumerate(zip(self._names, self._operands, strict=True), 1):
            calls[-number], spec = each, None
            if hasattr(each, "dtype"):
                dtype = DType.of(each.dtype)
                spec = ArraySpec(0, 0, dtype, each.shape, contiguous_strides(each.shape, dtype.itemsize))
            if _is_array(each):
                calls[-number] = stand_in = Call[Any](_COPY, ())
                stand_in.ahead = spec
            self._values[-number] = _Value(name, spec)

        def given(told: Any) -> Any:
            return calls[told] if isinstance(told, int) else told[0]

        for number, (function, args, named) in enumerate(steps):
            options = {key: given(each) for key, each in named}
            calls[number] = Call[Any](function, tuple(map(given, args)), options)
        device.look_ahead(Chain(calls[len(steps) - 1]))
        for number, step in enumerate(steps):
            self._values[number] = self._written(*step, calls[number].ahead)
        result = self._values[len(steps) - 1]
        try:
            rows = RowExpression.parse("\n".join([*self._statements, f"out = {result.text}"]), self._names)
        except ValueError as error:
            raise NotSupportedError(
                f"too much for one expression: {error}; make several functions of it"
            ) from None
        return self._one(rows, _shape_of(result.spec), operation)

    def _written(self, function: Function, args: tuple[Any, ...], named: Any, spec: ArraySpec) -> _Value:
        """Write the text of a function, with other names."""
        if spec.dtype.value not in base.FUNCTIONS:
            raise NotSupportedError(f"expressions do not compute with {spec.dtype}; cast() does")
        if function is _COPY:
            x = self._values[args[0]]
            return attrs.evolve(x, text=_converted(x, spec.dtype), spec=spec)
        signature = inspect.signature(DECLARED[function])
        given = signature.bind(*args, **dict(named)).arguments
        options, read, texts = dict[str, Any](), dict[str, _Value](), dict[str, str]()
        for key, parameter in signature.parameters.items():
            told = given.get(key, (parameter.default,))
            if isinstance(told, int):
                read[key] = self._values[told]
            elif key in _OPTIONS:
                options[key] = told[0]
            elif told[0] is not None:
                texts[key] = _literal(told[0], is_weak=parameter.annotation == "float")
        is_bare = self._is_bare(function, read)
        text, precision = _text_of(function, read, texts)
        if _is_reduction(function):
            shape = _common(read.values())
            axes = range(len(shape)) if options["axis"] is None else options["axis"]
            axes = tuple(sorted(normalize_axis_tuple(axes, len(shape))))
            for stage in RowExpression.parse(text, (*read, *texts)).stages:
                over = _common([read[key] for key in stage.map.inputs if key in read])
                self._stages.append((function.name, over, axes))
            is_bare = spec.ndim < len(shape)
        # Values are converted to what a function computes in at least, and the result is rounded.
        to = None if options.get("dtype") is None else DType.of(options["dtype"])
        wide: Mapping[str, DType] = {} if precision is None else base.WIDE[precision]
        for key, each in read.items():
            dtype = to or (None if each.spec is None else wide.get(each.spec.dtype.value))
            texts[key] = each.text if dtype is None else _converted(each, dtype)
        assigned = re.findall(r"(\w+) = ", text) or [""]
        result = f"_{len(self._statements)}"
        names = {each: result + each for each in assigned} | {assigned[-1]: result} | texts
        text = re.sub(r"\b[a-z]\w*", lambda each: names.get(each[0], each[0]), text)
        self._statements.append(text if assigned[-1] else f"{result} = {text}")
        return _Value(f"{spec.dtype}({result})" if to or precision else result, spec, is_bare)

    def _is_bare(self, function: Function, read: Mapping[str, _Value]) -> bool:
        """Tell whether values that a function reads were reduced, and have not the axes any more."""
        bare = {each.is_bare for each in read.values() if _shape_of(each.spec)}
        # Without their first axes, arrays broadcast as with them.
        if len(bare) > 1 and any(axes != tuple(range(len(axes))) for _, _, axes in self._stages):
            raise _refusal(
                f"{function.name} takes arrays with and without reduced axes (keepdims=True keeps them)"
            )
        return bare == {True}

    def _one(self, rows: RowExpression, shape: tuple[int, ...], operation: str) -> _Launch:
        """Make one launch of the statements."""
        last = rows.last
        named: dict[str, Any] = {"inputs": self._names, "operation": operation}
        if not self._stages:
            return Elementwise[AccelRef](last.text, **named), {}
        _, over, axes = self._stages[0]
        axis = None if len(axes) == len(over) else axes[0] if len(axes) == 1 else axes
        options = {"axis": axis, "keepdims": len(shape) == len(over)}
        is_alone = all(isinstance(node, base.Name) for _, node in cast("Any", last.statements))
        if len(self._stages) == 1 and is_alone:
            return Reduction(rows.stages[0].map.text, rows.stages[0].name, **named), options
        self._check_alike(last.inputs, shape)
        return Rowwise(rows.text, precision=None, **named), options

    def _check_alike(self, last: Sequence[str], shape: tuple[int, ...]) -> None:
        """Require reductions along the same axes of one shape, and a result of that or of the reduced one."""
        arrays = {
            name: each for name, each in zip(self._names, self._operands, strict=True) if _is_array(each)
        }
        whole = common_shape(*[each.shape for each in arrays.values()])
        first, _, axes = self._stages[0]
        for name, over, others in self._stages:
            if others != axes:
                raise _refusal(f"{first} is along axes {axes}, and {name} along {others}")
            if over != whole:
                told = whole or "no one shape"
                raise _refusal(f"{name} reduces shape {over}, and all arrays together have {told}")
        of_rows = [reduced(whole or (), axes, keepdims=keepdims) for keepdims in (True, False)]
        if shape not in ([whole] if arrays.keys() & {*last} else of_rows):
            raise _refusal(f"the result has shape {shape}, and all arrays together have {whole}")


def _common(values: Iterable[_Value]) -> tuple[int, ...]:
    return common_shape(*[_shape_of(each.spec) for each in values]) or ()


def _text_of(
    function: Function, read: Mapping[str, _Value], more: Mapping[str, str]
) -> tuple[str, str | None]:
    """Return the text of a function, and the least that it computes in."""
    declared: Any = DECLARED[function]
    if not _is_reduction(function):
        bounds = tuple([key for key in ("min", "max") if key in read or key in more])
        made: Elementwise[AccelRef] = clips[bounds] if function is _CLIP else declared.elementwise
        return made.text, made.precision
    is_wide = declared.wide and any(each.spec and each.spec.dtype in _WIDEST for each in read.values())
    return declared.wide if is_wide else declared.text, declared.precision


def _converted(value: _Value, dtype: DType) -> str:
    return value.text if value.spec and value.spec.dtype is dtype else f"{dtype}({value.text})"


def _refusal(why: str) -> NotSupportedError:
    return NotSupportedError(f"it takes several launches, as {why}; {_ADVICE}")


def _literal(value: Any, *, is_weak: bool) -> str:
    """Write a number."""
    given: Any = value
    number = given.item() if isinstance(value, np.generic) else given
    # The text of a subclass may differ, so that of the plain type is written.
    text = f"({next(each for each in (bool, int, float) if isinstance(number, each))(number)!r})"
    return text if is_weak or number is given else f"{DType.of(given.dtype)}{text}"


def _ask(message: ComputeReduction) -> Awaitable[AccelRef]:
    """Ask for a reduction, or for rows, which may take steps."""
    if isinstance(message.reduction, Rowwise):
        return message.reduction.ask(message)
    return device_of(message.operation, *message.arguments).ask(message)


class fused:  # noqa: N801  # a decorator, as `property` is
    """Make one launch of the calls that a function makes, or refuse them.

    The function runs at each call, with its arguments, and returns a call: of functions for each element,
    reductions along the same axes, normalizations and casts. They are written as one expression, which is
    kept for calls of the same structure. Results have the dtypes that `ta.arrays` gives step by step, and the
    same elements up to rounding.

    >>> import trio, numpy as np, trio_accel as ta
    >>> @ta.fused
    ... def norm(x, y):
    ...     xp = x.__array_namespace__()
    ...     return xp.sqrt(x * x + y * y)
    >>> async def main() -> None:
    ...     async with ta.open_system("norms") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.array([3.0, 5.0]))
    ...         print(await norm(x, np.array([4.0, 12.0])).to_host())
    >>> trio.run(main)
    [ 5. 13.]

    Arguments are arrays, calls and anything else, such as an axis. Calls that are arguments, or members of a
    list or tuple that is one, are operands: they run before the launch, in the same request. Numbers are
    handed over with the launch, so that one that changes makes no new expression.

    A function without reductions is one launch. So is one whose result is a reduction, and so are reductions
    along the same axes with functions of their results (see `ta.arrays.softmax` for few long rows). What
    would take several launches is refused: without `fused` it is as many launches, and one request.

    Args:
        function: The function. It returns one array.

    Raises:
        TypeError: It is async, or takes `out`, ``*args`` or ``**kwargs``.

    Attributes:
        xp: The namespace of the array API standard over calls, which ``x.__array_namespace__()`` returns.
    """

    xp: ClassVar[Namespace]
    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._operation = f"fused.{function.__name__}"
        parameters = inspect.signature(function).parameters
        kinds = {each.kind for each in parameters.values()}
        if inspect.iscoroutinefunction(function) or "out" in parameters:
            raise TypeError(f"{self._operation}: must be a plain function, without a parameter `out`")
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise TypeError(f"{self._operation}: must name its parameters, without * and **")
        self._function = function
        self._bound = binder(self._operation, function)
        self._names = {name: f"{name}_" if "_" in name or name in _TAKEN else name for name in parameters}
        self._expression = functools.lru_cache(_MOST)(partial(_Expression, self._operation))

    def __repr__(self) -> str:
        return f"<fused {self._operation.removeprefix('fused.')}{inspect.signature(self._function)}>"

    def __call__(self, *arguments: Any, out: Out = None, **named: Any) -> Call[AccelRef]:
        """Make the call of one launch; in a function that is fused, it is a part of that.

        Args:
            *arguments: Arguments of the function; arrays broadcast, and a Python number takes their dtype.
            out: Array to write to, of the shape of the result. It may be an argument that is not broadcast.
            **named: Arguments by their names.

        Returns:
            The call of the result.

        Raises:
            TypeError: A wrong argument, dtypes that the standard does not promote, or the function does not
                return an array.
            ValueError: Shapes that do not broadcast, an axis that there is not, a number that a dtype cannot
                hold, `out` that shares memory with an argument and is not the same array, or the function
                calls itself without end.
            NotSupportedError: The function makes a call that is no expression, or it takes several launches.
                The message says which, and why.
        """
        given = self._bound(arguments, named)
        if _IS_INSIDE.get():
            if out is not None:
                raise TypeError(f"{self._operation}: out is an argument of the outer fused function")
            return self._function(*arguments, **named)  # type: ignore[no-any-return]
        token = _IS_INSIDE.set(True)
        try:
            result = self._function(*arguments, **named)
        except RecursionError as error:
            raise ValueError(f"{self._operation}: calls itself without end") from error
        finally:
            _IS_INSIDE.reset(token)
        if not _is_array(result):
            told = type(result).__name__
            raise TypeError(f"{self._operation}: must return one array that it computes, got {told}")
        ends: dict[int, str] = {}
        for name, value in given.items():
            if type(value) in (list, tuple):
                ends |= dict.fromkeys(map(id, value), "")
            elif _is_array(value):
                ends[id(value)] = self._names[name]
        # A copy is no statement of its own, and what the function returns may be one of its arguments.
        made = _Made(self._operation, Call(_COPY, (result,)), ends)
        function = self._expression(cast("Any", made.key), tuple(made.names)).function
        return Call(function, tuple(made.operands), None if out is None else {"out": out})
