"""Operations of a worker as they are measured: in the application, where they begin and end."""

from __future__ import annotations

import outcome

from ....actors import Measured, Meter, note_end
from ...engine._device_state import DeviceState
from ...operations._operation import Launch
from ..transport._codec import Message
from ._actors import WorkerActors
from ._launch_encoding import TemplateTable
from ._request import HostArrays, OperationRequest

__all__ = ["MeasuredRequest", "Measures"]


class Measures:
    """Who takes what became of operations, by library and name.

    Args:
        device: The device.
        actors: The actors of its worker.
    """

    def __init__(self, device: DeviceState, actors: WorkerActors) -> None:
        self._observers = device.system.observers
        self._path = f"{device.path}/context"
        self._actors = actors
        self._meter: Meter | None = None
        self._measured: dict[tuple[str, str], Measured] = {}

    def now(self) -> float:
        """The time."""
        return self._observers.now()

    def of(self, launch: Launch) -> Measured | None:
        """Who takes what became of such operations; None if nobody measures any more."""
        meter = self._observers.meter
        if meter is not self._meter:
            self._meter = meter
            self._measured = {}
        if meter is None:
            return None
        key = launch.library, launch.name
        measured = self._measured.get(key)
        if measured is None:
            # A library that was never opened has no actor.
            path = self._actors.path_of(launch.library)
            measured = meter.measured(path or self._path, launch.name)
            if path is not None:
                self._measured[key] = measured
        return measured


class MeasuredRequest(OperationRequest):
    """A launch in a worker, which is measured."""

    __slots__ = ("_began", "_measures", "_sent")

    def __init__(
        self, number: int, launch: Launch, hosts: HostArrays, measures: Measures, *, invalidates: bool
    ) -> None:
        super().__init__(number, launch, hosts, invalidates=invalidates)
        self._measures = measures
        self._began = measures.now()
        # When it was handed over to a worker last.
        self._sent: float | None = None

    def message(self, word: int, released: tuple[int, ...], templates: TemplateTable) -> Message:
        """What is sent to the worker that has these templates."""
        self._sent = self._measures.now()
        return super().message(word, released, templates)

    def settle(self, result: outcome.Outcome[None]) -> None:
        """Count the launch, and give its outcome."""
        measured = self._measures.of(self.launch)
        if measured is not None:
            now = self._measures.now()
            sent = now if self._sent is None else self._sent
            error = result.error if isinstance(result, outcome.Error) else None
            # A cancellation and Ctrl-C are no errors of a launch.
            is_cancelled = error is not None and not isinstance(error, Exception)
            failure = None if is_cancelled else error
            note_end(measured, sent - self._began, now - sent, failure, cancelled=is_cancelled)
        super().settle(result)
