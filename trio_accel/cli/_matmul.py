"""``demo matmul``: matrix products asked by several clients at once, beside bare NumPy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import ClassVar, Literal

import attrs
import numpy as np
import trio
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.padding import Padding

import trio_accel as ta
from trio_accel.cli._board import Bench, Check, Step, StepResult, grid, relative_error, worst_of
from trio_accel.cli._run import InputError, in_thread

# Relative error of one product and sum in the dtype; it grows with the root of the number of terms.
_TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
_ROUND_SECONDS = 0.05
_ROUNDS = 5
_SLOW_SECONDS = 1.0
_CHECKED_ROWS = 1024


@attrs.frozen(kw_only=True)
class MatmulRow:
    """One size.

    Attributes:
        size: Rows and columns of the square operands.
        calls: Products per client and round.
        rounds: Timed rounds; device and NumPy take turns.
        gflops: Median of the device's rounds.
        numpy_gflops: Median of NumPy's rounds.
        error: Largest relative error of a client's product (Frobenius norm) against NumPy in float64.
        rows_checked: Rows of each product that were compared.
    """

    size: int
    calls: int
    rounds: int
    gflops: float
    numpy_gflops: float
    error: float
    rows_checked: int


@attrs.frozen(kw_only=True)
class MatmulData:
    """Every size of the run."""

    dtype: str
    clients: int
    rows: Sequence[MatmulRow]

    def figures(self) -> RenderableType:
        """See `StepData`: speeds and errors, a row for each size."""
        table = grid(self.dtype, ">products", ">GFLOP/s", ">bare NumPy", ">ratio", ">error")
        for row in self.rows:
            table.add_row(
                f"{row.size} × {row.size}",
                str(row.calls * row.rounds * self.clients),
                f"{row.gflops:.1f}",
                f"{row.numpy_gflops:.1f}",
                f"{row.gflops / row.numpy_gflops:.2f}",
                f"{row.error:.1e}",
            )
        return Padding(table, (1, 0))


@attrs.frozen(kw_only=True)
class _Operands:
    """One left operand for all clients, one right operand each, on the host and on the device."""

    left: NDArray[np.floating]
    rights: Sequence[NDArray[np.floating]]
    device_left: ta.AccelRef
    device_rights: Sequence[ta.AccelRef]
    outs: Sequence[ta.AccelRef]


@attrs.frozen(kw_only=True)
class MatmulStep(Step):
    """The step, with its options."""

    name: ClassVar[str] = "matmul"
    sizes: Sequence[int] = (256, 512, 1024)
    clients: int = 4
    dtype: Literal["float32", "float64"] = "float32"

    async def run(self, bench: Bench) -> StepResult:
        """Every size in turn."""
        rows = [await self._run_size(bench, index, size) for index, size in enumerate(self.sizes)]
        limits = [_TOLERANCE[self.dtype] * math.sqrt(row.size) for row in rows]
        checks = [
            Check(name=f"relative error, {row.size} × {row.size}", value=row.error, limit=limit)
            for row, limit in zip(rows, limits, strict=True)
        ]
        best = max(rows, key=lambda row: row.gflops)
        partly = [row for row in rows if row.rows_checked < row.size]
        return StepResult(
            summary=f"{self.clients} clients, {best.gflops:.1f} GFLOP/s at {best.size} × {best.size}, "
            f"{best.gflops / best.numpy_gflops:.2f} × NumPy",
            checks=checks,
            notes=[
                f"{row.size} × {row.size}: {row.rows_checked} rows of each product compared" for row in partly
            ],
            data=MatmulData(dtype=self.dtype, clients=self.clients, rows=rows),
        )

    async def _run_size(self, bench: Bench, index: int, size: int) -> MatmulRow:
        parts = _ROUNDS + 2

        def report(part: int, text: str) -> None:
            bench.progress.update(index * parts + part, len(self.sizes) * parts, f"{size} × {size}: {text}")

        report(0, "operands")
        try:
            operands = await self._operands(bench.device, size)
            seconds = await _device_round(operands, 1)
            calls = max(1, min(64, math.ceil(_ROUND_SECONDS / seconds)))
            rounds = _ROUNDS if seconds < _SLOW_SECONDS else 1
            ours: list[float] = []
            numpys: list[float] = []
            for number in range(rounds):
                report(1 + number, f"round {number + 1} of {rounds}")
                ours.append(await _device_round(operands, calls))
                numpys.append(await in_thread(_numpy_round, operands, calls))
            report(1 + _ROUNDS, "float64 reference")
            error, checked = await _largest_error(operands)
        except (MemoryError, ta.OutOfMemoryError) as failure:
            raise InputError(
                f"--sizes {size}: not enough memory for {self.clients} products of this size"
            ) from failure
        for ref in (operands.device_left, *operands.device_rights, *operands.outs):
            ref.release()
        work = 2.0 * size**3 * calls * self.clients / 1e9
        return MatmulRow(
            size=size,
            calls=calls,
            rounds=rounds,
            gflops=work / statistics.median(ours),
            numpy_gflops=work / statistics.median(numpys),
            error=error,
            rows_checked=checked,
        )

    async def _operands(self, device: ta.Device, size: int) -> _Operands:
        left, *rights = await in_thread(_random_matrices, size, 1 + self.clients, self.dtype)
        device_left = await device.put(left)
        device_rights = [await device.put(right) for right in rights]
        outs = [await ta.linalg.matmul(device_left, right) for right in device_rights]
        return _Operands(
            left=left, rights=rights, device_left=device_left, device_rights=device_rights, outs=outs
        )


async def _device_round(operands: _Operands, calls: int) -> float:
    """Return the seconds until every client has had ``calls`` products."""

    async def client(right: ta.AccelRef, out: ta.AccelRef) -> None:
        for _ in range(calls):
            await ta.linalg.matmul(operands.device_left, right, out=out)

    start = perf_counter()
    async with trio.open_nursery() as nursery:
        for right, out in zip(operands.device_rights, operands.outs, strict=True):
            nursery.start_soon(client, right, out)
    return perf_counter() - start


def _numpy_round(operands: _Operands, calls: int) -> float:
    """Return the seconds of bare NumPy for the same products, one after the other as on one stream."""
    out = np.empty_like(operands.left)
    np.matmul(operands.left, operands.rights[0], out=out)
    start = perf_counter()
    for right in operands.rights:
        for _ in range(calls):
            np.matmul(operands.left, right, out=out)
    return perf_counter() - start


async def _largest_error(operands: _Operands) -> tuple[float, int]:
    size = operands.left.shape[0]
    rows: NDArray[np.intp] = np.unique(np.linspace(0, size - 1, min(size, _CHECKED_ROWS), dtype=np.intp))
    errors: list[float] = []
    for right, out in zip(operands.rights, operands.outs, strict=True):
        product = await out.to_host()
        errors.append(await in_thread(_relative_error, operands.left, right, product, rows))
    return worst_of(errors), rows.size


def _relative_error(
    left: NDArray[np.floating],
    right: NDArray[np.floating],
    product: NDArray[np.generic],
    rows: NDArray[np.intp],
) -> float:
    reference = left[rows].astype(np.float64) @ right.astype(np.float64)
    return relative_error(np.asarray(product[rows], np.float64), reference)


def _random_matrices(size: int, count: int, dtype: str) -> list[NDArray[np.floating]]:
    generator = np.random.default_rng(20250101)
    return [generator.standard_normal((size, size), np.float32).astype(dtype) for _ in range(count)]
