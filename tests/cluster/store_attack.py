"""Damage of a large store in SQLite: `python tests/cluster/store_attack.py --help`.

Each attack restores the files of a store, damages them, takes every entity, writes a message to some, and
takes these again. Its outcome is the worst of all these calls.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import attrs
import trio

from trio_accel.cluster import Entry, Journal, SqliteStore, StoreError

__all__ = [
    "OUTCOMES",
    "Attack",
    "Target",
    "attacks_on_files",
    "flips",
    "make_target",
    "outcome_of",
    "stale_pages",
]

Files: TypeAlias = dict[str, bytes]
"""The contents of a store's files by suffix."""

SUFFIXES = ("", "-wal", "-mark")
OUTCOMES = ("right", "StoreError", "another state", "bare error")
PAGE_BYTES = 4096
# Kinds of pages by their first byte.
KINDS = {2: "interior index", 5: "interior table", 10: "leaf index", 13: "leaf table"}
# The number of entities that also get a message.
_WRITTEN = 8


@attrs.frozen
class Attack:
    """Files of a damaged store.

    Attributes:
        label: The kind of damage.
        files: The damaged files.
    """

    label: str
    files: Files


@attrs.frozen
class Target:
    """A store with its states at three moments.

    Attributes:
        path: The place of the store.
        older: The files after an orderly end, before the last saves and the last message.
        killed: The files after a kill, with all saves and messages; the log has the last message.
        closed: The files after an orderly end, with all saves and messages.
        right: The journals by entity, from the undamaged files.
    """

    path: Path
    older: Files
    killed: Files
    closed: Files
    right: dict[str, Journal]

    def undamaged(self) -> list[Attack]:
        """Return attacks without damage."""
        return [Attack("a kill", self.killed), Attack("an orderly end", self.closed)]


async def make_target(path: Path, *, entities: int, messages: int, nbytes: int) -> Target:
    """Make a store; its file has about `entities * messages * nbytes` bytes."""
    names = [f"cluster_entities:Account/str/'account {number:06}'" for number in range(entities)]
    states, killed = list[Files](), Files()
    for stage in range(3):
        store = await _opened(path)
        epoch = await store.next_epoch("the target")
        for name in names if stage < 2 else names[:1]:
            await store.take(name, epoch)
        if stage == 0:
            for number in range(1, messages):
                for name in names:
                    await store.write(name, epoch, _entry(number, nbytes), b"a save" if number == 5 else None)
        elif stage == 1:
            for name in names[::2]:
                await store.save(name, epoch, messages - 1, b"a later save")
        else:
            await store.write(names[0], epoch, _entry(messages, nbytes))
        killed = _contents(path)
        await store.aclose()
        states.append(_contents(path))
    older, _, closed = states
    return Target(path, older, killed, closed, await _journals(path, killed, names))


def _entry(number: int, nbytes: int) -> Entry:
    data = random.Random(number).randbytes(nbytes)
    return Entry(number, f"id {number}", data, b"reply %d" % number)


async def _opened(path: Path) -> SqliteStore:
    store = SqliteStore(path, timeout=60.0)
    await store.open()
    # No power cut ends these programs.
    await trio.to_thread.run_sync(store._database.execute, "pragma synchronous = off")
    return store


def _contents(path: Path) -> Files:
    return {suffix: file.read_bytes() for suffix in SUFFIXES if (file := Path(f"{path}{suffix}")).exists()}


def _restore(path: Path, files: Files) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
    for suffix, data in files.items():
        Path(f"{path}{suffix}").write_bytes(data)


async def _journals(path: Path, files: Files, names: Sequence[str]) -> dict[str, Journal]:
    _restore(path, files)
    store = await _opened(path)
    try:
        epoch = await store.next_epoch()
        return {name: await store.take(name, epoch) for name in names}
    finally:
        await store.aclose()


async def outcome_of(target: Target, attack: Attack) -> str:
    """Return the worst outcome of an attack."""
    _restore(target.path, attack.files)
    store, outcomes = SqliteStore(target.path, timeout=60.0), ["right"]
    try:
        store = await _opened(target.path)
        epoch = await store.next_epoch()
    except Exception as error:  # noqa: BLE001  # every error is an outcome
        outcomes.append(_error_outcome(error))
    else:
        items = list(target.right.items())
        outcomes += [await _use(store, epoch, *item, is_written=False) for item in items]
        written = items[:: max(1, len(items) // _WRITTEN)]
        outcomes += [await _use(store, epoch, *item, is_written=True) for item in written]
    finally:
        await store.aclose()
    return max(outcomes, key=OUTCOMES.index)


async def _use(store: SqliteStore, epoch: int, name: str, right: Journal, *, is_written: bool) -> str:
    try:
        journal = await store.take(name, epoch)
        if is_written and journal == right:
            entry = _entry(right.number + 1, 9)
            await store.write(name, epoch, entry)
            journal = await store.take(name, epoch)
            replies = {**right.replies, entry.id: entry.reply}
            right = attrs.evolve(right, number=entry.number, entries=(*right.entries, entry), replies=replies)
    except Exception as error:  # noqa: BLE001  # every error is an outcome
        return _error_outcome(error)
    return "right" if journal == right else "another state"


def _error_outcome(error: Exception) -> str:
    # The errors of SQLite for a row that is there twice come too late: the message has run again.
    is_late = "IntegrityError" in str(error)
    return "StoreError" if isinstance(error, StoreError) and not is_late else "bare error"


def flips(target: Target, count: int, seed: int = 0) -> Iterator[Attack]:
    """Yield attacks of one changed bit each, the same number for each kind of page."""
    rng, data = random.Random(seed), target.closed[""]
    pages = dict[str, list[int]]()
    for start in range(0, len(data), PAGE_BYTES):
        kind = "first page" if not start else KINDS.get(data[start], "overflow")
        pages.setdefault(kind, []).append(start)
    # Pages of few owners, saves and counts are rarely hit otherwise.
    pages["one of the first pages"] = list(range(PAGE_BYTES, min(len(data), 24 * PAGE_BYTES), PAGE_BYTES))
    for number in range(count):
        kind = sorted(pages)[number % len(pages)]
        start = rng.choice(pages[kind])
        # The head of a page and the first offsets of its cells, or any byte.
        offset = rng.choice([rng.randrange(32), rng.randrange(PAGE_BYTES)])
        damaged = bytearray(data)
        damaged[start + offset] ^= 1 << rng.randrange(8)
        yield Attack(f"bit in {kind}", {**target.closed, "": bytes(damaged)})


def stale_pages(target: Target, count: int | None = None, seed: int = 0) -> Iterator[Attack]:
    """Yield attacks of a page each with its earlier content, as after a write that the disk has lost."""
    older, closed = target.older[""], target.closed[""]
    starts = range(0, min(len(older), len(closed)), PAGE_BYTES)
    stale = [
        start for start in starts if older[start : start + PAGE_BYTES] != closed[start : start + PAGE_BYTES]
    ]
    if count is not None:
        stale = random.Random(seed).sample(stale, min(count, len(stale)))
    for start in stale:
        end = start + PAGE_BYTES
        yield Attack("stale page", {**target.closed, "": closed[:start] + older[start:end] + closed[end:]})


def attacks_on_files(target: Target, seed: int = 0) -> Iterator[Attack]:
    """Yield attacks on whole files: older ones next to newer ones, and files without their end."""
    older, killed, closed = target.older, target.killed, target.closed
    assert "-wal" not in closed
    yield Attack("older file, newer log", {**killed, "": older[""]})
    yield Attack("older file", {**closed, "": older[""]})
    yield Attack("older file, no log", {"": older[""], "-mark": killed["-mark"]})
    yield Attack("no log", {"": killed[""], "-mark": killed["-mark"]})
    yield Attack("newer file, older log", {**closed, "-wal": killed["-wal"][: len(killed["-wal"]) // 2]})
    rng = random.Random(seed)
    for label, files in (("file", closed), ("file with a log", killed)):
        size = len(files[""])
        for cut in (
            0,
            100,
            PAGE_BYTES,
            size - PAGE_BYTES,
            size - 1,
            *(rng.randrange(size) for _ in range(4)),
        ):
            yield Attack(f"cut {label}", {**files, "": files[""][:cut]})
            aligned = cut // PAGE_BYTES * PAGE_BYTES
            yield Attack(f"cut {label} between pages", {**files, "": files[""][:aligned]})
    size = len(killed["-wal"])
    for cut in (0, 32, size - 1, *(rng.randrange(size) for _ in range(6))):
        yield Attack("cut log", {**killed, "-wal": killed["-wal"][:cut]})


async def _main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = await make_target(
            Path(folder, "store.db"),
            entities=arguments.entities,
            messages=arguments.messages,
            nbytes=arguments.nbytes,
        )
        print(f"{len(target.closed['']) / 2**20:.1f} MiB, log {len(target.killed['-wal']) / 2**20:.1f} MiB")
        counts = dict[str, Counter[str]]()
        # One after the other, because each of them is as large as the store.
        attacks = itertools.chain(
            attacks_on_files(target),
            stale_pages(target, arguments.pages, arguments.seed),
            flips(target, arguments.flips, arguments.seed),
        )
        for attack in attacks:
            outcome = await outcome_of(target, attack)
            counts.setdefault(attack.label, Counter())[outcome] += 1
        for label, outcomes in counts.items():
            print(f"{label:32}", *(f"{outcome}: {outcomes[outcome]:4}" for outcome in OUTCOMES))
        total = sum(counts.values(), Counter[str]())
        print(f"{'all':32}", *(f"{outcome}: {total[outcome]:4}" for outcome in OUTCOMES))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entities", type=int, default=250, help="default: %(default)s")
    parser.add_argument("--messages", type=int, default=12, help="for each entity, default: %(default)s")
    parser.add_argument("--nbytes", type=int, default=10_000, help="of a message, default: %(default)s")
    parser.add_argument("--flips", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--pages", type=int, default=100, help="stale ones, default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    trio.run(partial(_main, parser.parse_args()))
