"""Functions of the CPU beside NumPy, SciPy and PyTorch: ``python -m benchmarks.cpu_functions [--only NAME]``.

Each row is one function of arrays that are there: milliseconds of processor time of one call through the
public function, of the peer's call, and their ratio. Both are taken in turns, and the least of each counts. A
peer that is not installed leaves its rows out. The last column is what was set as a goal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio

import trio_accel as ta

__all__ = ["main"]

_Ours: TypeAlias = Callable[[Any], Awaitable[object]]
_Theirs: TypeAlias = Callable[[Any], object]
_Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
_scipy: Any = import_module("scipy")
_numpy: Any = np
_SECONDS = 0.6
"""Processor time of one row and side, about."""


@attrs.frozen
class _Row:
    """A function, its peer's, and the most of the peer's time that it may take."""

    name: str
    ours: _Ours
    theirs: _Theirs
    goal: float = 2.0


def _attend(q: Any) -> Any:
    """Compute attention as one writes it by hand."""
    scores = q @ q.swapaxes(-1, -2) * (1 / np.sqrt(q.shape[-1]))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True) @ q


def _rows(device: Any, random: Any, generator: Any) -> Sequence[_Row]:
    a, nn = ta.arrays, ta.nn
    rows = [
        _Row(f"{name}, {dtype}", ours, theirs)
        for dtype in ("float64", "float32", "int64", "int16")
        for name, ours, theirs in _ordering(a, dtype)
    ]
    many = 1_000_000
    rows += [
        _Row("quantile of 3 shares", lambda v: a.quantile(v.o.float64, [0.1, 0.5, 0.9]),
             lambda v: _numpy.quantile(v.h.float64, [0.1, 0.5, 0.9])),
        _Row("histogram, 100 bins", lambda v: a.histogram(v.o.float64, 100),
             lambda v: _numpy.histogram(v.h.float64, 100)),
        _Row("pad of 1000 x 1000", lambda v: a.pad(v.o.square, 8), lambda v: _numpy.pad(v.h.square, 8)),
        _Row("pad by reflection", lambda v: a.pad(v.o.square, 8, mode="reflect"),
             lambda v: _numpy.pad(v.h.square, 8, mode="reflect")),
        _Row("normal of 1e6, float64", lambda v: random.normal(many, dtype="float64"),
             lambda v: generator.standard_normal(many)),
        _Row("normal of 1e6, float32", lambda v: random.normal(many, dtype="float32"),
             lambda v: generator.standard_normal(many, np.float32)),
        _Row("uniform of 1e6, float64", lambda v: random.uniform(many, dtype="float64"),
             lambda v: generator.random(many)),
        _Row("uniform of 1e6, float32", lambda v: random.uniform(many, dtype="float32"),
             lambda v: generator.random(many, np.float32)),
        _Row("attention (2, 64, 8, 32)", lambda v: nn.scaled_dot_product_attention(v.o.q, v.o.q, v.o.q),
             lambda v: _attend(v.h.q)),
        _Row("attention (100, 4, 8, 8)", lambda v: nn.scaled_dot_product_attention(v.o.r, v.o.r, v.o.r),
             lambda v: _attend(v.h.r)),
        _Row("dstn of 512 x 512", lambda v: ta.fft.dstn(v.o.grid), lambda v: _scipy.fft.dstn(v.h.grid)),
        _Row("dctn of 512 x 512", lambda v: ta.fft.dctn(v.o.grid), lambda v: _scipy.fft.dctn(v.h.grid)),
        _Row("lstsq of 2000 x 50", lambda v: ta.linalg.lstsq(v.o.tall, v.o.right),
             lambda v: _numpy.linalg.lstsq(v.h.tall, v.h.right)),
        _Row("lstsq of 20 x 4", lambda v: ta.linalg.lstsq(v.o.few, v.o.right4),
             lambda v: _numpy.linalg.lstsq(v.h.few, v.h.right4)),
        _Row("eigsh of 400, k 6", lambda v: ta.sparse.eigsh(v.o.matrix, 6),
             lambda v: _scipy.sparse.linalg.eigsh(v.h.matrix, 6), 3.0),
    ]  # fmt: skip
    rows += _images()
    torch = _torch()
    if torch is not None:
        f = torch.nn.functional
        rows += [
            _Row("conv2d 16x64x56x56, 64x3x3", lambda v: nn.conv2d(v.o.images, v.o.filters, padding=1),
                 lambda v: f.conv2d(v.t.images, v.t.filters, padding=1), 3.0),
            _Row("conv2d 1x3x224x224, 64x7x7", lambda v: nn.conv2d(v.o.photo, v.o.wide, stride=2, padding=3),
                 lambda v: f.conv2d(v.t.photo, v.t.wide, stride=2, padding=3), 3.0),
            _Row("max_pool2d 3, stride 2", lambda v: nn.max_pool2d(v.o.images, 3, 2),
                 lambda v: f.max_pool2d(v.t.images, 3, 2), 3.0),
            _Row("avg_pool2d 2", lambda v: nn.avg_pool2d(v.o.images, 2),
                 lambda v: f.avg_pool2d(v.t.images, 2), 3.0),
        ]  # fmt: skip
    return rows


def _images() -> Sequence[_Row]:
    """Filters and interpolation of an image of 1080 x 1920, beside `scipy.ndimage`."""
    matrix = [[0.9, 0.1], [-0.1, 0.9]]
    calls: Sequence[_Call] = (
        ("gaussian_filter", (2.0,), {}),
        ("uniform_filter", (5,), {}),
        ("uniform_filter", (31,), {}),
        ("median_filter", (3,), {}),
        ("median_filter", (5,), {}),
        ("maximum_filter", (5,), {}),
        ("sobel", (), {}),
        ("affine_transform", (matrix, 3.0), {"order": 1}),
        ("affine_transform", (matrix, 3.0), {"order": 3}),
        ("zoom", (0.5,), {"order": 1}),
        ("zoom", (0.5,), {"order": 3}),
    )
    given = [("float_image", call) for call in calls] + [("byte_image", call) for call in calls]
    marks: Sequence[_Call] = [
        (name, (), {}) for name in ("binary_erosion", "label", "distance_transform_edt")
    ]

    def row(host: str, call: _Call) -> _Row:
        name, values, how = call
        told = ", ".join([name, *[str(one) for one in values[:1] if one is not matrix]])
        told += "".join(f", {key} {one}" for key, one in how.items()) + f" of {host.replace('_', ' ')}"
        ours, theirs = getattr(ta.ndimage, name), getattr(_scipy.ndimage, name)
        return _Row(
            told,
            lambda v: ours(getattr(v.o, host), *values, **how),
            lambda v: theirs(getattr(v.h, host), *values, **how),
            3.0,
        )

    return [row(host, call) for host, call in [*given, *[("drops", mark) for mark in marks]]]


def _ordering(a: Any, dtype: str) -> Sequence[tuple[str, _Ours, _Theirs]]:
    def ours(function: Callable[..., Awaitable[object]], *more: Any, **how: Any) -> _Ours:
        return lambda v: function(getattr(v.o, dtype), *more, **how)

    def theirs(function: Callable[..., object], *more: Any) -> _Theirs:
        return lambda v: function(getattr(v.h, dtype), *more)

    def top_k(x: Any, k: int) -> object:
        # Values and indices, the largest first.
        chosen = np.argpartition(x, len(x) - k)[len(x) - k :]
        chosen = chosen[np.argsort(x[chosen])[::-1]]
        return x[chosen], chosen

    return (
        ("sort", ours(a.sort), theirs(np.sort)),
        ("argsort", ours(a.argsort), theirs(np.argsort)),
        ("unique", ours(a.unique_values), theirs(np.unique)),
        ("median", ours(a.median), theirs(np.median)),
        ("top_k(10)", ours(a.top_k, 10), theirs(top_k, 10)),
    )


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError:
        return None


def _hosts() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    count = 200_000
    return {
        "float64": draw.random(count),
        "float32": draw.random(count, np.float32),
        "int64": draw.integers(-(2**40), 2**40, count),
        "int16": draw.integers(-(2**15), 2**15, count).astype(np.int16),
        "square": draw.random((1000, 1000)),
        "q": draw.standard_normal((2, 64, 8, 32)).astype(np.float32),
        "r": draw.standard_normal((100, 4, 8, 8)).astype(np.float32),
        "grid": draw.random((512, 512)),
        "tall": draw.random((2000, 50)),
        "right": draw.random(2000),
        "few": draw.random((20, 4)),
        "right4": draw.random(20),
        "images": draw.standard_normal((16, 64, 56, 56)).astype(np.float32),
        "filters": draw.standard_normal((64, 64, 3, 3)).astype(np.float32),
        "photo": draw.standard_normal((1, 3, 224, 224)).astype(np.float32),
        "wide": draw.standard_normal((64, 3, 7, 7)).astype(np.float32),
        "matrix": _laplacian(20),
        "float_image": draw.random((1080, 1920), np.float32),
        "byte_image": draw.integers(0, 256, (1080, 1920)).astype(np.uint8),
        "drops": _scipy.ndimage.gaussian_filter(draw.random((1080, 1920)), 4) > 0.5,
    }


def _laplacian(n: int) -> Any:
    """Make the matrix of the differences of a square's points from their neighbours."""
    line = 2 * _scipy.sparse.eye_array(n) - _scipy.sparse.eye_array(n, k=1) - _scipy.sparse.eye_array(n, k=-1)
    one = _scipy.sparse.eye_array(n)
    return (_scipy.sparse.kron(line, one) + _scipy.sparse.kron(one, line)).tocsr()


class _Arrays:
    """Arrays of one side, by their names."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.__dict__.update(arrays)


class _Sides:
    """The device's arrays, those of the host, and PyTorch's."""

    def __init__(self, ours: dict[str, Any], hosts: dict[str, Any]) -> None:
        self.o, self.h, torch = _Arrays(ours), _Arrays(hosts), _torch()
        tensors = (
            {}
            if torch is None
            else {name: torch.from_numpy(hosts[name]) for name in ("images", "filters", "photo", "wide")}
        )
        self.t = _Arrays(tensors)


async def _measure(only: str) -> None:
    hosts = _hosts()
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("functions") as system, system.open_device("cpu", options=options) as device:
        ours: dict[str, Any] = {}
        for name, one in hosts.items():
            ours[name] = await (ta.sparse.csr(device, one) if name == "matrix" else device.put(one))
        sides = _Sides(ours, hosts)
        random = ta.random.Generator(device, seed=0)
        for row in _rows(device, random, np.random.default_rng(1)):
            if only in row.name:
                mine, peer = await _compared(row, sides)
                ratio = mine / peer
                _say(f"| {row.name} | {mine * 1e3:.2f} | {peer * 1e3:.2f} | {ratio:.1f} | {row.goal:g} |")


async def _compared(row: _Row, sides: _Sides) -> tuple[float, float]:
    """Return the least processor time of a call of both sides, taken in turns."""
    for _ in range(2):
        await row.ours(sides)
        row.theirs(sides)
    mine, peer = list[float](), list[float]()
    while len(mine) < 5 or sum(mine) < _SECONDS > sum(peer):
        start = time.process_time()
        await row.ours(sides)
        middle = time.process_time()
        row.theirs(sides)
        mine.append(middle - start)
        peer.append(time.process_time() - middle)
    return min(mine), min(peer)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="part of a name")
    trio.run(_measure, parser.parse_args().only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
