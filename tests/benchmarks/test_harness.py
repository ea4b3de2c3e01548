"""The benchmarks: their arithmetic, their choice and their table. How they are run: tests/cli."""

from __future__ import annotations

import gc
import sys

import attrs
import numpy as np
import pytest
import scipy.sparse
import trio
import trio.testing
from chosen import BACKEND

import trio_accel as ta
from benchmarks import (
    BENCHMARKS,
    Benchmark,
    Figure,
    Goal,
    Isolation,
    Machine,
    Plan,
    Result,
    Summary,
    Verdict,
    _machine,
    select,
    table,
)
from benchmarks._harness import alternate, per_call
from benchmarks._mixed import mixed_matrices, mixed_works, repeated_matrix
from benchmarks._statistics import Pairs, percentile
from benchmarks._table import goal_text, number
from benchmarks.loop_lag import lags
from benchmarks.rivals import MIXED, RivalMissingError, banded
from trio_accel.backends.cpu import CpuBackend

pytestmark = pytest.mark.machine

IS_ISOLATED = "process" in ta.list_devices()[0].isolations
ISOLATIONS = [
    "inline",
    pytest.param("process", marks=pytest.mark.skipif(not IS_ISOLATED, reason="the device has no workers")),
]


def test_median_and_quartiles_are_numpys() -> None:
    values = np.random.default_rng(7).lognormal(size=101).tolist()
    summary = Summary.of(values)
    expected = np.percentile(values, [25, 50, 75])
    assert (summary.lower, summary.median, summary.upper) == pytest.approx(expected, rel=1e-12)
    assert summary.count == 101


def test_one_measurement_is_its_own_quartiles_and_none_is_refused() -> None:
    assert Summary.of([4.0]) == Summary(median=4.0, lower=4.0, upper=4.0, count=1)
    with pytest.raises(ValueError, match="at least one"):
        Summary.of([])


def test_ratio_and_difference_are_taken_pair_by_pair() -> None:
    # A machine that slows down by a factor of 100 on the way does not change the ratio.
    pairs = Pairs(ours=(2.0, 20.0, 200.0), peer=(1.0, 10.0, 100.0))
    assert pairs.ratio() == Summary(median=2.0, lower=2.0, upper=2.0, count=3)
    assert pairs.difference() == Summary(median=10.0, lower=5.5, upper=55.0, count=3)


def test_percentile_is_numpys_nearest_rank() -> None:
    values = np.random.default_rng(8).normal(size=500).tolist()
    for percent in (0.1, 1, 50, 99, 99.9, 100):
        assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")
    for bad in (0, 101):
        with pytest.raises(ValueError, match="percentile"):
            percentile(values, bad)


@pytest.mark.slow
async def test_measurements_alternate_after_a_warm_up_without_garbage_collection() -> None:
    calls: list[str] = []

    async def measure(name: str) -> float:
        calls.append(f"{name}{'+gc' if gc.isenabled() else ''}")
        await trio.lowlevel.checkpoint()
        return float(len(calls))

    plan = Plan(pairs=3, warmups=1)
    pairs = await alternate(lambda: measure("a"), lambda: measure("b"), plan)
    assert calls == ["a+gc", "b+gc", *["a", "b"] * 3]
    assert pairs == Pairs(ours=(3.0, 5.0, 7.0), peer=(4.0, 6.0, 8.0))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


async def test_the_collector_is_back_after_a_failed_measurement() -> None:
    async def fail() -> float:
        await trio.lowlevel.checkpoint()
        raise OSError("measuring failed")

    with pytest.raises(OSError, match="measuring failed"):
        await alternate(fail, fail, Plan(warmups=0))
    assert gc.isenabled()


async def test_time_per_call_is_the_mean_of_the_calls() -> None:
    slept = 0

    async def sleep() -> None:
        nonlocal slept
        slept += 1
        # clock: the time that this work takes decides nothing
        await trio.sleep(0.002)

    seconds = await per_call(sleep, 5)
    assert slept == 5
    assert 0.002 <= seconds < 0.2


async def test_lateness_is_measured_from_when_the_task_wanted_to_wake() -> None:
    late = await lags(5, interval=0.001)
    assert len(late) == 5
    assert all(0 <= value < 1000 for value in late)


@pytest.mark.parametrize(
    ("goal", "verdict"),
    [
        (None, Verdict.NONE),
        (Goal(figure=Figure.OURS, most=4.0), Verdict.MET),
        (Goal(figure=Figure.OURS, most=3.9), Verdict.MISSED),
        (Goal(figure=Figure.RATIO, least=2.0), Verdict.MET),
        (Goal(figure=Figure.RATIO, least=2.1), Verdict.MISSED),
        (Goal(figure=Figure.DIFFERENCE, most=2.0), Verdict.MET),
        (Goal(figure=Figure.DIFFERENCE, most=1.0), Verdict.MISSED),
    ],
)
def test_a_goal_is_judged_by_the_median_of_its_figure(goal: Goal | None, verdict: Verdict) -> None:
    pairs = Pairs(ours=(4.0, 4.0, 9.0), peer=(2.0, 2.0, 3.0))
    assert Result.compare("group.name", pairs, unit="s", goal=goal).verdict is verdict


def test_a_skipped_benchmark_gives_the_reason_and_meets_nothing() -> None:
    result = Result(name="group.name", goal=Goal(figure=Figure.RATIO, least=3.0), reason="no peer")
    assert result.verdict is Verdict.NOT_RUN
    assert table([result]).splitlines()[-1].split() == (
        ["group.name", "-", "-", "-", "at", "least", "3.00", "×", "not", "run:", "no", "peer"]
    )


def test_a_goal_on_a_ratio_needs_a_peer() -> None:
    result = Result(name="lonely", ours=Summary.of([1.0]), goal=Goal(figure=Figure.RATIO, most=1.0))
    with pytest.raises(ValueError, match="lonely: the goal speaks of a ratio"):
        _ = result.verdict


def test_numbers_have_three_digits_and_no_exponent() -> None:
    shown = [number(value) for value in (0.0, 0.0123, 1.004, 12.34, 123.4, 1234.0, 12345.0, 1234567.0, -5.0)]
    assert shown == ["0.000", "0.012", "1.00", "12.3", "123", "1234", "12 300", "1 235 000", "-5.00"]


def test_the_table_shows_medians_quartiles_and_the_figure_of_the_goal() -> None:
    pairs = Pairs(ours=(10.0, 12.0, 14.0), peer=(4.0, 4.0, 4.0))
    goals = (Goal(figure=Figure.RATIO, most=1.8), Goal(figure=Figure.DIFFERENCE, most=120.0))
    results = [Result.compare(f"group.{goal.figure.value}", pairs, unit="µs", goal=goal) for goal in goals]
    header, rule, ratio, difference = table(results).splitlines()
    assert header.split() == ["name", "ours", "peer", "ratio", "goal", "verdict"]
    assert set(rule) == {"-", " "}
    assert "12.0 [11.0, 13.0] µs" in ratio
    assert "3.00 [2.75, 3.25] ×" in ratio
    assert ratio.endswith("MISSED")
    assert "8.00 [7.00, 9.00] µs more" in difference
    assert difference.endswith("met")
    assert goal_text(Goal(figure=Figure.OURS, least=12_000), "/s") == "at least 12 000 /s"


def test_benchmarks_are_chosen_by_name_or_group() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names)
    assert select(()) == BENCHMARKS
    assert [benchmark.name for benchmark in select(["actors.ask"])] == ["actors.ask"]
    assert {benchmark.group for benchmark in select(["actors"])} == {"actors"}
    with pytest.raises(ValueError, match=r"no benchmark or group nonsense; there are actors, actors\.ask"):
        select(["actors", "nonsense"])


def test_an_isolation_leaves_the_benchmarks_of_it() -> None:
    def names(*given: str, isolation: Isolation) -> list[str]:
        return [benchmark.name for benchmark in select(given, isolation=isolation)]

    everything = {benchmark.name for benchmark in BENCHMARKS}
    inline, isolated = names(isolation="inline"), names(isolation="process")
    # To recover, memory must outlive its context.
    assert isolated == [f"{name}-process" for name in [*inline, "cuda.recovery"]]
    assert {*inline, *isolated} == {
        name for name in everything if name.startswith(("devices.", "cuda.", "patterns.batched"))
    } - {
        "cuda.engine"  # in a process of its own, as a worker is
    }
    assert names("devices.matmul-64", isolation="process") == ["devices.matmul-64-process"]
    assert names("devices.matmul-64-process", isolation="process") == ["devices.matmul-64-process"]
    assert names("actors", "devices.matmul-64", isolation="inline") == ["devices.matmul-64"]
    with pytest.raises(ValueError, match="none of actors measures a device with isolation inline"):
        names("actors", isolation="inline")


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_every_benchmark_of_a_device_runs_if_the_device_has_the_isolation(
    isolation: Isolation,
) -> None:
    plan = Plan(pairs=1, warmups=0, scale=0.002, backend="cpu")
    # Next to a busy loop a thread may get no time at all, which this shows.
    chosen = [
        benchmark for benchmark in select(["devices"], isolation=isolation) if "busy" not in benchmark.name
    ]
    # A benchmark has one row or several, with names of their own.
    made = {benchmark.name: await benchmark.measure(plan) for benchmark in chosen}
    assert [name for name, own in made.items() if not own] == []
    rows = [row for own in made.values() for row in own]
    assert [row.name for row in rows if row.verdict not in (Verdict.MET, Verdict.MISSED, Verdict.NONE)] == []
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.name.endswith("-process") is (isolation == "process") for row in rows)
    goals = {row.name.removeprefix("devices.").removesuffix("-process"): row.goal for row in rows}
    most = {"inline": 120.0, "process": 220.0}[isolation]
    assert goals["matmul-64"] == Goal(figure=Figure.DIFFERENCE, most=most)
    # Of one second; here it is a part of that.
    assert goals["waiting-cpu"] == Goal(figure=Figure.OURS, most=50.0 * plan.scale)


@pytest.mark.slow
async def test_the_rows_of_batches() -> None:
    plan = Plan(pairs=1, warmups=0, scale=0.02, backend="cpu")
    chosen = [*select(["patterns.batcher-64", "patterns.batcher-lone"]), *select(["patterns.batched"])]
    rows = [row for benchmark in chosen for row in await benchmark.measure(plan)]
    assert [row.name for row in rows] == ["patterns.batcher-64", "patterns.batcher-lone", "patterns.batched"]
    goals = [Goal(figure=Figure.DIFFERENCE, most=15.0), None, Goal(figure=Figure.RATIO, least=1.5)]
    assert [row.goal for row in rows] == goals
    assert all(row.ours is not None and row.ours.median > 0 for row in rows)


async def test_an_unavailable_isolation_has_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = CpuBackend().list_devices()
    only_inline = tuple(attrs.evolve(info, isolations=("inline",)) for info in infos)
    monkeypatch.setattr(CpuBackend, "list_devices", lambda self: only_inline)
    (benchmark,) = select(["devices.matmul-64-process"])
    (row,) = await benchmark.measure(Plan(pairs=1, backend="cpu"))
    assert (row.name, row.verdict) == ("devices.matmul-64-process", Verdict.NOT_RUN)
    assert row.reason == (
        "isolation='process' is not there for this device; it has 'inline'; "
        "open the device with isolation='inline'"
    )


def test_every_benchmark_describes_its_measurement_in_a_sentence() -> None:
    assert [benchmark.name for benchmark in BENCHMARKS if not benchmark.description.endswith(".")] == []


async def test_progress_is_reported_only_between_measurements() -> None:
    seen: list[str] = []

    async def measure() -> float:
        await trio.lowlevel.checkpoint()
        seen.append("measured")
        return 1.0

    plan = Plan(pairs=2, warmups=0, watch=lambda done, total: seen.append(f"{done} of {total}"))
    await alternate(measure, measure, plan)
    assert seen == ["0 of 2", "measured", "measured", "1 of 2", "measured", "measured"]


async def test_an_uninstalled_library_has_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pykka", None)
    monkeypatch.delitem(sys.modules, "benchmarks._pykka", raising=False)
    (benchmark,) = select(["actors.ask-pykka"])
    rows = await benchmark.measure(Plan.quick())
    assert [row.name for row in rows] == ["actors.ask-pykka", "actors.ask-pykka-thread"]
    assert {(row.verdict, row.reason) for row in rows} == {(Verdict.NOT_RUN, "Pykka is not installed")}


@pytest.mark.slow
async def test_the_rows_of_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    [benchmark] = select(["actors.ask-traced"])
    rows = await benchmark.measure(Plan.quick())
    assert [row.name for row in rows] == ["actors.ask-traced", "actors.ask-traced-sampled"]
    assert all(row.ours is not None and row.peer is not None for row in rows)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    rows = await benchmark.measure(Plan.quick())
    assert {row.reason for row in rows} == {"OpenTelemetry's SDK is not installed"}


async def test_a_benchmark_of_cuda_devices_has_a_row_with_the_reason_on_others() -> None:
    for benchmark in select(["cuda.latency", "cuda.recovery-process"]):
        (row,) = await benchmark.measure(Plan(pairs=1, backend="cpu"))
        assert (row.name, row.verdict) == (benchmark.name, Verdict.NOT_RUN)
        assert row.reason == "it is measured on CUDA devices, not on cpu"


def test_the_sparse_matrix_of_the_bandwidth_is_canonical() -> None:
    for rows in (3, 1000, 700_000):
        indptr, indices, data = banded(rows)
        matrix = scipy.sparse.csr_array((data, indices, indptr), shape=(rows, rows))
        matrix.check_format(full_check=True)
        assert matrix.has_canonical_format
        assert matrix.nnz == min(rows, 10) * rows
        assert (matrix @ np.ones(rows, np.float32) == min(rows, 10)).all()


def test_mixed_shapes_are_different_ones_of_100_to_600() -> None:
    assert len(set(MIXED)) == len(MIXED) == 40
    assert all(100 <= extent <= 600 for shape in MIXED for extent in shape)
    # Large and small ones of both: no service has only squares.
    assert {rows > columns for rows, columns in MIXED} == {False, True}
    assert [matrix.shape for matrix in mixed_matrices()] == list(MIXED)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_mixed_workloads_use_one_matrix_after_the_other(isolation: Isolation) -> None:
    matrices, repeated = mixed_matrices(), repeated_matrix()
    async with (
        ta.open_system("benchmark") as system,
        await system.open_device("cpu", options=ta.DeviceOptions(isolation=isolation)) as device,
    ):
        works = await mixed_works(device)
        assert list(works) == ["matmul", "rfft", "repeat"]
        for index in (*range(len(MIXED)), 0):
            matrix = matrices[index].astype(np.float64)
            product, spectrum = [await works[name]() for name in ("matmul", "rfft")]
            expected, k = matrix @ matrix.T, matrix.shape[1]
            np.testing.assert_allclose(await product.to_host(), expected, rtol=1e-5, atol=1e-5 * k)
            of_rows = np.fft.rfft(matrix)
            np.testing.assert_allclose(await spectrum.to_host(), of_rows, rtol=1e-5, atol=1e-5 * k)
        square = repeated.astype(np.float64) @ repeated.astype(np.float64)
        for _ in range(2):
            result = await works["repeat"]()
            np.testing.assert_allclose(await result.to_host(), square, rtol=1e-5, atol=1e-5 * len(square))


def test_how_fast_python_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of nine loops, by a clock that returns their durations."""
    seconds = [0.5, 0.01, 0.02, 0.02, 0.04, 0.02, 0.02, 0.1, 0.01]
    now = [0.0]
    for took in seconds:
        now += [now[-1], now[-1] + took]
    ticks = iter(now[1:])
    monkeypatch.setattr(_machine.time, "perf_counter", lambda: next(ticks))
    assert _machine._speed() == pytest.approx(_machine._ADDITIONS / 0.02)
    monkeypatch.undo()
    assert f"{Machine.here().speed / 1e6:.0f}".isdigit()
    assert "million additions per second" in str(Machine.here())


async def test_an_impossible_benchmark_has_a_row_with_the_reason() -> None:
    """Wherever the interrupt is noticed, in a nursery as well."""

    async def run(plan: Plan) -> tuple[Result, ...]:
        async with trio.open_nursery():
            raise RivalMissingError("no driver")

    [row] = await Benchmark("test.missing", run).measure(Plan.quick())
    assert (row.name, row.verdict, row.reason) == ("test.missing", Verdict.NOT_RUN, "no driver")


@pytest.mark.skipif(BACKEND == "cuda", reason="they run there")
@pytest.mark.parametrize("name", [benchmark.name for benchmark in BENCHMARKS if benchmark.group == "cuda"])
async def test_without_a_gpu_each_benchmark_of_one_is_left_out(name: str) -> None:
    [benchmark] = select([name])
    rows = await benchmark.measure(Plan.quick())
    assert {row.verdict for row in rows} == {Verdict.NOT_RUN}
    assert all(row.reason for row in rows)
