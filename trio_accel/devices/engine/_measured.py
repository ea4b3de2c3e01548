"""Operations that are launched past the mailbox of their library, while messages are measured."""

from __future__ import annotations

from ...actors import System, note_end
from ..operations._operation import Launch
from ._library import Asked

__all__ = ["MeasuredAsked"]


class MeasuredAsked(Asked):
    """The reply of an operation whose asker has had it launched, which is measured.

    Args:
        launch: The operation.
        system: Whose messages are measured.
    """

    __slots__ = ("_began", "_observers")

    def __init__(self, launch: Launch, system: System) -> None:
        Asked.__init__(self, launch)
        self._observers = observers = system.observers
        self._began = observers.now()

    def deliver(self, error: BaseException | None) -> None:
        """Wake the task, or keep the outcome for it."""
        meter, outcomes = self._observers.meter, self.outcomes
        if meter is not None and outcomes is not None:
            run_time = self._observers.now() - self._began
            note_end(outcomes.measured(meter, self.message), 0.0, run_time, error)
        Asked.deliver(self, error)

    def cancelled(self) -> bool:
        """Give the task its cancellation; returns whether that is news."""
        is_news = super().cancelled()
        meter, outcomes = self._observers.meter, self.outcomes
        if is_news and meter is not None and outcomes is not None:
            run_time = self._observers.now() - self._began
            note_end(outcomes.measured(meter, self.message), 0.0, run_time, cancelled=True)
        return is_news
