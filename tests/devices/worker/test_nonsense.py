"""The application survives any message of a worker: that worker is lost, and the next one serves."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import hostile_library
import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from chunk_files import UNFIT, sealed
from isolated import options, outcome
from puppet import Puppet, Puppets, in_json
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import ActorRestarted
from trio_accel.devices.wire._answers import ANSWERS

pytestmark = pytest.mark.skipif(BACKEND != "cpu" or IS_STAND_IN, reason="what is sent knows no backend")

NONSENSE = "sent a message that makes no sense"
ERROR = ["ValueError", [["text"], {}], "ValueError: text", [], "", None]
FINE = ["done", True, False, None, []]
EVENT = {"path": "short/cpu:0/context/blas", "incarnation": 0}


class _Runs:
    """Pickled, it is a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self._command,)


def socket_of(puppet: Puppet) -> socket.socket:
    return puppet.channel._sock


def rights(*descriptors: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors)


def deep(levels: int) -> bytes:
    return b"\0" + b"[" * levels + b"]" * levels


# Sent while request {n} waits for its answer.
GARBAGE: dict[str, Callable[[int], bytes]] = {
    "nothing": lambda n: b"",
    "zeros": lambda n: bytes(64),
    "noise": lambda n: random.Random(1).randbytes(300),
    "half a pickle": lambda n: pickle.dumps(("done", n, (), (), None), 5)[:-3],
    "a pickle": lambda n: pickle.dumps(("done", n, (), (), None), 5),
    "half a message": lambda n: in_json("started")[:-2],
    "an answer cut off": lambda n: struct.pack("<BQ", 1, n)[:5],
    "a place cut off": lambda n: struct.pack("<BQQQ", 1, n, 1, 8),
    "several cut off": lambda n: b"\5" + struct.pack("<Q", 1 << 40) + b"\1",
    "answers cut off": lambda n: b"\6" + struct.pack("<3Q", n, 1, 1),
    "half an answer": lambda n: b"\6" + struct.pack("<Q", n),
    "half a number": lambda n: b"\6" + struct.pack("<QL", n, 0),
    "answers with endless addresses": lambda n: b"\6" + struct.pack("<2Q", n, 1 << 62),
    "several within several": lambda n: b"\5" + struct.pack("<Q", 1) + b"\5",
    "not ASCII": lambda n: b"\0" + '["ä"]'.encode("latin-1"),
    "a number": lambda n: b"\0" + b"7",
    "an empty message": lambda n: in_json(),
    "a deep message": lambda n: deep(100_000),
    "a long number": lambda n: b'\0["unchunk", ' + b"9" * 10_000 + b"]",
    "an unknown kind": lambda n: in_json("format", "/"),
    "a kind that is none": lambda n: in_json(["done"], 1),
    "a kind of the application": lambda n: in_json("request", 1, 1, False, [], []),
    "too few fields": lambda n: in_json("result", 1),
    "too many fields": lambda n: in_json("unchunk", 1, 2),
    "ready again": lambda n: in_json("ready", ["memory"]),
    "ready with numbers": lambda n: in_json("ready", [1]),
    "started again": lambda n: in_json("started"),
    "closed unasked": lambda n: in_json("closed"),
    "an unknown request": lambda n: ANSWERS.encode(("done", n + 100, (), (), None)),
    "an unknown request granted": lambda n: ANSWERS.encode(("granted", n + 100, (1, 8, 1000, 0))),
    "a request that is not a lease": lambda n: ANSWERS.encode(("granted", n, (1, 8, 1000, 0))),
    "a negative request": lambda n: in_json("done", -n, [], [], FINE),
    "a block of others": lambda n: ANSWERS.encode(("done", n, ((1 << 40, 8, 1000, 0),), (), None)),
    "a result unasked": lambda n: ANSWERS.encode(("done", n, (), (b"result",), None)),
    "results cut off": lambda n: ANSWERS.encode(("done", n, ((1, 64, 1000, 0),), (b"result",), None))[:-1],
    "results without end": lambda n: struct.pack("<BQII", 3, n, 0, 1) + struct.pack("<Q", 1 << 62),
    "endless results": lambda n: struct.pack("<BQII", 3, n, (1 << 32) - 1, (1 << 32) - 1) + bytes(64),
    "results that are none": lambda n: in_json("done", n, [], [1], None),
    "a trouble that is none": lambda n: in_json("done", n, [], [], "trouble"),
    "an end that is none": lambda n: in_json("done", n, [], [], ["gone", *FINE[1:]]),
    "an end that nobody asked for": lambda n: in_json("done", n, [], [], ["withdrawn", *FINE[1:]]),
    "an error that is none": lambda n: in_json("done", n, [], [], ["done", True, False, [1, 2], []]),
    "an error without fields": lambda n: in_json("lost", ["ValueError", 1, "text", [], "", None], True),
    "an error with notes of numbers": lambda n: in_json("lost", [*ERROR[:3], [1], "", None], True),
    "an error that cannot be said": lambda n: in_json(
        "lost", ["trio_accel.OutOfMemoryError", [[["message"]], {"requested": "x"}], 1, 2, 3, 4], True
    ),
    "lost for a number": lambda n: in_json("lost", ERROR, 1),
    "an unknown chunk": lambda n: in_json("unchunk", 12345),
    "a chunk without a descriptor": lambda n: in_json("chunk", 77, 4096),
    "an unknown call": lambda n: in_json("result", 1 << 50, None),
    "a result of another layout": lambda n: in_json("result", 1, [1, 2]),
    "a result with plans of another layout": lambda n: in_json("result", 1, [1, 1, {}, [1] * 7, {"": [1]}]),
    "a result with plans that are none": lambda n: in_json("result", 1, [1, 1, {}, [1] * 7, [1]]),
    "an unknown event": lambda n: in_json("event", ["SystemExit", {}], ""),
    "an event without fields": lambda n: in_json("event", ["ActorStarted", {}], ""),
    "an event with other fields": lambda n: in_json("event", ["ActorStarted", {**EVENT, "x": 1}], ""),
    "an event of another type": lambda n: in_json("event", ["ActorStarted", {**EVENT, "path": 1}], ""),
    "an event of others": lambda n: in_json("event", ["ActorStarted", {**EVENT, "path": "short"}], ""),
    "a log without text": lambda n: in_json("log", "name", 10, 7),
    "a log without level": lambda n: in_json("log", "name", "ERROR", "text"),
    "a copy for nobody": lambda n: ANSWERS.encode(("copy", 1, n, 5, 1000, 0, (1, 0, "float64", (2,), (8,)))),
    "times of an unknown request": lambda n: ANSWERS.encode(("times", n + 100, 1, 2)),
    "times cut off": lambda n: ANSWERS.encode(("times", n, 1, 2))[:-1],
    "times in the wrong order": lambda n: ANSWERS.encode(("times", n, 2, 1)),
    "times of the future": lambda n: ANSWERS.encode(("times", n, 1, 1 << 63)),
    "progress of an unknown request": lambda n: in_json("progress", n + 100, "1"),
    "progress of what is not a call": lambda n: in_json("progress", n, "1"),
    "progress that is not text": lambda n: in_json("progress", n, 1),
    "progress that is not a value": lambda n: in_json("progress", n, "["),
    "progress of an array": lambda n: in_json("progress", n, '["a",0]'),
    "progress of an unknown tag": lambda n: in_json("progress", n, '["c"]'),
    "a copy of many axes": lambda n: struct.pack("<B5QqQBB", 4, 1, n, 0, 1, 0, 1, 0, 0, 255),
}


@pytest.fixture
async def puppets(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Puppets, None]:
    async with Puppets.open(monkeypatch) as puppets:
        yield puppets


@pytest.fixture
async def device(system: ta.System, puppets: Puppets) -> AsyncGenerator[ta.Device, None]:
    often = options(intensity=ta.Intensity(10_000, 60.0))
    async with system.open_device(BACKEND, options=often) as device:
        yield device


@pytest.fixture
def losses(system: ta.System) -> list[str]:
    """The causes of lost contexts."""
    found: list[str] = []

    def observe(event: object) -> None:
        if isinstance(event, ActorRestarted):
            found.append(str(event.error))

    system.subscribe(observe, messages=False)
    return found


async def ask(device: ta.Device, made: list[ta.AccelRef]) -> None:
    made.append(await device.zeros((8,)))


def saying(payload: bytes | Callable[[int], bytes], *descriptors: int) -> Callable[[Puppet, int], None]:
    def say(puppet: Puppet, number: int) -> None:
        puppet.say(payload if isinstance(payload, bytes) else payload(number), descriptors)

    return say


def sending(length: int, descriptors: int, ahead: int) -> Callable[[Puppet, int], None]:
    """Send the beginning of a frame, this long before the next."""
    header = struct.Struct("<IBQ")

    def send(puppet: Puppet, _: int) -> None:
        number = puppet.channel._outbox._frames + 1 + ahead
        socket_of(puppet).send(header.pack(length, descriptors, number) + b"\1")

    return send


def placing(nbytes: int, chunk: int, offset: int) -> Callable[[Puppet, int], None]:
    def say(puppet: Puppet, number: int) -> None:
        ((block, _),) = puppet.asked[number]
        place = block, nbytes, puppet.pid * 1000 + chunk, offset
        puppet.tell("done", number, (place,), (), None)

    return say


async def upset(
    device: ta.Device, puppets: Puppets, say: Callable[[Puppet, int], None], *, is_lost: bool = True
) -> None:
    """Have a worker send a message while it has a request, which the next one answers."""
    generation = device.generation
    made: list[ta.AccelRef] = []
    puppet = puppets.last
    puppet.answers = False
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, device, made)
            await puppets.wait(lambda puppet: puppet.asked)
            say(puppet, next(iter(puppet.asked)))
            if is_lost:
                await puppets.wait(lambda last: last is not puppet)
    assert len(made) == 1
    assert device.generation == generation + is_lost


async def test_each_is_the_loss_of_that_worker(
    device: ta.Device, puppets: Puppets, losses: list[str]
) -> None:
    for name, garbage in GARBAGE.items():
        await upset(device, puppets, saying(garbage))
        assert len(losses) == 1, name
        assert NONSENSE in losses.pop(), name
    # Earlier messages count, and later messages of a given up worker do not.
    await upset(device, puppets, Puppet.done, is_lost=False)
    assert (await device.statistics()).launched == 0


async def test_nothing_after_it_counts(device: ta.Device, puppets: Puppets, losses: list[str]) -> None:
    def say(puppet: Puppet, number: int) -> None:
        puppet.say(in_json("format", "/"))
        puppet.tell("done", number, (), (), None)
        puppet.say(in_json("lost", ERROR, True))

    await upset(device, puppets, say)
    (loss,) = losses
    assert "unknown message 'format'" in loss


async def test_begun_work_is_lost_with_it(device: ta.Device, puppets: Puppets) -> None:
    found: list[object] = []

    async def fail() -> None:
        found.append(await outcome(device.zeros, (8,)))

    puppets.last.answers = False
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            puppet = await puppets.wait(lambda puppet: puppet.asked)
            (number,) = puppet.asked
            puppet.began(number)
            puppet.say(b"\xff")
    (error,) = found
    assert isinstance(error, ta.ContextLostError)
    assert NONSENSE in str(error.__cause__)


async def test_descriptors_too_many(device: ta.Device, puppets: Puppets, losses: list[str]) -> None:
    descriptor = os.memfd_create("test")
    try:
        for payload in (
            in_json("log", "name", 10, "text"),
            in_json("chunk", 77, 4096),
            in_json("unchunk", 1),
        ):
            await upset(device, puppets, saying(payload, descriptor, descriptor))
        # A message with less content than announced.
        await upset(device, puppets, lambda puppet, _: puppet.say(in_json("chunk", 77, 4096), (descriptor,)))
    finally:
        os.close(descriptor)
    assert len(losses) == 4
    assert all(NONSENSE in loss for loss in losses)


@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT)
async def test_chunks_that_could_end_the_application(
    device: ta.Device,
    puppets: Puppets,
    losses: list[str],
    make: Callable[[int, Path], int],
    tmp_path: Path,
) -> None:
    descriptor = make(4096, tmp_path)
    try:
        await upset(device, puppets, saying(in_json("chunk", 77, 4096), descriptor))
    finally:
        os.close(descriptor)
    (loss,) = losses
    assert NONSENSE in loss
    assert "chunk 77" in loss


async def test_a_chunk_larger_than_the_machine(
    device: ta.Device, puppets: Puppets, losses: list[str]
) -> None:
    descriptor = sealed(1 << 60)
    try:
        await upset(device, puppets, saying(in_json("chunk", 77, 1 << 60), descriptor))
    finally:
        os.close(descriptor)
    assert "chunk 77" in losses[0]


async def test_a_replaced_chunk(device: ta.Device, puppets: Puppets, losses: list[str]) -> None:
    kept = await device.zeros((8,))
    number = puppets.last.pid * 1000
    descriptor = sealed(1 << 20)
    try:
        # Another at its address, and none at its address: an array of the application is there.
        await upset(device, puppets, saying(in_json("chunk", number, 1 << 20), descriptor))
        await upset(device, puppets, saying(in_json("unchunk", number)))
    finally:
        os.close(descriptor)
    assert len(losses) == 2
    assert all(NONSENSE in loss for loss in losses)
    assert kept.block.id in device.dispatch._chunks.blocks  # type: ignore[attr-defined]


async def test_descriptors_that_no_message_names(
    device: ta.Device, puppets: Puppets, losses: list[str]
) -> None:
    def say(puppet: Puppet, _: int) -> None:
        with open(os.devnull) as file:
            for _ in range(20):
                # The first byte of a frame that never arrives, again and again.
                socket_of(puppet).sendmsg([b"\1"], [rights(file.fileno())])

    await upset(device, puppets, say)
    assert NONSENSE in losses[0]


async def test_lengths_and_numbers_of_frames(device: ta.Device, puppets: Puppets, losses: list[str]) -> None:
    for frame in ((2**32 - 1, 0, 0), (33 << 20, 0, 0), (1, 0, 1), (1, 16, 0)):
        await upset(device, puppets, sending(*frame))
        assert NONSENSE in losses.pop()


async def test_blocks_outside_their_chunks(device: ta.Device, puppets: Puppets, losses: list[str]) -> None:
    for place in ((64, 999, 0), (64, 0, 1 << 20), (64, 0, 2**64 - 1), (128, 0, 0)):
        await upset(device, puppets, placing(*place))
        assert NONSENSE in losses.pop()


async def test_blocks_over_one_another_are_not_given_to_the_next(device: ta.Device, puppets: Puppets) -> None:
    def say(puppet: Puppet, number: int) -> None:
        ((block, nbytes),) = puppet.asked.pop(number)
        puppet.tell("done", number, ((block, nbytes, puppet.pid * 1000, 0),), (), None)
        puppet.answers = True

    first = [await device.zeros((8,))]
    puppets.last.answers = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, device, first)
        puppet = await puppets.wait(lambda puppet: puppet.asked)
        say(puppet, next(iter(puppet.asked)))
    dispatch: Any = device.dispatch
    assert len(dispatch._chunks.blocks) == 2
    await upset(device, puppets, lambda puppet, _: puppet.say(b""))
    placed = sorted(place[2:] for place in dispatch._chunks.blocks.values())
    assert len(set(placed)) == len(placed) == 2
    del first


async def test_a_lease_elsewhere(device: ta.Device, puppets: Puppets, losses: list[str]) -> None:
    x = await device.zeros((8,))
    held: list[bytes] = []

    async def hold() -> None:
        async with x.lease() as array:
            held.append(array.tobytes())

    puppet = puppets.last
    puppet.answers = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await wait_all_tasks_blocked()
        (number,) = device.dispatch._requests._sent  # type: ignore[attr-defined]
        puppet.tell("granted", number, (x.block.id, 64, 4711, 0))
        await puppets.wait(lambda last: last is not puppet)
        await wait_all_tasks_blocked()
        assert NONSENSE in losses[0]
        puppets.last.tell("granted", number, (x.block.id, 64, 1000, 0))
        await wait_all_tasks_blocked()
        puppets.last.tell("done", number, (), (), None)
    assert held == [bytes(64)]


async def test_a_spare_that_talks_nonsense_is_replaced(system: ta.System, puppets: Puppets) -> None:
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        await puppets.wait(lambda last: last.pid == 2)
        spare = puppets.last
        spare.say(in_json("closed"))
        with trio.fail_after(60):
            await puppets.wait(lambda last: last.pid == 3)
        assert device.generation == 1
        await device.zeros((8,))


def mutated(payload: bytes, dice: random.Random) -> bytes:
    """One of the many that look like a message."""
    data = bytearray(payload)
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(data) + 1)
        how = dice.randrange(5)
        if how == 0:
            data[place : place + dice.randint(1, 9)] = b""
        elif how == 1:
            data[place:place] = dice.randbytes(dice.randint(1, 9))
        elif how == 2 and place < len(data):
            data[place] = dice.randrange(256)
        elif how == 3:
            data[place : place + 8] = struct.pack("<q", dice.choice([0, -1, 1, 1 << 31, 1 << 62]))
        elif payload[0] == 0:
            return b"\0" + json.dumps(_change(json.loads(payload[1:]), dice)).encode()
    return bytes(data)


def _change(value: Any, dice: random.Random) -> Any:
    """Change one item of a message somewhere."""
    items = list(value) if isinstance(value, list) else sorted(value) if isinstance(value, dict) else None
    if not items or dice.random() < 0.1:
        return dice.choice([None, True, -1, 0, 2**70, 1.5, "", "text", [], {}, [[1]], {"\0bytes": "x"}])
    which = dice.randrange(len(items))
    if isinstance(value, dict):
        return {**value, items[which]: _change(value[items[which]], dice)}
    return [*value[:which], _change(value[which], dice), *value[which + 1 :]]


async def test_mutations_of_workers_messages(device: ta.Device, puppets: Puppets) -> None:
    """Each is a message that can be meant, or the loss of that worker; neither is the end of anything."""
    dice = random.Random(20)
    sensible: list[Callable[[int], bytes]] = [
        lambda n: ANSWERS.encode(("done", n, (), (), None)),
        lambda n: ANSWERS.encode(("done", n, ((1, 64, 1000, 0),), (), None)),
        lambda n: ANSWERS.encode(("done", n, ((1, 64, 1000, 0),) * 2, (b"12",), None)),
        lambda n: ANSWERS.encode(("times", n, 1, 2)),
        lambda n: in_json("done", n, [], [], ["done", True, False, ERROR, []]),
        lambda n: in_json("lost", [*ERROR[:-1], ERROR], False),
        lambda n: in_json("event", ["ActorStarted", EVENT], "BlasActor"),
        lambda n: in_json("result", 1, [1, 1, {"a:B": 1}, [1] * 7, {"a:B": [1, 2, 3, 4]}]),
        lambda n: in_json("log", "some.logger", 10, "text"),
        lambda n: ANSWERS.encode(("copy", 1, n, 0, 1000, 0, (1, 0, "float64", (2, 2), (16, 8)))),
    ]
    for turn in range(300):
        puppet = puppets.last
        puppet.answers = False
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(try_to_ask, device)
                await puppets.wait(lambda last, puppet=puppet: last.asked or last is not puppet)
                if puppets.last is puppet:
                    number = next(iter(puppet.asked))
                    puppet.say(mutated(sensible[turn % len(sensible)](number), dice))
                    await wait_all_tasks_blocked()
                if puppets.last is puppet:
                    if number in device.dispatch._requests._sent:  # type: ignore[attr-defined]
                        puppet.done(number)
                    puppet.asked.clear()
                    puppet.answers = True
    assert device.generation > 100
    await device.zeros((8,))


async def try_to_ask(device: ta.Device) -> None:
    try:
        await device.zeros((8,))
    except (ta.AccelError, ta.actors.ActorError, ValueError, RuntimeError):
        # A worker may report that about a request.
        return


async def test_a_worker_that_would_have_the_application_run_something(
    system: ta.System, tmp_path: Path
) -> None:
    """A library of the worker sends what the application once unpickled."""
    target = tmp_path / "ran"
    payload = pickle.dumps(("log", "name", 10, _Runs(f"touch {target}")), 5)
    pickle.loads(payload)
    assert target.exists()
    target.unlink()
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.arange(4.0))
        for is_shown in (False, True):
            generation = device.generation
            with pytest.raises(ta.ContextLostError) as caught:
                await device.ask(hostile_library.Say(x, payload, is_shown))
            assert NONSENSE in str(caught.value.__cause__)
            x = await device.put(np.arange(4.0))
            assert device.generation == generation + 1
        assert (await x.to_host()).tolist() == [0, 1, 2, 3]
    assert not target.exists()


def test_results_of_any_size_cross_unchanged() -> None:
    addresses = ((1, 64, 1000, 0), (2, 8, 1000, 64))
    # Each zero byte would take six characters of JSON, and a message has 16 MiB of them at most.
    for results in ((b"result",), (b"", b"one", bytes(range(256)) * 3), (bytes(4 << 20),)):
        for places in ((), addresses):
            answer = ("done", 7, places, results, None)
            data = ANSWERS.encode(answer)
            assert ANSWERS.decode(data) == answer
            assert len(data) < sum(map(len, results)) + 200
