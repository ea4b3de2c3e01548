"""Policies and options of actors: frozen values, checked at construction."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import math
import random
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any, Literal, TypeVar, cast

import attrs

from ._errors import leaves
from ._hints import as_plain, described, fits, is_kind_of, types_of
from ._numbers import Validator, is_number, must_be_whole, validator
from ._openings import silence

__all__ = [
    "Backoff",
    "Directive",
    "Intensity",
    "MailboxOptions",
    "Overflow",
    "Policy",
    "Restart",
    "Strategy",
    "SystemOptions",
    "arguments_of",
    "as_plain",
    "bind_arguments",
    "binder",
    "checked_options",
    "fits",
    "named_arguments",
    "named_options",
    "nearest",
    "signed_like",
    "unknown_option",
]

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


SYNONYMS = "trio_accel.synonyms"
"""Key of a field's metadata: names that other libraries give to the option."""


def named_options(cls: type[T]) -> type[T]:
    """Make an attrs class check its options at construction, and name the wrong one.

    The error for an unknown option suggests the nearest known one. A NumPy scalar becomes a Python number. A
    field without its own validator or converter must have the type of its annotation.
    """
    make: Callable[..., None] = cls.__init__
    fields = [field for field in attrs.fields(cls) if field.init]  # type: ignore[arg-type]  # it is one
    names = [field.alias for field in fields]
    positional = [field.alias for field in fields if not field.kw_only]
    synonyms = {synonym: field.alias for field in fields for synonym in field.metadata.get(SYNONYMS, ())}
    unchecked = {field.alias: field.name for field in fields if not (field.validator or field.converter)}

    @functools.cache
    def hints() -> Mapping[str, Any]:
        # Resolve them on first use, because an annotation may name a class that its module defines later.
        return types_of(cls)

    @functools.wraps(make)
    def check(self: object, *values: Any, **options: Any) -> None:
        for name in options:
            if name not in names:
                raise _unknown_option(cls, name, names, synonyms)
        if len(values) > len(positional):
            try:
                make(self, *values, **options)
            except TypeError as error:
                raise _by_name(cls.__name__, error, values, positional, names) from None
        values = tuple(map(as_plain, values))
        options = {name: as_plain(value) for name, value in options.items()}
        for name, value in (*zip(positional, values, strict=False), *options.items()):
            if name in unchecked and not fits(hint := hints()[unchecked[name]], value):
                raise TypeError(f"{cls.__name__}: {name} must be {described(hint)}, got {value!r}")
        make(self, *values, **options)

    setattr(cls, "__init__", check)  # noqa: B010  # type checkers refuse an assignment
    return cls


def _unknown_option(
    cls: type, name: str, names: Collection[str], synonyms: Mapping[str, str] = MappingProxyType({})
) -> TypeError:
    """Make the error for an unknown option of a class, which names the option that has this meaning."""
    parts = [part for part in name.split("_") if part in names]
    if meant := synonyms.get(name) or (parts[0] if len(parts) == 1 else None):
        return TypeError(f"{cls.__name__}: there is no option {name!r}; did you mean {meant!r}?")
    if "timeout" in name:
        # Options have times by other names, and their descriptions give the unit.
        in_seconds = re.findall(r"^ +(\w+): .*[Ss]econds", cls.__doc__ or "", re.MULTILINE)
        times = [time for time in in_seconds if time in names]
        hint = f"did you mean {times[0]!r}?" if len(times) == 1 else f"its times are {', '.join(times)}"
        return TypeError(
            f"{cls.__name__}: there is no option {name!r}; {hint if times else nearest(name, names)}"
        )
    return unknown_option(cls.__name__, name, names)


def _by_name(
    label: str, error: TypeError, values: Sequence[object], positional: Sequence[str], names: Sequence[str]
) -> TypeError:
    """Make the error for options without names from Python's own."""
    if len(values) > len(names):
        return TypeError(f"{label}: there are {len(names)} options: {error}")
    named = [*map(repr, values[: len(positional)])]
    keywords = [name for name in names if name not in positional]
    for name, value in zip(keywords, values[len(positional) :], strict=False):
        named.append(f"{name}={value!r}")
    return TypeError(f"{label}: pass options by name, as in {label}({', '.join(named)}): {error}")


def checked_options(make: FunctionT) -> FunctionT:
    """Make a constructor check names, and switches, functions and mappings against their annotations.

    The constructor's body checks its numbers and words. A NumPy scalar becomes a Python number. A constructor
    with ``**kwargs`` receives unknown names and their values unchanged, because it passes them on.
    """
    hints = functools.cache(functools.partial(types_of, make))
    parameters = [*inspect.signature(make).parameters.values()][1:]
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    @functools.wraps(make)
    def check(self: object, *values: Any, **options: Any) -> None:
        if not has_any:
            for name in options:
                if name not in names:
                    raise _unknown_option(type(self), name, names)
        for name in filter(names.__contains__, [*options]):
            value = options[name] = as_plain(options[name])
            hint = hints().get(name, Any)
            if not is_kind_of(hint, value):
                raise TypeError(f"{type(self).__name__}: {name} must be {described(hint)}, got {value!r}")
        make(self, *values, **options)

    return cast("FunctionT", check)


def named_arguments(function: FunctionT) -> FunctionT:
    """Make a function's error for an unknown option suggest the nearest known one."""
    parameters = inspect.signature(function).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not parameter.POSITIONAL_ONLY and parameter.name != "self"
    ]
    by_name = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    has_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    max_positional = sys.maxsize if has_any or not by_name else len(parameters) - len(by_name)

    def check(values: Sequence[Any], options: Mapping[str, object]) -> None:
        if options:
            _check_names(function.__name__, options, names)
        if len(values) > max_positional:
            listing = ", ".join(f"{name}=" for name in by_name)
            raise TypeError(f"{function.__name__}: too many positional arguments; give {listing} by name")

    @functools.wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        if options or len(values) > max_positional:
            check(values, options)
        try:
            return function(*values, **options)
        except (TypeError, ValueError):
            silence(*values, *options.values())
            raise

    @functools.wraps(function)
    async def ask(*values: Any, **options: Any) -> Any:
        if options or len(values) > max_positional:
            check(values, options)
        try:
            return await function(*values, **options)
        except (TypeError, ValueError):
            silence(*values, *options.values())
            raise

    return cast("FunctionT", ask if inspect.iscoroutinefunction(function) else call)


def _check_names(label: str, options: Mapping[str, object], names: Collection[str]) -> None:
    """Raise the error of the first unknown option, if any."""
    for name in options:
        if name not in names:
            raise unknown_option(label, name, names)


def arguments_of(
    template: FunctionT, run: Callable[..., Any], *first: object
) -> Callable[[Callable[[], None]], FunctionT]:
    """Make an async function with the arguments of another function.

    The decorated function provides the name and the docstring. Its parameter list and its body are empty.

    Args:
        template: The other function.
        run: Called with `first`, followed by all arguments by name.
        first: Distinguishes the new function from the other.
    """

    def make(stub: Callable[[], None]) -> FunctionT:
        bound = binder(stub.__name__, template)

        async def call(*values: Any, **options: Any) -> Any:
            return await run(*first, **bound(values, options))

        result: Any = functools.update_wrapper(call, stub)
        result.__wrapped__, result.__annotations__ = template, template.__annotations__
        return cast("FunctionT", result)

    return make


def signed_like(template: Callable[..., Any], stub: Callable[..., None]) -> FunctionType:
    """Make a function with another function's signature and body, and its own name and docstring.

    Args:
        template: The other function, which may have decorators.
        stub: Provides name and docstring. It has an empty body, and no parameters except ``self`` in a class.
    """
    signature = cast("FunctionType", inspect.unwrap(template))
    name, code = stub.__name__, stub.__code__
    code = signature.__code__.replace(
        co_name=name,
        co_qualname=stub.__qualname__,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )
    result = FunctionType(code, signature.__globals__, name, signature.__defaults__)
    result.__kwdefaults__, result.__annotations__ = signature.__kwdefaults__, signature.__annotations__
    result.__doc__, result.__module__, result.__qualname__ = stub.__doc__, stub.__module__, stub.__qualname__
    return result


def nearest(name: str, names: Collection[str]) -> str:
    """Return a hint at the nearest known name, or the list of all names if none is near."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"there are {', '.join(sorted(names))}"


def unknown_option(label: str, name: str, names: Collection[str]) -> TypeError:
    """Make the error for an unknown option, with a suggestion."""
    if name == "timeout":
        return TypeError(f"{label}: no call takes a timeout: write `with trio.fail_after(seconds):`")
    hint = nearest(name, names) if names else "it takes none"
    return TypeError(f"{label}: there is no option {name!r}; {hint}")


def bind_arguments(
    label: str, signature: inspect.Signature, args: Any, kwargs: Mapping[str, object], *extra_options: str
) -> inspect.BoundArguments:
    """Match the arguments of a call to the parameters.

    Args:
        label: Name of the call, for the error.
        signature: The signature of the called function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        extra_options: Further options that the caller itself accepts.

    Raises:
        TypeError: The arguments do not match the signature.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters.values()
        names = {parameter.name for parameter in parameters}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for name in kwargs:
            if name not in names and not takes_any:
                raise unknown_option(label, name, {*names, *extra_options}) from None
        plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
        # Put the reason first, because a signature may be long.
        raise TypeError(f"{label}: {error}; it takes {inspect.Signature(plain)}") from None


def binder(
    operation: str, function: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Make a function that returns a call's arguments by name, including defaults.

    Args:
        operation: Name of the operation, for the error.
        function: Provides the signature, which must not have ``*args`` or ``**kwargs``.
    """

    @functools.cache
    def read() -> tuple[inspect.Signature, list[str], dict[str, Any]]:
        # Read it at the first call, because an imported package has many such functions and few are called.
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        positional = [
            parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        defaults = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.default is not parameter.empty
        }
        return signature, positional, defaults

    def bound(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        # `Signature.bind` takes four times as long, so use it only to explain an error.
        signature, positional, defaults = read()
        values = {**defaults, **dict(zip(positional, arguments, strict=False)), **named}
        is_twice = not named.keys().isdisjoint(positional[: len(arguments)])
        if is_twice or len(arguments) > len(positional) or values.keys() != signature.parameters.keys():
            bind_arguments(operation, signature, arguments, named)
        return values

    return bound


class Restart(enum.Enum):
    """The ends after which a child restarts (OTP's restart types)."""

    PERMANENT = "permanent"
    """Always, even after it ended on its own (`ActorContext.finish`)."""
    TRANSIENT = "transient"
    """Only after a failure, not after it ended on its own (`ActorContext.finish`)."""
    TEMPORARY = "temporary"
    """Never."""


class Directive(enum.Enum):
    """A supervisor's reaction to an exception in a handler."""

    RESUME = "resume"
    """The exception is the reply: the caller gets it, and the actor continues with its state."""
    RESTART = "restart"
    """The actor has crashed: the caller gets `ActorFailedError`, and a new incarnation takes over."""
    STOP = "stop"
    """The actor has crashed and does not restart."""
    ESCALATE = "escalate"
    """The actor has crashed and its supervisor fails with it."""


class Overflow(enum.Enum):
    """The treatment of a message that arrives at a full mailbox."""

    WAIT = "wait"
    """The sender waits for room."""
    REJECT = "reject"
    """The sender gets `MailboxFullError`."""
    DROP_OLDEST = "drop_oldest"
    """The oldest queued message is dropped; its caller gets `MailboxFullError`."""
    DROP_NEWEST = "drop_newest"
    """The new message is dropped: `ask` raises `MailboxFullError`, `tell` returns silently."""


class Strategy(enum.Enum):
    """The children that restart when one fails (OTP's strategies)."""

    ONE_FOR_ONE = "one_for_one"
    """Only the failed child."""
    ONE_FOR_ALL = "one_for_all"
    """All children: the others end in reverse start order, then all start in start order."""
    REST_FOR_ONE = "rest_for_one"
    """The failed child and all later ones, which end and start in the same orders."""


def _number(minimum: float = 0.0, maximum: float = math.inf) -> Validator:
    allowed = f"of at least {minimum:g}" if maximum == math.inf else f"from {minimum:g} to {maximum:g}"
    return validator(f"be a number {allowed}", lambda value: is_number(value, minimum, maximum))


def named(cls: type) -> str:
    """Return a class name with its article."""
    return f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"


@named_options
@attrs.frozen(kw_only=True)
class Backoff:
    """The delays before restarts.

    The first restart waits for `initial` seconds and the second for `base`. Each later delay is `factor`
    times longer, up to `maximum`. After `reset_after` seconds without a crash, a new series begins. Each
    delay varies randomly by up to `jitter` times its length, so that actors that failed together do not
    return together; none exceeds `maximum`.

    Attributes:
        initial: The delay in seconds before the first restart of a series.
        base: The delay in seconds before the second restart.
        factor: The ratio of each later delay to the previous delay, at least 1.
        maximum: The maximum delay in seconds.
        jitter: The maximum relative deviation of a delay, from 0 to 1.
        reset_after: Seconds without a crash after a restart, before a new series begins.
    """

    initial: float = attrs.field(default=0.0, validator=_number())
    base: float = attrs.field(default=0.1, validator=_number())
    factor: float = attrs.field(default=2.0, validator=_number(1.0))
    maximum: float = attrs.field(default=30.0, validator=_number())
    jitter: float = attrs.field(default=0.1, validator=_number(0.0, 1.0))
    reset_after: float = attrs.field(default=60.0, validator=_number())

    def __attrs_post_init__(self) -> None:
        for name in ("initial", "base"):
            if getattr(self, name) > self.maximum:
                pair = f"{getattr(self, name)!r} and {self.maximum!r}"
                raise ValueError(f"Backoff: {name} must not be above maximum, got {pair}")

    def delay(self, attempt: int, source: random.Random) -> float:
        """Return the delay in seconds before restart number `attempt` (from 0) of a series."""
        if attempt == 0:
            plain = self.initial
        else:
            try:
                plain = self.base and self.base * math.pow(self.factor, attempt - 1)
            except OverflowError:
                plain = self.maximum
        # Apply the maximum before the jitter too, so that delays at the maximum also vary.
        plain = min(plain, self.maximum)
        varied = plain * (1.0 + source.uniform(-self.jitter, self.jitter)) if self.jitter else plain
        return min(varied, self.maximum)


@named_options
@attrs.frozen
class Intensity:
    """The number of restarts that a supervisor allows before it fails or makes the child pause.

    Attributes:
        restarts: The maximum number of restarts within the window; `pause` controls what happens beyond it.
        within: Length of the window in seconds, above 0.
        counts_progress: Whether the restart of a child counts if the child had made progress
            (`ActorContext.report_progress`). If not, such a child is not in a crash loop: its restart does
            not count, and its earlier restarts are forgotten.
        pause: The reaction to one restart too many. None: the supervisor fails. Otherwise the child restarts
            after this pause, and its first failure without progress begins the next, longer pause. Progress,
            or a window without a failure, ends the series.
    """

    restarts: int = attrs.field(default=3, validator=must_be_whole(0))
    within: float = attrs.field(default=5.0, validator=_number())
    counts_progress: bool = attrs.field(default=True, kw_only=True)
    pause: Backoff | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not self.within > 0:
            raise ValueError(f"Intensity: within must be above 0, got {self.within!r}")


@named_options
@attrs.frozen(kw_only=True)
class MailboxOptions:
    """Size of a mailbox, and its behaviour when it is full or its actor restarts.

    Attributes:
        capacity: The maximum number of queued messages.
        overflow: The treatment of a message that arrives at a full mailbox.
        stash: The maximum number of stashed messages.
        on_restart: ``"keep"``: messages wait for the next incarnation; ``"reject"``: queued and new
            messages fail with `ActorRestartingError` until it has started.
    """

    capacity: int = attrs.field(default=64, validator=must_be_whole(1))
    overflow: Overflow = Overflow.WAIT
    stash: int = attrs.field(default=64, validator=must_be_whole(0))
    on_restart: Literal["keep", "reject"] = attrs.field(
        default="keep", validator=validator("be 'keep' or 'reject'", ("keep", "reject").__contains__)
    )


def _directives(value: Mapping[type[Exception], Directive]) -> Mapping[type[Exception], Directive]:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"Policy: directives must be a mapping of exception classes to Directive, got {value!r}"
        )
    for cls, directive in value.items():
        if not (isinstance(cls, type) and issubclass(cls, Exception)):
            raise TypeError(f"Policy: directives: {cls!r} is not a subclass of Exception")
        if not isinstance(directive, Directive):
            raise TypeError(f"Policy: directives: {directive!r} for {cls.__name__} is not a Directive")
    return MappingProxyType(dict(value))


@named_options
@attrs.frozen(kw_only=True)
class Policy:
    """The rules for supervising an actor, and for the actor's supervision of its own children.

    Attributes:
        directives: Reaction to an exception, by class. The most specific class applies; for a group,
            the most severe directive of its members. All other exceptions restart the actor.
        backoff: Delays before restarts.
        backoff_after_progress: Delays before restarts of an incarnation that had made progress
            (`ActorContext.report_progress`). These restarts form their own series, which starts over after an
            incarnation that lived for `reset_after` seconds after its progress. Any progress starts the
            series of `backoff` over. None: progress makes no difference.
        grace: Seconds for the actor to stop before it is cancelled, and then again before it is abandoned
            (see `Ref.stop`).
        strategy: Which of the actor's own children restart when one fails.
        intensity: The number of restarts that the actor allows its own children.
    """

    directives: Mapping[type[Exception], Directive] = attrs.field(
        factory=dict[type[Exception], Directive], converter=_directives
    )
    backoff: Backoff = Backoff()
    backoff_after_progress: Backoff | None = None
    grace: float = attrs.field(default=5.0, validator=_number())
    strategy: Strategy = Strategy.ONE_FOR_ONE
    intensity: Intensity = Intensity()

    def directive_for(self, error: BaseException) -> Directive:
        """Return the directive for an exception; a group gets the most severe directive of its members."""
        return max((self._directive_of(type(leaf)) for leaf in leaves(error)), key=_SEVERITY.index)

    def _directive_of(self, cls: type[BaseException]) -> Directive:
        for base in cls.__mro__:
            directive = self.directives.get(base)
            if directive is not None:
                return directive
        return Directive.RESTART


_SEVERITY = (Directive.RESUME, Directive.RESTART, Directive.STOP, Directive.ESCALATE)


@named_options
@attrs.frozen(kw_only=True)
class SystemOptions:
    """Options of a system.

    Attributes:
        strategy: Which of the system's top-level actors restart when one fails.
        intensity: The number of restarts that the system allows them.
        random: Random source for the jitter of back-offs; seed it to make them repeatable.
        held_after: Seconds after which a warning names the code that holds the Trio loop, because it computes
            or blocks without a checkpoint. None disables the watch, including its thread and
            `System.loop_holds`. Systems of the same Trio run share the watch, and the first system's value.
    """

    strategy: Strategy = Strategy.ONE_FOR_ONE
    intensity: Intensity = Intensity()
    random: random.Random = attrs.field(factory=random.Random)
    held_after: float | None = attrs.field(
        default=1.0,
        validator=validator(
            "be a number of at least 0.1, or None", lambda value: value is None or is_number(value, 0.1)
        ),
    )
