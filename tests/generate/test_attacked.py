"""`examples/generate/serve.py` in a hostile world: good clients get the answers of an undisturbed run.

The worker is killed again and again, and the cache is too small for all. Next to the good clients some hang
up in the middle of a stream, read nothing, or send half of a request.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock
from typing import Any

import pytest
from serving import Serving, chat, serving, until

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux"),
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("generate"),
]
# All sequences together want more pages than there are. With `--exact` no text depends on the others.
OPTIONS = ("--random-weights", "--layers", "1", "--pages", "10", "--sequences", "8", "--exact")
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "rank": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "rank"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
WARM: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20}


def said(number: int) -> Any:
    return [{"role": "user", "content": f"Hello {number % 3}"}]


def whole(client: Any, number: int) -> str:
    return str(chat(client, said(number), seed=number, **WARM).choices[0].message.content)


def in_parts(client: Any, number: int) -> str:
    parts = chat(client, said(number), seed=number, stream=True, **WARM)
    return "".join(part.choices[0].delta.content or "" for part in parts)


def as_json(client: Any, number: int) -> str:
    text = (
        chat(client, said(number), seed=number, response_format=FORM, **{**WARM, "max_tokens": 60})
        .choices[0]
        .message.content
    )
    assert json.loads(text).keys() == {"name", "rank"}
    return str(text)


def of_prompts(client: Any, number: int) -> list[str]:
    asked = {"model": "random", "prompt": ["a", "b"], "seed": number}
    found = client.completions.create(**asked, temperature=1.0, max_tokens=12).choices
    return [choice.text for choice in found]


def embedded(client: Any, number: int) -> list[float]:
    found = client.embeddings.create(model="random-encoder", input=f"{number} and more")
    return [float(value) for value in found.data[0].embedding]


GOOD: list[Callable[[Any, int], Any]] = [whole, in_parts, as_json, of_prompts, embedded]
STREAM = b"GET /v1/completions?prompt=a&max_tokens=%d&stream=true&temperature=1 HTTP/1.1\r\nHost: x\r\n\r\n"


def leaves(service: Serving, chance: random.Random) -> None:
    """Hang up after some of a stream."""
    with service.send(STREAM % 110) as sock:
        for _ in range(chance.randrange(4)):
            sock.recv(4096)


def reads_nothing(service: Serving, chance: random.Random) -> None:
    with service.send(STREAM % 110):
        # clock: any moment will do
        time.sleep(chance.uniform(0.1, 2.0))


def sends_half(service: Serving, chance: random.Random) -> None:
    with service.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"):
        # clock: any moment will do
        time.sleep(chance.uniform(0.0, 0.5))


BAD = [leaves, leaves, reads_nothing, sends_half]


class Attack:
    """Bad clients and kills, until it ends."""

    def __init__(self, service: Serving, seed: int) -> None:
        self.service, self.seed = service, seed
        self.over, self.lock, self.done = Event(), Lock(), Counter[str]()

    def kill(self) -> None:
        while not self.over.wait(2.0):
            [device] = json.loads(self.service.get("/health"))["devices"].values()
            # A worker killed just now has no follower yet.
            with suppress(TypeError, ProcessLookupError):
                os.kill(device["pid"], signal.SIGKILL)
                self.count("kill")

    def harm(self, number: int) -> None:
        chance = random.Random(self.seed + number)
        while not self.over.is_set():
            bad = chance.choice(BAD)
            # The service may refuse it, or end its connection.
            with suppress(OSError):
                bad(self.service, chance)
            self.count(bad.__name__)

    def count(self, name: str) -> None:
        with self.lock:
            self.done[name] += 1


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 8])
def test_good_clients_next_to_bad_clients_and_kills(rounds: int) -> None:
    with serving(*OPTIONS) as service:
        calls = [(good, number) for number in range(2) for good in GOOD]
        client = service.client(timeout=150.0)

        def ask(call: tuple[Callable[[Any, int], Any], int]) -> Any:
            return call[0](client, call[1])

        with ThreadPoolExecutor(len(calls)) as pool:
            expected = list(pool.map(ask, calls))
        # A text is the same whole and in parts; all others differ.
        assert expected[:: len(GOOD)] == expected[1 :: len(GOOD)]
        assert len({str(answer) for answer in expected}) == len(calls) * 4 // len(GOOD)
        attack = Attack(service, rounds)
        with ThreadPoolExecutor(30) as pool:
            others = [pool.submit(attack.harm, number) for number in range(5)] + [pool.submit(attack.kill)]
            try:
                for _ in range(rounds):
                    found = list(pool.map(ask, calls))
                    for call, answer, wanted in zip(calls, found, expected, strict=True):
                        assert (call[0].__name__, answer) == (call[0].__name__, wanted)
                until(lambda: set(attack.done) >= {"kill", *(bad.__name__ for bad in BAD)}, 20)
            finally:
                attack.over.set()
            for other in others:
                other.result()
        until(lambda: service.pages() == 0, 20)
        assert set_aside(service) > 0
        assert ask(calls[0]) == expected[0]
        service.close_clients()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(40) == 0


def set_aside(service: Serving) -> float:
    """How often a sequence was set aside, by the metrics."""
    lines = service.get("/metrics").splitlines()
    [found] = [line for line in lines if line.startswith("trio_accel_sequences_set_aside_total")]
    return float(found.rpartition(" ")[2])
