"""Options of a device, and modules that its workers are to begin with."""

from __future__ import annotations

from types import NoneType
from typing import Literal, cast

import attrs

from ...actors import Backoff, Intensity, is_number, named_options
from ...backends.base import Isolation
from ._checks import above_zero, is_above_zero, must, one_of, whole
from ._port import CompletionStrategy
from ._streams import PerActorStreams, StreamStrategy

__all__ = ["DeviceOptions", "Preload"]

# A device needs one after the other. So many are for contexts that are lost faster than workers start.
_MOST_SPARES = 16


_seconds = must("be seconds of at least 0", lambda value: is_number(value, 0.0))
_switch = one_of("be True or False", bool)


def _spares(instance: DeviceOptions, attribute: attrs.Attribute[int], value: int) -> None:
    whole(0)(instance, attribute, value)
    if value > _MOST_SPARES:
        raise ValueError(
            f"DeviceOptions: spares must be from 0 to {_MOST_SPARES}, got {value}: each is a process with a "
            "context of its own, which takes memory of the device while it stands ready; one or two bridge "
            "the time that a worker takes to start"
        )


def _are(value: object, *kinds: type[object]) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(each, kinds) for each in cast("tuple[object, ...]", value)
    )


def _modules(
    instance: DeviceOptions,
    attribute: attrs.Attribute[tuple[str | Preload, ...]],
    value: tuple[str | Preload, ...],
) -> None:
    must("be a tuple of names of modules or of Preload", lambda each: _are(each, str, Preload), TypeError)(
        instance, attribute, value
    )
    for each in value:
        if isinstance(each, str):
            Preload(each)


def _is_strategy(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "open", None))


@named_options
@attrs.frozen(kw_only=True)
class DeviceOptions:
    """How a device is opened and supervised.

    Attributes:
        isolation: Where the context lives: ``"inline"``, in this process; ``"process"``, in a worker.
            None takes the backend's default.
        completion: How completions are learned of; None for the device's best way.
        streams: Which stream a library actor works on.
        spares: Workers that stand ready to take over, with all memory mapped and the libraries open that are
            in use. Each is a process with a context of its own, which takes memory of the device; 16 at most;
            inline there are no workers.
        in_flight: The most launches that a library has on its stream; senders of more wait.
        retry: How often an operation that was in flight when the context was lost runs again instead of
            failing, if it changes no array that was there before. Inline, where memory is lost with the
            context, only operations without array arguments can run again.
        retry_suspects: Whether `retry` is also for the operation that has caused a fault of the device. If
            not, it fails at once, so that a bad request costs one loss and one error, its own. Where several
            may have caused it, they run again behind the others, each alone, but for the last if all others
            go well. If so, for faults that come by themselves, that one runs again, too.
        intensity: Restarts that the device allows its context, and the context its libraries. None takes the
            default recovery policy: 3 within 60 seconds, not counting those that follow progress. A
            context has made progress when it has completed a request without an error, and so has a library.
            A context has also when it was whole for a second: its arrays are there, and the libraries and
            programs that were in use are open.
            An intensity that is given here counts every restart, unless its `counts_progress` is False.
        backoff: Waiting before a context or library is started again. None takes the default recovery
            policy: after progress at once, and at most 1 second where losses follow one another closely;
            without progress as `Backoff` has it. A back-off that is given here holds for every restart.
        when_given_up: What follows where there were more losses than `intensity` allows. ``"end"``: nothing.
            The device has ended, and its arrays can be adopted. ``"reopen"``: it is opened again, after 1, 2,
            4 seconds and so on, 60 at most. Its references stay, and so do the arrays of workers. Until it
            has a context, all that is asked gets `DeviceLostError` with `retry_after` at once. A context that
            makes progress ends the series. `Intensity.pause` chooses other waits. A fault of a GPU inline
            ends it all the same, as this process gets no other context.
        cancel_grace: Seconds that a cancelled asker waits for its running operation. Past it the asker
            gets its cancellation, and the operation goes on: its buffers stay reserved, and it counts as in
            flight, until it ends. Only one that uses host memory of the program directly is waited for; see
            `Device.ask`. `trio_accel.cancel_grace` chooses it for single calls.
        close_grace: Seconds for which closing the device waits for operations in flight.
        stuck_after: Seconds after which a running operation counts as hung: its asker gets
            `CompletionTimeoutError`, and the context is replaced. Time for which the machine was
            suspended, or the program stopped, counts for a tenth of that at most. None: never.
        heartbeat_timeout: Seconds without a sign of life after which a worker counts as dead.
        memory_limit: The most bytes that arrays on the device may take; None for all memory.
        libraries: Import paths ``"package.module:Class"`` of library actors that are to be ready with the
            context; others are opened on first use.
        preload: Modules that the launcher of the workers imports before the first of them, such as
            ``("torch", "encoder")``, so that every worker begins with them. Each is tried in a process of its
            own first. Modules that a fork could not use, or that cannot be imported, are left to the workers,
            with a warning in the logs that names the culprit. `Preload` takes that risk for a module. None
            inline.
        nvtx: Whether each launch of an operation is a range in profilers of NVIDIA, in the process that
            launches. Needs the extra ``nvtx``: without it, opening the device raises `NotSupportedError`.
    """

    isolation: Isolation | None = attrs.field(
        default=None,
        validator=must("be 'process', 'inline' or None", lambda value: value in (None, "process", "inline")),
    )
    completion: CompletionStrategy | None = attrs.field(
        default=None,
        validator=must(
            "be a completion strategy such as HostCallbackCompletion()",
            lambda value: value is None or callable(getattr(value, "open", None)),
            TypeError,
        ),
    )
    streams: StreamStrategy = attrs.field(
        factory=PerActorStreams,
        validator=must("be a stream strategy such as StreamPool(4)", _is_strategy, TypeError),
    )
    spares: int = attrs.field(default=0, validator=_spares)
    # 64 askers inline take 30 µs each, with a window of 32 it is 33 µs; from a worker 29 µs with either
    # (H200).
    in_flight: int = attrs.field(default=64, validator=whole(1))
    retry: int = attrs.field(default=0, validator=whole(0))
    retry_suspects: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    intensity: Intensity | None = attrs.field(
        default=None, validator=one_of("be an Intensity or None", Intensity, NoneType)
    )
    backoff: Backoff | None = attrs.field(
        default=None, validator=one_of("be a Backoff or None", Backoff, NoneType)
    )
    when_given_up: Literal["end", "reopen"] = attrs.field(
        default="end", validator=must("be 'end' or 'reopen'", lambda value: value in ("end", "reopen"))
    )
    cancel_grace: float = attrs.field(default=0.0, validator=_seconds)
    close_grace: float = attrs.field(default=5.0, validator=_seconds)
    stuck_after: float | None = attrs.field(
        default=None,
        validator=must("be seconds above 0 or None", lambda value: value is None or is_above_zero(value)),
    )
    heartbeat_timeout: float = attrs.field(default=15.0, validator=above_zero)
    memory_limit: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(1)))
    libraries: tuple[str, ...] = attrs.field(
        default=(),
        validator=must(
            "be a tuple of import paths 'package.module:Class'", lambda value: _are(value, str), TypeError
        ),
    )
    preload: tuple[str | Preload, ...] = attrs.field(default=(), validator=_modules)
    nvtx: bool = attrs.field(default=False, validator=_switch)


def _module(instance: Preload, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"preload: a module is named by a string, got {value!r}")
    if value == "__main__" or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"preload: {value!r} is no name of a module that another process can import")


@attrs.frozen
class Preload:
    """A module that the launcher of workers imports ahead, for `DeviceOptions.preload`.

    Attributes:
        module: Its name.
        trusted: Whether workers may begin with it whatever its import leaves behind: threads, open files,
            handled signals. You know that a forked process can do without these. A worker that cannot may
            hang or crash. A module that initialises a driver or cannot be imported is refused all the same.
    """

    module: str = attrs.field(validator=_module)
    trusted: bool = attrs.field(default=False, kw_only=True, validator=_switch)
