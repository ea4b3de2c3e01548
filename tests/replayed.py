"""Records each device of each test, and replays it when the test has passed: `pytest --record-replay`."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Generator
from pkgutil import resolve_name
from typing import Any

import pytest
import trio
from chosen import BACKEND, INLINE
from recorded import kernels_of_backend
from recorded_devices import record_devices

import trio_accel as ta
from trio_accel import replay

_INJECTING = re.compile(r"inject|poison|fault|Fault|crash")
_PROPERTY = "replayed"
_SETTING = "TRIO_ACCEL_CPU_COMPILED"
# Tests that change how a device computes while it is open, which no journal knows.
_NOT_REPLAYED = (
    "test_compiled_code_draws_the_numbers_of_numpy",
    "test_pieces_make_the_same",
    "test_triangles_without_a_compiler",
)


class ReplayRecorder:
    """A plugin of pytest.

    Attributes:
        operations: The number of replayed operations.
        compared: The number of compared arrays.
        kernels: Names of the kernels that computed.
    """

    def __init__(self) -> None:
        self.operations = 0
        self.compared = 0
        self.kernels: set[str] = set()
        # With the setting under which the device was opened.
        self._journals: list[tuple[replay.MemoryJournal, str | None]] | None = None
        record_devices(self._journal)

    def _journal(self) -> replay.MemoryJournal | None:
        if self._journals is None:
            return None
        self._journals.append((journal := replay.MemoryJournal(), os.environ.get(_SETTING)))
        return journal

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record while a test runs, and replay."""
        journals: list[tuple[replay.MemoryJournal, str | None]] = []
        self._journals = journals
        try:
            result = yield
        finally:
            self._journals = None
        for journal, setting in journals if item.name.partition("[")[0] not in _NOT_REPLAYED else ():
            with pytest.MonkeyPatch.context() as patch:
                if setting is None:
                    patch.delenv(_SETTING, raising=False)
                else:
                    patch.setenv(_SETTING, setting)
                report = trio.run(self._replay, item, journal)
            item.user_properties.append((_PROPERTY, (report.operations, report.compared, named(journal))))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the replays of a test, whichever process ran it."""
        for name, value in report.user_properties if report.when == "call" else ():
            if name == _PROPERTY:
                counted: Any = value
                self.operations += counted[0]
                self.compared += counted[1]
                self.kernels.update(counted[2])

    async def _replay(self, item: pytest.Item, journal: replay.MemoryJournal) -> replay.Report:
        async with ta.open_system("replay") as system, system.open_device(BACKEND, options=INLINE) as device:
            report = await replay.replay(journal, device, programs=True)
        # An error that a test has injected does not occur again.
        injects = _INJECTING.search(item.path.read_text(encoding="utf-8"))
        failures = [one for one in report.failures if one.replayed or not injects]
        if report.differences or failures:
            pytest.fail(f"{item.nodeid}: the replay differs:\n{report}", pytrace=False)
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how much was compared."""
        terminalreporter.write_line(f"replayed {self.operations} operations, compared {self.compared} arrays")
        missing = sorted(kernels_of_backend().keys() - self.kernels)
        terminalreporter.write_line(f"kernels that no test asked for: {', '.join(missing) or 'none'}")


def named(journal: replay.RecordingJournal) -> list[str]:
    """Return the operation names in a journal, including those inside of recipes."""
    names: set[str] = set()
    for entry in map(pickle.loads, journal.entries()):
        plain = [entry[4], *entry[6], *entry[7]] if entry[0] == "launch" else []
        plain += [node[2] for node in entry[2]] if entry[0] == "recipe" else []
        names.update(resolve_name(spec[0]).operation for spec in plain)
    return sorted(names)
