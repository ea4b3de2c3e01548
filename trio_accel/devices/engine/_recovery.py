"""The default recovery policy, and the log of lost contexts."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

import attrs
import trio

from ...actors import ActorRestarted, Backoff, Directive, Intensity, Policy, describe, warn_untold
from ..base._options import DeviceOptions
from ..base._waits import Availability

_logger = logging.getLogger("trio_accel.devices")

_INTENSITY = Intensity(3, 60.0, counts_progress=False)
_BACKOFF = Backoff()
# A context is replaced at once after it has worked for half a second. After quicker losses there is a delay,
# because starting workers must not occupy the processors.
_AFTER_PROGRESS = Backoff(initial=0.0, base=0.1, factor=2.0, maximum=1.0, reset_after=0.5)
# The pauses of a device after too many losses.
_PAUSE = Backoff(initial=1.0, base=2.0, factor=2.0, maximum=60.0)
# A context counts as working after this many seconds, even without a request.
STEADY = 1.0
_NOTHING: Mapping[type[Exception], Directive] = {}
# If there are this many losses within `_WITHIN` seconds, a summary is logged, once in that time.
_MAX_SEPARATE_REPORTS = 5
_WITHIN = 60.0


def recovery_policy(
    options: DeviceOptions,
    *,
    grace: float,
    directives: Mapping[type[Exception], Directive] = _NOTHING,
    reopens: bool = False,
) -> Policy:
    """Make the policy of a device, its context or a library, as a child and as a supervisor.

    Options of None get the default recovery policy: an actor that has made progress is not in a crash loop,
    so its restart does not count, and is delayed by one second at most (D75).

    Args:
        options: The options of the device.
        grace: The seconds that the actor may take to stop.
        directives: The reactions of its supervisor to its errors.
        reopens: Whether its children pause when their restarts exceed the intensity.
    """
    intensity = _INTENSITY if options.intensity is None else options.intensity
    pause = (intensity.pause or _PAUSE) if reopens else None
    return Policy(
        directives=directives,
        backoff=_BACKOFF if options.backoff is None else options.backoff,
        backoff_after_progress=_AFTER_PROGRESS if options.backoff is None else None,
        grace=grace,
        intensity=attrs.evolve(intensity, pause=pause),
    )


@attrs.define(eq=False)
class Losses:
    """Counts the lost contexts of a device, and logs each.

    Attributes:
        count: The number of losses since the device was opened.
    """

    _device: str
    _availability: Availability
    _intensity: Intensity | None
    count: int = 0
    _last_generation: int = 0
    _recent: deque[float] = attrs.field(factory=deque[float])
    _summed_up: float = attrs.field(default=float("-inf"), init=False)
    _has_paused: bool = attrs.field(default=False, init=False)

    def restarted(self, event: ActorRestarted) -> None:
        """Count a lost context, or a failed start of a context. The next one follows after a delay."""
        generation = self._availability.generation
        self._has_paused = self._has_paused or event.is_paused
        cause = "it ended by itself" if event.error is None else describe(event.error)
        level = logging.ERROR if event.is_paused else logging.WARNING
        when = f"starts in {event.delay:.2f} s" if event.delay else "starts at once"
        next_one = f"{'the device is given up; ' if event.is_paused else ''}the next one {when}"
        if generation == self._last_generation:
            text = "device %s: no context of generation %d could be made: %s; %s"
            self._tell(level, text, generation + 1, cause, next_one)
            return
        self._last_generation = generation
        self.count += 1
        without = "" if event.has_progressed else ", which had completed no request"
        text = "device %s lost its context of generation %d%s: %s; %s"
        self._tell(level, text, generation, without, cause, next_one)
        self._sum_up()

    def given_up(self, arrays: str) -> None:
        """Log the end of the device. No context follows; the supervisor's error has the reason.

        Args:
            arrays: Text on the fate of the arrays, or nothing.
        """
        if self._availability.generation > self._last_generation:
            self._last_generation = self._availability.generation
            self.count += 1
        text = "device %s is given up in generation %d; contexts lost since it was opened: %d%s"
        self._tell(logging.ERROR, text, self._last_generation, self.count, arrays)

    def _sum_up(self) -> None:
        """Log, at most once a minute, that a device keeps losing contexts."""
        now = trio.current_time()
        self._recent.append(now)
        while self._recent[0] < now - _WITHIN:
            self._recent.popleft()
        if len(self._recent) < _MAX_SEPARATE_REPORTS or now < self._summed_up + _WITHIN:
            return
        self._summed_up = now
        intensity = self._intensity
        if self._has_paused:
            # The intensity already gives the device up, and it is opened again.
            advice = ""
        elif intensity is None:
            advice = "; to have the device given up instead, set DeviceOptions.intensity"
        else:
            advice = (
                f"; to have the device given up instead, lower the {intensity.restarts} restarts within "
                f"{intensity.within:g} s of DeviceOptions.intensity"
            )
        _logger.error(
            "device %s has lost %d contexts within %g s, %d since it was opened: requests lose them, or the "
            "hardware does%s",
            self._device,
            len(self._recent),
            _WITHIN,
            self.count,
            advice,
            extra=self._extra(self._last_generation),
        )

    def _tell(self, level: int, text: str, generation: int, *args: object) -> None:
        """Log a text with the device, the generation and further arguments."""
        extra = self._extra(generation)
        warn_untold("trio_accel.devices", text, self._device, generation, *args, level=level, **extra)

    def _extra(self, generation: int) -> dict[str, object]:
        return {"device": self._device, "generation": generation, "losses": self.count}
