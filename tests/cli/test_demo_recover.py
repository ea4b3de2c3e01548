"""``demo recover``: faults under load, and that the demo finds what is wrong."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.cli import _recover

if TYPE_CHECKING:
    from command import Cli

DEVICE = next(info for info in ta.list_devices() if info.backend == BACKEND)
KERNELS = [] if BACKEND == "cpu" else ["trap", "assert"]
FAULTS = ["crash", "poison", *KERNELS, "kill", "hang"]

pytestmark = pytest.mark.skipif(
    "process" not in DEVICE.isolations, reason="the device has no worker processes"
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault but a crash and a poisoned context: a hung operation takes seconds."""
    monkeypatch.setattr(_recover, "_FAULTS", _recover._FAULTS[:2])


def recover(cli: Cli, *options: str, code: int = 0) -> dict[str, Any]:
    done = cli("demo", "recover", *options, "--json")
    assert (done.code, done.err) == (code, "")
    document: dict[str, Any] = json.loads(done.out)
    return document


def failed_checks(document: dict[str, Any]) -> list[str]:
    return [check["name"] for check in document["checks"] if not check["ok"]]


def test_the_text_for_a_person(cli: Cli) -> None:
    done = cli("demo", "recover")
    assert (done.code, done.err) == (0, "")
    first, *lines = [line.strip() for line in done.out.splitlines()]
    assert f"on {DEVICE.name} (in a worker process), {DEVICE.description}" in first
    assert any(line.startswith("✓ recover  ") and "none lost; arrays unchanged" in line for line in lines)
    after = f"after {len(FAULTS)} faults, 16 requests under way all the time"
    assert lines.index("before") < lines.index(after)
    rows = [line.split() for line in lines]
    (kill,) = (row for row in rows if row[:5] == ["SIGKILL", "to", "the", "worker", "process"])
    times, _, took, _, most, unit = kill[5:]
    assert (times, took, unit) == ("1", most, "ms")
    assert any(line.startswith("retried after: 1 ActorFailedError, ") for line in lines)
    assert sum(line.endswith("identical") for line in lines) == 4
    assert "✓ requests failed or lost: 0, allowed 0" in lines
    assert lines[-1] == "all 6 checks hold"
    assert max(len(line) for line in lines if not line.startswith("✓ recover")) <= 80


@pytest.mark.slow
def test_each_fault_is_felt_and_recovered_from(cli: Cli) -> None:
    document = recover(cli)
    assert [fault["fault"] for fault in document["faults"]] == FAULTS
    generation = 1
    for fault in document["faults"]:
        assert fault["losses"] == (fault["fault"] != "crash")
        assert fault["generation_before"] == generation
        generation += fault["losses"]
        assert fault["generation_after"] == generation
        assert fault["retried"] >= 1
        assert 0 < fault["recovery_ms"] < 30_000
    assert generation == len(FAULTS)
    assert document["failed"] == {}
    failed = document["retried"]
    assert (
        document["requests"] > sum(failed.values()) >= sum(fault["retried"] for fault in document["faults"])
    )
    assert failed["ActorFailedError"] == failed["CompletionTimeoutError"] == 1
    assert failed.keys() <= _recover._FAILURES


@pytest.mark.usefixtures("few")
def test_a_lost_request_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = _recover.DemoLoad.prepare.__func__

    async def one_more(cls: type[_recover.DemoLoad], device: ta.Device) -> _recover.DemoLoad:
        load: _recover.DemoLoad = await prepare(cls, device)
        load.asked += 1
        return load

    monkeypatch.setattr(_recover.DemoLoad, "prepare", classmethod(one_more))
    document = recover(cli, code=1)
    assert failed_checks(document) == ["requests failed or lost"]
    assert ", 1 lost; " in document["summary"]


@pytest.mark.usefixtures("few")
def test_each_fault_comes_in_every_round(cli: Cli) -> None:
    faults = recover(cli, "--rounds", "3")["faults"]
    assert [fault["fault"] for fault in faults] == 3 * ["crash", "poison"]
    assert [fault["generation_after"] for fault in faults] == [1, 2, 2, 3, 3, 4]
    rows = [line.split() for line in cli("demo", "--rounds", "3").out.splitlines()]
    (crash,) = (row for row in rows if row[:4] == ["crash", "of", "the", "BLAS"])
    times, failed, median, _, most, _ = crash[5:]
    assert times == "3"
    assert int(failed) >= 3
    assert 0 < float(median) <= float(most)


async def test_a_wait_for_requests_ends_with_the_last_of_them(device: ta.Device) -> None:
    load = await _recover.DemoLoad.prepare(device)
    ended: list[int] = []

    async def wait() -> None:
        await load.wait_ended(2)
        ended.append(load.ended)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        for wanted in ([], [3]):
            await load.ask()
            await wait_all_tasks_blocked()
            assert ended == wanted
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("few")
def test_a_crash_costs_an_attempt_of_the_requests_that_it_hits_and_no_context(cli: Cli) -> None:
    crash = recover(cli)["faults"][0]
    assert (crash["fault"], crash["retried"], crash["generation_after"]) == ("crash", 1, 1)


@pytest.mark.usefixtures("few")
def test_the_hashes_match_the_elements(cli: Cli) -> None:
    arrays = recover(cli)["arrays"]
    assert [array["dtype"] for array in arrays] == ["float32", "float64", "complex64", "int8"]
    for seed, array in enumerate(arrays):
        content = np.random.default_rng(seed).bytes(16 << 20)
        assert array["nbytes"] == len(content)
        assert array["sha256_before"] == array["sha256_after"] == hashlib.sha256(content).hexdigest()


@pytest.mark.usefixtures("few")
def test_a_lost_fault_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ta.testing, "inject_fault", lambda *_, **__: None)
    document = recover(cli, code=1)
    assert failed_checks(document) == ["faults not felt, or not recovered from"]
    crash, poison = document["faults"]
    assert (crash["retried"], crash["recovery_ms"]) == (0, None)
    assert poison["recovery_ms"] > 0


@pytest.mark.usefixtures("few")
def test_a_wrong_result_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        return host * 1.01 if host.shape == (64, 64) else host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    # Nobody gets the right product, so there is no recovery either.
    assert failed_checks(recover(cli, code=1)) == [
        "faults not felt, or not recovered from",
        "relative error of every result",
    ]


@pytest.mark.usefixtures("few")
def test_a_changed_array_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host
    seen: list[None] = []

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        if host.dtype == np.float64:
            seen.append(None)
            host.view(np.uint8)[-1] ^= len(seen)
        return host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    document = recover(cli, code=1)
    assert failed_checks(document) == ["arrays lost or changed"]
    hashes = [array["sha256_before"] == array["sha256_after"] for array in document["arrays"]]
    assert hashes == [True, False, True, True]
    assert document["summary"].endswith("arrays lost or changed")


@pytest.mark.usefixtures("few")
def test_a_lost_array_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host
    seen: list[None] = []

    async def lost(self: ta.AccelRef, *, out: Any = None) -> Any:
        if self.dtype == np.int8:
            seen.append(None)
            if len(seen) == 2:
                raise ta.StaleRefError("it is lost", device="cpu:0")
        return await to_host(self, out=out)

    monkeypatch.setattr(ta.AccelRef, "to_host", lost)
    document = recover(cli, code=1)
    assert failed_checks(document) == ["arrays lost or changed"]
    assert [array["sha256_after"] == "lost" for array in document["arrays"]] == [False, False, False, True]


@pytest.mark.usefixtures("few")
def test_another_failure_is_distinguished_from_an_injected_fault(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject = ta.testing.inject_fault

    def other(device: ta.Device, operation: Any, *, fail: Exception, count: int = 1) -> Any:
        return inject(device, operation, fail=ZeroDivisionError("other"), count=count)

    monkeypatch.setattr(ta.testing, "inject_fault", other)
    assert failed_checks(recover(cli, code=1)) == ["attempts failed for another reason"]


@pytest.mark.usefixtures("few")
def test_a_generation_too_many_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def poison_instead(device: ta.Device, *_: Any, **__: Any) -> None:
        ta.testing.poison(device)

    monkeypatch.setattr(ta.testing, "inject_fault", poison_instead)
    document = recover(cli, code=1)
    assert failed_checks(document) == ["generations more or less than contexts lost"]
    assert [fault["generation_after"] for fault in document["faults"]] == [2, 3]


@pytest.mark.usefixtures("few")
def test_a_device_that_gives_up_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _recover, "_OPTIONS", attrs.evolve(_recover._OPTIONS, intensity=ta.Intensity(0, 60.0))
    )
    done = cli("demo", "recover")
    assert done.code == 1
    assert done.err.startswith(f"trio-accel: DeviceLostError: demo/{DEVICE.name}: the device was given up")
    assert done.err.count("\n") == 1
