"""`/ready` and `/health` ask the parts that the program gives them, within a time."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
import trio
from attacked import serving

import trio_accel as ta
from trio_accel import cluster
from trio_accel.http import Check, serve


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"


async def asked(port: int, path: str) -> tuple[int, Any]:
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}{path}")
        assert (answer.headers.get("retry-after") == "1") == (path == "/ready" and answer.status_code == 503)
        return answer.status_code, answer.json()


@pytest.mark.parametrize(("is_of_system", "is_checked"), [(True, False), (False, True), (True, True)])
async def test_a_cluster_without_nodes_is_not_ready(
    system: ta.System, is_of_system: bool, is_checked: bool
) -> None:
    inline = cluster.ClusterOptions(devices=("cpu",), device=ta.DeviceOptions(isolation="inline"))
    async with AsyncExitStack() as stack:
        other = system if is_of_system else await stack.enter_async_context(ta.open_system("other"))
        nodes = await stack.enter_async_context(
            cluster.open_cluster(other, cluster.LocalNodes(1), options=inline)
        )
        checks = (nodes,) if is_checked else ()
        async with serving(nothing, system=system, checks=checks) as port:
            assert await asked(port, "/ready") == (200, {"status": "ready"})
            await nodes.drain("node-0")
            expected = {"status": "not ready", "faults": ["cluster: no node is left"]}
            assert await asked(port, "/ready") == (503, expected)
            # A new process would not have more nodes.
            assert (await asked(port, "/health"))[0] == 200
    if is_of_system:
        # A closed cluster is not part of the program.
        async with serving(nothing, system=system) as port:
            assert (await asked(port, "/ready"))[0] == 200


async def test_own_checks_are_asked() -> None:
    found: dict[str, Any] = {"sync": True, "async": None}
    threads = set()

    def ask() -> Any:
        threads.add(threading.current_thread())
        if isinstance(found["sync"], Exception):
            raise found["sync"]
        return found["sync"]

    async def ask_async() -> Any:
        await trio.lowlevel.checkpoint()
        if isinstance(found["async"], Exception):
            raise found["async"]
        return found["async"]

    checks = [Check("database", ask), Check("licence", ask_async, restarts=True)]
    async with serving(nothing, checks=checks) as port:
        assert await asked(port, "/ready") == (200, {"status": "ready"})
        assert (await asked(port, "/health"))[1] == {"status": "alive", "faults": [], "devices": {}}
        # Blocking work does not hold the loop.
        assert threading.main_thread() not in threads
        for given, reason in (
            (False, "failed"),
            ("the disk is full", "the disk is full"),
            (ConnectionError("postgres://user:secret@host"), "ConnectionError"),
            (3, "returned int"),
            ("x" * 1000, "x" * 200),
        ):
            found["sync"], found["async"] = given, None
            faults = [f"database: {reason}"]
            assert await asked(port, "/ready") == (503, {"status": "not ready", "faults": faults})
            assert (await asked(port, "/health"))[0] == 200
            found["async"] = given
            faults.append(f"licence: {reason}")
            assert await asked(port, "/ready") == (503, {"status": "not ready", "faults": faults})
            health = {"status": "failed", "faults": faults[1:], "devices": {}}
            assert await asked(port, "/health") == (503, health)


async def test_a_check_has_a_bounded_time() -> None:
    release, count = threading.Event(), 0

    def hang() -> None:
        nonlocal count
        count += 1
        release.wait(60)

    checks = [Check("disk", hang, seconds=0.1), Check("peer", trio.sleep_forever, seconds=0.1)]
    expected = [f"{name}: no answer within 0.1 s" for name in ("disk", "peer")]
    async with serving(nothing, checks=checks) as port:
        try:
            for _ in range(3):
                with trio.fail_after(10):
                    assert await asked(port, "/ready") == (503, {"status": "not ready", "faults": expected})
        finally:
            release.set()
    # Only one thread waits for the part.
    assert count == 1


async def test_devices_and_their_owners_are_asked(system: ta.System) -> None:
    class Training:
        devices: tuple[ta.Device, ...] = ()

    options = ta.DeviceOptions(isolation="inline")
    async with system.open_device("cpu", name="trained", options=options) as device:
        Training.devices = (device,)
        for part in (device, Training()):
            async with serving(nothing, checks=[part]) as port:
                assert (await asked(port, "/ready"))[0] == 200
    async with serving(nothing, checks=[Training()]) as port:
        code, shown = await asked(port, "/ready")
        assert (code, len(shown["faults"])) == (503, 1)
        assert shown["faults"][0].startswith(f"{device.path}: does not answer (")


@pytest.mark.parametrize("on_failure", ["reopen", "end"])
async def test_a_lost_device_among_the_checks_is_named_once(system: ta.System, on_failure: Any) -> None:
    pause = ta.Backoff(initial=600.0, base=600.0, maximum=600.0)
    intensity = ta.Intensity(0, 60.0, pause=pause)
    options = ta.DeviceOptions(intensity=intensity, isolation="inline", on_failure=on_failure)
    device = await system.open_device("cpu", options=options, name="fragile")
    async with serving(nothing, system=system, checks=[device]) as port:
        assert await asked(port, "/ready") == (200, {"status": "ready"})
        ta.testing.poison(device)
        for lost in (ta.ContextPoisonedError, ta.DeviceLostError):
            with pytest.raises(lost):
                await device.put([1.0])
        code, shown = await asked(port, "/ready")
    assert (code, len(shown["faults"])) == (503, 1)
    assert "fragile" in shown["faults"][0]


@pytest.mark.parametrize("wrong", [3, "database", print, {"database": print}])
async def test_a_part_that_cannot_be_asked_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"serve: checks must be Check\(...\), devices, clusters or trainers"):
        await serve(nothing, port=0, signals=(), checks=[wrong])
    with pytest.raises((TypeError, ValueError), match="name"):
        Check("", print)
