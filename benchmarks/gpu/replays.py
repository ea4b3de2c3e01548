"""Replays on a GPU: ``python -m benchmarks.gpu.replays [--json FILE] [--rooms ROOM ...]``.

* ``against``: each public function is recorded on the processor, in float64 and float32, and replayed on the
  GPU within a tolerance.
* ``twice``: each function is recorded on the GPU, with small arrays and with larger ones, and replayed there.
  A function whose bits differ is not deterministic. ``--json`` stores their names: `docs/determinism.json` is
  such a file, and `docs/determinism_table.py` makes a table of it.
* ``mixed``: random operations, chains, graphs and programs of `tests/replay/random_work.py`, recorded on the
  GPU inline and by a worker, and replayed inline.

``--backend cpu`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import scipy.sparse
import trio

import trio_accel as ta
from trio_accel import replay

from .._function_arguments import Arguments, Computed, Drawn, call, candidates, whole, x
from ..record_functions import ROOMS, functions

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
INLINE = ta.DeviceOptions(isolation="inline")
# How far a dimension grows, by the largest number of dimensions among the arrays of a call.
GROWTH = {1: 512, 2: 16, 3: 8, 4: 5, 5: 3}
# Results of more bytes, such as a Kronecker product of larger matrices, are not recorded.
MAX_BYTES = 1 << 26
# Of the processor's and the GPU's libraries, relative to the larger number.
TOLERANCES = {"float64": 1e-7, "float32": 2e-3}
REPLAYS = 2
# Seconds after which a function is named as slow.
SLOW = 4.0


def _sparse(device: ta.Device, dtype: str) -> Any:
    matrix: Any = scipy.sparse.random(4096, 4096, 0.02, format="csr", rng=np.random.default_rng(5))
    return ta.sparse.csr(device, matrix.astype(dtype))


def _halves(device: ta.Device, dtype: str) -> Any:
    return device.put(np.array([0, 1 << 17, 1 << 18]))


# Functions that add up what comes to one place in an order that a device may choose.
LARGE: Mapping[str, Arguments] = {
    "arrays.scatter": call(x(64, 512), whole(4096), x(4096, 512), axis=0, reduce="add"),
    "arrays.scatter_nd": call(x(64), [whole(1 << 16)], x(1 << 16), reduce="add"),
    "arrays.bincount": call(whole(1 << 18), x(1 << 18)),
    "nn.embedding_grad": call(x(1 << 14, 64), whole(1 << 14), 4),
    "nn.conv_weight_grad": call(x(16, 64, 56, 56), (64, 64, 3, 3), x(16, 64, 54, 54)),
    "nn.conv_input_grad": call((16, 64, 56, 56), x(64, 64, 3, 3), x(16, 64, 54, 54)),
    "nn.max_pool_grad": call(x(8, 16, 28, 28), whole(8, 16, 28, 28), (8, 16, 56, 56)),
    "nn.avg_pool_grad": call(x(16, 64, 28, 28), (16, 64, 56, 56), 2),
    "nn.adaptive_avg_pool_grad": call(x(16, 64, 7, 7), (16, 64, 56, 56)),
    "arrays.segmented_reduce": call(x(1 << 18), Computed(_halves)),
    "sparse.spmv": call(Computed(_sparse), x(4096)),
    "sparse.spmm": call(Computed(_sparse), x(4096, 64)),
    "sparse.spgemm": call(Computed(_sparse), Computed(_sparse)),
    "linalg.matmul": call(x(512, 8192), x(8192, 512)),
    "linalg.dot": call(x(1 << 22), x(1 << 22)),
}


SPARSE = ("spmv", "spmm", "spgemm")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arrays(reply: object) -> Iterator[ta.AccelRef]:
    """Yield the arrays of a result, and of its fields."""
    if isinstance(reply, ta.AccelRef):
        yield reply
    elif isinstance(reply, (tuple, list)):
        for item in reply:  # pyright: ignore[reportUnknownVariableType]
            yield from _arrays(item)  # pyright: ignore[reportUnknownArgumentType]
    elif attrs.has(cls := type(reply)):
        for field in attrs.fields(cls):
            yield from _arrays(getattr(reply, field.name))


def _drawn(value: Any) -> Iterator[Drawn]:
    if isinstance(value, Drawn):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _drawn(item)


def grown(arguments: Arguments) -> Arguments:
    """Return the same call with larger arrays: dimensions that were equal stay equal."""
    every = list(_drawn([*arguments.positional, *arguments.named.values()]))
    factor = GROWTH[min(5, max((len(one.shape) for one in every), default=1))]

    def larger(value: Any) -> Any:
        if isinstance(value, Drawn):
            return attrs.evolve(value, shape=tuple(size * factor for size in value.shape))
        if type(value) in (list, tuple):
            return type(value)(map(larger, value))
        return value

    named = {name: larger(value) for name, value in arguments.named.items()}
    return attrs.evolve(arguments, positional=tuple(map(larger, arguments.positional)), named=named)


async def _asked(function: Callable[..., Any], arguments: Arguments, device: ta.Device, dtype: str) -> bool:
    """Call a function and read its results; returns whether it has results."""
    try:
        with trio.fail_after(PATIENCE):
            _, reply = await arguments.call(function, device, dtype, "plain")
            for ref in _arrays(reply):
                if ref.nbytes > MAX_BYTES:
                    return False
                await ref.to_host()
    except Exception:  # noqa: BLE001  # which arguments a function takes is found by trying
        return False
    return True


@attrs.define
class Found:
    """What became of the functions.

    Attributes:
        seconds: After which no further function is asked, in each part.
        only_large: Whether only the functions of `LARGE` are replayed.
        skip: Functions that ``against`` leaves out.
        ways: How each function is called.
        varying: Functions whose bits differ, with the dtypes and the most units in the last place.
        determined: Functions with the same bits in each replay.
    """

    seconds: float
    only_large: bool = False
    skip: int = 0
    ways: dict[str, tuple[Callable[..., Any], Arguments]] = attrs.field(factory=dict[str, Any])
    varying: dict[str, dict[str, Any]] = attrs.field(factory=dict[str, dict[str, Any]])
    determined: set[str] = attrs.field(factory=set[str])

    async def find(self, system: ta.System, rooms: Sequence[str]) -> None:
        """Find arguments of each function, on the processor."""
        async with system.open_device("cpu", options=INLINE) as device:
            for name, function in functions(rooms):
                # Some public names are aliases of types, which have no signature.
                with suppress(ValueError):
                    for arguments in candidates(name, function):
                        if await _asked(function, arguments, device, "float64"):
                            self.ways[name] = function, arguments
                            break


async def _recorded(
    device: ta.Device, function: Callable[..., Any], arguments: Arguments, dtype: str
) -> replay.MemoryJournal | None:
    journal = replay.MemoryJournal()
    async with replay.record(device, journal):
        has_results = await _asked(function, arguments, device, dtype)
    return journal if has_results else None


async def against(system: ta.System, backend: str, found: Found) -> None:
    """Replay journals of the processor on the GPU."""
    began, operations, compared, differ, ended = time.perf_counter(), 0, 0, list[str](), list[str]()
    asked = 0
    async with (
        system.open_device("cpu", options=INLINE, name="recorded") as processor,
        system.open_device(backend, options=INLINE, name="replayed") as device,
    ):
        for name, (function, arguments) in [*found.ways.items()][found.skip :]:
            if time.perf_counter() - began > found.seconds:
                break
            asked += 1
            for dtype, relative in TOLERANCES.items():
                journal = await _recorded(processor, function, arguments, dtype)
                if journal is None:
                    continue
                tolerance = replay.Tolerance(relative=relative, absolute=relative)
                report = await replay.replay(journal, device, programs=True, tolerance=tolerance)
                operations, compared = operations + report.operations, compared + report.compared
                differ += [f"{name} {dtype}: {one}" for one in report.differences[:1]]
                ended += [f"{name} {dtype}: {one.replayed or one.recorded}" for one in report.failures[:1]]
    _say(
        f"against: {asked} of {len(found.ways)} functions, {operations} operations of the processor on "
        f"{backend}, {compared} arrays compared, {len(differ)} functions differ, {len(ended)} ended "
        f"otherwise; {time.perf_counter() - began:.0f} s"
    )
    for line in (*differ, *ended):
        _say(f"    {line:.300}")


@attrs.define
class Twice:
    """Functions that are recorded and replayed on one device.

    Attributes:
        device: The device.
        found: What became of the functions.
        operations, compared: Operations that were replayed, and arrays that were compared.
        grew: Calls with larger arrays.
    """

    device: ta.Device
    found: Found
    operations: int = 0
    compared: int = 0
    grew: int = 0

    async def call(self, name: str, function: Callable[..., Any], arguments: Arguments) -> None:
        """Call a function with small arrays and larger ones, and replay that."""
        start = time.perf_counter()
        sizes = [arguments, grown(arguments), *([LARGE[name]] if name in LARGE else [])]
        for number, way in enumerate(sizes):
            for dtype in ("float32", "float16") if number == 1 else ("float32", "float64", "float16"):
                journal = await _recorded(self.device, function, way, dtype)
                if journal is None:
                    continue
                self.grew += number > 0
                for _ in range(REPLAYS):
                    self.note(name, dtype, await replay.replay(journal, self.device, programs=True))
        if (took := time.perf_counter() - start) > SLOW:
            _say(f"    {name} took {took:.0f} s")

    def note(self, name: str, dtype: str, report: replay.Report) -> None:
        """Count a replay."""
        self.operations += report.operations
        self.compared += report.compared
        if report.is_same:
            return
        seen = self.found.varying.setdefault(name, {"dtypes": [], "ulps": 0})
        seen["dtypes"] = sorted({*seen["dtypes"], dtype})
        seen["ulps"] = max([seen["ulps"], *(one.ulps or 0 for one in report.differences)])
        seen["first"] = f"{(report.differences or report.failures)[0]}"[:200]


async def twice(system: ta.System, backend: str, found: Found) -> None:
    """Record each function on the GPU, and replay it there."""
    began, ways = time.perf_counter(), dict(found.ways)
    if any(name.startswith("linalg.") for name in ways):
        ways |= {f"sparse.{name}": (getattr(ta.sparse, name), LARGE[f"sparse.{name}"]) for name in SPARSE}
    async with system.open_device(backend, options=INLINE) as device:
        counted = Twice(device, found)
        for name, (function, arguments) in ways.items():
            if time.perf_counter() - began > found.seconds:
                break
            if found.only_large and name not in LARGE:
                continue
            found.determined.add(name)
            await counted.call(name, function, arguments)
    found.determined -= found.varying.keys()
    _say(
        f"twice: {len(found.determined) + len(found.varying)} of {len(ways)} functions, {counted.grew} calls "
        f"with larger arrays, {counted.operations} operations, {counted.compared} arrays compared, "
        f"{len(found.varying)} functions are not deterministic; {time.perf_counter() - began:.0f} s"
    )
    for name, seen in found.varying.items():
        _say(f"    {name}: {' '.join(seen['dtypes'])}, {seen['ulps']} ulps at most; {seen['first']}")


async def mixed(system: ta.System, backend: str) -> None:
    """Replay random work of every sort."""
    os.environ["TRIO_ACCEL_BACKEND"] = backend
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "replay"), str(ROOT / "tests" / "devices")]
    work: Any = import_module("random_work")
    for isolation, tasks, kills in (("inline", 4, 0), ("process", 4, 0), ("process", 1, 12)):
        began = time.perf_counter()
        options = {"retry": 3} if kills else {}
        journal, read, _ = await work.recorded(system, isolation, tasks, 300, kills=kills, **options)
        async with system.open_device(backend, options=INLINE) as device:
            report = await replay.replay(journal, device, programs=True)
        _say(
            f"mixed, {isolation}, {tasks} tasks, {kills} kills: {report.operations} operations, {len(read)} "
            f"results read, {report.compared} arrays compared, {len(report.differences)} differ, "
            f"{len(report.failures)} ended otherwise; {time.perf_counter() - began:.0f} s"
        )
        if not report.is_same:
            _say(f"{report}"[:1000])


async def _main(given: argparse.Namespace) -> None:
    found = Found(given.seconds, given.only_large, given.skip)
    async with ta.open_system("replays") as system:
        await found.find(system, given.rooms)
        for part in given.parts or ("mixed", "against", "twice"):
            try:
                if part == "mixed":
                    await mixed(system, given.backend)
                else:
                    await {"against": against, "twice": twice}[part](system, given.backend, found)
            except Exception as error:  # noqa: BLE001  # the other parts run
                _say(f"{part}: {error!r}"[:2000])
        async with system.open_device(given.backend, options=INLINE) as device:
            card = device.info.description
    if given.json:
        document = {
            "date": f"{dt.datetime.now(tz=dt.UTC).date()}",
            "hardware": card,
            "determined": sorted(found.determined),
            "varying": {
                name: {"dtypes": seen["dtypes"], "ulps": seen["ulps"]}
                for name, seen in sorted(found.varying.items())
            },
        }
        await trio.Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="mixed|against|twice")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=600.0, help="the most of a part")
    parser.add_argument("--skip", type=int, default=0, help="functions that the first part leaves out")
    parser.add_argument("--only-large", action="store_true", help="of those that add in any order")
    trio.run(_main, parser.parse_args())


if __name__ == "__main__":
    main()
