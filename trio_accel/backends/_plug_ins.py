"""Backends of other distributions: their entry points, and the import of one.

Such a backend is foreign code. Whatever its import or its search for devices does, the package and all other
backends continue, and the reason is reported wherever the backend is named.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import attrs

from .base import AccelBackend, BackendReport, ChunkKeeper, DeviceInfo, NotSupportedError

__all__ = ["SECONDS", "Unusable", "entries", "imported", "load"]

GROUP = "trio_accel.backends"

SECONDS = 60.0
"""How long the import of a backend and its search for devices may take; PyTorch takes 2 to 20."""

ResultT = TypeVar("ResultT")


def entries() -> dict[str, dict[str, str]]:
    """Read the entry points; nothing of another distribution is imported.

    Returns:
        By name and import path, the distributions.
    """
    # Import it here, because that takes a good part of the time that the package's import may take.
    from importlib.metadata import entry_points

    distributions: dict[str, dict[str, str]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        distributions.setdefault(entry.name, {})[entry.value] = entry.dist.name if entry.dist else "?"
    return distributions


@attrs.frozen
class Unusable(AccelBackend):
    """A backend that cannot be used: it lists no devices, and reports why."""

    name: str  # pyright: ignore[reportIncompatibleMethodOverride]
    problem: str

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Find none."""
        return ()

    def unavailable_reason(self, index: int | None = None) -> str:
        """Return the problem."""
        return self.problem

    def describe(self) -> BackendReport:
        """Report the problem."""
        return BackendReport(name=self.name, problem=self.problem)

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> NoReturn:
        """Refuse."""
        raise NotSupportedError(self.problem, backend=self.name)

    def prepare_worker(self) -> None:
        """Do nothing."""


def imported(path: str) -> AccelBackend:
    """Import a backend's class, and make the backend."""
    module, _, attribute = path.partition(":")
    return cast("AccelBackend", getattr(importlib.import_module(module), attribute)())


def load(name: str, path: str) -> AccelBackend:
    """Import a backend, and query all its properties once. Blocks for `SECONDS` at most.

    Its prints meanwhile go to the standard error, because programs read the standard output.

    Args:
        name: Its name.
        path: Import path of the class.

    Returns:
        The backend, or a backend without devices that reports why.
    """

    def make() -> AccelBackend:
        backend = imported(path)
        if backend.name != name:
            raise ValueError(f"the backend has the name {backend.name!r}")
        for ask in (backend.list_devices, backend.describe, backend.links):
            ask()
        return backend

    outcome = _within(SECONDS, make)
    return Unusable(name, f"{path} cannot be used: {outcome}") if isinstance(outcome, str) else outcome


def _within(seconds: float, make: Callable[[], ResultT]) -> ResultT | str:
    """Call a function in a thread; return its result, or why there is none."""
    results: list[ResultT | str] = []

    def run() -> None:
        try:
            results.append(make())
        except BaseException as error:  # noqa: ASYNC103, BLE001  # in a thread; also SystemExit
            results.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="backend of another distribution", daemon=True)
    with contextlib.redirect_stdout(sys.stderr):
        thread.start()
        thread.join(seconds)
    return results[0] if results else f"its import and search for devices take more than {seconds:g} s"
