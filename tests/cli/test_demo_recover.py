"""``demo recover``: faults under load, in either isolation."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend

if TYPE_CHECKING:
    from command import Cli

DEVICE = next(info for info in ta.list_devices() if info.backend == BACKEND)
IS_ISOLATED = "process" in DEVICE.isolations
INLINE = "inline"
PROCESS = pytest.param(
    "process", marks=pytest.mark.skipif(not IS_ISOLATED, reason="the device has no worker processes")
)
KERNELS = [] if BACKEND == "cpu" else ["trap", "assert"]
FAULTS = {"inline": ["crash", "poison"], "process": ["crash", "poison", *KERNELS, "kill", "hang"]}
CHECKS = {
    "inline": "arrays that differ, those put again included",
    "process": "arrays lost or changed",
}


def recover(
    cli: Cli, isolation: str = "inline", code: int = 0, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    done = cli("demo", "recover", "--isolation", isolation, *options, "--json")
    assert (done.code, done.err) == (code, "")
    document = json.loads(done.out)
    assert document["isolation"] == isolation
    step: dict[str, Any] = document["steps"][0]
    assert step["name"] == "recover"
    assert step["data"]["isolation"] == isolation
    return step


@pytest.mark.skipif(not IS_ISOLATED, reason="the device has no worker processes")
def test_worker_processes_are_the_default(cli: Cli) -> None:
    done = cli("demo", "recover")
    assert (done.code, done.err) == (0, "")
    first, *lines = done.out.splitlines()
    assert "(in a worker process)" in first
    assert any(line.startswith("✓ recover  ") and "none lost; arrays" in line for line in lines)
    assert sum(line.split()[:5] == ["SIGKILL", "to", "the", "worker", "process"] for line in lines) == 1
    assert sum(line.rstrip().endswith("identical") for line in lines) == 4
    assert max(map(len, lines[2:])) <= 80


def test_a_device_without_worker_processes_is_opened_inline(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = CpuBackend().list_devices()
    only_inline = tuple(attrs.evolve(info, isolations=("inline",)) for info in infos)
    monkeypatch.setattr(CpuBackend, "list_devices", lambda self: only_inline)
    done = cli("demo", "recover", "--backend", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert (document["isolation"], len(document["steps"][0]["data"]["faults"])) == ("inline", 2)


def failed_checks(step: dict[str, Any]) -> list[str]:
    return [check["name"] for check in step["checks"] if not check["ok"]]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [INLINE, PROCESS])
def test_every_request_has_a_fate(cli: Cli, isolation: str) -> None:
    step = recover(cli, isolation)
    data = step["data"]
    fates = data["fates"]
    assert len({(fate["client"], fate["request"]) for fate in fates}) == len(fates) == data["requests"]
    assert {fate["client"] for fate in fates} == {1, 2, 3, 4}
    # Each client's requests are numbered without a gap.
    for client in range(1, 5):
        numbers = sorted(fate["request"] for fate in fates if fate["client"] == client)
        assert numbers == list(range(1, len(numbers) + 1))
    completed = [fate for fate in fates if fate["outcome"] == "completed"]
    failed = [fate for fate in fates if fate["outcome"] != "completed"]
    assert len(completed) == data["completed"]
    assert all(fate["cause"] is None and fate["error"] < 1e-5 for fate in completed)
    assert all(fate["cause"].startswith(f"{fate['outcome']}: ") for fate in failed)
    assert data["failed"] == Counter(fate["outcome"] for fate in failed)
    assert all(0 <= fate["begun"] <= fate["ended"] for fate in fates)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [INLINE, PROCESS])
def test_each_fault_is_felt_and_recovered_from(cli: Cli, isolation: str) -> None:
    data = recover(cli, isolation)["data"]
    names = FAULTS[isolation]
    assert [fault["fault"] for fault in data["faults"]] == names
    generation = 1
    for fault in data["faults"]:
        assert fault["losses"] == (fault["fault"] != "crash")
        assert fault["generation_before"] == generation
        generation += fault["losses"]
        assert fault["generation_after"] == generation
        assert fault["failed"] >= 1
        assert 0 < fault["recovery_ms"] < 30_000
    assert generation == len(names)
    fates = data["fates"]
    assert list(dict.fromkeys(fate["after"] for fate in fates)) == [None, *names]
    # Clients were served before, between and after the faults; nothing fails before the first.
    assert {fate["after"] for fate in fates if fate["outcome"] == "completed"} == {None, *names}
    assert all(fate["outcome"] == "completed" for fate in fates if fate["after"] is None)
    assert {fate["generation"] for fate in fates} == set(range(1, generation + 1))


def test_each_fault_comes_in_every_round(cli: Cli) -> None:
    step = recover(cli, INLINE, options=("--rounds", "3"))
    names = FAULTS[INLINE]
    faults = step["data"]["faults"]
    assert step["data"]["rounds"] == 3
    assert [fault["fault"] for fault in faults] == 3 * names
    assert [fault["generation_after"] for fault in faults] == [1, 2, 2, 3, 3, 4]
    text = cli("demo", "recover", "--isolation", INLINE, "--rounds", "3").out
    rows = {
        line.split()[0]: line.split() for line in text.splitlines() if " of the " in line and "ms" in line
    }
    assert set(rows) == set(names)
    for name in names:
        times, failed, median, _, most, _ = rows[name][-6:]
        assert times == "3"
        assert int(failed) >= 3
        assert 0 < float(median) <= float(most)


def test_a_crash_costs_the_requests_that_it_hits_and_no_array(cli: Cli) -> None:
    data = recover(cli)["data"]
    over_crash = [fate for fate in data["fates"] if fate["after"] == "crash"]
    failed = [fate for fate in over_crash if fate["outcome"] != "completed"]
    assert [fate["outcome"] for fate in failed] == ["ActorFailedError"]
    assert "RuntimeError: injected" in failed[0]["cause"]
    assert {fate["generation"] for fate in over_crash} == {1}


def test_inline_the_arrays_are_lost_with_their_context_and_the_demo_says_so(cli: Cli) -> None:
    step = recover(cli)
    arrays = step["data"]["arrays"]
    assert len(arrays) == 4
    assert sum(array["nbytes"] for array in arrays) == 64 * 2**20
    assert [array["lost_with"] for array in arrays] == [1] * 4
    assert all(array["sha256_before"] == array["sha256_after"] for array in arrays)
    assert "arrays put again" in step["summary"]
    assert step["data"]["failed"]["StaleRefError"] >= 1
    assert set(step["data"]["failed"]) <= {
        "ActorFailedError",
        "ContextLostError",
        "ContextPoisonedError",
        "StaleRefError",
    }


@pytest.mark.slow
@pytest.mark.skipif(not IS_ISOLATED, reason="the device has no worker processes")
def test_in_a_worker_process_the_arrays_outlive_every_context(cli: Cli) -> None:
    step = recover(cli, "process")
    arrays = step["data"]["arrays"]
    assert sum(array["nbytes"] for array in arrays) == 64 * 2**20
    assert [array["lost_with"] for array in arrays] == [None] * 4
    assert all(array["sha256_before"] == array["sha256_after"] for array in arrays)
    assert step["summary"].endswith("arrays unchanged")
    assert step["data"]["failed"].pop("CompletionTimeoutError") == 1
    assert set(step["data"]["failed"]) <= {"ActorFailedError", "ContextLostError", "ContextPoisonedError"}


def test_the_hashes_are_those_of_the_elements(cli: Cli) -> None:
    arrays = recover(cli)["data"]["arrays"]
    for index, array in enumerate(arrays):
        content = np.random.default_rng(index).bytes(array["nbytes"])
        assert array["sha256_before"] == hashlib.sha256(content).hexdigest()
        assert array["nbytes"] == math.prod(array["shape"]) * np.dtype(array["dtype"]).itemsize


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [INLINE, PROCESS])
def test_the_text_for_a_person(cli: Cli, isolation: str) -> None:
    done = cli("demo", "recover", "--isolation", isolation)
    assert (done.code, done.err) == (0, "")
    names = FAULTS[isolation]
    lines = [line.strip() for line in done.out.splitlines()]
    assert lines.index("before") < lines.index(f"after {len(names)} faults, 4 clients asking all the time")
    table = [line.split() for line in lines]
    (faults,) = (row for row in table if row[:4] == ["crash", "of", "the", "BLAS"])
    assert faults[5:9] == ["1", "→", "1", "1"]
    (fates,) = (row for row in table if row[:2] == ["requests", "by"])
    assert fates == ["requests", "by", "last", "fault", "none", *names, "all"]
    total = next(row for row in table if row[:1] == ["together"])[1:]
    outcomes = (
        "completed",
        "ActorFailedError",
        "CompletionTimeoutError",
        "ContextLostError",
        "ContextPoisonedError",
        "StaleRefError",
    )
    rows = [row[1:] for row in table if row[:1] and row[0] in outcomes and len(row) == len(names) + 3]
    assert [sum(int(row[column]) for row in rows) for column in range(len(names) + 2)] == [
        int(number) for number in total
    ]
    fate = {"inline": "lost, put again", "process": "identical"}[isolation]
    assert sum(line.endswith(fate) for line in lines) == 4
    assert ("Inline, arrays are lost with their context." in done.out) is (isolation == "inline")
    assert lines[-1] == "all 6 checks hold"


def test_a_lost_fault_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ta.testing, "inject_fault", lambda *_, **__: None)
    step = recover(cli, code=1)
    assert failed_checks(step) == ["faults not felt, or not recovered from"]
    crash, poison = step["data"]["faults"]
    assert (crash["failed"], crash["recovery_ms"]) == (0, None)
    assert poison["recovery_ms"] > 0


def test_a_wrong_result_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        return host * 1.01 if host.shape == (64, 64) else host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    step = recover(cli, code=1)
    # Nobody gets the right product, so there is no recovery either.
    assert failed_checks(step) == ["faults not felt, or not recovered from", "relative error of every result"]


def test_a_changed_array_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host
    seen: list[None] = []

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        if self.shape == (2097152,):
            seen.append(None)
            host.view(np.uint8)[-1] ^= len(seen)
        return host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    step = recover(cli, code=1)
    assert failed_checks(step) == [CHECKS["inline"]]
    hashes = [array["sha256_before"] == array["sha256_after"] for array in step["data"]["arrays"]]
    assert hashes == [True, False, True, True]


def test_another_failure_is_told_from_an_injected_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    inject = ta.testing.inject_fault

    def other(device: ta.Device, operation: Any, *, fail: Exception, count: int = 1) -> Any:
        return inject(device, operation, fail=ZeroDivisionError("other"), count=count)

    monkeypatch.setattr(ta.testing, "inject_fault", other)
    step = recover(cli, code=1)
    assert failed_checks(step) == ["requests failed for another reason"]


def test_a_generation_too_many_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def poison_instead(device: ta.Device, *_: Any, **__: Any) -> None:
        ta.testing.poison(device)

    monkeypatch.setattr(ta.testing, "inject_fault", poison_instead)
    step = recover(cli, code=1)
    assert failed_checks(step) == ["generations more or less than contexts lost"]
    assert [fault["generation_after"] for fault in step["data"]["faults"]] == [2, 3]


def test_a_device_that_gives_up_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.cli._run._INTENSITY", ta.Intensity(0, 60.0))
    done = cli("demo", "recover", "--isolation", "inline")
    assert done.code == 1
    assert done.err.startswith("trio-accel: DeviceLostError: demo/cpu:0: the device was given up")
    assert done.err.count("\n") == 1
