"""A stranger's journal runs no code, and reads and writes only the memory of its own arrays."""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replayed_programs
from chosen import BACKEND

import trio_accel as ta
from trio_accel import replay

Change = Callable[[Any], Any]


async def journal_of(device: ta.Device) -> list[Any]:
    """Entries of a product, a chain, a written view, and a staged copy."""
    journal = replay.MemoryJournal()
    async with replay.record(device, journal):
        x = await device.put(np.arange(16.0).reshape(4, 4))
        out = await device.zeros((4, 8), "complex128")
        await ta.linalg.matmul(x, np.ones((4, 4)))
        await ta.fft.fft(x, out=out[:, ::2])
        await ta.arrays.softmax(ta.nn.relu(x @ x) + 1.0, axis=1).to_host()
    return [pickle.loads(entry) for entry in journal.entries()]


def with_entries(entries: list[Any]) -> replay.MemoryJournal:
    journal = replay.MemoryJournal()
    for entry in entries:
        journal.append(pickle.dumps(tuple(entry)))
    return journal


def replaced(value: Any, change: Change) -> Any:
    """Apply a change to all tuples of plain values, from within."""
    if not isinstance(value, tuple):
        return value
    return change(tuple(replaced(each, change) for each in value))


def arrays(change: Callable[[int, int, str, Any, Any], Any]) -> Change:
    """Change all arrays: block, offset, dtype, shape, strides."""

    def apply(value: Any) -> Any:
        is_array = len(value) == 3 and value[0] == 1 and isinstance(value[2], tuple) and len(value[2]) == 4
        return (1, *change(value[1], *value[2])) if is_array else value

    return apply


BEYOND: dict[str, Change] = {
    "offset": arrays(lambda block, offset, dtype, shape, steps: (block, (1 << 30, dtype, shape, steps))),
    "before": arrays(lambda block, offset, dtype, shape, steps: (block, (-8, dtype, shape, steps))),
    "strides": arrays(
        lambda block, offset, dtype, shape, steps: (
            block,
            (offset, dtype, shape, tuple(99 * s for s in steps)),
        )
    ),
    "backwards": arrays(
        lambda block, offset, dtype, shape, steps: (block, (offset, dtype, shape, tuple(-s for s in steps)))
    ),
    "block": arrays(lambda block, offset, dtype, shape, steps: (block + 77, (offset, dtype, shape, steps))),
    "no number": arrays(
        lambda block, offset, dtype, shape, steps: (block, (offset, dtype, shape, ("8",) * 2))
    ),
}


def places(entries: list[Any]) -> dict[str, tuple[int, int]]:
    """Entries and their parts with arrays: specifications, staged copies, copies to views, steps."""
    launches = [at for at, entry in enumerate(entries) if entry[0] == "launch"]
    product = next(at for at in launches if entries[at][2] == "linalg.Matmul")
    behind = next(at for at in launches if entries[at][7])
    recipe = next(at for at, entry in enumerate(entries) if entry[0] == "recipe")
    return {"spec": (product, 4), "staged": (product, 6), "behind": (behind, 7), "step": (recipe, 2)}


@pytest.mark.parametrize("where", ["spec", "staged", "behind", "step"])
@pytest.mark.parametrize("how", list(BEYOND))
async def test_arrays_beyond_their_blocks(device: ta.Device, where: str, how: str) -> None:
    entries = await journal_of(device)
    assert (await replay.replay(with_entries(entries), device)).is_same
    at, part = places(entries)[where]
    entry = list(entries[at])
    entry[part] = replaced(entry[part], BEYOND[how])
    assert entry != list(entries[at])
    launched: list[str] = []
    observed = device.observed(lambda phase, launch: launched.append(launch.name), lambda ask: ask)  # type: ignore[attr-defined]
    with observed, pytest.raises(replay.JournalError):
        await replay.replay(with_entries([*entries[:at], tuple(entry), *entries[at + 1 :]]), device)
    assert not launched


async def test_recipes(device: ta.Device) -> None:
    entries = await journal_of(device)
    at = next(at for at, entry in enumerate(entries) if entry[0] == "recipe")
    chain = next(entry for entry in entries if entry[0] == "launch" and "ChainSpec" in entry[4][0])
    spec = list(chain[4])
    step = (
        "graphs.Replay",
        chain[3],
        ("trio_accel.backends.base.contract.ops.graphs:GraphSpec", 0, False, (0,), (0,), (0,)),
    )
    with pytest.raises(replay.JournalError, match="recipe 0 is used before it is made, as by one that names"):
        await replay.replay(with_entries([*entries[:at], ("recipe", 0, (step,)), *entries[at + 1 :]]), device)
    # Each has two of the one before.
    bomb = [("recipe", n, ((*step[:2], (step[2][0], n - 1, *step[2][2:])),) * 8) for n in range(1, 30)]
    with pytest.raises(replay.JournalError, match="steps, at most 100000 are allowed"):
        await replay.replay(with_entries([*entries[: at + 1], *bomb]), device)
    spec[1] = 99
    changed = [(*e[:4], tuple(spec), *e[5:]) if e is chain else e for e in entries]
    with pytest.raises(replay.JournalError, match="recipe 99 is used before"):
        await replay.replay(with_entries(changed), device)


async def test_programs_run_if_they_are_allowed(device: ta.Device, tmp_path: Path) -> None:
    journal = replay.MemoryJournal()
    async with replay.record(device, journal):
        x = await device.put(np.ones((4, 4)))
        async with ta.open_program(device, replayed_programs.Scaler, x) as program:
            await program.ask(replayed_programs.Scaler.grow, 1.0)
    before = device.generation
    with pytest.raises(
        replay.JournalError, match=r"operation 2, .* is of a program|ProgramReturn, which runs"
    ):
        await replay.replay(journal, device)
    report = await replay.replay(journal, device, programs=True)
    assert report.is_same, report
    assert device.generation == before
    # The source of the program has another digest now.
    entries = [pickle.loads(entry) for entry in journal.entries()]
    module = next(entry for entry in entries if entry[0] == "module")
    assert module[1] == "replayed_programs"
    assert module[2]
    changed = [("module", module[1], "other") if entry is module else entry for entry in entries]
    report = await replay.replay(with_entries(changed), device, programs=True)
    assert [change.name for change in report.environment] == ["module replayed_programs"]
    assert "module replayed_programs: recorded other, here" in str(report)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("antigravity:X", "uses the module 'antigravity', which this program has not imported"),
        ("trio_accel.__main__:X", "uses the module 'trio_accel.__main__'"),
        ("trio_accel.cluster:Node", "is not a subclass of OperationSpec|cannot be read"),
        ("os:system", "is not a subclass of OperationSpec"),
        ("trio_accel.no_such:X", "cannot be read: ModuleNotFoundError"),
    ],
)
async def test_modules(device: ta.Device, path: str, why: str) -> None:
    entries = await journal_of(device)
    changed = [(*e[:4], (path, *e[4][1:]), *e[5:]) if e[0] == "launch" else e for e in entries]
    with pytest.raises(replay.JournalError, match=why):
        await replay.replay(with_entries(changed), device)
    enum = [(*e[:4], (e[4][0], (3, path, 1), *e[4][2:]), *e[5:]) if e[0] == "launch" else e for e in entries]
    with pytest.raises(replay.JournalError):
        await replay.replay(with_entries(enum), device)
    library = [(*e[:3], path, *e[4:]) if e[0] == "launch" else e for e in entries]
    with suppress(replay.JournalError):
        assert (await replay.replay(with_entries(library), device)).failures


class Attack:
    """Its pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("module", ["trio_accel.programs", "trio_accel.programs._messages"])
async def test_definitions_of_programs_are_not_read(device: ta.Device, tmp_path: Path, module: str) -> None:
    entries = await journal_of(device)
    definition = base64.b85encode(pickle.dumps(Attack(tmp_path / "made"))).decode()
    changed = [
        (*e[:3], f"{module}:ProgramActor?x {definition} ()", *e[4:]) if e[0] == "launch" else e
        for e in entries
    ]
    failed = [("failed", e[1], "Cancelled", "") for e in entries if e[0] == "launch"]
    for journal in (with_entries(changed), with_entries([*changed, *failed])):
        with pytest.raises(replay.JournalError, match="give programs=True if you trust it"):
            await replay.replay(journal, device)
        assert list(replay.listing(journal))
    assert not (tmp_path / "made").exists()


async def test_the_digest_of_a_module_imports_no_package(
    device: ta.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "strangers_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "module.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    entries = await journal_of(device)
    named = ("module", "strangers_package.module", "digest")
    report = await replay.replay(with_entries([entries[0], named, *entries[1:]]), device)
    assert [change.name for change in report.environment] == ["module strangers_package.module"]
    assert "strangers_package" not in sys.modules


async def test_rubbish(device: ta.Device) -> None:
    """Parts of entries with another type, or missing."""
    entries = await journal_of(device)
    for at, entry in enumerate(entries[1:], 1):
        for part in range(1, len(entry)):
            for other in (None, -1, "text", (), ((),), 1 << 70):
                if entry[part] == other or (entry[0] == "result" and part == 2):
                    continue
                changed = [*entries[:at], (*entry[:part], other, *entry[part + 1 :]), *entries[at + 1 :]]
                try:
                    await replay.replay(with_entries(changed), device)
                except replay.JournalError:
                    pass
                except ta.AccelError:
                    # Another library, or a block of another size.
                    assert entry[0] == "launch"
    x = await device.put(np.ones(3))
    assert (await x.to_host()).tolist() == [1.0, 1.0, 1.0]
    assert device.generation == 1


async def test_contents_of_other_sizes(system: ta.System) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND) as device:
        x = await device.put(np.ones(4))
        async with replay.record(device, journal):
            await (x * 2.0).to_host()
        entries = [pickle.loads(entry) for entry in journal.entries()]
        content = next(entry for entry in entries if entry[0] == "content")
        wrong = (*content[:2], content[2] + 8, *content[3:])
        with pytest.raises(replay.JournalError, match="has 40 bytes, its content is of uint8"):
            await replay.replay(with_entries([wrong if e is content else e for e in entries]), device)


async def test_sizes_without_content(system: ta.System) -> None:
    """Sizes cost a journal nothing, so that they must be looked at before there is memory for them."""
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND) as device, replay.record(device, journal):
        x = await device.put(np.ones((2, 2)))
        await ta.linalg.inv(x + 0.5 * np.eye(2))
        await x.to_host()
        await (ta.linalg.inv(x + 0.5 * np.eye(2)) + 1.0).to_host()
    entries = [pickle.loads(entry) for entry in journal.entries()]
    words = ("result", "int32", (1 << 40,))
    large = ("blank", ("float64", (1 << 37,), b""))
    changes: list[tuple[str, Change]] = [
        ("launch", lambda value: words if value[:1] == ("result",) else value),
        ("recipe", lambda value: words if value[:1] == ("result",) else value),
        ("launch", lambda value: large if value[:1] == ("value",) else value),
        ("launch", lambda value: ("read", "float64", (1 << 37,)) if value[:1] == ("read",) else value),
    ]
    async with system.open_device(BACKEND, options=ta.DeviceOptions(memory_limit=1 << 24)) as device:
        assert (await replay.replay(with_entries(entries), device)).is_same
        for kind, change in changes:
            changed = [replaced(entry, change) if entry[0] == kind else entry for entry in entries]
            assert changed != entries
            with pytest.raises(replay.JournalError):
                await replay.replay(with_entries(changed), device)
        header, put, *rest = entries
        huge = (*put[:5], tuple((block, 1 << 37) for block, _ in put[5]), *put[6:])
        for first in ([("content", 77, 1 << 37, None, 1), put], [huge]):
            with pytest.raises(ta.OutOfMemoryError):
                await replay.replay(with_entries([header, *first, *rest]), device)
