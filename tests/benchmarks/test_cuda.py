"""The benchmarks of CUDA devices, and the rivals that they are compared with."""

from __future__ import annotations

import importlib.util

import pytest
from chosen import BACKEND

from benchmarks import BENCHMARKS, Benchmark, Plan, Verdict
from benchmarks.rivals import RivalMissingError, open_rival

CUDA = [benchmark for benchmark in BENCHMARKS if benchmark.group == "cuda"]
ON_CUDA = pytest.mark.skipif(BACKEND != "cuda", reason="it needs a CUDA device")
PEERS = ("cupy", "torch")


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


@ON_CUDA
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("benchmark", CUDA, ids=lambda benchmark: benchmark.name)
async def test_every_benchmark_runs(benchmark: Benchmark) -> None:
    rows = await benchmark.measure(Plan(pairs=1, warmups=0, scale=0.002, backend=BACKEND))
    assert len({row.name for row in rows}) == len(rows) > 0
    assert all(row.name.startswith(benchmark.name) for row in rows)
    left_out = [row for row in rows if row.verdict is Verdict.NOT_RUN]
    assert all(any(is_missing(peer) and peer in row.reason for peer in PEERS) for row in left_out)
    # Times and rates; only what ours takes more than a rival may be less than nothing.
    assert all(row.ours.median > 0 for row in rows if row.ours is not None)


@ON_CUDA
async def test_a_rival_measures_itself_and_reports_its_failures() -> None:
    async with open_rival("bare") as rival:
        for work in ("gemm_f32", "gemm_bf16", "fft", "spmv", "put", "to_host"):
            assert 0 < await rival.measure("blocking", work=work, size=64, calls=2) < 10
            assert 0 < await rival.measure("rate", work=work, size=64, calls=2) < 1e9
        for work in ("matmul", "rfft", "repeat"):
            assert 0 < await rival.measure("mixed", work=work, calls=2) < 10
        with pytest.raises(RivalMissingError, match="bare blocking failed: AttributeError"):
            await rival.measure("blocking", work="nonsense", size=64, calls=2)
        # It continues.
        assert await rival.measure("blocking", work="fft", size=64, calls=2) > 0
    async with open_rival("engine") as rival:
        for words, callbacks in ((0, 0), (1, 0), (1, 1)):
            assert await rival.measure("rate", size=16, calls=50, words=words, callbacks=callbacks) > 0


@pytest.mark.parametrize("package", PEERS)
async def test_an_uninstalled_rival_reports_so(package: str) -> None:
    if not is_missing(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(RivalMissingError, match=f"{package} cannot be measured: ModuleNotFoundError"):
        async with open_rival(package):
            pass
