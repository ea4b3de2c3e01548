"""Large everyday calls beside PyTorch: ``python -m benchmarks.gpu.everyday [--isolation I] [--scale S]``.

Each row is one function on large arrays that are there: milliseconds of one ask, and of one of eight that
are in flight. PyTorch's calls are waited for by its synchronise: after each, and after eight. Both sides are
measured in turns, and their results are compared once. The last line has the geometric means of the ratios.
Without PyTorch its columns are empty.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

__all__ = ["main"]

Call = Callable[[Any], Any]
_ROUNDS, _IN_FLIGHT = 7, 8
_SLOW = 20e-3
"""Seconds from which fewer rounds will do."""


def _rows() -> Sequence[tuple[str, Call, Call | None]]:
    """Return names, our calls and PyTorch's, each of a table of arrays."""
    a, g, n, s = ta.arrays, ta.linalg, ta.nn, ta.fft
    torch: Any = _torch()
    t: Any = torch
    f: Any = torch and torch.nn.functional
    return (
        ("add", lambda v: a.add(v.a, v.b), lambda v: v.a + v.b),
        ("exp", lambda v: a.exp(v.a), lambda v: t.exp(v.a)),
        ("clip", lambda v: a.clip(v.a, 0.25, 0.75), lambda v: t.clamp(v.a, 0.25, 0.75)),
        ("where", lambda v: a.where(v.mask, v.a, v.b), lambda v: t.where(v.mask, v.a, v.b)),
        ("cast to float16", lambda v: v.a.cast(ta.DType.float16), lambda v: v.a.half()),
        ("transposed copy", lambda v: v.a.T.copy(), lambda v: v.a.T.contiguous()),
        ("concat", lambda v: a.concat([v.a, v.b]), lambda v: t.cat([v.a, v.b])),
        ("sum", lambda v: a.sum(v.a), lambda v: t.sum(v.a)),
        ("sum of columns", lambda v: a.sum(v.a, axis=0), lambda v: t.sum(v.a, 0)),
        ("mean of rows", lambda v: a.mean(v.a, axis=1), lambda v: t.mean(v.a, 1)),
        ("var of rows", lambda v: a.var(v.a, axis=1), lambda v: t.var(v.a, 1, correction=0)),
        ("argmax of rows", lambda v: a.argmax(v.a, axis=1), lambda v: t.argmax(v.a, 1)),
        ("softmax", lambda v: a.softmax(v.a, axis=1), lambda v: t.softmax(v.a, 1)),
        ("layer_norm", lambda v: a.layer_norm(v.a), lambda v: f.layer_norm(v.a, v.a.shape[1:])),
        ("gelu", lambda v: n.gelu(v.a), lambda v: f.gelu(v.a)),
        ("cumulative_sum", lambda v: a.cumulative_sum(v.flat), lambda v: t.cumsum(v.flat, 0)),
        ("sort", lambda v: a.sort(v.short, stable=False), lambda v: t.sort(v.short)[0]),
        (
            "argsort",
            lambda v: a.argsort(v.short),
            lambda v: t.argsort(v.short, stable=True),
        ),
        ("top_k of rows", lambda v: _part(a.top_k(v.a, 10), 0), lambda v: t.topk(v.a, 10)[0]),
        ("take of rows", lambda v: a.take(v.a, v.rows, axis=0), lambda v: v.a[v.rows]),
        (
            "searchsorted",
            lambda v: a.searchsorted(v.ordered, v.short),
            lambda v: t.searchsorted(v.ordered, v.short),
        ),
        (
            "bincount",
            lambda v: a.bincount(v.counts, minlength=1024),
            lambda v: t.bincount(v.counts, minlength=1024),
        ),
        (
            "histogram",
            lambda v: _part(a.histogram(v.flat, 100, range=(0.0, 1.0)), 0),
            lambda v: t.histc(v.flat, 100, 0.0, 1.0),
        ),
        ("median of rows", lambda v: a.median(v.odd, axis=1), lambda v: t.median(v.odd, 1)[0]),
        ("unique", lambda v: a.unique_values(v.counts), lambda v: t.unique(v.counts)),
        ("matmul", lambda v: g.matmul(v.a, v.b), lambda v: v.a @ v.b),
        ("matmul float16", lambda v: g.matmul(v.half, v.half), lambda v: v.half @ v.half),
        (
            "einsum bij,bjk",
            lambda v: g.einsum("bij,bjk->bik", v.stack, v.stack),
            lambda v: t.einsum("bij,bjk->bik", v.stack, v.stack),
        ),
        ("cholesky", lambda v: g.cholesky(v.positive), lambda v: t.linalg.cholesky(v.positive)),
        ("solve", lambda v: g.solve(v.system, v.right), lambda v: t.linalg.solve(v.system, v.right)),
        (
            "svd",
            lambda v: _part(g.svd(v.tall, False), 1),
            lambda v: t.linalg.svd(v.tall, full_matrices=False)[1],
        ),
        ("eigh", lambda v: _part(g.eigh(v.symmetric), 0), lambda v: t.linalg.eigh(v.symmetric)[0]),
        ("fft", lambda v: s.fft(v.waves), lambda v: t.fft.fft(v.waves)),
        ("rfft2", lambda v: s.rfft2(v.a), lambda v: t.fft.rfft2(v.a)),
        (
            "conv2d",
            lambda v: n.conv2d(v.images, v.filters, padding=1),
            lambda v: f.conv2d(v.images, v.filters, padding=1),
        ),
        (
            "attention",
            lambda v: n.scaled_dot_product_attention(v.heads, v.heads, v.heads),
            lambda v: f.scaled_dot_product_attention(v.heads, v.heads, v.heads),
        ),
    )


def _hosts(n: int) -> dict[str, npt.NDArray[Any]]:
    draw = np.random.default_rng(0)
    a = draw.random((n, n), np.float32)
    small, side = max(n // 8, 8), max(n // 64, 4)
    square = draw.random((small, small), np.float32)
    return {
        "a": a,
        "b": draw.random((n, n), np.float32),
        "mask": a > 0.5,
        "flat": a.reshape(-1),
        "short": draw.random(n * n // 4, np.float32),
        "rows": draw.integers(0, n, 4 * n),
        "ordered": np.sort(draw.random(n * n // 16, np.float32)),
        "counts": draw.integers(0, 1024, n * n, np.int32),
        "odd": a[:, : n - 1].copy(),
        "half": (a - 0.5).astype(np.float16),
        "stack": draw.random((n // 2, 64, 64), np.float32),
        "positive": a @ a.T / n + np.eye(n, dtype=np.float32),
        "system": (a + n * np.eye(n, dtype=np.float32))[: n // 2, : n // 2].copy(),
        "right": draw.random((n // 2, 8), np.float32),
        "tall": square,
        "symmetric": square + square.T,
        "waves": (a + 1j * a).astype(np.complex64)[:, : n // 2].copy(),
        "images": draw.random((32, 64, side, side), np.float32),
        "filters": draw.random((64, 64, 3, 3), np.float32) - 0.5,
        "heads": (draw.random((8, 16, max(n // 4, 16), 64), np.float32) - 0.5).astype(np.float16),
    }


class _Arrays:
    """Arrays of one side, by their names."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.__dict__.update(arrays)


def _torch() -> Any:
    try:
        torch: Any = import_module("torch")
    except ImportError:
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch


async def _part(asked: Awaitable[Any], number: int) -> Any:
    """Wait for a call with several results, and take one."""
    return (await asked)[number]


async def _alone(ask: Callable[[], Awaitable[object]], rounds: int) -> float:
    took = np.empty(rounds)
    for number in range(rounds):
        start = time.perf_counter()
        await ask()
        took[number] = time.perf_counter() - start
    return float(np.median(took))


async def _eight(ask: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(_IN_FLIGHT):
            nursery.start_soon(_ask, ask)
    return (time.perf_counter() - start) / _IN_FLIGHT


async def _ask(ask: Callable[[], Awaitable[object]]) -> None:
    await ask()


async def _measure(backend: str, isolation: Literal["inline", "process"], scale: float, only: str) -> None:
    torch, n = _torch(), int(4096 * scale)
    hosts = _hosts(n)
    theirs = None if torch is None else _Arrays({k: torch.from_numpy(x).cuda() for k, x in hosts.items()})
    options = ta.DeviceOptions(isolation=isolation)
    async with (
        ta.open_system("everyday") as system,
        await system.open_device(backend, options=options) as device,
    ):
        ours = _Arrays({k: await device.put(x) for k, x in hosts.items()})
        alone, eight = list[float](), list[float]()
        _say(f"{'ms':18}{'one':>9}{'PyTorch':>9}{'ratio':>7}{'of 8':>9}{'PyTorch':>9}{'ratio':>7}")
        for name, call, peer in _rows():
            if only and only not in name:
                continue
            row = await _row(call, peer, ours, theirs, torch)
            if row is None:
                _say(f"{name:18}  differs from PyTorch")
                continue
            one, one_peer, each, each_peer = row
            if one_peer:
                alone.append(one / one_peer)
                eight.append(each / each_peer)
                told = f"{one * 1e3:9.3f}{one_peer * 1e3:9.3f}{one / one_peer:7.2f}"
                _say(f"{name:18}{told}{each * 1e3:9.3f}{each_peer * 1e3:9.3f}{each / each_peer:7.2f}")
            else:
                _say(f"{name:18}{one * 1e3:9.3f}{'':16}{each * 1e3:9.3f}")
        if alone:
            means = (float(np.exp(np.mean(np.log(each)))) for each in (alone, eight))
            _say("{} calls, geometric means: alone {:.3f}, eight in flight {:.3f}".format(len(alone), *means))


async def _row(
    call: Call, peer: Call | None, ours: Any, theirs: Any, torch: Any
) -> tuple[float, float, float, float] | None:
    """Measure one function: seconds alone and of eight, ours and PyTorch's; None if the results differ."""

    async def ask() -> Any:
        return await call(ours)

    await ask()
    await ask()
    got = await ask()
    if torch is None or peer is None:
        return await _alone(ask, 3), 0.0, await _eight(ask), 0.0

    def waited(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            peer(theirs)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    wanted = peer(theirs)
    waited(_IN_FLIGHT)
    await _eight(ask)
    found = (await got.to_host()).astype(np.complex128)
    is_right = np.allclose(found, wanted.cpu().numpy().astype(np.complex128), rtol=2e-2, atol=2e-2)
    del got, wanted
    rounds = 3 if waited(1) > _SLOW else _ROUNDS
    took = [
        (
            await _alone(ask, 3),
            float(np.median([waited(1) for _ in range(3)])),
            await _eight(ask),
            waited(_IN_FLIGHT),
        )
        for _ in range(rounds)
    ]
    one, one_peer, each, each_peer = (float(np.median(column)) for column in zip(*took, strict=True))
    return (one, one_peer, each, each_peer) if is_right else None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--isolation", choices=("inline", "process"), default="inline")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="", help="part of a name")
    given = parser.parse_args()
    trio.run(_measure, given.backend, given.isolation, given.scale, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
