"""Copies of the application that stay in their midst."""

from __future__ import annotations

import threading

import pytest
import trio

from trio_accel.devices.base._host_pool import Copying
from trio_accel.devices.dispatch import _outcomes

__all__ = ["Cut"]

_PATIENCE = 10_000


class Cut:
    """Copies that stay in their midst until they are let go or cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        cut = self

        class Halting(Copying):
            def run(self) -> None:
                cut.entered.set()
                # A test that failed before must not hang.
                for _ in range(_PATIENCE):
                    if cut.leave.wait(0.002) or self._is_cancelled:
                        break
                super().run()

        monkeypatch.setattr(_outcomes, "Copying", Halting)

    async def wait_entered(self) -> None:
        await trio.to_thread.run_sync(self.entered.wait)
