"""Journals with changed or missing bytes: an error with its place, or an incomplete last entry left out."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import pickle
import sqlite3
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel import replay

ENTRIES = [
    pickle.dumps(("header", 1, (), True)),
    *[pickle.dumps(("part", n, bytes([n]) * (7 * n))) for n in range(1, 5)],
    pickle.dumps(("outside", 1, "a.b")),
]
HEAD = struct.Struct("<QI")


def written(path: Path) -> tuple[bytes, list[int]]:
    """Write a journal; return its bytes, and the end of each entry after the start of the first one."""
    journal, ends = replay.FileJournal(path), [19]
    for entry in ENTRIES:
        journal.append(entry)
        ends.append(path.stat().st_size)
    return path.read_bytes(), ends


def check(path: Path, content: bytes, expected: int) -> str:
    """Read damaged bytes, and append: return an error that changes nothing, or keep the expected entries."""
    path.write_bytes(content)
    journal = replay.FileJournal(path)
    try:
        found = list(journal.entries())
    except replay.JournalError as error:
        with pytest.raises(replay.JournalError):
            replay.FileJournal(path).append(b"next")
        assert path.read_bytes() == content
        return str(error)
    assert found == ENTRIES[:expected]
    nbytes = journal.left_out()
    if found:
        *_, line = ["", *replay.listing(journal)]
        assert (line == f"left out: an incomplete last entry of {nbytes} bytes") == bool(nbytes)
    journal.append(b"next")
    assert list(replay.FileJournal(path).entries()) == [*found, b"next"]
    kept = content[: len(content) - nbytes]
    assert path.read_bytes()[: len(kept)] == kept
    return ""


def of_earlier_version() -> bytes:
    """Return a journal without checks of the lengths."""
    frames = [HEAD.pack(len(entry), zlib.crc32(entry)) + entry for entry in ENTRIES]
    return b"trio_accel journal\n" + b"".join(frames)


def test_each_changed_byte_is_found(tmp_path: Path) -> None:
    content, ends = written(tmp_path / "journal")
    for at in range(len(content)):
        number = sum(end <= at for end in ends)
        for change in (1, 0xFF, content[at]):
            damaged = bytearray(content)
            damaged[at] ^= change
            if bytes(damaged) == content:
                continue
            text = check(tmp_path / "damaged", bytes(damaged), 0)
            start, size = ends[number - 1], len(content)
            place = f"entry {number}, at byte {start} of {size}, has a wrong checksum"
            assert ("is not a journal" if at < 19 else place) in text


@pytest.mark.parametrize("is_old", [False, True], ids=["now", "earlier"])
def test_each_bit_of_the_last_entry(tmp_path: Path, is_old: bool) -> None:
    """A frame with all its bytes is not an incomplete one, whatever its length field contains."""
    content, ends = written(tmp_path / "journal")
    if is_old:
        content = of_earlier_version()
    for at, bit in itertools.product(range(ends[-2], len(content)), range(8)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        text = check(tmp_path / "damaged", bytes(damaged), 0)
        assert f"entry {len(ENTRIES)}, at byte {ends[-2]} of {len(content)}, has a wrong" in text


def test_a_larger_length_hides_no_entries_of_an_earlier_version(tmp_path: Path) -> None:
    content = of_earlier_version()
    for bit in range(9, 48):
        damaged = bytearray(content)
        damaged[19 + bit // 8] ^= 1 << bit % 8
        assert "entry 1, at byte 19 of" in check(tmp_path / "damaged", bytes(damaged), 0)


def test_each_length(tmp_path: Path) -> None:
    content, ends = written(tmp_path / "journal")
    for size in range(19, len(content)):
        assert not check(tmp_path / "damaged", content[:size], sum(end <= size for end in ends[1:]))


def test_a_cut_between_entries_of_an_ended_journal_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _, ends = written(path)
    journal = replay.FileJournal(path)
    journal.append(b"next")
    assert not journal.is_ended()
    journal.close()
    assert journal.is_ended()
    content, entries = path.read_bytes(), [*ENTRIES[:-1], pickle.dumps(("outside", 1, "a.b")), b"next"]
    assert list(journal.entries()) == entries
    assert journal.left_out() == 0
    note = "no end: the recording was not ended, or entries at the end of the journal are missing"
    path.write_bytes(content[: ends[-2]])
    assert not journal.is_ended()
    assert list(replay.listing(replay.FileJournal(path)))[-1] == note
    for size in range(ends[-1] + 1, len(content)):
        path.write_bytes(content[:size])
        assert not journal.is_ended()
        assert list(journal.entries()) == entries[: len(entries) - (size < len(content) - HEAD.size)]
    # A later entry takes the place of the end.
    path.write_bytes(content)
    journal = replay.FileJournal(path)
    journal.append(b"later")
    assert not journal.is_ended()
    journal.close()
    journal.close()
    assert list(replay.FileJournal(path).entries()) == [*entries, b"later"]


def test_each_bit_of_the_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = replay.FileJournal(path)
    for entry in ENTRIES:
        journal.append(entry)
    journal.close()
    content = path.read_bytes()
    for at, bit in itertools.product(range(len(content) - HEAD.size, len(content)), range(8)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        assert "has a wrong checksum" in check(path, bytes(damaged), 0)
    for more in (b"\0", content[-HEAD.size :], content[19:]):
        assert "has a wrong checksum" in check(path, content + more, 0)


def test_missing_repeated_and_exchanged_entries(tmp_path: Path) -> None:
    content, ends = written(tmp_path / "journal")
    frames = [content[start:end] for start, end in itertools.pairwise(ends)]
    for number in range(len(frames) - 1):
        for other in (
            frames[:number] + frames[number + 1 :],
            frames[: number + 1] + frames[number:],
            [*frames[:number], frames[number + 1], frames[number], *frames[number + 2 :]],
        ):
            text = check(tmp_path / "damaged", content[:19] + b"".join(other), 0)
            assert "has a wrong checksum" in text
    for zeros in (1, 12, 500):
        text = check(tmp_path / "damaged", content + bytes(zeros), len(ENTRIES))
        assert bool(text) == (zeros >= HEAD.size)


def test_journals_of_earlier_versions(tmp_path: Path) -> None:
    """They have no check of lengths, so an incomplete end may be damage, and nothing is appended to it."""
    path = tmp_path / "journal"
    content = of_earlier_version()
    path.write_bytes(content)
    journal = replay.FileJournal(path)
    assert list(journal.entries()) == ENTRIES
    journal.append(b"next")
    assert list(replay.FileJournal(path).entries()) == [*ENTRIES, b"next"]
    path.write_bytes(content[:-3])
    journal = replay.FileJournal(path)
    assert list(journal.entries()) == ENTRIES[:-1]
    assert journal.left_out() == 12 + len(ENTRIES[-1]) - 3
    with pytest.raises(replay.JournalError, match="an earlier version wrote it without a check"):
        journal.append(b"next")
    assert path.read_bytes() == content[:-3]
    damaged = bytearray(content)
    damaged[19 + 12 + 3] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(replay.JournalError, match="entry 1, at byte 19 of"):
        list(journal.entries())


@pytest.mark.parametrize("fails_after", [0, 5, 600])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_entry_that_the_disk_cannot_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_after: int, is_first: bool
) -> None:
    """Nothing of it stays after a shorter one, which takes its place."""
    path, left = tmp_path / "journal", [fails_after]
    journal, kept = replay.FileJournal(path), [] if is_first else ENTRIES[:2]
    for entry in kept:
        journal.append(entry)
    write = os.write

    def limited_write(descriptor: int, content: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space")
        count = write(descriptor, content[: left[0]])
        left[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", limited_write)
        with pytest.raises(OSError, match="No space"):
            journal.append(bytes(1000))
    for entry in ENTRIES[2:]:
        journal.append(entry)
    assert list(replay.FileJournal(path).entries()) == [*kept, *ENTRIES[2:]]


DAMAGE: list[Callable[[sqlite3.Connection], object]] = [
    lambda base: base.execute("update entries set entry = ? where number = 3", (ENTRIES[1],)),
    lambda base: base.execute("update entries set entry = 'text' where number = 3"),
    lambda base: base.execute("delete from entries where number = 3"),
    lambda base: base.execute("update entries set checksum = checksum + 1 where number = 3"),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_databases(tmp_path: Path, damage: Callable[[sqlite3.Connection], object]) -> None:
    path = tmp_path / "database"
    journal = replay.SqliteJournal(path)
    for entry in ENTRIES:
        journal.append(entry)
    assert list(journal.entries()) == ENTRIES
    with sqlite3.connect(path) as base:
        damage(base)
    base.close()
    with pytest.raises(replay.JournalError, match="is damaged: entry 3 is missing or has a wrong checksum"):
        list(replay.SqliteJournal(path).entries())
    with pytest.raises(replay.JournalError, match="is damaged: entry 3 is missing or has a wrong checksum"):
        replay.SqliteJournal(path).append(b"next")


def database(path: Path) -> bytes:
    """Write a journal in a database; return the bytes of the file."""
    journal = replay.SqliteJournal(path)
    for entry in ENTRIES[:3]:
        journal.append(entry)
    del journal
    gc.collect()
    base = sqlite3.connect(path)
    base.execute("pragma wal_checkpoint(truncate)")
    base.close()
    return path.read_bytes()


def failure(use: Callable[[], object]) -> str:
    """Return the text of the error of a journal, empty without an error."""
    try:
        use()
    except replay.JournalError as error:
        return str(error)
    return ""


def place(path: Path, content: bytes) -> None:
    """Write a database as a new file, without the log and the mark of an earlier one."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    path.write_bytes(content)


def check_database(path: Path, content: bytes) -> None:
    """Read damaged bytes, and append: all entries, or an error with the path."""

    def read() -> None:
        assert list(replay.SqliteJournal(path).entries()) == ENTRIES[:3]

    place(path, content)
    text = failure(read)
    assert not text or str(path) in text
    place(path, content)
    refusal = failure(lambda: replay.SqliteJournal(path).append(b"next"))
    if refusal:
        assert str(path) in refusal
    else:
        assert not text
        assert list(replay.SqliteJournal(path).entries()) == [*ENTRIES[:3], b"next"]


def test_changed_bits_of_a_database(tmp_path: Path) -> None:
    """All bits of each page's number of cells, and a bit of each fourth byte of the rest."""
    content = database(tmp_path / "database")
    size = int.from_bytes(content[16:18], "big")
    heads = [100, *range(size, len(content), size)]
    places = {(at + offset, bit) for at in heads for offset in (3, 4) for bit in range(8)}
    places |= {(at, at // 4 % 8) for at in range(0, len(content), 4) if content[at]}
    for at, bit in sorted(places):
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        check_database(tmp_path / "damaged", bytes(damaged))


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("delete from entries where number = 3", "entry 3 is missing, its count is 3"),
        ("delete from entries", "entry 1 is missing, its count is 3"),
        ("drop table entries", "its table of entries is missing"),
        ("delete from entry_count", "its count of entries is missing"),
        ("update entry_count set number = 'three'", "its count of entries is missing"),
        ("update entry_count set number = 4", "entry 4 is missing, its count is 4"),
    ],
)
def test_hidden_entries_of_a_database(tmp_path: Path, statement: str, why: str) -> None:
    path = tmp_path / "database"
    database(path)
    journal = replay.SqliteJournal(path)
    journal.append(ENTRIES[3])
    with sqlite3.connect(path) as base:
        base.execute("delete from entries where number = 4")
        base.execute("update entry_count set number = 3")
        base.execute(statement)
    base.close()
    for use in (lambda: list(journal.entries()), lambda: journal.append(b"next")):
        with pytest.raises(replay.JournalError):
            use()
    Path(f"{path}-mark").unlink()
    with pytest.raises(replay.JournalError, match=f"is damaged: {why}"):
        list(replay.SqliteJournal(path).entries())
    with pytest.raises(replay.JournalError, match=f"is damaged: {why}"):
        replay.SqliteJournal(path).append(b"next")


def test_a_database_without_its_schema(tmp_path: Path) -> None:
    """Pages without tables are not a new journal."""
    path = tmp_path / "database"
    damaged = bytearray(database(path))
    assert damaged[103:105] == b"\0\2"
    damaged[104] = 0
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(replay.JournalError, match="is damaged: its table of entries is missing"):
            replay.SqliteJournal(path)


def test_an_entry_is_appended_during_a_reading(tmp_path: Path) -> None:
    path = tmp_path / "database"
    database(path)
    reader, writer = replay.SqliteJournal(path), replay.SqliteJournal(path)
    for journal, expected in ((reader, ENTRIES[:3]), (writer, [*ENTRIES[:3], ENTRIES[3]])):
        reading = reader.entries()
        assert next(reading) == ENTRIES[0]
        journal.append(ENTRIES[len(expected)])
        assert [ENTRIES[0], *reading][: len(expected)] == expected
    assert list(reader.entries()) == ENTRIES[:5]


def test_a_database_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "database"
    database(path)
    journal = replay.SqliteJournal(path)
    base = sqlite3.connect(path)
    base.execute("create trigger full before insert on entries begin select raise(abort, 'no space'); end")
    base.close()
    with pytest.raises(replay.JournalError, match=r"database cannot be written: no space"):
        journal.append(b"next")
    base = sqlite3.connect(path)
    base.execute("drop trigger full")
    base.close()
    journal.append(b"next")
    assert list(replay.SqliteJournal(path).entries()) == [*ENTRIES[:3], b"next"]


def test_a_database_of_an_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "database"
    with sqlite3.connect(path) as base:
        base.execute("create table entries (number integer primary key, entry blob not null)")
        base.executemany("insert into entries (entry) values (?)", [(entry,) for entry in ENTRIES])
    base.close()
    journal = replay.SqliteJournal(path)
    assert list(journal.entries()) == ENTRIES
    journal.append(b"next")
    assert list(replay.SqliteJournal(path).entries()) == [*ENTRIES, b"next"]
    with sqlite3.connect(path) as base:
        base.execute("delete from entries where number > 5")
    base.close()
    with pytest.raises(replay.JournalError, match="is damaged: entry 6 is missing, its count is 7"):
        list(replay.SqliteJournal(path).entries())


def test_an_entry_of_another_type_is_named() -> None:
    journal = replay.MemoryJournal()
    for entry in (*ENTRIES[:2], b"rubbish"):
        journal.append(entry)
    with pytest.raises(replay.JournalError, match="entry 3: an entry of the journal holds more than plain"):
        list(replay.listing(journal))


async def test_the_report_names_an_incomplete_entry(device: ta.Device, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with replay.record(device, replay.FileJournal(path)) as recording:
        for number in range(2):
            await recording.mark(f"m{number}", x=await device.put(np.arange(4.0) + number))
    whole = await replay.replay(replay.FileJournal(path), device)
    assert (whole.left_out, whole.is_same, whole.compared, whole.is_ended) == (0, True, 2, True)
    content = path.read_bytes()[: -HEAD.size]
    path.write_bytes(content)
    report = await replay.replay(replay.FileJournal(path), device)
    assert (report.is_same, report.compared, report.is_ended) == (True, 2, False)
    assert "no end: the recording was not ended" in str(report)
    assert "no end" not in str(whole)
    path.write_bytes(content[:-1])
    report = await replay.replay(replay.FileJournal(path), device)
    assert (report.is_same, report.compared) == (True, 1)
    assert f"left out: an incomplete last entry of {report.left_out} bytes" in str(report)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(replay.JournalError, match="is damaged: entry"):
        await replay.replay(replay.FileJournal(path), device)
    with pytest.raises(replay.JournalError, match="is damaged: entry"):
        async with replay.record(device, replay.FileJournal(path)):
            pass
    assert path.read_bytes() == damaged


def killed_database(path: Path) -> dict[str, bytes]:
    """Write a journal in a database; return its files as a kill leaves them."""
    journal = replay.SqliteJournal(path)
    for entry in ENTRIES:
        journal.append(entry)
    return {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal", "-mark")}


def place_files(path: Path, files: dict[str, bytes]) -> None:
    place(path, files[""])
    for suffix, content in files.items():
        Path(f"{path}{suffix}").write_bytes(content)


@pytest.mark.parametrize("is_cut", [False, True], ids=["changed", "cut"])
def test_a_damaged_log_of_a_database(tmp_path: Path, is_cut: bool) -> None:
    """SQLite leaves out the log from the damage on, without an error."""
    files, path = killed_database(tmp_path / "database"), tmp_path / "damaged"
    place_files(path, files)
    assert list(replay.SqliteJournal(path).entries()) == ENTRIES
    log, errors = files["-wal"], list[str]()
    for at in (*range(0, len(log), 997), len(log) - 1):
        damaged = log[:at] if is_cut else log[:at] + bytes([log[at] ^ 0xFF]) + log[at + 1 :]
        place_files(path, {**files, "-wal": damaged})
        try:
            journal = replay.SqliteJournal(path)
        except replay.JournalError as error:
            errors.append(str(error))
            assert str(path) in errors[-1]
        else:
            assert list(journal.entries()) == ENTRIES, at
    assert sum("entries that were acknowledged by" in text for text in errors) > 10


def test_the_mark_of_a_database_is_of_this_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may undo the last commits, so later programs of the machine append after what is left."""
    boots = ["12345678123456781234567812345678"]
    # Within the test only, because what follows reads other files.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path: boots[-1])
        files, path = killed_database(tmp_path / "database"), tmp_path / "after"
        files["-wal"] = files["-wal"][:-4200]
        place_files(path, files)
        with pytest.raises(replay.JournalError, match="it has 5 of the 6 entries that were acknowledged by"):
            replay.SqliteJournal(path)
        boots.append("87654321123456781234567812345678")
        for number in range(2):
            journal = replay.SqliteJournal(path)
            assert list(journal.entries()) == [*ENTRIES[:5], *[b"next"] * number]
            journal.append(b"next")
        files = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal", "-mark")}
        place_files(tmp_path / "cut", {**files, "-wal": files["-wal"][:-4200]})
        with pytest.raises(replay.JournalError, match="it has 6 of the 7 entries that were acknowledged by"):
            replay.SqliteJournal(tmp_path / "cut")


def test_a_new_database_in_the_place_of_a_removed_one(tmp_path: Path) -> None:
    path = tmp_path / "database"
    database(path)
    path.unlink()
    replay.SqliteJournal(path).append(b"first")
    assert list(replay.SqliteJournal(path).entries()) == [b"first"]
