"""The soak for a few seconds, and that it finds what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

import trio_accel as ta
from benchmarks import soak
from benchmarks._health import LONGEST, Health, asked_beside
from benchmarks._soak_lives import Bank, Prompt, Training, losses_of, text_of
from benchmarks._soak_work import Kept, WrongNumbersError
from trio_accel import cluster

pytestmark = pytest.mark.own_launcher

HOLDINGS = soak.Holdings(
    descriptors=100,
    processes=7,
    threads=10,
    memory=64 << 20,
    resident=96 << 20,
    shared=90 << 20,
    objects=100_000,
    used=65_924,
)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_seconds_of_everything_under_kills() -> None:
    said: list[str] = []
    faults = await soak.main(6.0, 4, say=said.append)
    # Memory of a late-loading library is not growth, and a short run cannot distinguish them.
    assert [fault for fault in faults if " grew from " not in fault] == []
    assert len(said) == 7
    assert "11 processes" in said[0]
    assert "WRONG" not in said[-1]
    table = said[-1].partition("\nrequests ")[2].splitlines()
    assert table[0].split()[-5:] == ["wrong", "without", "outcome", "lost", "twice"]
    for name, line in zip(("services", "texts", "additions", "training steps"), table[1:], strict=False):
        assert line.startswith(name)
        assert int(line.removeprefix(name).split()[0]) > 0
        assert line.split()[-4:] == ["0"] * 4


def training(*losses: float) -> Training:
    return Training((), Path("nowhere"), losses)


def finished(*held: soak.Holdings, **outcomes: int) -> soak.Soak:
    service: Any = None
    return soak.Soak(service, training(), 6.0, outcomes=Counter(outcomes), held=list(held))


def test_a_correct_run_has_no_faults() -> None:
    assert finished(*[HOLDINGS] * 6, begun=3, right=2, left=1).faults() == []


@pytest.mark.parametrize(
    "name", ["descriptors", "processes", "threads", "memory", "resident", "shared", "objects", "used"]
)
def test_growth_is_named(name: str) -> None:
    before = getattr(HOLDINGS, name)
    more = attrs.evolve(HOLDINGS, **{name: 2 * before})
    found = finished(*[HOLDINGS] * 4, *[more] * 2, begun=1, right=1).faults()
    assert found == [f"{name} grew from {before} to {2 * before}"]


def test_a_request_without_an_outcome_is_a_fault() -> None:
    assert finished(*[HOLDINGS] * 6, begun=2, right=1).faults() == [
        "the outcomes are not as many as the requests"
    ]


async def test_a_changed_array_is_seen(device: ta.Device) -> None:
    kept = Kept(await device.put(np.arange(4.0)), np.arange(4.0))
    await kept.check()
    await kept.ref[2].assign(7.0)
    with pytest.raises(WrongNumbersError, match="an array that was kept"):
        await kept.check()


class FakeAccount:
    """An account that answers with these numbers."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    async def ask(self, message: object, *, id: str = "") -> list[int]:  # noqa: A002  # as of an entity
        await trio.lowlevel.checkpoint()
        return self.numbers


class FakeCluster:
    """A cluster with one account."""

    def __init__(self, *numbers: int) -> None:
        self.account = FakeAccount([*numbers])

    def entity(self, kind: type[object], key: str) -> FakeAccount:
        assert key.startswith("account-")
        return self.account


@pytest.mark.parametrize(
    ("there", "lost", "twice"),
    [
        ((1, 2, 3), 0, 0),
        ((1, 3), 1, 0),
        ((1, 2, 2, 3), 0, 1),
        ((1, 2, 3, 9), 0, 1),
        ((), 3, 0),
        ((1, 1, 3), 1, 1),
    ],
)
async def test_lost_and_doubled_additions_are_seen(there: tuple[int, ...], lost: int, twice: int) -> None:
    members: Any = FakeCluster(*there)
    bank = Bank(cluster.LocalNodes(["left"]), members)
    bank.acknowledged["account-1"] += [1, 2, 3]
    found = await bank.check()
    assert (bank.lost, bank.twice) == (lost, twice)
    told = f"account-1: {lost} additions lost, {twice} counted twice or not asked for"
    assert found == ([told] if lost or twice else [])


async def test_additions_without_an_answer_are_sent_again(system: ta.System) -> None:
    """An addition with a cancelled caller may have happened: the same id makes it happen once."""
    members: Any = FakeCluster()
    bank = Bank(cluster.LocalNodes(["left"]), members)
    with trio.CancelScope() as scope:
        scope.cancel()
        await bank.add(np.random.default_rng(0))
    assert bank.acknowledged == {}
    members.account.numbers = [0]
    assert await bank.check() == []
    assert [*bank.acknowledged.values()] == [[0]]


async def test_losses_are_compared_and_no_step_is_left_out(system: ta.System, tmp_path: Path) -> None:
    losses = await losses_of(system, 4)
    assert len(set(losses)) == 4
    options = ta.DeviceOptions(isolation="inline")
    for wrong, expected in (((), []), ((2,), [3])):
        given = [loss + (number in wrong) for number, loss in enumerate(losses)]
        async with (
            system.open_device("cpu", options=options) as first,
            system.open_device("cpu", options=options) as second,
        ):
            it = Training((first, second), tmp_path / str(len(wrong)), given)
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(it.run, 20.0, (ta.AccelError,))
                    while it.steps < 6:  # noqa: ASYNC110  # nobody is told
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()
        told = [line for line in it.wrong if line.startswith("step 3 ")]
        assert (len(told) > 0, len(it.wrong)) == (bool(expected), len(told))
        assert (it.lost, it.twice) == (0, 0)


def test_a_wrong_text_is_seen() -> None:
    """The texts are the network's: a token depends on the last four, and on the weights."""
    prompt = Prompt((3, 1, 4), 12)
    text = text_of(prompt)
    assert len(text) == 12
    assert all(0 <= token < 32 for token in text)
    assert text_of(Prompt((3, 1, 5), 12)) != text
    assert text_of(Prompt((3, 1, 4, text[0]), 11)) == text[1:]


def test_wrong_steps_and_texts_are_faults_in_the_table() -> None:
    run = finished(*[HOLDINGS] * 6, begun=1, right=1)
    run.training.wrong.append("step 3 of the training: loss 1.0, not 2.0 of 3")
    assert run.faults() == ["step 3 of the training: loss 1.0, not 2.0 of 3"]


async def test_health_is_asked_by_a_preferred_process_of_its_own() -> None:
    asked_by = set[int]()
    delay = 0.0

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            peer = stream.socket.getpeername()
            if not asked_by:
                asked_by.update(_owners(peer[1]))
            await trio.sleep(delay)  # clock: another process measures this delay
            await stream.send_all(b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        for delay, is_good in ((0.0, True), (1.2 * LONGEST, False)):
            async with asked_beside(port) as health:
                await trio.sleep(1.0 + delay)  # clock: the other process asks for as long
            assert health.asked >= 1
            assert health.refused == 0
            assert (health.longest <= LONGEST, health.faults() == []) == (is_good, is_good)
            assert health.priority == _permitted()
        nursery.cancel_scope.cancel()
    assert asked_by
    assert os.getpid() not in asked_by


def test_an_unused_service_is_a_fault() -> None:
    assert Health().faults() == ["health was never asked"]
    health = Health(asked=1, longest=0.3, refused=1)
    health.add(Health(asked=2, longest=0.2, refused=1))
    assert health == Health(asked=3, longest=0.3, refused=2)
    assert health.faults() == ["2 of 3 answers of /health were not 200"]


def _owners(port: int) -> set[int]:
    """Return the processes with a socket of a local port."""
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    inodes = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[1].endswith(f":{port:04X}")}
    found = set[int]()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) in inodes:
                found.add(int(link.parts[2]))
    return found


def _permitted() -> str:
    """Try in another process which priority the system permits."""
    code = "from _asker import prefer; print(prefer())"
    root = Path(__file__).parents[2] / "benchmarks"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
