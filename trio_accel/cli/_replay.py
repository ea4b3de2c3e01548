"""``trio-accel replay`` and ``trio-accel journal``: ask a journal again, and show what it has."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio_accel as ta
from trio_accel.cli._run import InputError, open_device, printable, run_async

_DATABASE = b"SQLite format 3\0"


def run_replay(
    file: Path,
    *,
    device: str | None,
    against: str | None,
    until: int | None,
    tolerance: float | None,
    allows_programs: bool,
) -> int:
    """Replay a journal; the exit code is 1 if something differs."""
    journal = _journal(file)
    allowed = None if tolerance is None else ta.replay.Tolerance(relative=tolerance, absolute=tolerance)
    return run_async(partial(_replay, journal, device, against, until, allowed, allows_programs))


async def _replay(
    journal: ta.replay.RecordingJournal,
    name: str | None,
    against: str | None,
    until: int | None,
    tolerance: ta.replay.Tolerance | None,
    programs: bool,
) -> int:
    async with ta.open_system("replay") as system:
        device = await open_device(system, name, ta.DeviceOptions(), name="replay")
        try:
            if against is None:
                report = await ta.replay.replay(
                    journal, device, programs=programs, until=until, tolerance=tolerance
                )
            else:
                reference = await open_device(system, against, ta.DeviceOptions(), name="reference")
                report = await ta.replay.lockstep(
                    journal, reference, device, programs=programs, until=until, tolerance=tolerance
                )
        except ta.replay.JournalError as error:
            raise InputError(str(error)) from error
    for line in str(report).splitlines():
        print(printable(line))
    return 0 if report.is_same else 1


def show_journal(file: Path) -> int:
    """Print the operations of a journal, with marks and failures."""
    try:
        for line in ta.replay.listing(_journal(file)):
            print(printable(line))
    except ta.replay.JournalError as error:
        raise InputError(str(error)) from error
    return 0


def _journal(file: Path) -> ta.replay.RecordingJournal:
    try:
        with file.open("rb") as opened:
            is_database = opened.read(len(_DATABASE)) == _DATABASE
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    return ta.replay.SqliteJournal(file) if is_database else ta.replay.FileJournal(file)
