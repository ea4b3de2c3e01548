"""Operations declared once: message, specification, checks and function follow from a signature and its shapes.

The plan of a declared operation runs for each message, so its source is generated: one straight line of steps
for each operation, in place of a loop over its parameters. Frames of it have the place of the declaration.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from types import FunctionType
from typing import (
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

import attrs
import numpy as np

from ...backends.base import DType, LibraryError, LinAlgError
from ...backends.base.ops import (
    NumberRole,
    OperationSpec,
    Shapes,
    StatusArray,
    exact,
    number,
    parse_shapes,
    reads,
    specification,
    status,
    updates,
    writes,
)
from ..arrays._ref import device_of
from ._operation import Operation, Planned, Planner
from ._plan_source import PlanSource, is_structured, refuse_value

__all__ = [
    "DECLARED",
    "Declaration",
    "Declared",
    "DeclaredSpec",
    "StructuredOperand",
    "message_of",
    "operation",
]

ParametersP = ParamSpec("ParametersP")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)
ReplyT = TypeVar("ReplyT")

Failure: TypeAlias = "str | Callable[[DeclaredSpec, str, int, tuple[int, ...]], LibraryError]"

_NOT_FINITE = -1
_PLANS = 1024


class Declared(Protocol[ParametersP, ReplyT_co]):
    """A function that asks the device of its operands for an operation, as `operation` makes it."""

    @property
    def declaration(self) -> Declaration:
        """What was declared."""
        ...

    @property
    def message(self) -> Callable[ParametersP, Operation[Any, ReplyT_co]]:
        """The class of its message, for `Device.ask` and `Device.submit`."""
        ...

    @property
    def spec(self) -> type[OperationSpec]:
        """The class of its specification."""
        ...

    def __call__(
        self, *args: ParametersP.args, **kwargs: ParametersP.kwargs
    ) -> Coroutine[Any, Any, ReplyT_co]:
        """Ask for the operation."""
        ...


class StructuredOperand(Protocol):
    """An operand of several arrays, such as a sparse matrix: the base class says how a plan takes it."""

    operand_fields: ClassVar[Mapping[str, Literal["exact", "reads"]]]
    """Fields that it has in a specification."""

    @classmethod
    def take_operand(cls, planner: Planner, argument: str, value: Any, *, has_values: bool) -> Any:
        """Check and read it; returns an object with ``shape``, ``dtype`` and the fields as ``values``."""
        ...


class DeclaredSpec(OperationSpec):
    """Base of the specifications that follow from a declaration."""

    __slots__ = ()
    declaration: ClassVar[Declaration]

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`; for a specification that was made by hand."""
        self.declaration.check(name, self)

    def check_status(self) -> None:
        """Fail the operation over the first matrix whose status word is not 0."""
        info: StatusArray | None = getattr(self, "info", None)
        if info is None or not info.any():
            return
        first = getattr(self, self.declaration.lines[0].inputs[0].name)
        place, stack = int(info.nonzero()[0][0]), first.shape[:-2]
        index = tuple(int(one) for one in np.unravel_index(place, stack)) if stack else ()
        where = f"matrix {index[0] if len(index) == 1 else index} of the stack" if index else "the matrix"
        raise self.declaration.failure(self, where, int(info[place]), index)


@attrs.frozen(eq=False)
class Declaration:
    """A declared operation.

    Attributes:
        name: Capability and function, such as ``"linalg.cholesky"``: the name that kernels have it by.
        function: Name of the function.
        library: Import path of the library actor.
        parameters: Its parameters.
        variants: Shapes, by the values of the parameters `by`.
        by: Those parameters.
        allowed: By parameter the values that it may have, where it is a ``Literal``.
        dtypes: Dtypes that it has; empty where the backends say.
        status: See `operation`.
        place: File and line.
    """

    name: str
    function: str
    library: str
    parameters: Mapping[str, inspect.Parameter]
    variants: Mapping[tuple[object, ...], Shapes]
    by: tuple[str, ...]
    allowed: Mapping[str, tuple[object, ...]]
    dtypes: tuple[DType, ...]
    status: Failure | None
    place: str

    @property
    def lines(self) -> tuple[Shapes, ...]:
        """All its shapes."""
        return tuple(self.variants.values())

    def check(self, name: str, spec: Any) -> None:
        """Hold a specification against the shapes and dtypes; see `OperationSpec.check_shapes`."""
        for parameter, values in self.allowed.items():
            if getattr(spec, parameter) not in values:
                refuse_value(f"{name}: {type(spec).__name__}", parameter, values, getattr(spec, parameter))
        shapes = self.variants[tuple([getattr(spec, one) for one in self.by])]
        given = [getattr(spec, item.name, None) for item in shapes.inputs]
        name = f"{name}: {type(spec).__name__}"
        letters = tuple([getattr(spec, item.op) for item in shapes.inputs if item.op])
        made, stack, _ = shapes.fit(name, tuple([one and one.shape for one in given]), letters)
        dtype = next(
            one.dtype for one, item in zip(given, shapes.inputs, strict=True) if one and not item.kind
        )
        wanted = [
            (item, one.shape) for item, one in zip(shapes.inputs, given, strict=True) if one is not None
        ]
        for item, shape in (*wanted, *zip(shapes.outputs, made, strict=True)):
            array = getattr(spec, item.name)
            if array is None or array.shape != shape:
                raise ValueError(f"{name}.{item.name} must have shape {shape}, got {array and array.shape}")
            if array.dtype is not item.dtype(dtype):
                raise TypeError(f"{name}.{item.name} must have dtype {item.dtype(dtype)}, got {array.dtype}")
        others = {item.name for line in self.lines for item in line.outputs} - {
            one.name for one in shapes.outputs
        }
        for other in others:
            if getattr(spec, other) is not None:
                raise ValueError(f"{name}.{other} must be None here")
        words = getattr(spec, "info", None)
        if words is not None and words.shape != (math.prod(stack),):
            raise ValueError(f"{name}.info must have one word for each matrix of {stack}, got {words.shape}")

    def failure(self, spec: DeclaredSpec, where: str, code: int, index: tuple[int, ...]) -> LibraryError:
        """What a status word means for a matrix."""
        if callable(self.status):
            return self.status(spec, where, code, index)
        trouble = "holds a NaN or an infinity" if code == _NOT_FINITE else str(self.status).format(code)
        return LinAlgError(f"{self.function}: {where} {trouble}", library="solver", code=code, index=index)


def message_of(
    function: Callable[ParametersP, Coroutine[Any, Any, ReplyT]],
) -> Callable[ParametersP, Operation[Any, ReplyT]]:
    """Find the message of a declared function that has overloads, which a type checker takes for a plain one."""
    message: Callable[ParametersP, Operation[Any, ReplyT]] = cast("Any", function).message
    return message


DECLARED: dict[str, Declared[..., Any]] = {}
"""All operations that were declared, by their names."""


@overload
def operation(
    shapes: str | Mapping[Any, str] = "",
    *,
    actor: type[Any] | str,
    by: str | tuple[str, ...] = (),
    dtypes: tuple[DType, ...] = (),
    status: Failure | None = None,
    reply: Callable[..., Any] | None = None,
    spec: Callable[..., OperationSpec] | None = None,
    alias: Mapping[str, str] | None = None,
    plan: Callable[[Any, Planner], Planned[Any]] | None = None,
    not_recorded: str = "",
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, ReplyT]]], Declared[ParametersP, ReplyT]]: ...
@overload
def operation(
    *,
    actor: type[Any] | str,
    signature: Callable[ParametersP, Coroutine[Any, Any, ReplyT]],
    plan: Callable[[Any, Planner], Planned[Any]],
    message: Callable[ParametersP, Operation[Any, ReplyT]] | None = None,
) -> Callable[[Callable[[], None]], Declared[ParametersP, ReplyT]]: ...
def operation(
    shapes: str | Mapping[Any, str] = "",
    *,
    actor: type[Any] | str,
    by: str | tuple[str, ...] = (),
    dtypes: tuple[DType, ...] = (),
    status: Failure | None = None,
    reply: Callable[..., Any] | None = None,
    spec: Callable[..., OperationSpec] | None = None,
    alias: Mapping[str, str] | None = None,
    plan: Callable[[Any, Planner], Planned[Any]] | None = None,
    signature: Callable[..., Any] | None = None,
    message: Callable[..., Any] | None = None,
    not_recorded: str = "",
) -> Callable[[Any], Any]:
    """Declare an operation by the signature and the docstring of a function, whose body is ``...``.

    The result is a function of the same signature, which checks its arguments in the caller's task and asks the
    device of its operands. It has the message as ``.message`` and the specification as ``.spec``. Parameters
    that are annotated as `Operand` or `AccelRef` are arrays; `bool`, `int`, `str` and ``Literal`` are exact
    values, of which a ``Literal`` says what is allowed; `float` and `complex` are factors of the arrays. A
    parameter `out` takes the caller's array for the result. Where there is a parameter `beta`, an array on the
    right that is a parameter too is added to, or is a new one where it is None.

    Args:
        shapes: Arrays, shapes and dtypes: ``"a(..., n, n) -> out(..., n, n)"``; see `ops.parse_shapes`. A
            mapping, where they depend on a parameter.
        actor: Class of the library actor that serves it, or its import path.
        by: The parameter, or several, whose value is the key of `shapes`.
        dtypes: Dtypes of the arrays that have no dtype of their own. Without it the kernels say which.
        status: There is a status word for each matrix of the first array, and one that is not 0 fails the
            operation: what is wrong with the matrix, with the word in place of ``{}``; or a function that makes
            the error of the specification, the place, the word and the index.
        reply: Makes the reply of several results; without it, it is a tuple.
        spec: Makes the specification, of arguments by the names of parameters and outputs; without it, a class
            is made that has them as its fields.
        alias: By the name of a result, the operand that it may be.
        plan: The way out, where no line of shapes says it: plans a message as `Operation.plan` does.
        signature: A function whose signature it has, in place of its own.
        message: Class of the message, where another function has it already.
        not_recorded: See `Operation`.

    Raises:
        TypeError: The declaration contradicts the function. The message begins with file and line.
    """

    def declare(function: Any) -> Any:
        code, like = function.__code__, signature or function
        place = f"{code.co_filename}:{code.co_firstlineno}"
        try:
            if (plan is None) is (not shapes):
                raise ValueError("it takes either shapes or a plan")
            keyed = shapes if isinstance(shapes, Mapping) else {(): shapes}
            lines = {
                key if isinstance(key, tuple) else (key,): parse_shapes(line)
                for key, line in keyed.items()
                if line
            }
            name = function.__name__.lstrip("_")
            package = [part for part in function.__module__.split(".") if not part.startswith("_")]
            parameters = inspect.signature(like).parameters
            kinds = {one: _kind(like, parameter) for one, parameter in parameters.items()}
            declaration = Declaration(
                name=f"{package[-1]}.{name}",
                function=name,
                library=_path_of(actor),
                parameters=parameters,
                variants=lines,
                by=(by,) if isinstance(by, str) else by,
                allowed={one: kind for one, kind in kinds.items() if isinstance(kind, tuple)},
                dtypes=dtypes,
                status=status,
                place=place,
            )
            maker = _Maker(function, like, kinds, declaration, spec)
            made_spec, made_plan = None, plan
            if plan is None:
                maker.check()
                made_spec = maker.make_spec() if spec is None else None
                made_plan = maker.make_plan(made_spec, reply, alias or {})
            asked = message or maker.make_message(made_spec, made_plan, not_recorded)
            made = maker.make_function(asked)
        except (ValueError, TypeError, NameError) as error:
            raise TypeError(f"{place}: operation {function.__name__}: {error}") from error
        made.message, made.spec, made.declaration = asked, made_spec, declaration
        DECLARED[declaration.name] = made
        return made

    return declare


_ARRAYS = ("Operand", "Operand | None", "AccelRef", "AccelRef | None")
_KINDS = {bool: "bool", int: "whole", str: "text", float: "real", complex: "number"}


def _kind(function: FunctionType, parameter: inspect.Parameter) -> Any:
    """What a parameter is: "array", a kind of value, the values that it may have, or an operand's class."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise TypeError(f"{parameter} has no place in a message")
    note = parameter.annotation
    if (note if isinstance(note, str) else getattr(note, "__name__", "")) in _ARRAYS:
        return "array"
    kind = eval(note, function.__globals__) if isinstance(note, str) else note  # noqa: S307  # its own annotation
    if get_origin(kind) is Literal:
        return get_args(kind)
    return kind if is_structured(kind) else _KINDS.get(kind, "other")


class _Maker:
    """Makes what follows from one declaration."""

    def __init__(
        self, function: Any, signature: Any, kinds: dict[str, Any], declaration: Declaration, spec: Any
    ) -> None:
        self._function = function
        self._signature = signature
        self._declaration = declaration
        self._build = spec
        parameters = declaration.parameters
        self._kinds = kinds
        self._optional = {name for name, one in parameters.items() if one.default is None}
        self._message = "".join(part.capitalize() for part in declaration.function.split("_"))

    def check(self) -> None:
        """Hold the shapes against the function."""
        declaration = self._declaration
        there = ", ".join(self._kinds)
        wrong = [one for one in declaration.dtypes if not isinstance(one, DType)]
        if wrong:
            raise TypeError(f"dtypes has {wrong[0]!r}, which no backend has")
        for key, line in declaration.variants.items():
            if len(key) != len(declaration.by):
                raise ValueError(f"shapes of {key!r}: it is not one value for each of {declaration.by}")
            inputs = [item.name for item in line.inputs]
            for name in (*declaration.by, *[item.op for item in line.inputs if item.op], *inputs):
                if name not in self._kinds:
                    raise ValueError(f"{name!r} of the shapes is no parameter; there are {there}")
            if all(item.kind for item in line.inputs):
                raise ValueError(f"shapes {line.line!r}: no array on the left has the dtype of the others")
            named = {*inputs, *[item.name for item in line.outputs]}
            for name, kind in self._kinds.items():
                is_array = kind == "array" or is_structured(kind)
                if is_array is not (name in named):
                    what = "an array, and not in the shapes" if is_array else "in the shapes, and no array"
                    raise ValueError(f"parameter {name!r} is {what}")
                if kind == "other":
                    note = self._signature.__annotations__.get(name, "nothing")
                    raise TypeError(
                        f"parameter {name!r} is annotated with {note!r}, which says not what it is"
                    )

    def make_spec(self) -> type[Any]:
        """Make the class of the specification."""
        declaration, fields = self._declaration, self._fields()
        space = {
            "__annotations__": dict.fromkeys(fields, "Any"),
            "__module__": self._function.__module__,
            "__qualname__": f"{self._function.__name__}.spec",
            "__doc__": f"The operation `{declaration.function}`, with its arrays in their places.",
            "__slots__": (),
            "declaration": declaration,
            "operation": declaration.name,
            **fields,
        }
        return specification(type(f"{self._message}Spec", (DeclaredSpec,), space))

    def _fields(self) -> dict[str, Any]:
        """Fields of the specification, with their roles: parameters in their order, results, status words."""
        lines = self._declaration.lines
        inputs = {item.name: item for line in lines for item in line.inputs}
        updated = {name for line in lines for name in line.updated}
        results = dict.fromkeys(item.name for line in lines for item in line.outputs)
        changed = [*updated, *results, *inputs][0]
        fields: dict[str, Any] = {}
        for name, kind in self._kinds.items():
            if is_structured(kind):
                parts = kind.operand_fields.items()
                skipped = "data" if inputs[name].kind == "pattern" else ""
                fields |= {
                    part: exact() if role == "exact" else reads() for part, role in parts if part != skipped
                }
            elif kind in ("real", "number"):
                fields[name] = number(NumberRole.FACTOR, changed)
            elif kind != "array":
                fields[name] = exact()
            elif name in inputs:
                fields[name] = (
                    updates()
                    if name in updated
                    else reads(optional=True)
                    if name in self._optional
                    else reads()
                )
        for name in results:
            is_always = all(name in [item.name for item in line.outputs] for line in lines)
            added_to = "beta" in self._kinds
            fields[name] = updates() if added_to else writes() if is_always else writes(optional=True)
        if self._declaration.status is not None:
            fields["info"] = status()
        return fields

    def make_message(self, spec: Any, plan: Any, not_recorded: str) -> type[Any]:
        """Make the class of the message."""
        declaration = self._declaration
        fields = {
            name: attrs.field(default=attrs.NOTHING if one.default is one.empty else one.default)
            for name, one in declaration.parameters.items()
        }
        space = {
            "__module__": self._function.__module__,
            "__qualname__": self._message,
            "__doc__": f"Asks for `{declaration.function}`, which says what the fields mean.",
            "library": declaration.library,
            "not_recorded": not_recorded,
            "plan": plan,
            "spec": spec,
            **fields,
        }
        return attrs.define(eq=False, on_setattr=None, these=fields)(type(self._message, (Operation,), space))

    def make_plan(self, spec: Any, reply: Any, alias: Mapping[str, str]) -> Any:
        """Make the method `plan` of the message."""
        declaration = self._declaration
        build, is_own = self._build or spec, self._build is None
        fields = [*self._fields()] if is_own else [*inspect.signature(build).parameters]
        results = {item.name for line in declaration.lines for item in line.outputs}
        plans: dict[tuple[object, ...], Any] = {}
        for key, line in declaration.variants.items():
            absent = frozenset(results - {item.name for item in line.outputs})
            source = PlanSource(self._kinds, line, fields, absent)
            text = source.text(self._optional, declaration.dtypes, alias, is_checked=is_own)
            names = {"fit": lru_cache(_PLANS)(line.fit), "Spec": build, "Reply": reply or _tuple}
            plans[key] = self._compiled(text, "plan", source.names | names)
        if not declaration.by:
            return plans[()]
        first = next(iter(plans.values()))

        def plan(message: Any, planner: Planner) -> Planned[Any]:
            """Plan by the parameters that the shapes depend on; the plan itself refuses what is none of these."""
            return plans.get(tuple([getattr(message, name) for name in declaration.by]), first)(
                message, planner
            )

        return plan

    def make_function(self, message: type[Any]) -> Any:
        """Make the function that asks."""
        function, like, parameters = self._function, self._signature, self._declaration.parameters
        arrays = [name for name, kind in self._kinds.items() if kind == "array" or is_structured(kind)]
        bare = [one.replace(default=one.empty, annotation=one.empty) for one in parameters.values()]
        text = (
            f"async def {function.__name__}{inspect.Signature(bare)}:\n"
            f"    return await device_of({self._declaration.function!r}, {', '.join(arrays)})"
            f".ask(Message({', '.join(parameters)}))\n"
        )
        made = self._compiled(text, function.__name__, {"device_of": device_of, "Message": message})
        made.__defaults__, made.__kwdefaults__ = like.__defaults__, like.__kwdefaults__
        made.__annotations__, made.__doc__ = like.__annotations__, function.__doc__
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        return made

    def _compiled(self, text: str, name: str, names: Mapping[str, Any]) -> Any:
        """Make a function of its source, whose frames show the declaration."""
        code, tree, space = self._function.__code__, ast.parse(text), dict(names)
        for node in ast.walk(tree):
            if isinstance(node, (ast.expr, ast.stmt, ast.arg, ast.keyword)):
                node.lineno = node.end_lineno = code.co_firstlineno
        exec(compile(tree, code.co_filename, "exec"), space)  # noqa: S102  # made of names of parameters
        return space[name]


def _tuple(*results: Any) -> tuple[Any, ...]:
    return results


def _path_of(actor: type[Any] | str) -> str:
    """Where a worker finds a library actor: the package that exports it."""
    if isinstance(actor, str):
        return actor
    package = [part for part in actor.__module__.split(".") if not part.startswith("_")]
    return f"{'.'.join(package)}:{actor.__qualname__}"
