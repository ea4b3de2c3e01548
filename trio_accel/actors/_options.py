"""Policies and options of actors: frozen values, checked when they are made."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import math
import random
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


def named_options(cls: type[T]) -> type[T]:
    """Have an attrs class refuse a wrong option by name, when it is made.

    An unknown option is answered with the nearest known one. A scalar of NumPy becomes a number of Python. A
    field without a validator or a converter of its own must have the type of its annotation.
    """
    make: Callable[..., None] = cls.__init__
    fields = [field for field in attrs.fields(cls) if field.init]  # type: ignore[arg-type]  # it is one
    names = [field.alias for field in fields]
    places = [field.alias for field in fields if not field.kw_only]
    unchecked = {field.alias: field.name for field in fields if not (field.validator or field.converter)}

    @functools.cache
    def hints() -> Mapping[str, Any]:
        # The first use resolves them, because an annotation may name a class that its module defines later.
        return types_of(cls)

    @functools.wraps(make)
    def check(self: object, *values: Any, **options: Any) -> None:
        _check_names(cls.__name__, options, names)
        values = tuple(map(as_plain, values))
        options = {name: as_plain(value) for name, value in options.items()}
        for name, value in (*zip(places, values, strict=False), *options.items()):
            if name in unchecked and not fits(hint := hints()[unchecked[name]], value):
                raise TypeError(f"{cls.__name__}: {name} must be {described(hint)}, got {value!r}")
        make(self, *values, **options)

    setattr(cls, "__init__", check)  # noqa: B010  # type checkers refuse an assignment
    return cls


def checked_options(make: FunctionT) -> FunctionT:
    """Have a constructor refuse switches, functions and mappings of a wrong type by their names.

    Its numbers and words have checks in its body. A scalar of NumPy becomes a number of Python.
    """
    hints = functools.cache(functools.partial(types_of, make))

    @functools.wraps(make)
    def check(self: object, *values: Any, **options: Any) -> None:
        options = {name: as_plain(value) for name, value in options.items()}
        for name, value in options.items():
            hint = hints().get(name, Any)
            if not is_kind_of(hint, value):
                raise TypeError(f"{type(self).__name__}: {name} must be {described(hint)}, got {value!r}")
        make(self, *values, **options)

    return cast("FunctionT", check)


def named_arguments(function: FunctionT) -> FunctionT:
    """Have a function answer an option that it does not have with the nearest that it has."""
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY and one.name != "self"]
    by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    has_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    most = sys.maxsize if has_any or not by_name else len(parameters) - len(by_name)

    def check(values: Sequence[Any], options: Mapping[str, object]) -> None:
        if options:
            _check_names(function.__name__, options, names)
        if len(values) > most:
            told = ", ".join(f"{name}=" for name in by_name)
            raise TypeError(f"{function.__name__}: too many positional arguments; give {told} by name")

    @functools.wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        if options or len(values) > most:
            check(values, options)
        try:
            return function(*values, **options)
        except (TypeError, ValueError):
            silence(*values, *options.values())
            raise

    @functools.wraps(function)
    async def ask(*values: Any, **options: Any) -> Any:
        if options or len(values) > most:
            check(values, options)
        try:
            return await function(*values, **options)
        except (TypeError, ValueError):
            silence(*values, *options.values())
            raise

    return cast("FunctionT", ask if inspect.iscoroutinefunction(function) else call)


def _check_names(where: str, options: Mapping[str, object], names: Collection[str]) -> None:
    """Refuse the first option that there is not."""
    for name in options:
        if name not in names:
            raise unknown_option(where, name, names)


def arguments_of(
    other: FunctionT, run: Callable[..., Any], *first: object
) -> Callable[[Callable[[], None]], FunctionT]:
    """Make an async function that has the arguments of another one.

    The name and the docstring are those of a function without parameters. Its body is empty.

    Args:
        other: The other one.
        run: Is called with `first`, and then all arguments by their names.
        first: What distinguishes the function from the other one.
    """

    def make(own: Callable[[], None]) -> FunctionT:
        bound = binder(own.__name__, other)

        async def call(*values: Any, **options: Any) -> Any:
            return await run(*first, **bound(values, options))

        made: Any = functools.update_wrapper(call, own)
        made.__wrapped__, made.__annotations__ = other, other.__annotations__
        return cast("FunctionT", made)

    return make


def signed_like(other: Callable[..., Any], own: Callable[..., None]) -> FunctionType:
    """Make a function with the signature and the body of another one, and its own name and docstring.

    Args:
        other: The other one, which may have decorators.
        own: Has no parameters, but for ``self`` in a class, and an empty body.
    """
    signature = cast("FunctionType", inspect.unwrap(other))
    name, code = own.__name__, own.__code__
    code = signature.__code__.replace(
        co_name=name,
        co_qualname=own.__qualname__,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )
    made = FunctionType(code, signature.__globals__, name, signature.__defaults__)
    made.__kwdefaults__, made.__annotations__ = signature.__kwdefaults__, signature.__annotations__
    made.__doc__, made.__module__, made.__qualname__ = own.__doc__, own.__module__, own.__qualname__
    return made


def nearest(name: str, names: Collection[str]) -> str:
    """Find the name that was meant, in words; all there are, where none is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}"


def unknown_option(where: str, name: str, names: Collection[str]) -> TypeError:
    """Make the error of an option that there is not, which says what to write."""
    if name == "timeout":
        return TypeError(f"{where}: no call takes a timeout: write `with trio.fail_after(seconds):`")
    told = nearest(name, names) if names else "it takes none"
    return TypeError(f"{where}: there is no option {name!r}; {told}")


def bind_arguments(
    where: str, signature: inspect.Signature, args: Any, kwargs: Mapping[str, object], *own: str
) -> inspect.BoundArguments:
    """Find out which argument of a call is which.

    Args:
        where: Name of the call, for the error.
        signature: The signature of what is called.
        args: Arguments by their places.
        kwargs: Arguments by their names.
        own: Options that the caller has besides.

    Raises:
        TypeError: They do not fit.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters.values()
        names = {one.name for one in parameters}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        for name in kwargs:
            if name not in names and not takes_any:
                raise unknown_option(where, name, {*names, *own}) from None
        plain = [one.replace(annotation=one.empty) for one in parameters]
        # The reason comes first: a signature may be long.
        raise TypeError(f"{where}: {error}; it takes {inspect.Signature(plain)}") from None


def binder(
    operation: str, function: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Make a function that returns the arguments of a call by their names, with defaults.

    Args:
        operation: Name of the operation, for the error.
        function: Has the signature; it takes no ``*args`` and no ``**kwargs``.
    """

    @functools.cache
    def read() -> tuple[inspect.Signature, list[str], dict[str, Any]]:
        # At the first call, because a package that is imported has many such functions and few are called.
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        places = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        return signature, places, defaults

    def bound(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        # `Signature.bind` takes four times as long: it is left to find out what is wrong.
        signature, places, defaults = read()
        given = {**defaults, **dict(zip(places, arguments, strict=False)), **named}
        is_twice = not named.keys().isdisjoint(places[: len(arguments)])
        if is_twice or len(arguments) > len(places) or given.keys() != signature.parameters.keys():
            bind_arguments(operation, signature, arguments, named)
        return given

    return bound


class Restart(enum.Enum):
    """The ends after which a child is started again (OTP's restart types)."""

    PERMANENT = "permanent"
    """Always, also after it ended by itself (`ActorContext.finish`)."""
    TRANSIENT = "transient"
    """Only after a failure, not after it ended by itself (`ActorContext.finish`)."""
    TEMPORARY = "temporary"
    """Never."""


class Directive(enum.Enum):
    """Reaction of a supervisor to an exception of a handler."""

    RESUME = "resume"
    """It is a reply: the asker gets the exception itself, the actor lives on with its state."""
    RESTART = "restart"
    """The actor crashed: the asker gets `ActorFailedError`, a new incarnation takes over."""
    STOP = "stop"
    """The actor crashed and is not started again."""
    ESCALATE = "escalate"
    """The actor crashed and its supervisor fails with it."""


class Overflow(enum.Enum):
    """Fate of a message that meets a full mailbox."""

    WAIT = "wait"
    """The sender waits for room."""
    REJECT = "reject"
    """The sender gets `MailboxFullError`."""
    DROP_OLDEST = "drop_oldest"
    """The oldest queued message goes; its asker gets `MailboxFullError`."""
    DROP_NEWEST = "drop_newest"
    """The new message goes; its asker gets `MailboxFullError`, a tell ends silently."""


class Strategy(enum.Enum):
    """The children that are restarted when one fails (OTP's strategies)."""

    ONE_FOR_ONE = "one_for_one"
    """That child alone."""
    ONE_FOR_ALL = "one_for_all"
    """All children: the others are ended in reverse start order, then all start in start order."""
    REST_FOR_ONE = "rest_for_one"
    """That child and those started after it, ended and started in the same orders."""


def _number(minimum: float = 0.0, maximum: float = math.inf) -> Validator:
    allowed = f"of at least {minimum:g}" if maximum == math.inf else f"from {minimum:g} to {maximum:g}"
    return validator(f"be a number {allowed}", lambda value: is_number(value, minimum, maximum))


def named(cls: type) -> str:
    """Name a class, with its article."""
    return f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"


@named_options
@attrs.frozen(kw_only=True)
class Backoff:
    """The pauses before restarts.

    The first restart waits for `initial` seconds, the second for `base`, each later one `factor`
    times longer up to `maximum`; after `reset_after` seconds without a crash it begins anew.
    Every delay is varied by up to `jitter` times itself, so that actors that failed together
    do not return together; none is above `maximum`.

    Attributes:
        initial: Seconds before the first restart of a series.
        base: Seconds before the second.
        factor: How many times longer each later one is, at least 1.
        maximum: The most seconds.
        jitter: Part of a delay by which it may be longer or shorter, from 0 to 1.
        reset_after: Seconds without a crash after a restart, after which a new series begins.
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
                given = f"{getattr(self, name)!r} and {self.maximum!r}"
                raise ValueError(f"Backoff: {name} must not be above maximum, got {given}")

    def delay(self, attempt: int, source: random.Random) -> float:
        """Return the seconds to wait before restart number `attempt` (from 0) of a series."""
        if attempt == 0:
            plain = self.initial
        else:
            try:
                plain = self.base and self.base * math.pow(self.factor, attempt - 1)
            except OverflowError:
                plain = self.maximum
        # Bounded before it is varied too: those that wait for the maximum are to be spread as well.
        plain = min(plain, self.maximum)
        varied = plain * (1.0 + source.uniform(-self.jitter, self.jitter)) if self.jitter else plain
        return min(varied, self.maximum)


@named_options
@attrs.frozen
class Intensity:
    """The restarts that a supervisor allows, before it fails itself or lets the child pause.

    Attributes:
        restarts: The most restarts within the window; one more, and `pause` says what follows.
        within: Length of the window in seconds, above 0.
        counts_progress: Whether the restart of a child counts that had made progress
            (`ActorContext.report_progress`). If not, such a child is in no crash loop: its restart is not
            counted, and its earlier restarts are forgotten.
        pause: What follows one restart more. None: the supervisor fails. Otherwise the child is started again
            after this pause, and its first failure without progress begins the next, longer one. Progress, or
            a window without a failure, ends the series.
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
    """Size of a mailbox, and its rules when it is full or its actor restarts.

    Attributes:
        capacity: The most messages that are queued.
        overflow: Fate of a message that meets a full mailbox.
        stash: The most messages that the actor may set aside.
        on_restart: ``"keep"``: messages wait for the next incarnation; ``"reject"``: queued and new
            ones get `ActorRestartingError` until it has started.
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
    """The rules by which an actor is supervised, and supervises its own children.

    Attributes:
        directives: Reaction to an exception, by class; the most specific class wins, in a
            group the most severe directive of its members. Anything else restarts the actor.
        backoff: Waiting before a restart.
        backoff_after_progress: Waiting before a restart if the incarnation had made progress
            (`ActorContext.report_progress`). Those restarts are a series of their own; it begins anew with
            an incarnation that lived for `reset_after` seconds after its progress. The series of `backoff`
            begins anew with any progress. None: progress makes no difference.
        grace: Seconds that the actor may take to stop before it is cancelled, and then again before
            it is given up (see `Ref.stop`).
        strategy: Which of the actor's own children are restarted when one fails.
        intensity: Restarts that the actor allows its own children.
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
        """Find the directive for an exception; groups are looked into."""
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
        strategy: Which of the actors spawned in the system directly are restarted when one fails.
        intensity: Restarts that the system allows them.
        random: Source of the jitter of back-offs; seed it to make them repeatable.
        held_after: Seconds after which a warning names the code that holds the Trio loop, because it computes
            or waits without a checkpoint. None switches the watch off, with its thread and
            `System.loop_holds`. Systems of the same Trio run share the watch and the value of the first.
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
