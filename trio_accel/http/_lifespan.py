"""The lifespan of an application: its startup before the first request, its shutdown after the last."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import attrs
import trio

from ._edge import Application


@attrs.define(eq=False)
class Lifespan:
    """The task in which an application starts and ends.

    Attributes:
        app: The application.
        state: Values for the ``state`` of each request, which the application fills.
    """

    app: Application
    state: dict[str, Any] = attrs.field(factory=dict[str, Any], init=False)
    _started: trio.Event = attrs.field(factory=trio.Event, init=False)
    _ending: trio.Event = attrs.field(factory=trio.Event, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    # The reason that the application gave, which is the text of a traceback for Starlette.
    _failure: str | None = attrs.field(default=None, init=False)
    _is_supported: bool = attrs.field(default=False, init=False)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the application, report that it has started, and wait for its end.

        Raises:
            RuntimeError: The application reports that its startup or shutdown has failed.
            Exception: The error of the application.
        """
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._started.set()
                task_status.started()
            elif message["type"] == "lifespan.shutdown.complete":
                self._ended.set()
            elif message["type"] in {"lifespan.startup.failed", "lifespan.shutdown.failed"}:
                self._failure = f"{message['type']}: {message.get('message', '')}"
            else:
                raise RuntimeError(f"the application sends {message['type']!r} in its lifespan")

        try:
            await self.app(scope, self._receive, send)
        except Exception:
            # An application without a lifespan raises at the kind of its scope.
            if self._is_supported:
                raise
        finally:
            self._ended.set()
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if not self._started.is_set():
            task_status.started()

    async def end(self) -> None:
        """Have the application end, and wait for that."""
        self._ending.set()
        await self._ended.wait()

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._is_supported:
            self._is_supported = True
            return {"type": "lifespan.startup"}
        await self._ending.wait()
        return {"type": "lifespan.shutdown"}
