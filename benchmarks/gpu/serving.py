"""Texts by HTTP while contexts are lost: ``python -m benchmarks.gpu.serving [OPTION ...]``.

``examples/generate/serve.py`` runs in a process of its own, with random weights of SmolLM2's shape. Clients
read texts by server-sent events. First nobody disturbs them. Then a worker is killed every ``--every``
seconds; with ``--poison`` the service itself does it, and writes to a bad address in turns (``--faults``),
beside streams of its own. Each text is compared with the undisturbed one.

What follows ``--`` goes to the service, such as ``-- --backend cuda --dtype bfloat16 --exact``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import attrs
import httpx2
import trio

from ._sections import search_path

__all__ = ["main"]

SERVE = Path(__file__).parents[2] / "examples" / "generate" / "serve.py"


@attrs.define
class Found:
    """The texts of a phase.

    Attributes:
        texts: Each text, by the number of its client; the last one.
        right: Texts as in the undisturbed run.
        wrong: Others.
        refused: Requests that got an error, by its text.
        gaps: The longest time between two events of each text, in seconds.
        firsts: Seconds until the first event of each text.
    """

    texts: dict[int, str] = attrs.field(factory=dict[int, str])
    right: int = 0
    wrong: int = 0
    refused: Counter[str] = attrs.field(factory=Counter[str])
    gaps: list[float] = attrs.field(factory=list[float])
    firsts: list[float] = attrs.field(factory=list[float])


async def _read(client: httpx2.AsyncClient, number: int, most: int, found: Found) -> str:
    """Read one text; an error of the service is raised."""
    body = {"model": "random", "prompt": f"Tell me about {number}.", "max_tokens": most, "stream": True}
    text, times, has_ended = "", [trio.current_time()], False
    async with client.stream("POST", "/v1/completions", json={**body, "temperature": 0}) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode()[:200])
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            has_ended = line == "data: [DONE]"
            if has_ended:
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            times.append(trio.current_time())
            text += "".join(choice["text"] for choice in event["choices"])
    if not has_ended:
        raise RuntimeError("the stream was cut")
    between = [after - before for before, after in pairwise(times)]
    found.firsts.append(between[0])
    found.gaps.append(max(between[1:], default=0.0))
    return text


async def _client(
    client: httpx2.AsyncClient, number: int, most: int, until: float, expected: Found, found: Found
) -> None:
    while trio.current_time() < until:
        try:
            text = await _read(client, number, most, found)
        except (RuntimeError, httpx2.HTTPError) as error:
            found.refused[f"{error!r:.200}"] += 1
            await trio.sleep(0.1)
            continue
        is_right = text == expected.texts[number]
        found.right, found.wrong = found.right + is_right, found.wrong + (not is_right)


def _workers(process: int) -> list[int]:
    """The processes below one that compute, the oldest first."""
    found, seen = list[int](), [process]
    for one in seen:
        for task in Path(f"/proc/{one}/task").iterdir():
            seen += map(int, (task / "children").read_text().split())
    for one in seen[1:]:
        with suppress(OSError):
            if Path(f"/proc/{one}/comm").read_text().strip() == "accel worker":
                found.append(one)
    return sorted(found)


async def _kill(process: int, every: float) -> None:
    while True:
        await trio.sleep(every)
        with suppress(OSError):
            os.kill(_workers(process)[0], signal.SIGKILL)


async def _measure(url: str, process: int, given: argparse.Namespace) -> bool:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=120.0, trust_env=False, limits=limits) as client:
        expected, found = Found(), Found()

        async def read_calm(number: int) -> None:
            expected.texts[number] = await _read(client, number, given.most, expected)

        for reading in (read_calm, None):
            async with trio.open_nursery() as nursery:
                if reading is None and not given.poison:
                    nursery.start_soon(_kill, process, given.every)
                async with trio.open_nursery() as inner:
                    until = trio.current_time() + given.seconds
                    for number in range(given.clients):
                        read = partial(_client, client, number, given.most, until, expected, found)
                        inner.start_soon(partial(reading, number) if reading else read)
                nursery.cancel_scope.cancel()
    for name, one in (("undisturbed", expected), ("disturbed", found)):
        median, first = statistics.median(one.gaps or [0]), max(one.firsts, default=0)
        sys.stdout.write(
            f"  {name:12} longest gap {max(one.gaps, default=0):.2f} s, median of the longest "
            f"{median:.2f} s; first token after {first:.2f} s at most\n"
        )
    sys.stdout.write(f"  {found.right} right, {found.wrong} wrong, {found.refused.total()} refused\n")
    for text, count in found.refused.most_common(3):
        sys.stdout.write(f"    {count} times: {text}\n")
    return not (found.wrong or found.refused)


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--most", type=int, default=200, help="tokens of a text")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two losses")
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("service", nargs="*", help="options of the service")
    given = parser.parse_args()
    options = ["--port", "0", "--random-weights", *given.service]
    options += ["--faults", str(given.every)] if given.poison else []
    command = [sys.executable, str(SERVE), *options]
    with subprocess.Popen(  # noqa: S603  # the example of this repository
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": search_path()}
    ) as service:
        assert service.stdout is not None
        try:
            url = next(line for line in service.stdout if line.startswith("listening")).split()[-1]
            is_right = trio.run(_measure, url, service.pid, given)
        finally:
            service.send_signal(signal.SIGTERM)
            for line in service.stdout:
                sys.stdout.write(f"  | {line}")
    return 0 if is_right and service.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
