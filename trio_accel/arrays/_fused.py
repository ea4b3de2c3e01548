"""Functions over names of the array API standard, recorded once and computed as expressions (D147).

A function is called with stand-ins of its arguments. What it does with them is written as statements of an
expression of rows: the texts that `ta.arrays` has of its functions, with other names. Expressions do the
rest: they are cut where something is reduced, typed, checked and launched.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from ..actors import binder
from ..backends.base import DType, DTypeLike, NotSupportedError
from ..backends.base import expressions as base
from ..backends.base.contract.ops import common_shape
from ..backends.base.expressions import COUNT, ArgumentType, RowExpression, Weak
from ..devices import AccelRef
from ..devices.base._refusals import said
from ..expressions import (
    Elementwise,
    ExpressionArgument,
    Out,
    Reduction,
    Rowwise,
    argument_of,
    reduced,
)
from . import _elementwise, _normalizations, _numeric, _reductions, _special, _statistics  # pyright: ignore[reportPrivateUsage]  # beside it

__all__ = ["fused"]

_MODULES: Sequence[Any] = (_elementwise, _numeric, _special, _reductions, _statistics, _normalizations)
_FUNCTIONS = {name: getattr(module, name) for module in _MODULES for name in module.__all__}
# Names that an argument has not in a text; nor one with "_" in it, which the names of other values have.
_TAKEN = {*base.FUNCTIONS, *base.CONSTANTS, *base.REDUCTIONS, COUNT, "axis", "i", "keepdims", "out", "shape"}
_MOST_RECORDINGS = 256
# The text of so many is longer than any expression may be.
_MOST_STEPS = 1000

_Ones: TypeAlias = tuple[int, ...]
"""For each axis 1 if it has one element, else 0: that decides what shapes broadcast to."""


@functools.cache
def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_FUNCTIONS[name]).parameters


@functools.cache
def _binder(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    return binder(name, _FUNCTIONS[name])


def _is_array(given: object) -> bool:
    return isinstance(given, (AccelRef, np.ndarray))


class _NotRecordedError(NotSupportedError, AttributeError):
    """An attribute that a recording has not; an `AttributeError`, as `hasattr` wants it."""


class _Traced:
    """A stand-in of an array or a number, while a function is recorded.

    Attributes:
        recording: Where it is written.
        text: Its name there, or a literal.
        kind: Its type.
        ones: Its axes.
    """

    __array_ufunc__ = None  # NumPy's numbers leave operators to it
    __hash__ = None  # type: ignore[assignment]  # it is compared by element

    def __init__(self, recording: _Recording, text: str, kind: ArgumentType, ones: _Ones = ()) -> None:
        self.recording = recording
        self.text = text
        self.kind = kind
        self.ones = ones

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        return fused.xp

    @property
    def ndim(self) -> int:
        return len(self.ones)

    def __getattr__(self, name: str) -> Any:
        if name == "dtype" and isinstance(self.kind, DType):
            return self.kind
        raise _NotRecordedError(
            f"{self.recording.operation}: .{name} is not recorded, as one recording is for all shapes: there "
            "are dtype and ndim; give what you need as an argument"
        )


def _operator(name: str, step: int = 1) -> Callable[..., _Traced]:
    def method(*operands: Any) -> _Traced:
        return _call(name, *operands[::step])

    return method


def _refusal(name: str, told: str) -> Callable[..., Any]:
    def method(self: _Traced, *_: object) -> Any:
        raise NotSupportedError(f"{self.recording.operation}: {name} of an array is not recorded: {told}")

    return method


_OF_TWO = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
_OTHERS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal", "neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert",
}  # fmt: skip
_ELEMENT = "a number that the function looks at is a keyword-only argument"
_PART = "take parts before the call, as by x[1:]"
_REFUSED = {
    "bool": "xp.where(condition, a, b) chooses by element, and a keyword-only argument once for all",
    **dict.fromkeys(("float", "int", "complex", "index"), _ELEMENT),
    **dict.fromkeys(("len", "iter", "getitem", "setitem"), _PART),
    **dict.fromkeys(("matmul", "rmatmul"), "call ta.linalg.matmul before or behind it"),
    "array": "take functions of xp = x.__array_namespace__() in place of NumPy's",
}
for _method, _name in (_OF_TWO | _OTHERS).items():
    setattr(_Traced, f"__{_method}__", _operator(_name))
for _method, _name in _OF_TWO.items():
    setattr(_Traced, f"__r{_method}__", _operator(_name, -1))
for _method, _told in _REFUSED.items():
    setattr(_Traced, f"__{_method}__", _refusal(f"__{_method}__", _told))


class _Namespace:
    """The functions of `ta.arrays` that are expressions, for stand-ins."""

    e: float = math.e
    inf: float = math.inf
    nan: float = math.nan
    pi: float = math.pi

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTIONS:
            return functools.partial(_call, name)
        if name in DType.__members__:
            return DType[name]
        raise _NotRecordedError(
            f"fused: {name} is not recorded: there are functions of each element, reductions, normalizations "
            "and astype; call others before or behind the function"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_FUNCTIONS, *DType.__members__})

    def astype(self, x: _Traced, dtype: DTypeLike, /, *, copy: bool = True) -> _Traced:
        return x.recording.cast(x, DType.of(dtype))


def _call(name: str, /, *arguments: Any, **named: Any) -> _Traced:
    """Record a function of the namespace."""
    given = _binder(name)(arguments, named)
    traced = [each for each in given.values() if isinstance(each, _Traced)]
    if not traced:
        raise TypeError(f"fused: {name}: one argument must be an argument of the recorded function")
    recording = traced[0].recording
    try:
        return recording.call(name, given)
    except (TypeError, ValueError, NotSupportedError) as error:
        raise type(error)(f"{recording.operation}: {error}") from None


def _broadcast(every: Iterable[_Ones]) -> _Ones:
    shapes = [*every]
    ndim = max(map(len, shapes), default=0)
    return tuple(map(all, zip(*[(1,) * (ndim - len(ones)) + ones for ones in shapes], strict=True)))


@attrs.frozen
class _Stage:
    """A reduction of a recording.

    Attributes:
        call: Number of the function that it is a part of.
        ones: Axes of what is reduced.
        axes: The axes that are reduced.
        keepdims: Whether they stay in what the function makes of it.
    """

    call: int
    ones: _Ones
    axes: tuple[int, ...]
    keepdims: bool


@attrs.frozen
class _Statement:
    """A statement of a recording, or several that make one value.

    Attributes:
        result: Name of the value.
        text: The statement.
        read: Names that it reads.
        stages: Its reductions, in order.
    """

    result: str
    text: str
    read: frozenset[str]
    stages: tuple[_Stage, ...]


def _count(call: int) -> str:
    """Return the name of the count of elements that a function reduces."""
    return f"_n{call}"


class _Recording:
    """The record of a function's call, for arguments of certain types and axes.

    Args:
        operation: Name of the operation.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.statements: list[_Statement] = []
        self.places: list[str] = []
        # The axes of arguments that are arrays, and the numbers, each under its name.
        self.arrays: dict[str, _Ones] = {}
        self.numbers: dict[str, Any] = {}

    def argument(self, name: str, given: tuple[str, _Ones | None] | None) -> _Traced | None:
        """Make a stand-in of the next argument; a number has no axes, and None stays."""
        chosen = f"{name}_" if "_" in name or name in _TAKEN else name
        self.places.append(chosen)
        if given is None:
            return None
        text, ones = given
        if ones is not None:
            self.arrays[chosen] = ones
        return _Traced(self, chosen, base.Argument.decode(text).kind, ones or ())

    def call(self, name: str, given: dict[str, Any]) -> _Traced:
        """Record a function of the namespace."""
        function = _FUNCTIONS[name]
        if given.pop("out", None) is not None:
            raise TypeError(f"{name}: out is an argument of the recorded function, and of no step of it")
        parameters = _parameters(name)
        options = {key: given[key] for key in ("axis", "keepdims", "dtype") if key in given}
        values: dict[str, _Traced] = {}
        for key in parameters:
            if key in given and key not in options and (name != "clip" or given[key] is not None):
                # `rows` declares the same: such a number never widens the result.
                is_weak = parameters[key].annotation == "float" and isinstance(given[key], np.generic)
                values[key] = self._lifted(name, key, given[key].item() if is_weak else given[key])
        return (self._reduced if hasattr(function, "text") else self._applied)(name, values, **options)

    def cast(self, value: _Traced, dtype: DType) -> _Traced:
        """Record a conversion."""
        if dtype.value not in base.FUNCTIONS:
            raise NotSupportedError(f"{self.operation}: expressions do not compute with {dtype}; cast() does")
        made = Elementwise[AccelRef](f"{dtype}(x)", operation="astype")
        made.dtype_of(f"{self.operation}: astype", [value.kind])
        return value if value.kind is dtype else self._written(made.text, {"x": value}, dtype)

    def _lifted(self, name: str, key: str, given: Any) -> _Traced:
        if isinstance(given, _Traced):
            return given
        if _is_array(given):
            raise TypeError(
                f"{name}: {key} is an array that is no argument of the recorded function: make it one"
            )
        kind = base.Argument.decode(argument_of(name, key, given)).kind
        if isinstance(given, (np.generic, complex)):
            text = f"_c{len(self.numbers)}"
            self.numbers[text] = given
        else:
            # The text of a subclass may differ, so that of the plain type is written.
            text = f"({next(each for each in (bool, int, float) if isinstance(given, each))(given)!r})"
        return _Traced(self, text, kind)

    def _written(
        self,
        text: str,
        values: Mapping[str, _Traced],
        kind: ArgumentType,
        ones: _Ones | None = None,
        stages: Sequence[_Stage] = (),
    ) -> _Traced:
        """Write a text, with other names."""
        if len(self.statements) == _MOST_STEPS:
            # A function that never ends is told, too.
            raise NotSupportedError(
                f"too much for one expression: more than {_MOST_STEPS} steps; make several functions of it"
            )
        number, assigned = len(self.statements), re.findall(r"(\w+) = ", text) or [""]
        result, read = f"_{number}", {key: value.text for key, value in values.items()}
        names = (
            {each: result + each for each in assigned} | {assigned[-1]: result, COUNT: _count(number)} | read
        )
        made = re.sub(r"\b[a-z]\w*", lambda each: names.get(each[0], each[0]), text)
        text = made if assigned[-1] else f"{result} = {made}"
        self.statements.append(_Statement(result, text, frozenset(read.values()), tuple(stages)))
        ones = _broadcast(value.ones for value in values.values()) if ones is None else ones
        return _Traced(self, result, kind, ones)

    def _applied(self, name: str, values: Mapping[str, _Traced]) -> _Traced:
        """Record a function of each element."""
        made: Elementwise[AccelRef] = (
            _elementwise.clips[tuple(values)[1:]] if name == "clip" else _FUNCTIONS[name].elementwise
        )
        kinds = [each.kind for each in values.values()]
        kind: ArgumentType = made.dtype_of(name, kinds)
        if all(isinstance(each, Weak) for each in kinds):
            (_, node), *_ = base.parse(made.text).statements
            if not isinstance(node, base.Apply) or node.function not in base.WEAK_ARITHMETIC:
                raise TypeError(f"{name}: one argument must be an array: of numbers, arithmetic is recorded")
            kind = next(weak for weak in Weak if weak.carrier is kind)
        result = self._written(made.text, self._widened(values, made.precision), kind)
        return result if made.precision is None else self._rounded(result)

    def _widened(self, values: Mapping[str, _Traced], precision: str | None) -> dict[str, _Traced]:
        """Record conversions to what a function computes in at least."""
        wide: Mapping[str, DType] = {} if precision is None else base.WIDE[precision]
        casts = {key: wide[str(value.kind)] for key, value in values.items() if str(value.kind) in wide}
        return {**values, **{key: self.cast(values[key], dtype) for key, dtype in casts.items()}}

    def _rounded(self, result: _Traced) -> _Traced:
        """Record that what was computed in a wider dtype is rounded."""
        return self._written(f"{result.kind}(x)", {"x": result}, result.kind)

    def _reduced(
        self,
        name: str,
        values: Mapping[str, _Traced],
        axis: int | Sequence[int] | None = None,
        keepdims: bool = True,
        dtype: DTypeLike | None = None,
    ) -> _Traced:
        """Record a function along axes."""
        if dtype is not None:
            chosen = DType.of(dtype)
            values = {key: self.cast(value, chosen) for key, value in values.items()}
            return self.cast(self._reduced(name, values, axis, keepdims), chosen)
        if all(isinstance(value.kind, Weak) for value in values.values()):
            raise TypeError(f"{name}: one argument must be an array, got a number")
        function, ones = _FUNCTIONS[name], _broadcast(value.ones for value in values.values())
        precision = function.precision
        named: dict[str, Any] = {"precision": precision, "operation": name}
        rows = Rowwise(function.text, tuple(values), wide=function.wide, **named)
        kinds = [base.Argument(value.kind, isinstance(value.kind, DType)) for value in values.values()]
        specialized, _ = rows.specialize(tuple([kind.encode() for kind in kinds]), None)
        stages = specialized.rows.stages
        if any(stage.is_index for stage in stages) and not isinstance(axis, (int, NoneType)):
            raise TypeError(f"{name}: axis must be one axis or None, got {axis!r}")
        if any(
            _broadcast(values[key].ones for key in stage.map.inputs if key in values) != ones
            for stage in stages
        ):
            raise NotSupportedError(f"{name}: its arrays must have one shape: broadcast them before the call")
        try:
            axes = tuple(sorted(normalize_axis_tuple(range(len(ones)) if axis is None else axis, len(ones))))
        except (TypeError, ValueError, OverflowError) as error:
            raise said(f"{name}: axis {axis!r} of {len(ones)} axes", error) from None
        values = self._widened(values, precision)
        made = ones if specialized.is_whole else reduced(ones, axes, keepdims=keepdims)
        each = _Stage(len(self.statements), ones, axes, keepdims)
        result = self._written(
            rows.chosen(kinds).text, values, specialized.result, made, [each] * len(stages)
        )
        return result if precision is None else self._rounded(result)


class _Launches:
    """Computes what a function was recorded to do.

    Args:
        recording: What that is. Statements that the result does not need go.
        result: What the function has returned.

    Raises:
        TypeError: It is computed of numbers alone.
    """

    def __init__(self, recording: _Recording, result: _Traced) -> None:
        live, needed = list[_Statement](), {result.text}
        for statement in reversed(recording.statements):
            if statement.result in needed:
                live.insert(0, statement)
                needed |= statement.read
        self._arrays = {name: ones for name, ones in recording.arrays.items() if name in needed}
        if not self._arrays:
            raise TypeError(f"{recording.operation}: the result must be computed of an array, not of numbers")
        stages = [stage for statement in live for stage in statement.stages]
        counts = dict.fromkeys(_count(stage.call) for stage in stages)
        text = "\n".join([*[statement.text for statement in live], f"out = {result.text}"])
        try:
            self._rows = RowExpression.parse(text, (*recording.places, *recording.numbers, *counts))
        except ValueError as error:
            raise NotSupportedError(
                f"{recording.operation}: too much for one expression: {error}; make several functions of it"
            ) from None
        # The keys are the names that its reductions have in the text.
        self._stages = {base.found(number): stage for number, stage in enumerate(stages)}
        self._recording, self._ones = recording, result.ones
        self._named: dict[str, Any] = {"operation": recording.operation}

    async def compute(self, arguments: Sequence[Any], out: Out) -> AccelRef:
        """Compute it: in one launch if that is the same, else in steps."""
        values = {**self._recording.numbers, **dict(zip(self._recording.places, arguments, strict=True))}
        shape = common_shape(*[values[name].shape for name in self._arrays])
        # Arrays that never meet in the function need not broadcast.
        if self._at_once is not None and shape is not None:
            rows, inputs, axes, keepdims = self._at_once
            count = math.prod(shape[axis] for axis in axes)
            values |= {_count(stage.call): count for stage in self._stages.values()}
            axis, given = _axis_of(axes, len(shape)), [values[name] for name in inputs]
            return await rows.ask(rows.compute(*given, axis=axis, keepdims=keepdims, out=out))
        reductions, last = self._steps
        for (name, stage), reduction in zip(self._stages.items(), reductions, strict=True):
            given = [self._value(values, each, stage.call) for each in reduction.inputs]
            axes, is_last = stage.axes, last is None and reduction is reductions[-1]
            array = await reduction(
                *given,
                axis=_axis_of(axes, len(stage.ones)),
                keepdims=stage.keepdims or not is_last,
                out=out if is_last else None,
            )
            if is_last:
                return array
            shape = common_shape(*[each.shape for each in given if _is_array(each)]) or ()
            values[name], values[_count(stage.call)] = array, math.prod(shape[axis] for axis in axes)
        assert last is not None
        return await last(*[self._value(values, each) for each in last.inputs], out=out)

    @functools.cached_property
    def _steps(self) -> tuple[list[Reduction], Elementwise[AccelRef] | None]:
        """A launch for each reduction, and one for the result, unless that is the last reduction."""
        maps = [(stage.map, stage.name) for stage in self._rows.stages]
        reductions = [Reduction(each.text, name, inputs=each.inputs, **self._named) for each, name in maps]
        last = self._rows.last
        if self._stages and all(isinstance(node, base.Name) for _, node in last.statements):
            return reductions, None
        return reductions, Elementwise[AccelRef](last.text, inputs=last.inputs, **self._named)

    @functools.cached_property
    def _at_once(self) -> tuple[Rowwise, list[str], tuple[int, ...], bool] | None:
        """One launch, its inputs, axes and `keepdims`; None where steps are better or needed.

        An expression of rows reduces arrays of one shape along the same axes, and what it finds broadcasts
        back as with `keepdims`.
        """
        stages, parts, last = [*self._stages.values()], self._rows.stages, self._rows.last.inputs
        if not stages or (len(stages) == 1 and self._steps[1] is None):
            return None
        axes, whole = stages[0].axes, _broadcast(self._arrays.values())
        is_whole = any(name in self._arrays for name in last)
        kept, gone = reduced(whole, axes, keepdims=True), reduced(whole, axes)
        inner = [
            self._is_squeezed(name, stage.call)
            for stage, part in zip(stages, parts, strict=True)
            for name in part.map.inputs
        ]
        outer = [self._is_squeezed(name) for name in last if name in self._stages]
        # Without their first axes, arrays broadcast as with them.
        is_aligned = axes == tuple(range(len(axes))) or not (
            any(inner) or (any(outer) and (is_whole or not all(outer)))
        )
        is_alike = all(stage.axes == axes and stage.ones == whole for stage in stages)
        if not is_aligned or not is_alike or self._ones not in ((whole,) if is_whole else (kept, gone)):
            return None
        read = {*last, *[name for part in parts for name in part.map.inputs]}
        inputs = [name for name in self._rows.inputs if name in read]
        rows = Rowwise(self._rows.text, inputs, precision=None, **self._named)
        return rows, inputs, axes, self._ones == kept

    def _is_squeezed(self, name: str, call: int | None = None) -> bool:
        """Tell whether a value is a reduction without its axes for those who read it: not in its function."""
        stage = self._stages.get(name)
        return stage is not None and not stage.keepdims and stage.call != call

    def _value(self, values: Mapping[str, Any], name: str, call: int | None = None) -> Any:
        value = values[name]
        is_squeezed = self._is_squeezed(name, call)
        return value.reshape(reduced(value.shape, self._stages[name].axes)) if is_squeezed else value


def _axis_of(axes: tuple[int, ...], ndim: int) -> int | tuple[int, ...] | None:
    """Name axes as a call does: the place of an extreme takes one axis or None."""
    return None if len(axes) == ndim else axes[0] if len(axes) == 1 else axes


class fused:  # noqa: N801  # a decorator, as `property` is
    """Record a function over names of the array API standard, and compute it in one launch or a few.

    The function is called once for arguments of certain dtypes and numbers of axes, with stand-ins of them.
    What it does with these is written as one expression. Later calls compute that with other elements and
    shapes. Results have the dtypes that `ta.arrays` gives step by step, and the same elements up to rounding.

    >>> import trio, numpy as np, trio_accel as ta
    >>> @ta.fused
    ... def norm(x, y):
    ...     xp = x.__array_namespace__()
    ...     return xp.sqrt(x * x + y * y)
    >>> async def main() -> None:
    ...     async with ta.open_system("norms") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.array([3.0, 5.0]))
    ...         print(await (await norm(x, np.array([4.0, 12.0]))).to_host())
    >>> trio.run(main)
    [ 5. 13.]

    Arguments by position are arrays and numbers; None is given as it is. Keyword-only arguments, such as an
    axis, are given as they are, and the function is recorded for each of their values. The namespace is
    ``x.__array_namespace__()``, so that the function takes arrays of other libraries as well; or `fused.xp`.
    It has the functions of `ta.arrays` for each element, its reductions and normalizations, and ``astype``.

    A function without reductions is one launch, and so is one whose result is a reduction. Reductions along
    the same axes, and functions of their results, are one launch too (see `ta.arrays.softmax` for few long
    rows). Other reductions are a launch each, with one more for the result.

    Args:
        function: The function. It returns one array, and must do the same for the same types of arguments.

    Raises:
        TypeError: It is async, or takes `out`, ``*args`` or ``**kwargs``.

    Attributes:
        xp: The namespace.
    """

    xp: ClassVar[Any] = _Namespace()
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
        self._names = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
        self._options = [name for name in parameters if name not in self._names]
        self._record = functools.lru_cache(_MOST_RECORDINGS)(self._recorded)

    def __repr__(self) -> str:
        return f"<fused {self._operation.removeprefix('fused.')}{inspect.signature(self._function)}>"

    def __call__(
        self, *arguments: ExpressionArgument | None, out: Out = None, **named: Any
    ) -> Coroutine[Any, Any, AccelRef]:
        """Compute it on the device of its arrays; in a function that is recorded, it is a part of that.

        Args:
            *arguments: Arrays and numbers; arrays broadcast, and a Python number takes their dtype.
            out: Array to write to, of the shape of the result. It may be an argument that is not broadcast.
            **named: Arguments by their names.

        Returns:
            The result.

        Raises:
            TypeError: A wrong argument, dtypes that the standard does not promote, or the function does not
                return an array.
            ValueError: Shapes that do not broadcast, an axis that there is not, a number that a dtype cannot
                hold, `out` that shares memory with an argument and is not the same array, or the function
                calls itself without end.
            NotSupportedError: The function does something that no expression has. The message names it.
        """
        given = self._bound(arguments, named)
        if any(isinstance(each, _Traced) for each in given.values()):
            return cast("Coroutine[Any, Any, AccelRef]", self._function(*arguments, **named))
        return self._compute(given, out)

    async def _compute(self, given: Mapping[str, Any], out: Out) -> AccelRef:
        places = [given[name] for name in self._names]
        signature: list[tuple[str, _Ones | None] | None] = []
        for name, each in zip(self._names, places, strict=True):
            ones = tuple([int(extent == 1) for extent in each.shape]) if _is_array(each) else None
            signature.append(None if each is None else (argument_of(self._operation, name, each), ones))
        # Equal options may differ yet, as 1, 1.0 and True do.
        options = tuple([(name, given[name], repr(given[name])) for name in self._options])
        try:
            hash(options)
        except TypeError as error:
            told = ", ".join(self._options)
            raise TypeError(
                f"{self._operation}: {told} must be hashable, to be known again: {error}"
            ) from None
        return await self._record(tuple(signature), options).compute(places, out)

    def _recorded(
        self,
        signature: tuple[tuple[str, _Ones | None] | None, ...],
        options: tuple[tuple[str, Any, str], ...],
    ) -> _Launches:
        recording = _Recording(self._operation)
        stands = [recording.argument(*each) for each in zip(self._names, signature, strict=True)]
        try:
            result = self._function(*stands, **{name: value for name, value, _ in options})
        except RecursionError as error:
            text = (
                "calls itself without end; a keyword-only argument can say when it ends, and no element can"
            )
            raise ValueError(f"{self._operation}: {text}") from error
        if not isinstance(result, _Traced):
            told = type(result).__name__
            raise TypeError(f"{self._operation}: must return one array that it computes, got {told}")
        return _Launches(recording, result)
