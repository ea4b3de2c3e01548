"""Whole requests beside PyTorch and their floor: ``python -m benchmarks.gpu.requests [--backend B]``.

A request is a host array of 8 × 512 float32, one product or three operations, and a host array. Its peers
are PyTorch, which blocks, and the floor in a Trio program: CuPy's calls, pinned memory, and an event that
is polled between checkpoints. The same follow by `trio_accel.step`, also with a number that changes. Then
come small asks on data that is there, requests of 16 askers, and a large product that is cold: NumPy works
between two asks for longer than a processor keeps the code and the clock of the driver's path.
Everything is measured in turns. Without PyTorch and CuPy the columns of the peers are empty.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import trio

import trio_accel as ta

__all__ = ["main"]

Ask = Callable[[], Awaitable[object]]
_ROUNDS, _CALLS, _WARM, _ASKERS = 7, 150, 40, 16
_ROWS, _SIZE = 8, 512
_SOFTMAX = r"""
extern "C" __global__ void soft(const float* x, float* y) {
  __shared__ float m[512];
  int t = threadIdx.x;
  const float* row = x + blockIdx.x * 512;
  m[t] = row[t];
  __syncthreads();
  for (int s = 256; s; s /= 2) { if (t < s) m[t] = fmaxf(m[t], m[t + s]); __syncthreads(); }
  float top = m[0];
  __syncthreads();
  float e = expf(row[t] - top);
  m[t] = e;
  __syncthreads();
  for (int s = 256; s; s /= 2) { if (t < s) m[t] += m[t + s]; __syncthreads(); }
  y[blockIdx.x * 512 + t] = e / m[0];
}
"""


_COLD = np.random.default_rng(1).random((1024, 1024))


async def _each(ask: Ask, calls: int, *, is_cold: bool = False) -> float:
    """Return the microseconds of one ask: the median of several, one after the other."""
    took = np.empty(calls)
    for number in range(calls):
        if is_cold:
            np.sort(_COLD, axis=None)
        start = time.perf_counter()
        await ask()
        took[number] = time.perf_counter() - start
    return float(np.median(took)) * 1e6


async def _together(ask: Ask, calls: int) -> float:
    """Return the microseconds for each ask of several askers."""

    async def one() -> None:
        for _ in range(calls // _ASKERS * 4):
            await ask()

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(_ASKERS):
            nursery.start_soon(one)
    return (time.perf_counter() - start) * 1e6 / (calls // _ASKERS * 4 * _ASKERS)


def _blocking(call: Callable[[], object]) -> Ask:
    async def ask() -> object:
        return call()

    return ask


class _Inputs:
    """What all sides compute with."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.x = draw.random((_ROWS, _SIZE), np.float32)
        self.w = draw.random((_SIZE, _SIZE), np.float32)
        self.small = draw.random(1024, np.float32)
        self.large = draw.random(65536, np.float32)
        self.big = draw.random((4096, 4096), np.float32)
        scores = np.maximum(self.x.astype(np.float64) @ self.w, 0) @ self.w
        shares = np.exp(scores - scores.max(1, keepdims=True))
        self.three = shares / shares.sum(1, keepdims=True)
        self.one = self.x.astype(np.float64) @ self.w


async def _ours(device: ta.Device, given: _Inputs) -> Mapping[str, Ask]:
    x, (w, a, large) = given.x, [await device.put(each) for each in (given.w, given.small, given.large)]
    linalg, relu, softmax, add, total = ta.linalg, ta.nn.relu, ta.arrays.softmax, ta.arrays.add, ta.arrays.sum

    def one() -> Awaitable[object]:
        return linalg.matmul(x, w).to_host()

    def three() -> Awaitable[object]:
        return softmax(relu(linalg.matmul(x, w)) @ w, axis=1).to_host()

    def product(x: Any, w: Any) -> ta.Call[Any]:
        return linalg.matmul(x, w).to_host()

    def shares(x: Any, w: Any) -> ta.Call[Any]:
        return softmax(relu(linalg.matmul(x, w)) @ w, axis=1).to_host()

    def scaled(x: Any, w: Any, factor: float) -> ta.Call[Any]:
        return (linalg.matmul(x, w) * factor).to_host()

    factors = itertools.count(1)
    step_of_one, step_of_three, step_of_two = ta.step(product), ta.step(shares), ta.step(scaled)
    steps: dict[str, Ask] = {
        "step of one": lambda: step_of_one(x, w),
        "step of three": lambda: step_of_three(x, w),
        "step, new number": lambda: step_of_two(x, w, 1 / next(factors)),
    }
    asks: list[tuple[Ask, Any]] = [(one, given.one), (three, given.three)]
    asks += [(steps["step of one"], given.one), (steps["step of three"], given.three)]
    for ask, wanted in asks:
        for _ in range(_WARM):
            got: Any = await ask()
            assert np.allclose(got, wanted, rtol=2e-3, atol=1e-6), "a request is wrong"
    big = await device.put(given.big)
    return {
        "request of one": one,
        "request of three": three,
        **steps,
        "16 askers of one": one,
        "16 askers, step": steps["step of one"],
        "product of 4096": lambda: linalg.matmul(big, big),
        "cold product of 4096": lambda: linalg.matmul(big, big),
        "product of 512": lambda: linalg.matmul(w, w),
        "add of 1024": lambda: add(a, a),
        "sum of 1024": lambda: total(a),
        "put 4 KiB": lambda: device.put(given.small),
        "to_host 256 KiB": large.to_host,
    }


def _torch(given: _Inputs) -> Mapping[str, Ask]:
    torch: Any = import_module("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    x, w, a, large = (torch.from_numpy(each) for each in (given.x, given.w, given.small, given.large))
    w_there, a_there, large_there = w.cuda(), a.cuda(), large.cuda()
    big = torch.from_numpy(given.big).cuda()
    factors = itertools.count(1)

    def one() -> object:
        return (x.cuda() @ w_there).cpu().numpy()

    def three() -> object:
        return torch.softmax(torch.relu(x.cuda() @ w_there) @ w_there, 1).cpu().numpy()

    def scaled() -> object:
        return ((x.cuda() @ w_there) * (1 / next(factors))).cpu().numpy()

    def waited(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            made = call()
            torch.cuda.synchronize()
            return made

        return run

    calls: dict[str, Callable[[], object]] = {
        "request of one": one,
        "request of three": three,
        "step of one": one,
        "step of three": three,
        "step, new number": scaled,
        "16 askers of one": one,
        "16 askers, step": one,
        "product of 4096": waited(lambda: big @ big),
        "cold product of 4096": waited(lambda: big @ big),
        "product of 512": waited(lambda: w_there @ w_there),
        "add of 1024": waited(lambda: torch.add(a_there, a_there)),
        "sum of 1024": waited(lambda: torch.sum(a_there)),
        "put 4 KiB": waited(a.cuda),
        "to_host 256 KiB": lambda: large_there.cpu().numpy(),
    }
    return {name: _blocking(call) for name, call in calls.items()}


def _floor(given: _Inputs) -> Mapping[str, Ask]:
    cupy: Any = import_module("cupy")
    import_module("cupy.cublas")

    def pinned() -> Any:
        memory = cupy.cuda.alloc_pinned_memory(given.x.nbytes)
        return np.frombuffer(memory, np.float32, given.x.size).reshape(given.x.shape)

    w, stream = cupy.asarray(given.w), cupy.cuda.Stream(non_blocking=True)
    host_in, host_out = pinned(), pinned()
    x, first, second = (cupy.empty((_ROWS, _SIZE), np.float32) for _ in range(3))
    event = cupy.cuda.Event(block=False, disable_timing=True)
    relu = cupy.ElementwiseKernel("float32 x", "float32 y", "y = max(x, 0.f)", "relu")
    soft = cupy.RawKernel(_SOFTMAX, "soft")
    multiply, copy = cupy.matmul, cupy.cuda.runtime.memcpyAsync

    async def request(number: int) -> object:
        with stream:
            host_in[...] = given.x
            x.set(host_in, stream=stream)
            multiply(x, w, out=first)
            if number > 1:
                relu(first, first)
                multiply(first, w, out=second)
                soft((_ROWS,), (_SIZE,), (second, first))
            copy(host_out.ctypes.data, first.data.ptr, given.x.nbytes, 2, stream.ptr)
            event.record(stream)
        while not event.done:  # noqa: ASYNC110  # it is the driver's
            await trio.lowlevel.checkpoint()
        return host_out.copy()

    one, three = partial(request, 1), partial(request, 3)
    return {"request of one": one, "request of three": three, "step of one": one, "step of three": three}


async def _measure(backend: str, calls: int) -> None:
    given, sides = _Inputs(), dict[str, Mapping[str, Ask]]()
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(ta.open_system("requests"))
        for isolation in ("inline", "process"):
            options = ta.DeviceOptions(isolation=isolation)
            device = await system.open_device(backend, options=options, name=isolation)
            sides[isolation] = await _ours(await stack.enter_async_context(device), given)
        for name, peer in (("PyTorch", _torch), ("floor", _floor)):
            try:
                sides[name] = peer(given)
            except ImportError as error:
                _say(f"{name}: {error}")
        columns = ("PyTorch", "floor", "inline", "process")
        _say(f"{'µs':20}" + "".join(f"{column:>10}" for column in columns) + "   of the peer")
        for name in sides["inline"]:
            took: dict[str, list[float]] = {}
            for number in range(_ROUNDS):
                for side, asks in sides.items():
                    if name not in asks:
                        continue
                    is_many = name.startswith("16") and side != "PyTorch"
                    is_cold = name.startswith("cold")
                    alone = partial(_each, is_cold=is_cold)
                    run = partial(_together if is_many else alone, asks[name])
                    if not number:
                        await run(4 if is_cold else _WARM)
                    took.setdefault(side, []).append(await run(8 if is_cold else calls))
            best = {side: float(np.median(each)) for side, each in took.items()}
            row = "".join(f"{best[side]:10.1f}" if side in best else " " * 10 for side in columns)
            least = best.get("floor", best.get("PyTorch", float("nan")))
            _say(f"{name:20}{row}   {best['inline'] / least:.2f} {best['process'] / least:.2f}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--calls", type=int, default=_CALLS)
    given = parser.parse_args()
    trio.run(_measure, given.backend, given.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
