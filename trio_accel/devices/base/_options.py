"""The options of a device, and their values: streams, completions, modules for workers."""

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
    """Return whether a value is a finite number above 0."""
    return is_number(value, 0.0, sys.float_info.max) and value > 0


above_zero = validator("be seconds above 0", is_above_zero)
"""A validator for seconds."""


class StreamSource(Protocol):
    """The streams of one context."""

    def acquire(self, library: str) -> AccelStream:
        """Return a stream for one incarnation of a library's actor."""
        ...

    def release(self, stream: AccelStream) -> None:
        """Take the stream back. That incarnation enqueues nothing more, but enqueued work still runs."""


class StreamStrategy(Protocol):
    """A way to assign streams, for `DeviceOptions`."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        ...


@named_options
@attrs.frozen(kw_only=True)
class PerActorStreams:
    """A stream for each library actor, new after a crash, so that no library waits for another. The default.

    Attributes:
        priorities: The priorities by library name, 0 for libraries without one. Work of a higher priority
            begins first, if the device has priorities (CUDA does, the CPU does not).
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
    """A stream for each library, shared by all its actors."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _CachedStreams(device)


@attrs.frozen(kw_only=True)
class SingleStream:
    """One stream for everything. Operations run one after the other, in the order of their launch."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _PooledStreams(device, 1)


@named_options
@attrs.frozen
class StreamPool:
    """A fixed number of streams, which are assigned to library actors in turn.

    Attributes:
        size: The number of streams.
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
    """Streams that exist until the context's end closes them."""

    _device: AccelDevice
    _streams: dict[str, AccelStream] = attrs.field(factory=dict[str, AccelStream], init=False)

    def acquire(self, library: str) -> AccelStream:
        if library not in self._streams:
            self._streams[library] = self._device.open_stream(f"{self._device.info.name} {library}")
        return self._streams[library]

    def release(self, stream: AccelStream) -> None:
        pass


class _PooledStreams(_CachedStreams):
    """A fixed number of such streams, assigned in turn."""

    def __init__(self, device: AccelDevice, size: int) -> None:
        super().__init__(device)
        self._names: Iterator[str] = itertools.cycle(f"pool {number}" for number in range(size))

    def acquire(self, library: str) -> AccelStream:
        return super().acquire(next(self._names))


# The number of processors that lets both a program and its worker stay awake.
_ROOMY = 4


_finite_seconds = validator("be seconds from 0", lambda value: is_number(value, 0.0, sys.float_info.max))


@attrs.frozen(kw_only=True)
class HostCallbackCompletion:
    """The stream itself notifies, from its own thread or the driver's, and wakes Trio through its token.

    Nothing else runs during an operation. This is the default of the CPU backend. On CUDA the driver calls a
    C function that posts a semaphore, on a separate stream; no Python runs in its threads.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return HostCallbackPort(LoopNotifier(reap))


@named_options
@attrs.frozen(kw_only=True)
class PolledCompletion:
    """Checks events at intervals while anything is in flight.

    Attributes:
        interval: Seconds between two checks; Trio itself adds about a millisecond.
    """

    interval: float = attrs.field(default=0.001, validator=above_zero)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return PolledPort(reap, self.interval)


@named_options
@attrs.frozen(kw_only=True)
class AdaptiveCompletion:
    """Polls the events for a short while, then asks the stream to notify.

    Short operations are detected without the cost of a callback and a wake-up, but each takes up to `budget`
    of processor time. If that keeps failing, the time is reduced. After sleeping, a processor takes long to
    wake up, and has lost the next code from its cache. So if operations of a stream take about as long as the
    previous ones, they are polled again around the time when they are due. For successive operations of up to
    25 ms this means all the time, as in the driver's own waiting by default; other tasks run in between. This
    is the default of the CUDA backend, where a check reads a word that the stream writes to host memory.

    Attributes:
        budget: The maximum seconds to poll before the stream is asked to notify.
        window: The maximum seconds to poll around the time when an operation is due: half of them before.
            A smaller window saves processor time; with 0 the stream notifies each time.
    """

    budget: float = attrs.field(default=50e-6, validator=above_zero)
    window: float = attrs.field(default=50e-3, validator=_finite_seconds)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        # D98: without this fast path the stream notifies each time, as with a window of 0.
        return AdaptivePort(reap, self.budget, self.window if current_fast_paths().spin_wait else 0.0)


@attrs.frozen(kw_only=True)
class SyncCompletion:
    """The launch itself blocks until the operation is done, **and so does the whole Trio loop**.

    Use this for measurements and for finding errors: operations run one at a time, in order.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        # The notifier lets the launch return first, because it has to add its operation before the engine can
        # reply.
        return SyncPort(LoopNotifier(reap))


def best_completion(info: DeviceInfo) -> CompletionStrategy:
    """Return the best strategy for a device."""
    # D8: on CUDA a check reads a word of host memory. On the CPU, spinning takes 0.9 ms at p99 instead of 0.1
    # ms.
    return AdaptiveCompletion() if info.completion == "adaptive" else HostCallbackCompletion()


def window_of(completion: CompletionStrategy | None, info: DeviceInfo) -> float:
    """Return the seconds for which a program and its worker may stay awake for a due operation."""
    chosen = completion or best_completion(info)
    if not isinstance(chosen, AdaptiveCompletion) or not current_fast_paths().spin_wait:
        return 0.0
    # The processors available to this process, because a container or `taskset` may leave it fewer than the
    # machine has.
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # The program, the worker, and the work that they wait for all need a processor.
    return chosen.window if processors >= _ROOMY else 0.0


# A device needs spares one after the other. This many suffice if contexts are lost faster than workers start.
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
        lambda candidate: fits(tuple[str | Preload, ...], candidate),
        TypeError,
    )(instance, attribute, value)
    for module in value:
        if isinstance(module, str):
            Preload(module)


def _is_strategy(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "open", None))


@named_options
@attrs.frozen(kw_only=True)
class DeviceOptions:
    """The options with which a device is opened and supervised.

    Attributes:
        isolation: The place of the context: ``"inline"``, in this process; ``"process"``, in a worker.
            None takes the backend's default.
        completion: The way to learn of completions; None for the device's best way.
        streams: The assignment of streams to library actors.
        spares: The number of ready spare workers, with all memory mapped and the libraries in use open. Each
            is a process with its own context, which takes memory of the device; 16 at most. Inline there are
            no workers.
        in_flight: The maximum number of launches that a library has on its stream; further callers wait.
        retry: The number of times that an operation in flight at a context's loss runs again instead of
            failing, if it changes no existing array. Inline, where memory is lost with the context, only
            operations without array arguments can run again.
        retry_suspects: Whether `retry` also applies to the operation that has caused a fault of the device.
            If not, it fails at once, so that a bad request costs one loss and one error, its own. If several
            operations may have caused the fault, they run again after the others, one at a time, except the
            last if all others succeed. Set it for spontaneous faults, so that this operation also runs again.
        intensity: The restarts that the device allows its context, and the context its libraries. None takes
            the default recovery policy: 3 within 60 seconds, not counting restarts after progress. A context
            has made progress when it has completed a request without an error, and so has a library. A
            context has also made progress when it was complete for a second, with all arrays, and with all
            previously used libraries and programs open. If you set an intensity, it counts every restart,
            unless its `counts_progress` is False.
        backoff: The delay before a context or library is started again. None takes the default recovery
            policy: after progress at once, and at most 1 second if losses closely follow one another; without
            progress the delays of `Backoff`. If you set a back-off, it applies to every restart.
        on_failure: The reaction to more losses than `intensity` allows. ``"end"``: the device ends, and its
            arrays can be adopted. ``"reopen"``: it is opened again, after 1, 2, 4 seconds and so on, 60 at
            most. Its references stay valid, and so do the arrays of workers. Until it has a context, all
            requests raise `DeviceLostError` with `retry_after` at once. A context that makes progress ends
            the series. `Intensity.pause` sets other delays. An inline device ends after a fault of a GPU
            nevertheless, because this process cannot get another context.
        cancel_grace: The seconds that a cancelled call waits for its running operation. After that the call
            is cancelled, and the operation continues: its buffers stay reserved, and it counts as in flight,
            until it ends. The call waits longer only if the operation uses host memory of your program
            directly; see `Device.ask`. `trio_accel.cancel_grace` sets the grace of single calls.
        close_grace: The seconds for which closing the device waits for operations in flight.
        stuck_after: The seconds after which a running operation counts as hung: its caller gets
            `CompletionTimeoutError`, and the context is replaced. If the machine was suspended, or the
            program stopped, that time counts for at most a tenth of this value. None: never.
        heartbeat_timeout: The seconds without a sign of life after which a worker counts as dead.
        memory_limit: The maximum bytes of arrays on the device; None for all memory.
        libraries: The import paths ``"package.module:Class"`` of library actors that are started with the
            context; others are started on first use.
        in_place: Whether a short recorded `trio_accel.step` is computed in the task that calls it, on an
            inline device that computes on the host: a step that took at most 0.4 ms of processor time in each
            of its last runs. Then it blocks the loop for that time, and no deadline interrupts it.
        preload: The modules that the launcher of the workers imports before the first worker, such as
            ``("torch", "encoder")``, so that every worker begins with them. All are first tried in a separate
            process. If one cannot be imported, or could not be used after a fork, the workers import all of
            them themselves, and a warning in the logs explains why. `Preload` takes that risk for a module.
            Ignored inline.
        nvtx: Whether each launch of an operation is a range in NVIDIA's profilers, in the launching process.
            Needs the extra ``nvtx``; without it, opening the device raises `NotSupportedError`.
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
    # 64 callers inline take 30 µs each, and 33 µs with a window of 32; from a worker 29 µs with either
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
    """A module that the launcher of workers imports in advance, for `DeviceOptions.preload`.

    Attributes:
        module: Its name.
        trusted: Whether workers may begin with it despite the leftovers of its import: threads, open files,
            handled signals. Set it if you know that a forked process can do without these, because otherwise
            a worker may hang or crash. A module that initialises a driver or cannot be imported is refused
            nevertheless.
    """

    module: str = attrs.field(validator=_module)
    trusted: bool = attrs.field(default=False, kw_only=True)
