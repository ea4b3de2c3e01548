"""Options of a device."""

from __future__ import annotations

import attrs

from ..actors import Backoff, Intensity, named_options
from ..backends.base import Isolation
from ._preload import Preload
from .base._streams import PerActorStreams, StreamStrategy
from .completion._port import CompletionStrategy

__all__ = ["DeviceOptions"]

# A device needs one after the other. So many are for contexts that are lost faster than workers start.
_MOST_SPARES = 16


def _positive(instance: DeviceOptions, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"DeviceOptions: {attribute.name} must be a whole number of at least 1, got {value!r}"
        )


def _count(instance: DeviceOptions, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"DeviceOptions: {attribute.name} must be a whole number of at least 0, got {value!r}"
        )


def _spares(instance: DeviceOptions, attribute: attrs.Attribute[int], value: int) -> None:
    _count(instance, attribute, value)
    if value > _MOST_SPARES:
        raise ValueError(
            f"DeviceOptions: spares must be from 0 to {_MOST_SPARES}, got {value}: each is a process with a "
            "context of its own, which takes memory of the device while it stands ready; one or two bridge "
            "the time that a worker takes to start"
        )


def _paths(
    instance: DeviceOptions, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]
) -> None:
    if not isinstance(value, tuple) or not all(isinstance(path, str) for path in value):
        raise TypeError(
            f"DeviceOptions: libraries must be a tuple of import paths 'package.module:Class', got {value!r}"
        )


def _modules(
    instance: DeviceOptions,
    attribute: attrs.Attribute[tuple[str | Preload, ...]],
    value: tuple[str | Preload, ...],
) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, (str, Preload)) for each in value):
        raise TypeError(
            f"DeviceOptions: preload must be a tuple of names of modules or of Preload, got {value!r}"
        )
    for each in value:
        if isinstance(each, str):
            Preload(each)


def _seconds(instance: DeviceOptions, attribute: attrs.Attribute[float], value: float) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"DeviceOptions: {attribute.name} must be seconds of at least 0, got {value!r}")


def _isolation(
    instance: DeviceOptions, attribute: attrs.Attribute[Isolation | None], value: Isolation | None
) -> None:
    if value not in (None, "process", "inline"):
        raise ValueError(f"DeviceOptions: isolation must be 'process', 'inline' or None, got {value!r}")


def _above_zero(instance: DeviceOptions, attribute: attrs.Attribute[float], value: float) -> None:
    if not _is_above_zero(value):
        raise ValueError(f"DeviceOptions: {attribute.name} must be seconds above 0, got {value!r}")


def _above_zero_or_none(
    instance: DeviceOptions, attribute: attrs.Attribute[float | None], value: float | None
) -> None:
    if value is not None and not _is_above_zero(value):
        raise ValueError(f"DeviceOptions: {attribute.name} must be seconds above 0 or None, got {value!r}")


def _is_above_zero(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < float("inf")


def _intensity(
    instance: DeviceOptions, attribute: attrs.Attribute[Intensity | None], value: Intensity | None
) -> None:
    if value is not None and not isinstance(value, Intensity):
        raise TypeError(f"DeviceOptions: intensity must be an Intensity or None, got {value!r}")


def _backoff(
    instance: DeviceOptions, attribute: attrs.Attribute[Backoff | None], value: Backoff | None
) -> None:
    if value is not None and not isinstance(value, Backoff):
        raise TypeError(f"DeviceOptions: backoff must be a Backoff or None, got {value!r}")


def _strategy(
    instance: DeviceOptions,
    attribute: attrs.Attribute[CompletionStrategy | None],
    value: CompletionStrategy | None,
) -> None:
    if value is not None and not callable(getattr(value, "open", None)):
        raise TypeError(
            "DeviceOptions: completion must be a completion strategy such as HostCallbackCompletion(), "
            f"got {value!r}"
        )


def _switch(instance: DeviceOptions, attribute: attrs.Attribute[bool], value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"DeviceOptions: {attribute.name} must be True or False, got {value!r}")


def _stream_strategy(
    instance: DeviceOptions, attribute: attrs.Attribute[StreamStrategy], value: StreamStrategy
) -> None:
    if isinstance(value, type) or not callable(getattr(value, "open", None)):
        raise TypeError(
            f"DeviceOptions: streams must be a stream strategy such as StreamPool(4), got {value!r}"
        )


@named_options
@attrs.frozen(kw_only=True)
class DeviceOptions:
    """How a device is opened and supervised.

    Attributes:
        isolation: Where the context lives: ``"inline"``, in this process; ``"process"``, in a worker.
            None takes the backend's default.
        completion: How completions are learned of; None for what suits the device best.
        streams: Which stream a library actor works on.
        spares: Workers that stand ready to take over, with all memory mapped and the libraries open that are
            in use. Each is a process with a context of its own, which takes memory of the device; 16 at most,
            and none inline.
        in_flight: The most launches that a library has on its stream; senders of more wait.
        retry: How often an operation that was in flight when the context was lost runs again instead of
            failing, if it changes no array that was there before. Inline, where memory is lost with the
            context, only what uses no array at all can run again.
        retry_suspects: Whether `retry` is for operations, too, that may have caused a fault of the device.
            They run again behind the others, each alone. False: if there is only one, it fails at once, so
            that a bad request costs one loss.
        intensity: Restarts that the device allows its context, and the context its libraries. None takes the
            default recovery policy: 3 within 60 seconds, of which those are none that follow progress. A
            context has made progress when it has completed a request without an error, and so has a library.
            What is given here counts every restart, unless its `counts_progress` is False.
        backoff: Waiting before a context or library is started again. None takes the default recovery
            policy: after progress at once, and at most 1 second where losses follow one another closely;
            without progress as `Backoff` has it. What is given here holds for every restart.
        cancel_grace: Seconds that a cancelled asker waits for its running operation. Past it the asker
            gets its cancellation, and the operation goes on: its buffers stay reserved, and it counts as in
            flight, until it ends. Only one that uses host memory of the program directly is waited for; see
            `Device.ask`. `trio_accel.cancel_grace` chooses it for single calls.
        close_grace: Seconds for which closing the device waits for what is in flight.
        stuck_after: Seconds after which a running operation counts as hung: its asker gets
            `CompletionTimeoutError`, and the context is replaced. None: never.
        heartbeat_timeout: Seconds without a sign of life after which a worker counts as dead.
        memory_limit: The most bytes that arrays on the device may take; None for what there is.
        libraries: Import paths ``"package.module:Class"`` of library actors that are to be ready with the
            context; others are opened on first use.
        preload: Modules that the launcher of the workers imports before the first of them, such as
            ``("torch", "encoder")``, so that every worker begins with them. Each is tried in a process of its
            own first. What a fork could not use, or what cannot be imported, is left to the workers, with a
            warning in the logs that names the culprit. `Preload` takes that risk for a module. None inline.
        nvtx: Whether each launch of an operation is a range in profilers of NVIDIA, in the process that
            launches. Needs the extra ``nvtx``: without it, opening the device raises `NotSupportedError`.
    """

    isolation: Isolation | None = attrs.field(default=None, validator=_isolation)
    completion: CompletionStrategy | None = attrs.field(default=None, validator=_strategy)
    streams: StreamStrategy = attrs.field(factory=PerActorStreams, validator=_stream_strategy)
    spares: int = attrs.field(default=0, validator=_spares)
    # 64 askers inline take 30 µs each, with a window of 32 it is 33 µs; from a worker 29 µs with either
    # (H200).
    in_flight: int = attrs.field(default=64, validator=_positive)
    retry: int = attrs.field(default=0, validator=_count)
    retry_suspects: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    intensity: Intensity | None = attrs.field(default=None, validator=_intensity)
    backoff: Backoff | None = attrs.field(default=None, validator=_backoff)
    cancel_grace: float = attrs.field(default=0.0, validator=_seconds)
    close_grace: float = attrs.field(default=5.0, validator=_seconds)
    stuck_after: float | None = attrs.field(default=None, validator=_above_zero_or_none)
    heartbeat_timeout: float = attrs.field(default=15.0, validator=_above_zero)
    memory_limit: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    libraries: tuple[str, ...] = attrs.field(default=(), validator=_paths)
    preload: tuple[str | Preload, ...] = attrs.field(default=(), validator=_modules)
    nvtx: bool = attrs.field(default=False, validator=_switch)
