"""Journals keep entries in order, and everything else is reported as not being a journal."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from trio_accel import replay

FORMAT = 1

ENTRIES = [
    pickle.dumps(("header", FORMAT, (), True)),
    *[pickle.dumps(("part", n, bytes(n))) for n in range(4)],
]
ENTRIES.append(pickle.dumps(("launch", 1, "linalg.Matmul")))


def journals(folder: Path) -> Iterator[replay.RecordingJournal]:
    yield replay.MemoryJournal()
    yield replay.FileJournal(folder / "file")
    yield replay.SqliteJournal(folder / "database")


def test_entries_are_in_order(tmp_path: Path) -> None:
    for journal in journals(tmp_path):
        for entry in ENTRIES:
            journal.append(entry)
        assert list(journal.entries()) == ENTRIES
    assert list(replay.FileJournal(tmp_path / "file").entries()) == ENTRIES
    assert list(replay.SqliteJournal(tmp_path / "database").entries()) == ENTRIES


def test_a_custom_journal(tmp_path: Path) -> None:
    class Folder:
        def append(self, entry: bytes, /) -> None:
            (tmp_path / f"{len(list(tmp_path.iterdir())):09}").write_bytes(entry)

        def entries(self) -> Iterator[bytes]:
            return (path.read_bytes() for path in sorted(tmp_path.iterdir()))

    journal: replay.RecordingJournal = Folder()
    for entry in ENTRIES:
        journal.append(entry)
    assert list(journal.entries()) == ENTRIES
    assert list(replay.listing(journal)) == ["1 linalg.Matmul"]


def test_a_truncated_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    journal = replay.FileJournal(tmp_path / "whole")
    ends = []
    for entry in ENTRIES:
        journal.append(entry)
        ends.append(journal.path.stat().st_size)
    content = journal.path.read_bytes()
    magic = ends[0] - len(ENTRIES[0]) - 12
    for size in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:size])
        cut = replay.FileJournal(tmp_path / "cut")
        if size < magic:
            with pytest.raises(replay.JournalError, match="not a journal"):
                list(cut.entries())
            # A kill during the first write leaves no entry.
            cut.append(b"next")
            assert list(cut.entries()) == [b"next"]
            continue
        assert list(cut.entries()) == ENTRIES[: sum(end <= size for end in ends)]
        # The next recording overwrites what is torn.
        cut.append(b"next")
        assert list(cut.entries()) == [*ENTRIES[: sum(end <= size for end in ends)], b"next"]


def test_a_changed_byte_of_a_file(tmp_path: Path) -> None:
    journal = replay.FileJournal(tmp_path / "file")
    for entry in ENTRIES:
        journal.append(entry)
    content = bytearray(journal.path.read_bytes())
    content[-1] ^= 1
    journal.path.write_bytes(content)
    with pytest.raises(replay.JournalError, match=f"is damaged: entry {len(ENTRIES)}, at byte"):
        list(journal.entries())


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"some text that is longer than the beginning of a journal")
    with pytest.raises(replay.JournalError, match="is not a journal: it does not begin with"):
        replay.FileJournal(path).append(b"")
    with pytest.raises(replay.JournalError, match="is not a journal"):
        replay.SqliteJournal(path)
    with pytest.raises(FileNotFoundError):
        list(replay.FileJournal(tmp_path / "missing").entries())


def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        replay.FileJournal(tmp_path / "full").append(b"entry")


def of(*entries: bytes) -> replay.MemoryJournal:
    journal = replay.MemoryJournal()
    for entry in entries:
        journal.append(entry)
    return journal


class Runs:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/trio_accel_must_not_exist",)


def nested(depth: int) -> tuple[object, ...]:
    """Return a tuple of a few bytes that represents very many values."""
    value: tuple[object, ...] = ()
    for _ in range(depth):
        value = (value,) * 4
    return value


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (pickle.dumps(("part", Runs())), "holds more than plain values: opcode 0x93 at byte"),
        (pickle.dumps(("part", Runs()), 2), "opcode 0x71"),
        (pickle.dumps(("part", Path("x"))), "opcode 0x93"),
        (b"\x80\x05\x8c\x01xQ.", "opcode 0x51"),
        # Opcodes that take memory: a place in a table, and a buffer before its content is there.
        (b"\x80\x05)r\xff\xff\xff\xff.", "opcode 0x72"),
        (b"\x80\x05)p9999999999\n.", "opcode 0x70"),
        (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.", "opcode 0x96"),
        (b"\x80\x05\x8e" + (1 << 62).to_bytes(8, "little") + b"x.", "cannot be read"),
        (pickle.dumps(("part", nested(60))), r"an entry of the journal has \d+ values in \d+ bytes"),
        (pickle.dumps(("part", (nested(7),) * 4)), r"an entry of the journal has \d+ values in \d+ bytes"),
        (b"rubbish", "opcode 0x72 at byte 0"),
        (b"", "cannot be read"),
        (b"(" * 100_000 + b"t" * 100_000 + b".", "must be a tuple|cannot be read"),
        (pickle.dumps(["part"]), "opcode 0x5d"),
        (pickle.dumps("part"), "must be a tuple"),
        (pickle.dumps(()), "must be a tuple"),
        (pickle.dumps((1, 2)), "must be a tuple"),
    ],
)
def test_invalid_entries(entry: bytes, why: str) -> None:
    with pytest.raises(replay.JournalError, match=why):
        list(replay.listing(of(entry)))
    assert not Path("/tmp/trio_accel_must_not_exist").exists()


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (None, "the journal is empty"),
        (("part", 1, b""), "its header is missing"),
        (("header", FORMAT + 1, (), True), f"has format {FORMAT + 1}, this version reads format {FORMAT}"),
        (("header",), "has format None"),
        (("header", FORMAT), f"has format {FORMAT}"),
    ],
)
def test_headers(first: tuple[object, ...] | None, why: str) -> None:
    journal = replay.MemoryJournal()
    if first is not None:
        journal.append(pickle.dumps(first))
    with pytest.raises(replay.JournalError, match=why):
        list(replay.listing(journal))
