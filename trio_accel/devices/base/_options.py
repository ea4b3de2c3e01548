"""Options of a device, and what they choose from: streams, completions, modules for workers."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol

import attrs

from ...actors import Backoff, Intensity, fits, is_number, must_be_whole, named_options, validator
from ...backends.base import AccelDevice, AccelStream, DeviceInfo, Isolation
from ...backends.base.kit.fast_paths import current_fast_paths
from ._bridge import LoopNotifier
from ._port import AdaptivePort, CompletionPort, CompletionStrategy, HostCallbackPort, PolledPort, SyncPort

__all__ = [
    "AdaptiveCompletion",
    "DeviceOptions",
    "HostCallbackCompletion",
    "PerActorStreams",
    "PerLibraryStreams",
    "PolledCompletion",
    "Preload",
    "SingleStream",
    "StreamPool",
    "StreamSource",
    "StreamStrategy",
    "SyncCompletion",
]


def is_above_zero(value: object) -> bool:
    """Tell whether a value is a finite number above 0."""
    return is_number(value, 0.0, sys.float_info.max) and value > 0


above_zero = validator("be seconds above 0", is_above_zero)
"""Requires seconds."""


class StreamSource(Protocol):
    """The streams of one context."""

    def acquire(self, library: str) -> AccelStream:
        """Return a stream for one incarnation of a library's actor."""
        ...

    def release(self, stream: AccelStream) -> None:
        """Take the stream back: that incarnation enqueues nothing more; what is enqueued still runs."""


class StreamStrategy(Protocol):
    """A way to give streams out, given to `DeviceOptions`."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        ...


@named_options
@attrs.frozen(kw_only=True)
class PerActorStreams:
    """A stream for each library actor, a new one after a crash: no library waits behind another. The default.

    Attributes:
        priorities: By the name of the library, 0 for those that are not named: work of a higher one is
            begun first, where the device has priorities (CUDA; the CPU has none).
    """

    priorities: Mapping[str, int] = attrs.field(
        factory=dict[str, int],
        validator=validator(
            "map library names to integers", lambda value: fits(Mapping[str, int], value), TypeError
        ),
    )

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _OwnStreams(device, self.priorities)


@attrs.frozen(kw_only=True)
class PerLibraryStreams:
    """A stream for each library, shared by all actors that serve it."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _CachedStreams(device)


@attrs.frozen(kw_only=True)
class SingleStream:
    """One stream for everything: operations run one after the other, in the order of their launch."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _PooledStreams(device, 1)


@named_options
@attrs.frozen
class StreamPool:
    """So many streams, which the library actors take in turn.

    Attributes:
        size: How many.
    """

    size: int = attrs.field(validator=must_be_whole(1))

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _PooledStreams(device, self.size)


@attrs.frozen
class _OwnStreams:
    _device: AccelDevice
    _priorities: Mapping[str, int]

    def acquire(self, library: str) -> AccelStream:
        name = f"{self._device.info.name} {library}"
        return self._device.open_stream(name, self._priorities.get(library, 0))

    def release(self, stream: AccelStream) -> None:
        stream.close()


@attrs.define(eq=False)
class _CachedStreams:
    """Streams that last as long as the context: its end closes them."""

    _device: AccelDevice
    _streams: dict[str, AccelStream] = attrs.field(factory=dict[str, AccelStream], init=False)

    def acquire(self, library: str) -> AccelStream:
        if library not in self._streams:
            self._streams[library] = self._device.open_stream(f"{self._device.info.name} {library}")
        return self._streams[library]

    def release(self, stream: AccelStream) -> None:
        pass


class _PooledStreams(_CachedStreams):
    """The same, taken in turn."""

    def __init__(self, device: AccelDevice, size: int) -> None:
        super().__init__(device)
        self._names: Iterator[str] = itertools.cycle(f"pool {number}" for number in range(size))

    def acquire(self, library: str) -> AccelStream:
        return super().acquire(next(self._names))


# The processors that let a program and its worker both stay awake.
_ROOMY = 4


_finite_seconds = validator("be seconds from 0", lambda value: is_number(value, 0.0, sys.float_info.max))


@attrs.frozen(kw_only=True)
class HostCallbackCompletion:
    """The stream itself notifies, from its own thread or the driver's; Trio is woken by token.

    Nothing runs while an operation does. The default of the CPU backend. On CUDA the driver calls a C
    function that posts a semaphore, on a stream beside the work's own; no Python runs in its threads.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return HostCallbackPort(LoopNotifier(reap))


@named_options
@attrs.frozen(kw_only=True)
class PolledCompletion:
    """The events are looked at in intervals while anything is in flight.

    Attributes:
        interval: Seconds between two looks; Trio itself adds about a millisecond.
    """

    interval: float = attrs.field(default=0.001, validator=above_zero)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return PolledPort(reap, self.interval)


@named_options
@attrs.frozen(kw_only=True)
class AdaptiveCompletion:
    """Polls the events for a short while, then asks the stream to notify.

    Short operations are seen without the cost of a callback and a wake-up, at the price of up to
    `budget` of processor time each; where that keeps failing, less and less is spent. A processor that has
    slept takes long to wake, and has forgotten the code that is to run next. So where operations of a stream
    take about as long as those before, they are looked at again around the time when they are due: with what
    takes up to 25 ms, one after the other, that is all the time, as in the driver's own waiting by default;
    other tasks run in between. The default of the CUDA backend, where a look reads a word that the stream
    writes to the host's memory.

    Attributes:
        budget: The most seconds to poll before the stream is asked to notify.
        window: The most seconds to look around the time when an operation is due: half of them before.
            Less saves processor time; with 0 the stream notifies each time.
    """

    budget: float = attrs.field(default=50e-6, validator=above_zero)
    window: float = attrs.field(default=50e-3, validator=_finite_seconds)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        # D98: without this fast path the stream notifies each time, as with a window of 0.
        return AdaptivePort(reap, self.budget, self.window if current_fast_paths().spin_wait else 0.0)


@attrs.frozen(kw_only=True)
class SyncCompletion:
    """The launch itself blocks until the operation is done, **and the whole Trio loop with it**.

    For measurements and for finding errors: one operation at a time, in order.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        # The notifier lets the launch return first: it has to add its operation before the engine can reply
        # to it.
        return SyncPort(LoopNotifier(reap))


def best_completion(info: DeviceInfo) -> CompletionStrategy:
    """Return the strategy that suits a device."""
    # D8: on CUDA a look reads a word of the host's memory. On the CPU, to spin costs 0.9 ms at p99, and not
    # 0.1.
    return AdaptiveCompletion() if info.completion == "adaptive" else HostCallbackCompletion()


def window_of(completion: CompletionStrategy | None, info: DeviceInfo) -> float:
    """Tell how many seconds a program and its worker may stay awake for one operation that is due."""
    chosen = completion or best_completion(info)
    if not isinstance(chosen, AdaptiveCompletion) or not current_fast_paths().spin_wait:
        return 0.0
    # The processors that this process may use: a container or `taskset` may leave it fewer than the machine
    # has.
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Both, and what they wait for, must have a processor to run on.
    return chosen.window if processors >= _ROOMY else 0.0


# A device needs one after the other. So many are for contexts that are lost faster than workers start.
_MOST_SPARES = 16


_seconds = validator("be seconds of at least 0", lambda value: is_number(value, 0.0))


def _spares(instance: DeviceOptions, attribute: attrs.Attribute[int], value: int) -> None:
    must_be_whole(0)(instance, attribute, value)
    if value > _MOST_SPARES:
        raise ValueError(
            f"DeviceOptions: spares must be from 0 to {_MOST_SPARES}, got {value}: each is a process with a "
            "context of its own, which takes memory of the device while it stands ready; one or two bridge "
            "the time that a worker takes to start"
        )


def _modules(
    instance: DeviceOptions,
    attribute: attrs.Attribute[tuple[str | Preload, ...]],
    value: tuple[str | Preload, ...],
) -> None:
    validator(
        "be a tuple of names of modules or of Preload",
        lambda each: fits(tuple[str | Preload, ...], each),
        TypeError,
    )(instance, attribute, value)
    for each in value:
        if isinstance(each, str):
            Preload(each)


def _is_strategy(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "open", None))


@named_options
@attrs.frozen(kw_only=True)
class DeviceOptions:
    """The options with which a device is opened and supervised.

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
        on_failure: What follows where there were more losses than `intensity` allows. ``"end"``: nothing.
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
        in_place: Whether a recorded `trio_accel.step` that is short is computed in the task that asks for it,
            inline on a device that computes on the host: one that took at most 0.4 ms of processor time in
            each of its last runs. Then it holds the loop for as long, and no deadline cuts it short.
        preload: Modules that the launcher of the workers imports before the first of them, such as
            ``("torch", "encoder")``, so that every worker begins with them. All are tried in a process of
            their own first. If one cannot be imported, or a fork could not use it, all are left to the
            workers, with a warning in the logs that says why. `Preload` takes that risk for a module. None
            inline.
        nvtx: Whether each launch of an operation is a range in profilers of NVIDIA, in the process that
            launches. Needs the extra ``nvtx``: without it, opening the device raises `NotSupportedError`.
    """

    isolation: Isolation | None = attrs.field(
        default=None,
        validator=validator(
            "be 'process', 'inline' or None", lambda value: value in (None, "process", "inline")
        ),
    )
    completion: CompletionStrategy | None = attrs.field(
        default=None,
        validator=validator(
            "be a completion strategy such as HostCallbackCompletion()",
            lambda value: value is None or callable(getattr(value, "open", None)),
            TypeError,
        ),
    )
    streams: StreamStrategy = attrs.field(
        factory=PerActorStreams,
        validator=validator("be a stream strategy such as StreamPool(4)", _is_strategy, TypeError),
    )
    spares: int = attrs.field(default=0, validator=_spares)
    # 64 askers inline take 30 µs each, with a window of 32 it is 33 µs; from a worker 29 µs with either
    # (H200).
    in_flight: int = attrs.field(default=64, validator=must_be_whole(1))
    retry: int = attrs.field(default=0, validator=must_be_whole(0))
    retry_suspects: bool = False
    intensity: Intensity | None = None
    backoff: Backoff | None = None
    on_failure: Literal["end", "reopen"] = attrs.field(
        default="end", validator=validator("be 'end' or 'reopen'", lambda value: value in ("end", "reopen"))
    )
    cancel_grace: float = attrs.field(default=0.0, validator=_seconds)
    close_grace: float = attrs.field(default=5.0, validator=_seconds)
    stuck_after: float | None = attrs.field(
        default=None,
        validator=validator(
            "be seconds above 0 or None", lambda value: value is None or is_above_zero(value)
        ),
    )
    heartbeat_timeout: float = attrs.field(default=15.0, validator=above_zero)
    memory_limit: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(must_be_whole(1))
    )
    libraries: tuple[str, ...] = attrs.field(
        default=(),
        validator=validator(
            "be a tuple of import paths 'package.module:Class'",
            lambda value: fits(tuple[str, ...], value),
            TypeError,
        ),
    )
    preload: tuple[str | Preload, ...] = attrs.field(default=(), validator=_modules)
    nvtx: bool = False
    in_place: bool = True


def _module(instance: Preload, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"preload: a module is named by a string, got {value!r}")
    if value == "__main__" or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"preload: a module must be named as another process can import it, got {value!r}")


@named_options
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
    trusted: bool = attrs.field(default=False, kw_only=True)
