"""What several GPUs of one host do together: ``python -m benchmarks.gpu.several [SECTION ...]``.

``bare`` measures PyTorch's copies between two GPUs and NCCL by itself, and writes a file that the others
compare with; so it goes first. Each section prints one line for each of its findings, and goes on after a
failure.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
import ml_dtypes
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta
from trio_accel.collectives import RankFailedError, Reduction, World
from trio_accel.patterns import Pipeline, PipelineStage, open_results

from . import several_bare

ROOT = Path(__file__).parents[2]
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128"),
)
REDUCTIONS: tuple[Reduction, ...] = ("sum", "prod", "min", "max", "mean")


@attrs.frozen(kw_only=True)
class Given:
    """The arguments.

    Attributes:
        devices: Names of the devices, one rank each.
        nbytes: Bytes of large arrays.
        losses: How often a rank is lost in each way.
        seconds: The most for each way.
        bare: Figures of other libraries.
        table: File that gets the lines, too.
    """

    devices: list[str]
    nbytes: int
    losses: int
    seconds: float
    bare: Path
    table: Path | None

    def line(self, what: str, found: object, goal: str = "", *, is_met: bool | None = None) -> None:
        """Print a finding."""
        verdict = "" if is_met is None else "met" if is_met else "MISSED"
        text = f"| {what} | {found} | {goal} | {verdict} |"
        print(text, flush=True)
        if self.table is not None:
            with self.table.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def figure(self, *names: str) -> float:
        """Return a figure of `bare`; NaN if there is none."""
        found: Any = json.loads(self.bare.read_text(encoding="utf-8")) if self.bare.exists() else {}
        for name in names:
            found = found.get(name, {})
        return float(found or "nan")


async def seconds(ask: Callable[[], Awaitable[object]], times: int, ahead: int = 3) -> float:
    """Return the median time of a call."""
    taken: list[float] = []
    for _ in range(times + ahead):
        start = time.perf_counter()
        made = await ask()
        taken.append(time.perf_counter() - start)
        del made
    return statistics.median(taken[ahead:])


def measure_bare(given: Given) -> None:
    """Measure other libraries, and write a file as far as it goes."""
    found: dict[str, Any] = {}
    for name, measure in (
        ("NCCL", partial(several_bare.nccl, len(given.devices), given.nbytes)),
        ("PyTorch", partial(several_bare.pytorch, given.nbytes)),
    ):
        try:
            found |= measure()
        except (subprocess.SubprocessError, ValueError, IndexError, OSError) as error:
            print(f"{name}: {error}: {getattr(error, 'stderr', '')}")
        given.bare.write_text(json.dumps(found), encoding="utf-8")
    given.line("bare figures", {key: value for key, value in found.items() if key != "peers"})


async def topology(given: Given) -> None:
    """Compare what is told of links with the driver, and with what nvidia-smi prints."""
    table = await trio.to_thread.run_sync(ta.topology)
    print(table)
    text = given.bare.read_text(encoding="utf-8") if given.bare.exists() else "{}"
    bare: dict[str, Any] = json.loads(text)
    names = [info.name for info in table.devices if info.backend == "cuda"]
    ours = [[a == b or table.link(a, b).has_peer_access for b in names] for a in names]
    is_equal = ours == bare.get("peers")
    given.line("peer access of each pair as PyTorch tells it", is_equal, "equal", is_met=is_equal)
    done = await trio.run_process(["nvidia-smi", "topo", "-m"], capture_stdout=True, check=False)
    text = done.stdout.decode()
    print(text)
    rows = [
        line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.startswith("GPU")
    ]
    theirs = {
        (a, b): int(row[1 + b][2:]) if row[1 + b].startswith("NV") else 0
        for a, row in enumerate(rows)
        for b in range(len(rows))
        if a != b
    }
    told = str(table).splitlines()
    mine = {
        (a, b): int(cells[1 + b].rpartition("x")[2]) if cells[1 + b].startswith("NVLink x") else 0
        for a, cells in enumerate([re.split(r"\s{2,}", line) for line in told[1 : 1 + len(names)]])
        for b in range(len(names))
        if a != b
    }
    given.line("NVLinks of each pair as nvidia-smi counts them", mine, str(theirs), is_met=mine == theirs)


async def copies(given: Given, world: World) -> None:
    """Copy between the devices of two workers, bit for bit."""
    first, second = world.devices[:2]
    host = np.random.default_rng(1).integers(0, 256, given.nbytes, np.uint8)
    array = await first.put(host)
    copy = await array.copy_to(second)
    is_equal = bool(np.array_equal(await copy.to_host(), host))
    copy.release()
    for nbytes in (1 << 10, given.nbytes >> 4, given.nbytes >> 2, given.nbytes):
        part = array[:nbytes]
        taken = await seconds(partial(part.copy_to, second), 12)
        back = await seconds(partial((await part.copy_to(second)).copy_to, first), 12)
        bare = given.figure("copies", str(nbytes))
        given.line(
            f"copy_to of {nbytes >> 10} KiB between workers, and back",
            f"{1e6 * taken:.0f} and {1e6 * back:.0f} µs, {nbytes / taken / 1e9:.1f} GB/s, "
            f"{'equal by bit' if is_equal else 'DIFFERENT'}; PyTorch {1e6 * bare:.0f} µs: {bare / taken:.2f}",
            "0.9" if nbytes == given.nbytes else "",
            is_met=is_equal and bare / taken >= 0.9 if nbytes == given.nbytes else None,
        )


async def speed(given: Given, worlds: Sequence[World]) -> None:
    """Time sums of large and small arrays, by NCCL and by mapped arrays."""
    plus, one = ta.jit.elementwise("x + 1"), await worlds[0].devices[0].full(256, 1, "float32")
    alone = await seconds(lambda: plus(one), 300, 50)
    given.line("an operation of 1 KiB in one worker", f"{1e6 * alone:.0f} µs")
    ones = [one, *[await device.full(256, 1, "float32") for device in worlds[0].devices[1:]]]

    async def each() -> None:
        async with trio.open_nursery() as nursery:
            for other in ones:
                nursery.start_soon(plus, other)

    given.line("one in each worker at the same time", f"{1e6 * await seconds(each, 300, 50):.0f} µs")
    for world in worlds:
        large = [await device.full(given.nbytes // 4, 1, "float32") for device in world.devices]
        small = [await device.full(256, 1, "float32") for device in world.devices]
        slow = await seconds(partial(world.all_reduce, large), 12)
        fast = await seconds(partial(world.all_reduce, small), 300, 20)
        way, bare, quick = world.transport, given.figure("nccl large"), given.figure("nccl small")
        is_nccl = way == "nccl"
        given.line(
            f"all_reduce of {given.nbytes >> 20} MiB, {way}",
            f"{1e3 * slow:.2f} ms; NCCL alone {1e3 * bare:.2f} ms: {bare / slow:.3f}",
            "0.95" if is_nccl else "",
            is_met=bare / slow >= 0.95 if is_nccl else None,
        )
        given.line(
            f"all_reduce of 1 KiB, {way}",
            f"{1e6 * fast:.0f} µs; NCCL alone {1e6 * quick:.0f} µs: {1e6 * (fast - quick):+.0f} µs",
            "+60 µs" if is_nccl else "",
            is_met=fast - quick <= 60e-6 if is_nccl else None,
        )
        for array in (*large, *small):
            array.release()


def elements(shape: tuple[int, ...], dtype: str, seed: int) -> npt.NDArray[Any]:
    """Small whole numbers, whose sums and products are exact in every dtype."""
    element = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    whole = np.random.default_rng(seed).integers(0, 3, shape)
    made: npt.NDArray[Any] = whole.astype(element)
    return (made + 1j * whole[::-1]).astype(element) if element.kind == "c" else made


def reduced(reduction: str, hosts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Reduce by NumPy."""
    step = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(reduction, np.add)
    total = hosts[0]
    for host in hosts[1:]:
        total = step(total, host)
    return (total / len(hosts)).astype(total.dtype) if reduction == "mean" else total


async def numbers(given: Given, worlds: Sequence[World]) -> None:
    """Compare every collective and dtype with NumPy, by bit."""
    for world in worlds:
        right, wrong = 0, list[str]()
        for dtype in DTYPES:
            hosts = [elements((6 * world.size, 5), dtype, seed) for seed in range(world.size)]
            arrays = [await device.put(host) for device, host in zip(world.devices, hosts, strict=True)]
            for name, call, expected in (*_reductions(world, hosts, arrays), *_moves(world, hosts, arrays)):
                made = await call()
                refs = cast("list[ta.AccelRef]", made if isinstance(made, list) else [made])
                for one, other in zip(refs, expected, strict=True):
                    found = await one.to_host()
                    is_equal = found.tobytes() == other.tobytes() and found.shape == other.shape
                    right += is_equal
                    wrong += [] if is_equal else [f"{name} {dtype}"]
        given.line(
            f"collectives of {len(DTYPES)} dtypes against NumPy, {world.transport}",
            f"{right} equal by bit, {len(wrong)} not{': ' if wrong else ''}{', '.join(wrong[:5])}",
            "all",
            is_met=right > 0 and not wrong,
        )


Calls: TypeAlias = "list[tuple[str, Callable[[], Awaitable[Any]], Sequence[npt.NDArray[Any]]]]"


def _reductions(world: World, hosts: Sequence[npt.NDArray[Any]], arrays: list[ta.AccelRef]) -> Calls:
    """Name the reductions of a dtype, with what each rank gets."""
    size, kind, last = world.size, hosts[0].dtype.kind, world.size - 1
    calls: Calls = []
    for how in REDUCTIONS:
        if (kind == "c" and how in ("min", "max")) or (kind in "bui" and how == "mean"):
            continue
        total: Any = reduced(how, hosts)
        parts = np.split(total, size)
        calls += [
            (f"all_reduce {how}", partial(world.all_reduce, arrays, how), [total] * size),
            (f"reduce {how}", partial(world.reduce, arrays, how, root=last), [total]),
            (f"reduce_scatter {how}", partial(world.reduce_scatter, arrays, how), parts),
        ]
    return calls


def _moves(world: World, hosts: Sequence[npt.NDArray[Any]], arrays: list[ta.AccelRef]) -> Calls:
    """Name the collectives that move elements, with what each rank gets."""
    size, joined, last = world.size, np.concatenate(hosts), world.size - 1
    parts = [np.split(host, size) for host in hosts]
    splits = [[len(host) - 1, *[0] * (size - 2), 1] if size > 1 else [len(host)] for host in hosts]
    uneven = [np.split(host, np.cumsum(row)[:-1]) for host, row in zip(hosts, splits, strict=True)]

    def crossed(pieces: Sequence[Sequence[npt.NDArray[Any]]]) -> list[npt.NDArray[Any]]:
        return [np.concatenate([each[rank] for each in pieces]) for rank in range(size)]

    return [
        ("all_gather", partial(world.all_gather, arrays), [joined] * size),
        ("gather", partial(world.gather, arrays, root=last), [joined]),
        ("broadcast", partial(world.broadcast, arrays[0]), [hosts[0]] * size),
        ("scatter", partial(world.scatter, arrays[last], root=last), parts[last]),
        ("send", partial(world.send, arrays[0], last), [hosts[0]]),
        ("all_to_all", partial(world.all_to_all, arrays), crossed(parts)),
        ("all_to_all, uneven", partial(world.all_to_all, arrays, splits=splits), crossed(uneven)),
    ]


async def losses(given: Given, world: World) -> None:
    """Lose a rank in each way, while a task asks for sums and one for each device for work of its own."""
    ways = ("kill", "bad address", "trap", "stop")
    # Whole numbers: their sum is the same in any order of ranks.
    hosts = [np.random.default_rng(n).integers(0, 999, 1 << 18) * 1.0 for n in range(world.size)]
    total = sum(hosts[1:], start=hosts[0])
    arrays = [await device.put(host) for device, host in zip(world.devices, hosts, strict=True)]
    for how in ways:
        try:
            await Ordeal(given, world, how, arrays, total).run()
        except Exception as error:  # noqa: BLE001  # the next way
            traceback.print_exc()
            given.line(f"a rank lost by {how}", f"FAILED: {error!r:.200}", is_met=False)
        kept = [
            (await array.to_host()).tobytes() == host.tobytes()
            for array, host in zip(arrays, hosts, strict=True)
        ]
        given.line(f"arrays after {how}", kept, "all intact", is_met=all(kept))


@attrs.define
class Ordeal:
    """Losses of ranks in one way.

    Attributes:
        given: The arguments.
        world: The world.
        how: How ranks are lost.
        arrays: What is summed.
        total: The sum.
        right: Sums without an error.
        wrong: Those of them that were looked at and are not the sum.
        errors: How many sums failed on each rank.
        ended: Begin and end of each sum, and whether it had no error.
        own: Rank, begin and end of each operation of a single device.
        waits: For each loss, until the sum that it has hit ended.
        healed: For each loss, until the end of the first right sum that was begun behind it.
        others: For each loss, the longest operation of the other devices' own until then.
        unseen: Losses after which all sums were right.
    """

    given: Given
    world: World
    how: str
    arrays: list[ta.AccelRef]
    total: Any
    right: int = 0
    wrong: int = 0
    errors: dict[str, int] = attrs.field(factory=dict[str, int])
    ended: list[tuple[float, float, bool]] = attrs.field(factory=list[tuple[float, float, bool]])
    own: list[tuple[int, float, float]] = attrs.field(factory=list[tuple[int, float, float]])
    waits: list[float] = attrs.field(factory=list[float])
    healed: list[float] = attrs.field(factory=list[float])
    others: list[float] = attrs.field(factory=list[float])
    unseen: int = 0

    async def run(self) -> None:
        """Lose ranks in turn, and print what came of it."""
        end = time.perf_counter() + self.given.seconds
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sum)
            for rank in range(self.world.size):
                nursery.start_soon(self.work, rank)
            for number in range(self.given.losses):
                await trio.sleep(0.2)
                await self.lose(number % self.world.size)
                if time.perf_counter() > end:
                    break
            nursery.cancel_scope.cancel()
        self.tell()

    async def sum(self) -> None:
        """Ask for sums all the time."""
        while True:
            start, is_right, made = time.perf_counter(), True, list[ta.AccelRef]()
            try:
                made = await self.world.all_reduce(self.arrays)
            except RankFailedError as error:
                key = f"rank {error.rank}"
                self.errors[key] = self.errors.get(key, 0) + 1
                is_right = False
            self.ended.append((start, time.perf_counter(), is_right))
            if is_right and self.right % 20 == 0:
                # Not each time: the copies to the host would be what is asked for most.
                for one in made:
                    with suppress(ta.ContextLostError, ta.CompletionTimeoutError):
                        self.wrong += not np.array_equal(await one.to_host(), self.total)
            self.right += is_right

    async def work(self, rank: int) -> None:
        """Ask a device for small operations of its own, every few milliseconds."""
        plus, x = ta.jit.elementwise("x + 1"), await self.world.devices[rank].full(256, 1, "float32")
        while True:
            start = time.perf_counter()
            with suppress(ta.ContextLostError, ta.CompletionTimeoutError):
                await plus(x)
            self.own.append((rank, start, time.perf_counter()))
            await trio.sleep(0.002)

    async def lose(self, rank: int) -> None:
        """Lose a rank, and wait until sums are right again."""
        device = self.world.devices[rank]
        generation = device.generation
        lost = await _strike(device, self.how)
        with trio.fail_after(12):
            while (  # noqa: ASYNC110  # any of many calls finds it
                device.generation == generation or not any(a > lost and ok for a, _, ok in self.ended[-50:])
            ):
                await trio.sleep(0.002)
        again = next(b for a, b, ok in self.ended if a > lost and ok)
        later = [(b - max(a, lost), ok) for a, b, ok in self.ended if lost < b <= again]
        # The call that the loss has hit: the first that failed, or none, and it was done again unseen.
        self.waits.append(next((wait for wait, ok in later if not ok), later[0][0]))
        self.unseen += all(ok for _, ok in later)
        self.healed.append(again - lost)
        own = [b - max(a, lost) for one, a, b in self.own if one != rank and b > lost and a < again]
        self.others.append(max(own, default=0.0))

    def tell(self) -> None:
        """Print it."""
        hit = f"{1e3 * max(self.waits):.0f} ms (median {1e3 * statistics.median(self.waits):.0f})"
        again = f"{1e3 * statistics.median(self.healed):.0f} ms, at most {1e3 * max(self.healed):.0f} ms"
        longest = f"{1e3 * statistics.median(self.others):.1f} ms, at most {1e3 * max(self.others):.1f} ms"
        usual = statistics.median(b - a for _, a, b in self.own)
        is_met = max(self.waits) <= 1.0 and max(self.healed) <= 2.5 and not self.wrong
        self.given.line(
            f"a rank lost by {self.how}, {len(self.healed)} times, {self.world.transport}",
            f"the sum that was hit ended within {hit}, {self.unseen} times right; right again after {again}; "
            f"{self.right} sums, {self.wrong} wrong, failed {self.errors}; longest operation of the other "
            f"devices' own: median {longest} (undisturbed {1e3 * usual:.1f})",
            "1 s, 2.5 s",
            is_met=is_met,
        )


async def _strike(device: ta.Device, how: str) -> float:
    """Lose the context of a device; returns when."""
    pid = (await device.statistics()).pid
    assert pid is not None
    if how in ("kill", "stop"):
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    elif how == "trap":
        ta.testing.inject_fault(device, "collectives.sum", poison=True, how="trap")
    else:
        ta.testing.poison(device)
    return time.perf_counter()


async def pipeline(given: Given, world: World) -> None:
    """Run two stages on two devices, and compare with the slower stage alone."""
    first, second = world.devices[:2]
    extent = 4096 if "cuda" in given.devices[0] else 256
    weights = [await device.full((extent, extent), 1 / extent, "float32") for device in (first, second)]
    batch = [await first.full((extent, extent), number, "float32") for number in range(4)]

    async def stage(number: int, x: ta.AccelRef) -> ta.AccelRef:
        for _ in range(6):
            x = await ta.linalg.matmul(x, weights[number])
        return x

    moved = await batch[0].copy_to(second)
    alone = [await seconds(partial(stage, n, x), 10) for n, x in enumerate((batch[0], moved))]
    items = [batch[number % 4] for number in range(40)]
    stages = (
        PipelineStage(partial(stage, 0), name="first"),
        PipelineStage(partial(stage, 1), name="second", device=second, capacity=2),
    )
    running = await first.system.spawn(Pipeline, *stages)
    begun, done, last = 0.0, 0, moved
    async with open_results(running, items, limit=8) as results:
        async for made in results:
            done += 1
            begun = begun or time.perf_counter()
            last = made
    each = (time.perf_counter() - begun) / (done - 1)
    is_right = np.allclose(await last.to_host(), 3.0, rtol=1e-3)
    await running.stop()
    given.line(
        "a pipeline over two devices",
        f"{1e3 * each:.2f} ms for each item, {'right' if is_right else 'WRONG'}; stages alone "
        f"{1e3 * alone[0]:.2f} and {1e3 * alone[1]:.2f} ms: {max(alone) / each:.2f}",
        "0.9",
        is_met=is_right and max(alone) / each >= 0.9,
    )


async def example(given: Given) -> None:
    """Run the example that trains, with a fault each two seconds; it compares with one undisturbed device."""
    backend = given.devices[0].partition(":")[0]
    program, steps = str(ROOT / "examples" / "train_digits.py"), "1500" if backend == "cuda" else "200"
    command = [sys.executable, program, "--backend", backend, "--devices", str(len(given.devices))]
    command += ["--faults", "2", "--quiet", "--steps", steps]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    print(done.stdout.decode(), done.stderr.decode()[-2000:])
    lines = done.stdout.decode().splitlines() or ["nothing"]
    is_right = done.returncode == 0
    given.line("examples/train_digits.py, with faults", "; ".join(lines), "equal losses", is_met=is_right)


# Those that have a world each.
OWN = {"topology": topology, "example": example}
HASTY = ta.DeviceOptions(
    isolation="process",
    spares=1,
    heartbeat_timeout=0.3,
    stuck_after=2.0,
    intensity=ta.Intensity(10_000, 1.0),
)
NAMES = ("bare", "topology", "speed", "copies", "numbers", "losses", "example", "pipeline")


async def run(given: Given, sections: Sequence[str]) -> None:
    """Run sections, each with its own failure."""

    async def one(name: str, section: Callable[[], Awaitable[None]]) -> None:
        start = time.perf_counter()
        try:
            await section()
        except Exception as error:  # noqa: BLE001  # the next section
            traceback.print_exc()
            given.line(name, f"FAILED: {error!r:.300}", is_met=False)
        print(f"({name}: {time.perf_counter() - start:.1f} s)", flush=True)

    if "bare" in sections:
        await trio.to_thread.run_sync(measure_bare, given)
    for name in ("topology", "example"):
        if name in sections:
            await one(name, partial(OWN[name], given))
    for options in (ta.DeviceOptions(isolation="process"), HASTY):
        wanted = {"losses"} if options is HASTY else {"copies", "speed", "numbers", "pipeline"}
        if not wanted & set(sections):
            continue
        async with (
            ta.open_system("several") as system,
            system.open_devices(given.devices, options=options) as devices,
            ta.open_world(devices) as world,
            ta.open_world(devices, transport="mapped") as mapped,
        ):
            print(world, mapped, flush=True)
            worlds = [world, mapped] if world.transport == "nccl" else [world]
            calls: dict[str, Callable[[], Awaitable[None]]] = {
                "speed": partial(speed, given, worlds),
                "copies": partial(copies, given, world),
                "numbers": partial(numbers, given, worlds),
                "pipeline": partial(pipeline, given, world),
                "losses": partial(losses, given, world),
            }
            for name in NAMES:
                if name in sections and name in wanted:
                    await one(name, calls[name])
            print(world, flush=True)


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(NAMES)}; all without")
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="one rank each")
    parser.add_argument("--mib", type=int, default=1024, help="size of large arrays")
    parser.add_argument("--losses", type=int, default=10, help="how many of each way")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most for each way of a loss")
    parser.add_argument("--bare", type=Path, default=Path("bare.json"), help="figures of other libraries")
    parser.add_argument("--table", type=Path, help="file that gets the lines, too")
    asked = parser.parse_args()
    given = Given(
        devices=asked.devices.split(","),
        nbytes=asked.mib << 20,
        losses=asked.losses,
        seconds=asked.seconds,
        bare=asked.bare,
        table=asked.table,
    )
    warnings.filterwarnings("ignore", "open_device", RuntimeWarning)
    trio.run(run, given, asked.sections or NAMES)


if __name__ == "__main__":
    main()
