"""Measure the plug-in beside PyTorch in the same run: ``python plugins/torch/measure.py [--kind cuda]``.

It prints a line for each figure: turns of the loop for each completion, arrays after SIGKILLs and after a
lost context, a product, and BERT with random weights if `transformers` is installed. Each section runs
although another one failed, and the exit code is the number of failed sections. Times are medians of rounds
in which both sides take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

_PLUG_IN = Path(__file__).parent
_ROOT = _PLUG_IN.parents[1]
_METADATA = "TRIO_ACCEL_TORCH_METADATA"


def restart_with_plug_in(kind: str) -> None:
    """Start this program again, so that it and its workers find the plug-in without an installation."""
    if _METADATA in os.environ:
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(_PLUG_IN))
        from conformance import write_metadata

        write_metadata(Path(folder))
        env = {**os.environ, _METADATA: folder, "TRIO_ACCEL_TORCH": kind, "TRIO_ACCEL_BACKEND": "torch"}
        searched = [str(_ROOT), str(_PLUG_IN), folder, os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
        code = subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode  # noqa: S603  # this program
    sys.exit(code)


def say(text: str) -> None:
    """Print a line at once: who ends the program for want of time has the others."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Measurement:
    """The sections, each on devices of its own.

    Args:
        kind: ``"cpu"`` or a kind of card.
        rounds: Turns of each comparison.
    """

    def __init__(self, kind: str, rounds: int) -> None:
        import torch
        import trio

        import trio_accel as ta

        self._torch: Any = torch
        self._trio = trio
        self._ta = ta
        self._is_card = kind != "cpu"
        self._where = torch.device(kind)
        self._module: Any = getattr(torch, kind)
        self._rounds = rounds
        self._size = 4096 if self._is_card else 512

    def _wait(self) -> None:
        if self._is_card:
            self._module.synchronize()

    def _isolations(self) -> tuple[str, ...]:
        from trio_accel.backends import resolve

        found: tuple[str, ...] = resolve("torch")[1].isolations
        return found

    def _options(self, isolation: str, **more: Any) -> Any:
        often = self._ta.Intensity(1000, 60.0)
        return self._ta.DeviceOptions(isolation=isolation, intensity=often, **more)

    async def _on(self, isolation: str, measure: Callable[[Any], Awaitable[None]], **more: Any) -> None:
        options = self._options(isolation, **more)
        async with (
            self._ta.open_system("measure") as system,
            system.open_device("torch", options=options) as device,
        ):
            await measure(device)

    async def completion(self) -> None:
        """Turns of the loop while one product runs, and the time of a tiny request."""
        for isolation in self._isolations():
            await self._on(isolation, partial(self._completion, isolation))

    async def _completion(self, isolation: str, device: Any) -> None:
        ta, turns = self._ta, 0

        class Turns(self._trio.abc.Instrument):  # type: ignore[misc, name-defined]
            def before_io_wait(self, timeout: float) -> None:
                nonlocal turns
                turns += 1

        x = await device.full((self._size, self._size), 0.5, "float32")
        tiny = await device.put([1.0])
        for _ in range(5):
            await ta.linalg.matmul(x, x)
            await ta.arrays.add(tiny, 1)
        turns_of, took, of_tiny = [], [], []
        counter = Turns()
        for _ in range(20):
            self._trio.lowlevel.add_instrument(counter)
            turns, began = 0, time.perf_counter()
            for _ in range(4):
                await ta.linalg.matmul(x, x)
            took.append((time.perf_counter() - began) / 4)
            turns_of.append(turns / 4)
            self._trio.lowlevel.remove_instrument(counter)
        for _ in range(200):
            began = time.perf_counter()
            await ta.arrays.add(tiny, 1)
            of_tiny.append(time.perf_counter() - began)
        say(
            f"completion, {isolation}: product of {self._size} {statistics.median(took) * 1e3:.3f} ms, "
            f"{statistics.median(turns_of):.1f} turns of the loop each (most {max(turns_of):.1f}); "
            f"tiny request {statistics.median(of_tiny) * 1e3:.3f} ms"
        )

    async def kills(self) -> None:
        """Twelve SIGKILLs in a row."""
        if "process" in self._isolations():
            await self._on("process", partial(self._lose, "SIGKILL", self._kill))
            await self._on("process", partial(self._lose, "SIGKILL, with a spare", self._kill), spares=1)
        else:
            say(f"kills: no workers, isolations are {self._isolations()}")

    async def recovery(self) -> None:
        """From a SIGKILL to the next right result, beside the CPU backend in turns."""
        options = self._options("process")
        rows: dict[str, list[float]] = {"torch": [], "cpu": []}
        async with self._ta.open_system("measure") as system, contextlib.AsyncExitStack() as stack:
            devices = {
                name: await stack.enter_async_context(system.open_device(name, options=options))
                for name in rows
            }
            for turn in range(-1, self._rounds):
                for name, device in devices.items():
                    # The next worker is whole by then, and its start is no part of a crash loop.
                    await self._trio.sleep(3)
                    took = await self._recovered(device)
                    if turn >= 0:
                        rows[name].append(took)
        medians = {name: statistics.median(row) * 1e3 for name, row in rows.items()}
        say(
            f"recovery, {self._rounds} SIGKILLs each in turns: plug-in {medians['torch']:.0f} ms (most "
            f"{max(rows['torch']) * 1e3:.0f}), CPU backend {medians['cpu']:.0f} ms (most "
            f"{max(rows['cpu']) * 1e3:.0f}), ratio {medians['torch'] / medians['cpu']:.2f}"
        )

    async def _recovered(self, device: Any) -> float:
        import numpy as np

        host = np.arange(1e6, dtype=np.float32)
        x = await device.put(host)
        await self._ta.arrays.add(x, 1)
        began = time.perf_counter()
        await self._kill(device)
        while True:
            try:
                right = await (await self._ta.arrays.add(await device.put(host), 1)).to_host()
                break
            except self._ta.AccelError:
                # The worker is being replaced: the loop asks again, and the time counts.
                continue
        took = time.perf_counter() - began
        np.testing.assert_array_equal(right, host + 1)
        return took

    async def poison(self) -> None:
        """A context that is lost in the worker, six times."""
        if "process" in self._isolations():
            await self._on("process", partial(self._lose, "poison", self._poison))
        else:
            say(f"poison: no workers, isolations are {self._isolations()}")

    async def _kill(self, device: Any) -> None:
        os.kill((await device.statistics()).pid, signal.SIGKILL)

    async def _poison(self, device: Any) -> None:
        self._ta.testing.poison(device)

    async def _lose(self, how: str, lose: Callable[[Any], Awaitable[None]], device: Any) -> None:
        import numpy as np

        ta = self._ta
        host = np.arange(1e6, dtype=np.float32)
        again, errors, intact, pids = [], dict[str, int](), 0, set[int]()
        # Between two of them the next spare comes up.
        rounds, pause = (4, 4.0) if "spare" in how else (12, 0.0)
        for _ in range(rounds):
            x = await device.put(host)
            pids.add((await device.statistics()).pid)
            await ta.arrays.add(x, 1)
            began = time.perf_counter()
            await lose(device)
            with self._trio.fail_after(60):
                while True:
                    try:
                        y = await device.put(host)
                        right = await (await ta.arrays.add(y, 1)).to_host()
                        break
                    except ta.AccelError as error:
                        errors[type(error).__name__] = errors.get(type(error).__name__, 0) + 1
            again.append(time.perf_counter() - began)
            np.testing.assert_array_equal(right, host + 1)
            try:
                intact += bool(np.array_equal(await x.to_host(), host))
            except ta.AccelError as error:
                name = f"array: {type(error).__name__}"
                errors[name] = errors.get(name, 0) + 1
            await self._trio.sleep(pause)
        say(
            f"{how}: {rounds} times, {intact} arrays intact, {len(pids)} workers, next right result after "
            f"{statistics.median(again) * 1e3:.0f} ms (most {max(again) * 1e3:.0f}); errors {errors}"
        )

    async def product(self) -> None:
        """A product beside `torch.mm`, in three types."""
        for isolation in self._isolations():
            await self._on(isolation, partial(self._product, isolation))

    async def _product(self, isolation: str, device: Any) -> None:
        ta, torch, size = self._ta, self._torch, self._size
        for name in ("float32", "float16", "bfloat16") if self._is_card else ("float32",):
            a = await device.full((size, size), 0.5, name)
            out = await device.empty((size, size), name)
            mine = torch.full((size, size), 0.5, dtype=getattr(torch, name), device=self._where)
            room = torch.empty_like(mine)
            calls, alone, asked = 20, list[float](), list[float]()
            with torch.inference_mode():
                for turn in range(-2, self._rounds):
                    self._wait()
                    began = time.perf_counter()
                    for _ in range(calls):
                        torch.mm(mine, mine, out=room)
                    self._wait()
                    middle = time.perf_counter()
                    async with self._trio.open_nursery() as nursery:
                        for _ in range(calls):
                            nursery.start_soon(partial(self._multiply, a, out))
                    end = time.perf_counter()
                    one = time.perf_counter()
                    await ta.linalg.matmul(a, a, out=out)
                    one = time.perf_counter() - one
                    if turn >= 0:
                        alone.append((middle - began) / calls)
                        asked.append((end - middle) / calls)
            ratio = statistics.median(asked) / statistics.median(alone)
            same = torch.equal(
                torch.from_numpy((await out[:8, :8].to_host()).astype("float32")), room[:8, :8].float().cpu()
            )
            say(
                f"product of {size}, {name}, {isolation}: PyTorch {statistics.median(alone) * 1e3:.3f} ms, "
                f"plug-in {statistics.median(asked) * 1e3:.3f} ms, ratio {ratio:.3f}; "
                f"one alone {one * 1e3:.3f} ms; {'equal' if same else 'DIFFERENT'}"
            )

    async def _multiply(self, a: Any, out: Any) -> None:
        await self._ta.linalg.matmul(a, a, out=out)

    async def bert(self) -> None:
        """BERT's forward of 8 texts of 64 tokens as a program, beside the same model by itself."""
        if importlib.util.find_spec("transformers") is None:
            say("bert: transformers is not installed")
            return
        import numpy as np

        from benchmarks.gpu._bert import Bert, random_weights

        weights = random_weights()
        ids = np.random.default_rng(0).integers(0, 30000, (8, 64))
        there = {name: self._torch.from_numpy(weight).to(self._where) for name, weight in weights.items()}
        plain, given = Bert(there), self._torch.from_numpy(ids).to(self._where)
        for isolation in self._isolations():
            await self._on(
                isolation,
                partial(self._bert, isolation, weights, ids, plain, given),
                **({"preload": (Bert.__module__,)} if isolation == "process" else {}),
            )

    async def _bert(
        self, isolation: str, weights: Any, ids: Any, plain: Any, given: Any, device: Any
    ) -> None:
        ta, calls = self._ta, 20 if self._is_card else 1
        arrays = {name: await device.put(weight) for name, weight in weights.items()}
        async with ta.open_program(device, type(plain), arrays) as program:
            x = await device.put(ids)
            found = await (await program.ask("encode", x)).to_host()
            difference = float(abs(found - plain.encode(given).cpu().numpy()).max())
            alone, alone_one, asked, asked_one = list[float](), list[float](), list[float](), list[float]()
            for turn in range(-2, self._rounds):
                marks = [self._now()]
                for _ in range(calls):
                    plain.encode(given)
                marks.append(self._now())
                async with self._trio.open_nursery() as nursery:
                    for _ in range(calls):
                        nursery.start_soon(program.ask, "encode", x)
                marks.append(self._now())
                plain.encode(given)
                marks.append(self._now())
                await program.ask("encode", x)
                marks.append(self._now())
                if turn >= 0:
                    steps = [after - before for before, after in itertools.pairwise(marks)]
                    for row, step in zip((alone, asked, alone_one, asked_one), steps, strict=True):
                        row.append(step)
            of_many = [statistics.median(row) / calls * 1e3 for row in (alone, asked)]
            of_one = [statistics.median(row) * 1e3 for row in (alone_one, asked_one)]
            say(
                f"bert, {isolation}: PyTorch, plug-in, {calls} calls: {of_many[0]:.3f}, {of_many[1]:.3f} "
                f"ms each, ratio {of_many[1] / of_many[0]:.3f}; one: {of_one[0]:.3f} and {of_one[1]:.3f} ms, "
                f"ratio {of_one[1] / of_one[0]:.3f}; differs by {difference:g}"
            )

    def _now(self) -> float:
        self._wait()
        return time.perf_counter()


def main() -> int:
    """Measure, and return how many sections failed."""
    sections = ("completion", "product", "bert", "poison", "kills", "recovery")
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="*", default=sections)
    parser.add_argument("--kind", default="cpu", choices=["cpu", "cuda", "xpu", "mps"])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    restart_with_plug_in(given.kind)
    import trio

    measurement, failed = Measurement(given.kind, given.rounds), 0
    for name in given.sections:
        began = time.perf_counter()
        try:
            trio.run(getattr(measurement, name))
        except Exception:  # noqa: BLE001  # the other sections are to run
            failed += 1
            say(f"{name} FAILED\n{traceback.format_exc()}")
        say(f"({name}: {time.perf_counter() - began:.0f} s)")
    return failed


if __name__ == "__main__":
    sys.exit(main())
