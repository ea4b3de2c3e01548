"""Operations declared once: message, specification, checks and function follow from a signature and shapes.

The plan of a declared operation runs for each message, so its source is generated: each operation gets a
straight line of steps instead of a loop over its parameters. Frames of the plan show the place of the
declaration.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache, partial, wraps
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)
from weakref import WeakValueDictionary

import attrs
import numpy as np

from ...actors import signed_like, unknown_option
from ...backends.base import DType, LibraryError, LinAlgError, Strs, name_function
from ...backends.base.contract.ops import (
    ArraySpec,
    NumberRole,
    OperationSpec,
    Shapes,
    StatusArray,
    check_index,
    exact,
    field_repr,
    number,
    parse_shapes,
    reads,
    specification,
    status,
    updates,
    writes,
)
from ...backends.base.contract.ops._array import role_of
from ...backends.base.kit.kernels import ALLOWED
from ._calls import Call, Operators
from ._chain import ArrayFunction
from ._named import refuse_as
from ._operation import Operand, Operation, Planned, Planner, operation_name
from ._pending import ReplyT, ReplyT_co
from ._plan_source import PlanSource, Structured, check_steps, refuse_value

__all__ = [
    "DECLARED",
    "Declaration",
    "Declared",
    "DeclaredSpec",
    "message_of",
    "operation",
    "operation_like",
]

ParametersP = ParamSpec("ParametersP")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

Check: TypeAlias = Callable[[str, Any], None]
Failure: TypeAlias = "str | Callable[[DeclaredSpec, str, int, tuple[int, ...]], LibraryError]"

# The number of shape combinations for which an operation caches the results.
_MAX_CACHED_SHAPES = 1024
# The status word of a matrix that skipped all routines.
_NOT_FINITE = -1


def _refuse_layers(message: Any, declaration: Declaration) -> None:
    """Refuse the arguments of a layer, because PyTorch's layers have the names of messages."""
    construct, first = message.__init__, next(iter(declaration.parameters))
    called = ", ".join(
        name
        for name, parameter in inspect.signature(message).parameters.items()
        if parameter.default is parameter.empty
    )
    advice = f"it is a message, and layers are not available: write await ta.{declaration.name}({called})"

    @wraps(construct)
    def construct_or_refuse(self: Any, *args: Any, **named: Any) -> None:
        try:
            construct(self, *args, **named)
        except TypeError as error:
            text = str(error).partition("() ")[2] or str(error)
            raise TypeError(f"nn.{message.__name__}: {text}; {advice}") from None
        value = getattr(self, first)
        if type(value) is int:
            raise TypeError(
                f"nn.{message.__name__}: {first} must be an AccelRef or a NumPy array, got {value}; {advice}"
            )

    message.__init__ = construct_or_refuse


@attrs.frozen(eq=False)
class Declaration:
    """A declared operation.

    Attributes:
        name: The capability and function, such as ``"linalg.cholesky"``.
        function: The name of the function.
        library: The import path of the library actor.
        parameters: The kinds of its parameters, by name: ``"array"``, ``"bool"``, ``"whole"``, ``"text"``,
            ``"real"`` or ``"number"`` (factors), a tuple of the allowed values, the class of an operand that
            consists of several arrays, or ``"other"``.
        variants: The shapes, by the values of the parameters `by`; empty if a function plans it.
        by: The parameters that select one of `variants`.
        dtypes: Its dtypes; empty if the backends determine them.
        status: The meaning of a status word other than 0; None without status words.
        check: Refuses arguments by rules that shapes cannot express.
        location: The file and line.
    """

    name: str
    function: str
    library: str
    parameters: Mapping[str, Any]
    variants: Mapping[tuple[object, ...], Shapes]
    by: Strs
    dtypes: tuple[DType, ...]
    status: Failure | None
    check: Check | None
    location: str

    @property
    def arrays(self) -> dict[str, str]:
        """The parameter name of each array that belongs to an operand of several arrays."""
        names: dict[str, str] = {}
        for name, kind in self.parameters.items():
            if isinstance(kind, type):
                structured: type[Structured] = kind
                names.update((f"{name}.{field}", name) for field in structured.operand_fields)
        return names

    def check_function(self) -> None:
        """Compare the shapes with the parameters.

        Raises:
            TypeError, ValueError: They contradict each other.
        """
        if not isinstance(self.dtypes, tuple) or not all(isinstance(dtype, DType) for dtype in self.dtypes):
            raise TypeError(f"dtypes must be a tuple of DType, such as (DType.float64,), got {self.dtypes!r}")
        for key, line in self.variants.items():
            if len(key) != len(self.by):
                raise ValueError(f"shapes of {key!r}: it is not one value for each of {self.by}")
            self._check_line(line)

    def _check_line(self, line: Shapes) -> None:
        inputs = [item.name for item in line.inputs if item.name not in self.arrays]
        for name in (*self.by, *[item.op for item in line.inputs if item.op], *inputs):
            if name not in self.parameters:
                there = ", ".join(self.parameters)
                raise ValueError(f"the shapes name {name!r}, which is not a parameter; there are {there}")
        if all(item.kind for item in line.inputs):
            raise ValueError(f"shapes {line.line!r}: no array on the left has the dtype of the others")
        named = {*inputs, *[item.name for item in line.outputs]}
        for name, kind in self.parameters.items():
            if (kind == "array" or isinstance(kind, type)) is not (name in named):
                array = "in the shapes: annotate it as Operand or AccelRef"
                problem = array if name in named else "an array, and not in the shapes"
                raise ValueError(f"parameter {name!r} is {problem}")
            if kind == "other":
                raise TypeError(f"parameter {name!r} has an annotation that does not say what it is")


class DeclaredSpec(OperationSpec):
    """The base of declared specifications. Kernels are registered by the declared names.

    The fields are the parameters of the function in order, then the arrays that the operation makes. An
    operand of several arrays becomes its shape, followed by these arrays: ``matrix``, ``matrix_data``. Last
    is `info` if there are status words: one for each matrix of the stack of the first array, in C order. The
    kernel writes all of them: 0 for success, and -1 for a matrix with a NaN or an infinity, which was passed
    to no routine. A result from another line of shapes is None.
    """

    __slots__ = ()
    declaration: ClassVar[Declaration]

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **named: Any) -> None: ...

        # Its fields, for kernels. Signatures list them, but type checkers do not read these.
        def __getattr__(self, name: str) -> Any: ...

    def check_shapes(self, name: str) -> None:
        """Compare a specification made without a plan with the declaration."""
        declaration, name = self.declaration, f"{name}: {type(self).__name__}"
        kinds = cast("dict[str, tuple[object, ...]]", declaration.parameters)
        literals = [(parameter, kinds[parameter]) for parameter in kinds if type(kinds[parameter]) is tuple]
        for parameter, allowed in literals:
            if getattr(self, parameter) not in allowed:
                refuse_value(name, parameter, allowed, getattr(self, parameter))
        line = declaration.variants[tuple([getattr(self, selector) for selector in declaration.by])]
        operands: list[Any] = [getattr(self, item.field) for item in line.inputs]
        letters = tuple([getattr(self, item.op) for item in line.inputs if item.op])
        result_shapes, stack, _ = line.fit(
            name, tuple([getattr(operand, "shape", operand) for operand in operands]), letters
        )
        arrays = [pair for pair in zip(line.inputs, operands, strict=True) if isinstance(pair[1], ArraySpec)]
        dtype = next(spec.dtype for item, spec in arrays if not item.kind)
        indexes = [(item.name, spec) for item, spec in arrays if item.kind == "index"]
        expected = [(item, spec.shape) for item, spec in arrays if item.kind != "index"]
        expected += zip(line.outputs, result_shapes, strict=True)
        for item, shape in expected:
            array: ArraySpec | None = getattr(self, item.field)
            if array is None or array.shape != shape:
                raise ValueError(f"{name}.{item.name} must have shape {shape}, got {array and array.shape}")
            if array.dtype is not item.dtype(dtype):
                raise TypeError(f"{name}.{item.name} must have dtype {item.dtype(dtype)}, got {array.dtype}")
        check_index(name, indexes)
        result_names = {item.name for variant in declaration.variants.values() for item in variant.outputs}
        for result_name in result_names - {item.name for item, _ in expected}:
            if getattr(self, result_name) is not None:
                raise ValueError(f"{name}.{result_name} must be None here")
        words: StatusArray | None = getattr(self, "info", None)
        if words is not None and words.shape != (math.prod(stack),):
            raise ValueError(
                f"{name}.info must have shape {stack}, one word for each matrix; got {words.shape}"
            )
        if declaration.check is not None:
            declaration.check(name, self)

    def check_status(self) -> None:
        """Fail the operation because of the first matrix with a status word other than 0."""
        info: StatusArray | None = getattr(self, "info", None)
        if info is None or not info.any():
            return
        declaration, position = self.declaration, int(info.nonzero()[0][0])
        axes = len(next(iter(declaration.variants.values())).inputs[0].dims)
        stack = self.inputs()[0].shape[:-axes]
        index = tuple(int(i) for i in np.unravel_index(position, stack)) if stack else ()
        matrix_name = (
            f"matrix {index[0] if len(index) == 1 else index} of the stack" if index else "the matrix"
        )
        said, code = declaration.status, int(info[position])
        if callable(said):
            raise said(self, matrix_name, code, index)
        trouble = "holds a NaN or an infinity" if code == _NOT_FINITE else str(said).format(code)
        text = f"{declaration.name}: {matrix_name} {trouble}"
        raise LinAlgError(text, library="solver", code=code, index=index)


class Declared(Protocol[ParametersP, ReplyT_co]):
    """A function that runs an operation on the device of its operands, as made by `operation`."""

    @property
    def declaration(self) -> Declaration:
        """The declaration from which it was made."""
        ...

    @property
    def message(self) -> Callable[ParametersP, Operation[Any, ReplyT_co]]:
        """The class of its message, for `Device.ask` and `Device.submit`."""
        ...

    @property
    def spec(self) -> type[DeclaredSpec]:
        """The class of its specification; None if `operation` got one."""
        ...

    def __call__(self, *args: ParametersP.args, **kwargs: ParametersP.kwargs) -> Call[ReplyT_co]:
        """Make a call of the operation."""
        ...


DECLARED: WeakValueDictionary[str, Declared[..., Any]] = WeakValueDictionary()
"""All declared operations by name."""


def message_of(
    function: Callable[ParametersP, Coroutine[Any, Any, ReplyT]],
) -> Callable[ParametersP, Operation[Any, ReplyT]]:
    """Return the message of a declared function with overloads, which type checkers take for a plain one."""
    message: Callable[ParametersP, Operation[Any, ReplyT]] = cast("Any", function).message
    return message


def operation(
    shapes: str | Mapping[Any, str] = "",
    *,
    actor: type[Any] | str,
    spec: Callable[..., OperationSpec] | None = None,
    status: Failure | None = None,
    check: Check | None = None,
    by: str | Strs = (),
    dtypes: tuple[DType, ...] | None = None,
    reply: Callable[..., Any] | None = None,
    alias: Mapping[str, str] | None = None,
    plan: Callable[[Any, Planner], Planned[Any]] | None = None,
    not_recorded: str = "",
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, ReplyT]]], Declared[ParametersP, ReplyT]]:
    """Declare an operation by the signature and the docstring of a function with the body ``...``.

    The result is a function of the same signature, which uses the device of its operands. Its ``.message`` is
    the class of its message, whose plan checks the arguments in the caller's task and makes the results. Its
    ``.spec`` is the class of its specification; see `DeclaredSpec`.
    Parameters annotated as `Operand` or `AccelRef` are arrays; `bool`, `int`, `str` and ``Literal`` are exact
    values, and a ``Literal`` lists the allowed ones; `float` and `complex` are factors of the arrays. A class
    with ``operand_fields`` is an operand that consists of several arrays with these names; its objects also
    have `shape`, `dtype` and `device`, and ``made_by`` of the class names the function that makes them.
    A parameter `out` takes the caller's array for the result. If there is a parameter `beta`, an array on the
    right that is also a parameter is added to, or is new if the argument is None.

    Args:
        shapes: Arrays, shapes and dtypes: ``"a(..., n, n) -> out(..., n, n)"``; see `ops.parse_shapes`. A
            mapping, if they depend on a parameter.
        actor: The class of the library actor that serves it, or its import path.
        spec: Makes a specification that other operations share, from arguments with the names of parameters
            and results.
        status: Declares a status word for each matrix of the first array. A word other than 0 fails the
            operation: the text explains the fault of the matrix, with the word in place of ``{}``. Or a
            function of the specification, the matrix in words, the word and the index, which makes the error.
        check: Refuses arguments by rules that shapes cannot express, given the name for the error and the
            specification.
        by: The parameter or parameters that are the key of `shapes`.
        dtypes: The dtypes of the arrays without their own dtype. By default, the `dtypes` of the actor's
            class; if it has none, the kernels determine them.
        reply: Makes the reply of several results; by default it is a tuple.
        alias: The operand that each result may be, by the name of the result.
        plan: Plans a message as `Operation.plan` does, if lines of shapes do not suffice.
        not_recorded: See `Operation`.

    Raises:
        TypeError: The declaration contradicts the function. The message begins with file and line.
    """
    if dtypes is None and spec is None and plan is None:
        dtypes = getattr(actor, "dtypes", None) or None

    def declare(function: Any) -> Any:
        code = function.__code__
        location = f"{code.co_filename}:{code.co_firstlineno}"
        name, package = function.__name__.lstrip("_"), _public(function.__module__)
        try:
            _check_module(function.__module__, package)
            declaration = Declaration(
                name=f"{package.rpartition('.')[2]}.{name}",
                function=name,
                library=_path_of(actor),
                parameters={
                    parameter.name: _kind(function, parameter) for parameter in _parameters(function).values()
                },
                variants=_lines(shapes, is_planned=plan is not None),
                by=(by,) if isinstance(by, str) else by,
                dtypes=_listed(dtypes),
                status=status,
                check=check,
                location=location,
            )
            maker = _Maker(function, declaration)
            declaration.check_function()
            generated_spec = maker.make_spec() if plan is None and spec is None else None
            planning = (
                maker.make_plan(generated_spec or spec, reply or _as_tuple, alias or {})
                if plan is None
                else maker.check_values(plan)
            )
            message = maker.make_message(planning, not_recorded)
        except (ValueError, TypeError, NameError) as error:
            raise TypeError(f"{location}: operation {function.__name__}: {error}") from error
        declared = maker.make_function(message)
        declared.message, declared.spec, declared.declaration = message, generated_spec, declaration
        DECLARED[declaration.name] = declared
        name_function(operation_name(message), declaration.name)
        if dtypes and generated_spec is not None:
            ALLOWED[declaration.name] = _dtypes_of(generated_spec, declaration)
        return declared

    return declare


def operation_like(
    original: FunctionT, shapes: str | Mapping[Any, str] = "", **options: Any
) -> Callable[[Callable[[], None]], FunctionT]:
    """Declare an operation with the signature and the actor of another operation, as `operation` does.

    The name and the docstring come from a function without parameters and with an empty body.

    Args:
        original: The other operation, declared in the same module.
        shapes: See `operation`.
        options: See `operation`.
    """
    declared: Any = original

    def declare(stub: Callable[[], None]) -> FunctionT:
        derived: Any = operation(shapes, actor=declared.declaration.library, **options)(
            signed_like(original, stub)
        )
        return cast("FunctionT", derived)

    return declare


def _as_tuple(*results: Any) -> tuple[Any, ...]:
    return results


def _listed(dtypes: tuple[DType, ...] | None) -> tuple[DType, ...]:
    if dtypes is not None and not dtypes:
        raise ValueError("dtypes must name at least one dtype, or be left out, so that the kernels decide")
    return dtypes or ()


def _dtypes_of(spec: type[Any], declaration: Declaration) -> dict[str, tuple[DType, ...]]:
    """Return the dtypes of the fields without their own dtype, as a kernel may name them."""
    lines = declaration.variants.values()
    fields = {item.field for line in lines for item in line.inputs if not item.kind}
    # The descriptor would have this too, but it is made at the first use of a specification.
    first = next(field.name for field in attrs.fields(spec) if role_of(field).kind == "array")
    return dict.fromkeys([*fields, *([""] if first in fields else [])], declaration.dtypes)


def _lines(shapes: str | Mapping[Any, str], *, is_planned: bool) -> dict[tuple[object, ...], Shapes]:
    if is_planned is bool(shapes):
        raise ValueError("it takes either shapes or a plan")
    keyed = shapes if isinstance(shapes, Mapping) else {(): shapes}
    return {
        key if isinstance(key, tuple) else (key,): parse_shapes(line) for key, line in keyed.items() if line
    }


def _check_module(module: str, package: str) -> None:
    """Refuse a module that workers cannot import by a public name."""
    if module == "__main__" or not package:
        raise ValueError(
            f"it is declared in module {module!r}, which cannot be imported by a public name; declare it in "
            "a module that can, and import it from there"
        )


def _public(module: str) -> str:
    """Return the package that exports a module's names."""
    return ".".join(part for part in module.split(".") if not part.startswith("_"))


def _path_of(actor: type[Any] | str) -> str:
    return actor if isinstance(actor, str) else f"{_public(actor.__module__)}:{actor.__qualname__}"


# In modules without `from __future__ import annotations`, the annotation is the union itself.
_ARRAYS = ("Operand", "Operand | None", "AccelRef", "AccelRef | None", "Out")
# A parameter that no operation accepts. Its refusal names the valid parameters.
_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD)
_QUALIFIED = re.compile(r"\w+\.")
_KINDS = {bool: "bool", int: "whole", str: "text", float: "real", complex: "number"}


def _parameters(function: FunctionType) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _kind(function: FunctionType, parameter: inspect.Parameter) -> Any:
    """Return the kind of a parameter; see `Declaration.parameters`."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise TypeError(f"{parameter} cannot be a field of a message; name each argument")
    note = parameter.annotation
    text = note if isinstance(note, str) else getattr(note, "__name__", str(note))
    if note in (Operand, Operand | None) or _QUALIFIED.sub("", text) in _ARRAYS:
        return "array"
    kind = eval(note, function.__globals__) if isinstance(note, str) else note  # noqa: S307  # its own annotation
    if hasattr(kind, "operand_fields"):
        return kind
    return get_args(kind) if get_origin(kind) is Literal else _KINDS.get(kind, "other")


class _LaterPlan:
    """Compiles the plan of a message at its first use, which then takes this place.

    Compiling all plans took a sixth of the import of `linalg`.
    """

    def __init__(self, compile_plan: Callable[[], Any]) -> None:
        self._compile_plan = compile_plan

    def __get__(self, message: Any, cls: type[Any]) -> Any:
        cls.plan = plan = self._compile_plan()
        return plan if message is None else plan.__get__(message)


class _Maker:
    """Makes the parts that follow from one declaration."""

    def __init__(self, function: FunctionType, declaration: Declaration) -> None:
        self._function = function
        self._declaration = declaration
        self._parameters = _parameters(function)
        self._optional = {name for name, parameter in self._parameters.items() if parameter.default is None}
        self._message = "".join(part.capitalize() for part in declaration.function.split("_"))

    def make_spec(self) -> type[Any]:
        """Make the class of the specification."""
        declaration, lines = self._declaration, self._declaration.variants.values()
        inputs = {item.name for line in lines for item in line.inputs}
        updated = [name for line in lines for name in line.updated]
        results = dict.fromkeys(item.name for line in lines for item in line.outputs)
        changed = [*updated, *results][0] if updated or results else ""
        fields: dict[str, Any] = {}
        for name, kind in declaration.parameters.items():
            if kind in ("real", "number"):
                fields[name] = number(NumberRole.FACTOR, changed)
            elif kind != "array":
                fields[name] = exact()
                of = [
                    item
                    for line in lines
                    for item in line.inputs
                    if declaration.arrays.get(item.name) == name
                ]
                fields.update((item.field, reads()) for item in of)
            elif name in updated:
                fields[name] = updates()
            elif name in inputs:
                fields[name] = reads(optional=True) if name in self._optional else reads()
        for name in results:
            is_always = all(name in [item.name for item in line.outputs] for line in lines)
            is_added_to = "beta" in declaration.parameters
            fields[name] = updates() if is_added_to else writes() if is_always else writes(optional=True)
        if declaration.status is not None:
            fields["info"] = status()
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

    def make_plan(self, spec: Any, reply: Any, alias: Mapping[str, str]) -> Any:
        """Make the method `plan` of the message."""
        declaration = self._declaration
        is_own = getattr(spec, "declaration", None) is declaration
        fields = (
            [field.name for field in attrs.fields(spec)] if is_own else [*inspect.signature(spec).parameters]
        )
        results = {item.name for line in declaration.variants.values() for item in line.outputs}
        arrays = [name.replace(".", "_") for name in declaration.arrays]
        for name in fields:
            if name not in {*results, *declaration.parameters, *arrays, "info"}:
                raise ValueError(f"spec takes {name!r}, which is neither a parameter nor a result")
        sources: dict[tuple[object, ...], tuple[str, dict[str, Any]]] = {}
        for key, line in declaration.variants.items():
            absent = frozenset(results - {item.name for item in line.outputs})
            source = PlanSource(declaration.parameters, line, fields, absent)
            text = source.text(
                self._optional, declaration.dtypes, alias, declaration.check, is_checked=is_own
            )
            names = {"fit": lru_cache(_MAX_CACHED_SHAPES)(line.fit), "Spec": spec, "Reply": reply}
            sources[key] = text, source.names | names
        return _LaterPlan(partial(self._compile_plan, sources))

    def _compile_plan(self, sources: Mapping[tuple[object, ...], tuple[str, Mapping[str, Any]]]) -> Any:
        """Compile the plans of all shapes, and return a plan that selects among them."""
        plans = {key: self._compiled(text, "plan", names) for key, (text, names) in sources.items()}
        by, first = self._declaration.by, next(iter(plans.values()))
        if not by:
            return first

        def plan(message: Any, planner: Planner) -> Planned[Any]:
            """Plan by the parameters that select the shapes; each plan refuses their other values."""
            key = tuple([getattr(message, name) for name in by])
            try:
                chosen = plans.get(key, first)
            except TypeError:  # a value without a hash
                chosen = first
            planned: Planned[Any] = chosen(message, planner)
            return planned

        return plan

    def check_values(self, plan: Any) -> Any:
        """Check flags and values of a ``Literal`` before a handwritten plan."""
        names: dict[str, Any] = {"own": plan, "refuse_value": refuse_value}
        steps = check_steps(self._declaration.parameters, names)
        if not steps:
            return plan
        text = "\n    ".join(["def plan(self, planner):", *steps, "return own(self, planner)"])
        return self._compiled(text, "plan", names)

    def make_message(self, plan: Any, not_recorded: str) -> type[Any]:
        """Make the class of the message."""
        declaration, name = self._declaration, self._message
        fields = {
            parameter: attrs.field(
                default=attrs.NOTHING if formal.default is formal.empty else formal.default
            )
            for parameter, formal in self._parameters.items()
        }
        space = {
            "__module__": self._function.__module__,
            "__qualname__": name,
            "__doc__": f"Asks for `{declaration.function}`, which says what the fields mean.",
            "library": declaration.library,
            "not_recorded": not_recorded,
            "plan": plan,
            "__repr__": field_repr,
        }
        message = attrs.define(eq=False, repr=False, on_setattr=None, these=fields)(
            type(name, (Operation,), space)
        )
        if declaration.name.startswith("nn.") and next(iter(declaration.parameters.values()), "") == "array":
            _refuse_layers(message, declaration)
        return message

    def make_function(self, message: type[Any]) -> Any:
        """Make the function that returns calls."""
        function, declaration, kinds = self._function, self._declaration, self._declaration.parameters
        arrays = [name for name, kind in kinds.items() if kind == "array" or isinstance(kind, type)]
        first = next(iter(kinds))
        check = "" if first in arrays else f"    if isinstance({first}, Operators): refuse()\n"
        bare = [
            parameter.replace(default=parameter.empty, annotation=parameter.empty)
            for parameter in self._parameters.values()
        ]
        text = (
            f"def {function.__name__}{inspect.Signature([*bare, _UNKNOWN])}:\n"
            f"    if unknown: raise unknown_option({declaration.name!r}, [*unknown][0], {[*kinds]})\n{check}"
            f"    return Call(Asked, ({', '.join(kinds)},))\n"
        )

        def refuse() -> NoReturn:
            called = f"{declaration.function}({', '.join(kinds)})"
            raise TypeError(f"{declaration.name}: {first} must be a number, got AccelRef: {called}")

        def refuse_call(error: Exception, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            refuse_as(declaration.name, function, error, dict(zip(kinds, args, strict=True)))

        asked = ArrayFunction(declaration.name, message, refuse=refuse_call)
        names = {"Call": Call, "Asked": asked, "unknown_option": unknown_option}
        names |= {"Operators": Operators, "refuse": refuse}
        compiled = self._compiled(text, function.__name__, names)
        compiled.__wrapped__, compiled.asked = function, asked
        compiled.__defaults__, compiled.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        compiled.__annotations__, compiled.__doc__ = function.__annotations__, function.__doc__
        compiled.__module__, compiled.__qualname__ = function.__module__, function.__qualname__
        return compiled

    def _compiled(self, text: str, name: str, names: Mapping[str, Any]) -> Any:
        """Make a function from its source; its frames show the declaration."""
        code, space = self._function.__code__, dict(names)
        # Empty lines precede the source, so that it begins at the line of the declaration. Changing the line
        # numbers of a tree took an eighth of the package's import.
        source = "\n" * (code.co_firstlineno - 1) + text
        exec(compile(source, code.co_filename, "exec"), space)  # noqa: S102  # contains only names of parameters
        return space[name]
