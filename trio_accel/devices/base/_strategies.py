"""How the engine learns that work on a stream is done: what programs choose from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import attrs

from ...actors import is_number
from ...backends.base import DeviceInfo
from ...backends.base.kit.fast_paths import current_fast_paths
from ._adaptive import AdaptivePort
from ._bridge import LoopNotifier
from ._checks import above_zero, must
from ._port import CompletionPort, CompletionStrategy, HostCallbackPort, PolledPort, SyncPort

__all__ = [
    "AdaptiveCompletion",
    "HostCallbackCompletion",
    "PolledCompletion",
    "SyncCompletion",
    "best_completion",
    "window_of",
]

# So many processors let a program and its worker both stay awake.
_ROOMY = 4


_seconds = must("be seconds from 0", lambda value: is_number(value, 0.0, sys.float_info.max))


@attrs.frozen(kw_only=True)
class HostCallbackCompletion:
    """The stream itself notifies, from its own thread or the driver's; Trio is woken by token.

    Nothing runs while an operation does. The default of the CPU backend. On CUDA the driver calls a C
    function that posts a semaphore, on a stream beside the work's own; no Python runs in its threads.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return HostCallbackPort(LoopNotifier(reap))


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
    window: float = attrs.field(default=50e-3, validator=_seconds)

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
        # Not at once: the launch has to add its operation before the engine can reply to it.
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
    # Those that this process may use: a container or `taskset` may leave it fewer than the machine has.
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Both, and what they wait for, must have a processor to run on.
    return chosen.window if processors >= _ROOMY else 0.0
