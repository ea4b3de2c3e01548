"""Declarations of a program's methods, and their look-up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

import attrs

from ..actors import ActorError, nearest
from ..backends.base import AccelError, Refused
from ..backends.base.kit.programs import ENQUEUES, REFUSES, UPDATES
from ..devices.base._refusals import shown

__all__ = ["Array", "method"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
P = ParamSpec("P")

_Plain: TypeAlias = "int | float | complex | str | bytes | Sequence[_Plain] | Mapping[str, _Plain] | None"
# A value that arrives unchanged; arrays arrive as references.
PlainT = TypeVar("PlainT", bound=_Plain)

Array: TypeAlias = Any
"""An array in the signature of a program: for the caller, an `AccelRef` or a NumPy array; in the program, a
NumPy array, or on CUDA an object that PyTorch, CuPy and JAX accept without a copy."""

# Type checkers know the parameters of a lambda by this.
_Rule: TypeAlias = (
    Callable[[], Any]
    | Callable[[Any], Any]
    | Callable[[Any, Any], Any]
    | Callable[[Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any, Any, Any], Any]
)

# The attribute has the declaration for the side that asks; other attributes are for the side that runs it.
_DECLARED = "_trio_accel_method"
Resumes: TypeAlias = Literal[False, True, "count"]
SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that take several arguments."""


class _Effects(TypedDict, total=False):
    """The options that a method has with and without declared outputs."""

    updates: Sequence[str]
    refuses: Sequence[type[Exception]]
    enqueues: bool
    idempotent: bool
    resumes: Resumes
    prefetch: int


@overload
def method(*, out: None = None, **effects: Unpack[_Effects]) -> Callable[[FunctionT], FunctionT]: ...
@overload  # its caller gets the declared arrays, whatever the method returns
def method(*, out: _Rule, **effects: Unpack[_Effects]) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def method(
    *,
    out: _Rule | None = None,
    updates: Sequence[str] = (),
    refuses: Sequence[type[Exception]] = (),
    enqueues: bool = False,
    idempotent: bool = False,
    resumes: Resumes = False,
    prefetch: int = 1,
) -> Callable[[Any], Any]:
    """Declare the outputs and effects of a program's method, or of a function.

    A method without this declaration may return any arrays. It may also return a function without arguments,
    which is called when the device has finished the enqueued work. Its result is the reply: numbers, strings
    and collections of these, such as ``return lambda: tokens.tolist()`` for a tensor in pinned memory. So the
    next call is enqueued meanwhile.

    Args:
        out: The rule of the outputs, called in the program's process with the arguments of the call. Returns
            shape and dtype of the result, ``((rows, 384), "float32")``, or a dict, list or tuple of such
            pairs, or None for no result. Then a call is one operation instead of two. A method with a
            parameter `out` gets the arrays there, and writes to them; the result of any other method is
            copied to them. The caller may pass its own arrays by that parameter.
        updates: Names of parameters with arrays that are changed in place; prefix the constructor's
            parameters with ``"self."``. Other methods get NumPy arrays read-only, but not every library
            supports such a mark. Such a call is never run twice: if its context is lost, its arrays are
            damaged, and the caller gets an error.
        refuses: Error classes by which it refuses a request. The caller gets such an error with its class and
            text, and the program continues as if it had not been called. Any other error restarts the
            program, except `Refused`, which needs no declaration. It cannot be combined with `updates`,
            unless the method is idempotent. A method with `updates` may
            ``raise Refused("...", unchanged=True)`` to state that no array has changed.
        enqueues: Whether it only enqueues work on the device, and never waits for anything. Then a GPU's
            program is called without a change of thread, which saves a large part of the cost of a short
            call. While it runs, it blocks the event loop of its process: the worker's, or inline your own.
            After a call of more than 2 ms the next one is made in a thread. On the CPU backend, where methods
            compute, it changes nothing.
        idempotent: Whether a call may run again after a loss of its context, according to
            `DeviceOptions.retry`, although it updates arrays. The written values must not depend on anything
            that it or a concurrent call writes: ``self.cache[place] = value``, but not
            ``self.total += value``. So a failed or lost call does not damage the arrays. Its error tells the
            caller that the written places are in doubt, so the caller calls again, or no longer reads them.
        resumes: Whether a method that yields continues after a loss: it is called again, and its parameter
            `resume` gets the list of the items yielded so far, or with ``"count"`` their number. It yields
            the following items. Such a method must not change arrays, or be idempotent.
        prefetch: The maximum number of unread items of a method that yields.

    Raises:
        TypeError: An argument is of another type.

    >>> class Counter:
    ...     def __init__(self, counts: Array) -> None:
    ...         self.counts = counts
    ...
    ...     @method(updates=["self.counts"])
    ...     def add(self, numbers: Array) -> None:
    ...         self.counts += numbers
    """
    if out is not None and not callable(out):
        raise TypeError(f"method: out must be a function of the arguments, got {out!r}")
    if isinstance(updates, str) or not all(isinstance(cast("object", name), str) for name in updates):
        raise TypeError(f"method: updates must be a sequence of parameter names, got {updates!r}")
    for option, value in (("enqueues", enqueues), ("idempotent", idempotent)):
        if not isinstance(cast("object", value), bool):
            raise TypeError(f"method: {option} must be True or False, got {value!r}")
    if resumes not in {False, True, "count"}:
        raise TypeError(f'method: resumes must be True, False or "count", got {resumes!r}')
    if resumes and updates and not idempotent:
        raise TypeError(
            "method: a method that updates arrays resumes only if it is idempotent, as a loss damages them; "
            "write idempotent=True if what it writes depends on nothing that it writes"
        )
    if not isinstance(cast("object", prefetch), int) or prefetch < 1:
        raise ValueError(f"method: prefetch must be an integer from 1, got {prefetch!r}")
    classes = _check_refuses(refuses, () if idempotent else updates)
    declared = {"out": out, "idempotent": idempotent, "resumes": resumes, "prefetch": prefetch}

    def declare(function: FunctionT) -> FunctionT:
        setattr(function, _DECLARED, declared)
        setattr(function, REFUSES, classes)
        setattr(function, ENQUEUES, enqueues)
        setattr(function, UPDATES, tuple(updates))
        return function

    return declare


def _check_refuses(refuses: Sequence[object], updates: Sequence[str]) -> tuple[type[Exception], ...]:
    classes = tuple(refuses) if isinstance(refuses, (tuple, list)) else (refuses,)
    for cls in classes:
        if not isinstance(cls, type) or not issubclass(cls, Exception):
            raise TypeError(f"method: refuses must be a tuple of classes of exceptions, got {refuses!r}")
        if issubclass(cls, (AccelError, ActorError, MemoryError)) and cls is not Refused:
            raise TypeError(
                f"method: {cls.__name__} cannot be a refusal, as it says how a device or an actor is; "
                "raise Refused, or an error of your own"
            )
    if updates and set(classes) - {Refused}:
        raise TypeError(
            "method: a method that updates arrays cannot refuse by other errors than Refused, as half of the "
            'update may be done; raise Refused("...", unchanged=True) before it changes anything'
        )
    return cast("tuple[type[Exception], ...]", classes)


@attrs.frozen(eq=False)
class ProgramMethod:
    """A method of a program, or a function.

    Attributes:
        name: The name; empty for a function.
        full_name: The name for errors, such as ``"encoder.Encoder.encode"``.
        signature: The signature without `self`.
        out: The rule of the outputs, if they are declared.
        takes_out: Whether it has a parameter `out` for them.
        updates: The parameters with arrays that it changes.
        state: The parameters of the constructor with arrays that it changes.
        refuses: The error classes by which it refuses a request.
        idempotent: Whether a call that updates may run again.
        yields: Whether it yields items.
        resumes: The form of its `resume` argument after a loss.
        prefetch: The maximum number of unread items.
    """

    name: str
    full_name: str
    signature: inspect.Signature
    out: Callable[..., Any] | None
    takes_out: bool
    updates: frozenset[str]
    state: frozenset[str]
    refuses: tuple[type[Exception], ...]
    idempotent: bool
    yields: bool
    resumes: Resumes
    prefetch: int

    @property
    def changes(self) -> bool:
        """Whether it must not run twice."""
        return bool(self.updates or self.state) and not self.idempotent


def find_method(cls: type[object], method_or_name: object) -> ProgramMethod:
    """Find a method of a program's class.

    Args:
        cls: The class.
        method_or_name: The method's function, as ``Encoder.encode``, or its name.

    Raises:
        TypeError: It is not a callable method.
        AttributeError: The class lacks such a method.
    """
    name = method_or_name if isinstance(method_or_name, str) else _name_in(cls, method_or_name)
    member = inspect.getattr_static(cls, name, None) if name else None
    if member is None:
        description = (
            repr(method_or_name)
            if isinstance(method_or_name, str)
            else getattr(method_or_name, "__qualname__", shown(method_or_name))
        )
        raise AttributeError(
            f"{description} is not a method of {cls.__qualname__}; pass a method and its arguments: "
            f"{cls.__qualname__}.method, ..."
        )
    if name.startswith("_") or name == "warm_up":
        raise AttributeError(
            f"{cls.__qualname__}.{name} is not for asking: it is private, or called by itself"
        )
    if not inspect.isfunction(member):
        raise TypeError(
            f"{cls.__qualname__}.{name} must be a plain method with self, got {type(member).__name__}; "
            "write one that returns it"
        )
    first, *rest = inspect.signature(member).parameters.values() or (None,)
    if first is None:
        raise TypeError(f"{cls.__qualname__}.{name} takes no self")
    constructor = dict.fromkeys(inspect.signature(cls).parameters)
    return _describe(member, name, f"{_module(cls)}.{cls.__qualname__}.{name}", rest, constructor)


def _name_in(cls: type[object], member: object) -> str:
    """Return the name under which a class or its bases have an object; empty if there is none."""
    # The caller passes the function of a static or class method.
    plain = getattr(member, "__func__", member)
    if not (callable(plain) or isinstance(plain, property)):
        return ""
    names = (
        name
        for base in cls.__mro__
        for name, attribute in vars(base).items()
        if getattr(attribute, "__func__", attribute) is plain
    )
    return next(names, "")


def state_of(cls: type[object]) -> frozenset[str]:
    """Return the constructor parameters with arrays that a method changes.

    Raises:
        TypeError: A method has an invalid declaration.
    """
    asked = [name for name in dir(cls) if not name.startswith("_") and name != "warm_up"]
    declared = [name for name in asked if hasattr(inspect.getattr_static(cls, name), UPDATES)]
    return frozenset[str]().union(*[find_method(cls, name).state for name in declared])


def describe_function(function: Callable[..., Any]) -> ProgramMethod:
    """Describe a function that is used as a program.

    Raises:
        TypeError: It cannot be a program.
    """
    full_name = f"{_module(function)}.{function.__qualname__}"
    return _describe(function, "", full_name, inspect.signature(function).parameters.values(), {})


def _describe(
    function: Callable[..., Any],
    name: str,
    full_name: str,
    parameters: Any,
    constructor: Mapping[str, object],
) -> ProgramMethod:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{full_name} is async, and it runs in a thread of the device: write `def`, without await"
        )
    declared: Any = getattr(function, _DECLARED, {})
    out: Callable[..., Any] | None = declared.get("out")
    signature = inspect.Signature(list(parameters))
    yields = inspect.isgeneratorfunction(function)
    resumes = declared.get("resumes", False)
    if yields and out is not None:
        raise TypeError(f"{full_name} yields, and its items are what they are: leave out= away")
    resume = signature.parameters.get("resume")
    if resumes and (not yields or resume is None or resume.default is resume.empty):
        raise TypeError(
            f"{full_name} is declared with resumes=, and must yield, and take an argument resume with a "
            "default, which it has at its first call"
        )
    if out is not None:
        _check_rule(full_name, out, signature)
    updates: set[str] = set()
    state: set[str] = set()
    for declared_name in getattr(function, UPDATES, ()):
        first, _, of_constructor = declared_name.partition("self.")
        names, allowed = (
            (state, constructor) if of_constructor and not first else (updates, signature.parameters)
        )
        plain = of_constructor or declared_name
        if plain not in allowed:
            there = [*signature.parameters, *[f"self.{parameter}" for parameter in constructor]]
            raise TypeError(
                f"{full_name}: updates names {declared_name!r}, which is not a parameter; "
                f"{nearest(f'self.{plain}' if f'self.{plain}' in there else declared_name, there)}"
            )
        names.add(plain)
    return ProgramMethod(
        name,
        full_name,
        signature,
        out,
        out is not None and "out" in signature.parameters,
        frozenset(updates),
        frozenset(state),
        getattr(function, REFUSES, ()),
        declared.get("idempotent", False),
        yields,
        resumes,
        declared.get("prefetch", 1),
    )


def _check_rule(full_name: str, rule: Callable[..., Any], signature: inspect.Signature) -> None:
    """Refuse an output rule that accepts neither all of the method's arguments nor the required ones only."""
    all_parameters = [
        parameter
        for name, parameter in signature.parameters.items()
        if name != "out" and parameter.kind not in SEVERAL
    ]
    needed = [parameter for parameter in all_parameters if parameter.default is parameter.empty]
    misfits = [_misfit(rule, parameters) for parameters in (all_parameters, needed)]
    if all(misfits):
        names = ", ".join(parameter.name for parameter in all_parameters)
        raise TypeError(f"{full_name}: its rule out= must take ({names}): {misfits[0]}")


def _misfit(rule: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> str:
    named = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    with suppress(ValueError):  # Python does not know each callable's signature
        try:
            inspect.signature(rule).bind(*parameters[: len(parameters) - len(named)], **named)
        except TypeError as error:
            return str(error)
    return ""


def _module(target: Any) -> str:
    return str(target.__module__).rpartition(".")[2]
