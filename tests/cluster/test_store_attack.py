"""Damage of stores whose files are too large for a whole check: the right state, or `StoreError`."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from store_attack import Target, attacks_on_files, flips, make_target, outcome_of, stale_pages

pytestmark = pytest.mark.no_device

FINE = {"right", "StoreError"}


async def unchecked_target(path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Make a small store that is treated as a large one; its trees have interior pages."""
    monkeypatch.setattr("trio_accel.cluster._sqlite_store._MAX_CHECKED_BYTES", 0)
    return await make_target(path, entities=80, messages=7, nbytes=300)


async def test_a_changed_bit_in_a_page_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await unchecked_target(tmp_path / "store.db", monkeypatch)
    assert len({attack.label for attack in flips(target, 20)}) >= 6
    outcomes = Counter[str]()
    for attack in flips(target, 70, seed=3):
        outcome = await outcome_of(target, attack)
        assert outcome in FINE, attack.label
        outcomes[outcome] += 1
    assert outcomes["StoreError"] > 10


async def test_files_of_different_moments_and_files_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await unchecked_target(tmp_path / "store.db", monkeypatch)
    for attack in attacks_on_files(target):
        outcome = await outcome_of(target, attack)
        assert outcome in FINE, attack.label
        if "older" in attack.label:
            assert outcome == "StoreError", attack.label


async def test_a_lost_write_of_each_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await unchecked_target(tmp_path / "store.db", monkeypatch)
    outcomes = Counter[str]()
    for attack in stale_pages(target):
        outcome = await outcome_of(target, attack)
        assert outcome in FINE, attack.label
        outcomes[outcome] += 1
    assert outcomes["StoreError"] >= 10


@pytest.mark.slow
async def test_many_changed_bits_of_a_large_file(tmp_path: Path) -> None:
    target = await make_target(tmp_path / "store.db", entities=250, messages=12, nbytes=10_000)
    assert len(target.closed[""]) > 16 << 20
    for attack in itertools.chain(
        attacks_on_files(target), stale_pages(target, 60), flips(target, 200, seed=1)
    ):
        assert await outcome_of(target, attack) in FINE, attack.label


async def test_an_undamaged_store_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await unchecked_target(tmp_path / "store.db", monkeypatch)
    for attack in target.undamaged():
        assert await outcome_of(target, attack) == "right"
