"""Put the service under load, and tell what became of each request: `python examples/service/load.py`."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from contextlib import suppress
from functools import partial

import attrs
import httpx2
import numpy as np
import trio

# What each sort of outcome means.
MEANING = {
    200: "answered",
    429: "refused: the key asks too much",
    503: "refused: try again",
    504: "the deadline has passed",
}
TEXTS = (
    "what happens when the worker process is killed",
    "how does a request get its deadline",
    "arrays survive the loss of a context",
    "a mailbox that is full",
    "compile a kernel of my own",
    "read the weights of a model",
    "supervisors restart their children",
)


@attrs.define
class Findings:
    """What was seen."""

    begun: int = 0
    outcomes: Counter[int] = attrs.field(factory=Counter[int])
    without: int = 0
    wrong: int = 0
    seconds: list[float] = attrs.field(factory=list[float])
    models: Counter[str] = attrs.field(factory=Counter[str])
    kills: int = 0
    swaps: Counter[int] = attrs.field(factory=Counter[int])
    memory: list[int] = attrs.field(factory=list[int])


async def client(url: str, key: str, number: int, findings: Findings) -> None:
    """Ask one thing after the other."""
    source = random.Random(f"{key} {number}")  # noqa: S311  # load
    headers = {"x-api-key": key, "x-deadline": "10"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=30.0, trust_env=False) as http:
        while True:
            texts = source.choices(TEXTS, k=source.randint(1, 4))
            is_search = source.random() < 0.3
            path, body = "embed", dict[str, object](texts=texts)
            if is_search:
                path, body = "similar", dict[str, object](text=texts[0], count=3)
            begun = trio.current_time()
            findings.begun += 1
            try:
                response = await http.post(path, json=body)
            except httpx2.HTTPError:
                findings.without += 1
                await trio.sleep(0.1)
                continue
            except trio.Cancelled:
                # The end of the load, and no fault of the service.
                findings.begun -= 1
                raise
            findings.outcomes[response.status_code] += 1
            if response.status_code == 200:
                findings.seconds.append(trio.current_time() - begun)
                found = response.json()
                findings.models[found["model"]] += 1
                findings.wrong += is_wrong(found, 3 if is_search else len(texts))
            else:
                await trio.sleep(float(response.headers.get("retry-after", 0.1)))


def is_wrong(found: dict[str, list[object]], count: int) -> bool:
    """Whether an answer is not what was asked for."""
    if "sentences" in found:
        return len(found["sentences"]) != count
    vectors = np.array(found["vectors"])
    return len(vectors) != count or not np.allclose((vectors**2).sum(1), 1.0, atol=1e-3)


async def kill_workers(url: str, every: float, findings: Findings) -> None:
    """Kill the worker process, as a crash of the driver would."""
    async with httpx2.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as http:
        while True:
            await trio.sleep(every)
            with suppress(httpx2.HTTPError, ProcessLookupError):
                for worker in await workers_of(http):
                    os.kill(worker, signal.SIGKILL)
                    findings.kills += 1


async def workers_of(http: httpx2.AsyncClient) -> list[int]:
    """The worker processes that serve now."""
    devices = (await http.get("health")).json()["devices"]
    return [device["pid"] for device in devices.values() if device["pid"]]  # 0 would be this program's group


async def swap_models(url: str, key: str, every: float, findings: Findings) -> None:
    """Replace the model, to and fro."""
    headers = {"x-api-key": key}
    async with httpx2.AsyncClient(base_url=url, timeout=60.0, headers=headers, trust_env=False) as http:
        while True:
            for version in ("v2", "v1"):
                await trio.sleep(every)
                response = await http.post("admin/model", json={"model": version})
                findings.swaps[response.status_code] += 1


async def watch_memory(url: str, findings: Findings) -> None:
    """Note the memory of the service's process."""
    async with httpx2.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as http:
        while True:
            with suppress(httpx2.HTTPError):
                findings.memory.append(memory_in((await http.get("metrics")).text))
            await trio.sleep(1.0)


def memory_in(metrics: str) -> int:
    """The resident memory of the program in its metrics, in bytes."""
    of_program = r'^trio_accel_process_resident_memory_bytes\{path="search",.*\} (.+)$'
    found = re.search(of_program, metrics, re.MULTILINE)
    if found is None:
        raise ValueError("the metrics have no memory")
    return int(float(found[1]))


def tell(findings: Findings, seconds: float) -> None:
    """Print what was seen."""
    print(f"{findings.begun} requests in {seconds:.0f} s, {findings.begun / seconds:.0f} a second")
    for status, count in sorted(findings.outcomes.items()):
        print(f"  {count:8} {status} {MEANING.get(status, 'an error')}")
    print(f"  {findings.without:8} without an outcome")
    print(f"  {findings.wrong:8} answers that are wrong")
    if findings.seconds:
        half, most = np.quantile(findings.seconds, [0.5, 0.99])
        print(f"answered within {half * 1e3:.1f} ms (p50), {most * 1e3:.1f} ms (p99)")
    print(f"workers killed: {findings.kills}; answers by model: {dict(sorted(findings.models.items()))}")
    if findings.swaps:
        print(f"models replaced: {findings.swaps[200]} of {findings.swaps.total()}")
    if len(findings.memory) > 10:
        early, late = findings.memory[len(findings.memory) // 5], findings.memory[-1]
        print(
            f"memory of the service: {early >> 20} MiB after a fifth of the time, {late >> 20} MiB at the end"
        )


async def main(arguments: argparse.Namespace) -> int:
    """Returns 0 if every request had an outcome, and none was wrong."""
    findings = Findings()
    try:
        async with httpx2.AsyncClient(base_url=arguments.url, trust_env=False) as http:
            await workers_of(http)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"no service answers at {arguments.url}: {error}\n")
        return 2
    with trio.move_on_after(arguments.seconds):
        async with trio.open_nursery() as nursery:
            for key in arguments.keys.split(","):
                for number in range(arguments.clients):
                    nursery.start_soon(client, arguments.url, key, number, findings)
            nursery.start_soon(watch_memory, arguments.url, findings)
            if arguments.kill_every:
                nursery.start_soon(kill_workers, arguments.url, arguments.kill_every, findings)
            if arguments.admin_key:
                swap = partial(swap_models, arguments.url, arguments.admin_key, arguments.swap_every)
                nursery.start_soon(swap, findings)
    if arguments.json:
        seen = attrs.asdict(findings, filter=lambda field, _: field.name not in {"seconds", "memory"})
        sys.stdout.write(json.dumps({**seen, "memory": findings.memory, "seconds": findings.seconds}) + "\n")
    else:
        tell(findings, arguments.seconds)
    return int(findings.without + findings.wrong > 0 or not findings.seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8, help="clients of each key")
    parser.add_argument("--keys", default="gold,free")
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--admin-key", default="", help="replace the model now and then, too")
    parser.add_argument("--swap-every", type=float, default=7.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true")
    raise SystemExit(trio.run(main, parser.parse_args()))
