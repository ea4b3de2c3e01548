"""What the parts of an engine share: which context it is, whether it is lost, and how errors name it."""

from __future__ import annotations

from typing import Any, Protocol

from ...backends.base import ContextPoisonedError, DeviceLostError
from ..base._errors import FailureClass, classify, locate
from ..operations._hooks import EngineHook
from ..operations._operation import Launch

__all__ = ["ContextState", "EngineObserver"]


class EngineObserver(Protocol):
    """Sees what an engine does: the owner of the context, a device or a worker process."""

    @property
    def hooks(self) -> list[EngineHook]:
        """See every operation at every step."""
        ...

    @property
    def counts_launches(self) -> bool:
        """Whether it is told of each launch by `launching`."""
        ...

    def launching(self, launch: Launch, /) -> None:
        """Note that an operation is about to be launched, whatever becomes of it."""

    def looked(self, number: int, /) -> None:
        """Note that the engine has looked after what is in flight so often; 0 when nothing is any more."""

    def made(self, library: str, seconds: float, imports: float, /) -> None:
        """Note that a program was made: the library's name, the seconds in all, and those of its import."""

    def is_alone(self) -> bool:
        """Whether nothing else is asked for than the operation that is being launched."""
        ...


class ContextState:
    """The base of the engine, as its parts know it.

    Args:
        device_name: Name of the device.
        generation: Number of the context.

    Attributes:
        generation: Number of the context.
        is_lost: Whether the context is gone: nothing is launched any more, and replies are of no account.
        closed_alone: Paths of library actors that are closed while the context goes on.
        is_closing: Whether the device closes, so that what is in flight is lost to that.
    """

    def __init__(self, device_name: str, generation: int) -> None:
        self.generation: int = generation
        self.is_lost: bool = False
        self.closed_alone: set[str] = set()
        self.is_closing: bool = False
        self._device_name = device_name

    def expect_end(self, path: str) -> None:
        """Note that an actor stops: unless it alone does, or the context is lost, the device closes."""
        if path not in self.closed_alone:
            self.is_closing = not self.is_lost

    def lose_context(self, cause: Exception) -> None:
        """The context is gone: end everything in flight, and have the context replaced."""
        raise NotImplementedError

    def locate(self, error: Exception, launch: Launch) -> None:
        """Say where an error happened; if the context is lost with it, have the context replaced."""
        locate(error, device=self._device_name, operation=launch.name, generation=self.generation)
        if classify(error) is FailureClass.CONTEXT_LOST:
            self.lose_context(error)

    def lost(self, launch: Launch, cause: BaseException | None) -> ContextPoisonedError | DeviceLostError:
        """Make the error of an operation that was in flight when the context ended."""
        return self._lost(launch.name, "was in flight", launch.advice, cause)

    def lost_to_library(
        self, launch: Launch, cause: BaseException | None
    ) -> ContextPoisonedError | DeviceLostError:
        """Make the error of an operation whose library was being opened when the context turned out lost."""
        return self._lost(launch.name, "waited for its library to be opened", "ask again", cause)

    def lost_lease(self, cause: BaseException | None) -> ContextPoisonedError | DeviceLostError:
        """Make the error of a lease that was waited for when the context ended."""
        return self._lost("lease", "was waited for", "lease the array again", cause)

    def _lost(
        self, name: str, state: str, advice: str, cause: BaseException | None
    ) -> ContextPoisonedError | DeviceLostError:
        where: dict[str, Any] = {
            "device": self._device_name,
            "operation": name,
            "generation": self.generation,
        }
        if self.is_closing:
            return DeviceLostError(f"the device was closed while this operation {state}", **where)
        error = ContextPoisonedError(
            f"the device's context was lost while this operation {state}; {advice}", **where
        )
        error.__cause__ = cause
        return error
