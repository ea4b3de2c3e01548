"""The router for a mixture of experts, against the same router written down token by token."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import trio
from dense_experts import Rows, dense, weights_of
from hypothesis import given, settings
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    ExpertsFailedError,
    GetStatistics,
    ModelOutputError,
    MoeRouter,
    MoeStatistics,
    Routed,
    RoutingStatistics,
    Submit,
)

Model = Callable[[Rows], Awaitable[Any]]
WIDTH, WIDER = 5, 7


def matrices(many: int, seed: int = 0) -> list[Rows]:
    rng = np.random.default_rng(seed)
    return list(rng.standard_normal((many, WIDTH, WIDER)))


def gate_of(logits: Any) -> Model:
    async def gate(tokens: Rows) -> Any:
        await trio.lowlevel.checkpoint()
        return logits

    return gate


def expert_of(matrix: Rows, sizes: list[int] | None = None) -> Model:
    async def expert(tokens: Rows) -> Rows:
        await trio.lowlevel.checkpoint()
        if sizes is not None:
            sizes.append(len(tokens))
        return tokens @ matrix

    return expert


def failing(error: Exception) -> Model:
    async def expert(tokens: Rows) -> Rows:
        await trio.lowlevel.checkpoint()
        raise error

    return expert


def case(seed: int, tokens: int, experts: int) -> tuple[Rows, Rows]:
    rng = np.random.default_rng(seed)
    # A few values only, so that there are ties.
    logits = rng.integers(-3, 3, (tokens, experts)).astype(float)
    return rng.standard_normal((tokens, WIDTH)), logits


async def route(
    system: ta.System, tokens: Any, logits: Any, experts: Sequence[Model], **options: Any
) -> Routed:
    router = await system.spawn(MoeRouter, gate_of(logits), experts, **options)
    routed: Routed = await router.ask(Submit(tokens))
    return routed


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 12),
    experts=st.integers(1, 6),
    factor=st.none() | st.floats(0.1, 3),
    overflow=st.sampled_from(["drop", "wait"]),
    normalise=st.booleans(),
    data=st.data(),
)
def test_it_is_the_dense_computation(
    seed: int,
    tokens: int,
    experts: int,
    factor: float | None,
    overflow: str,
    normalise: bool,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, experts))
    broken = data.draw(st.frozensets(st.integers(0, experts - 1), max_size=experts - 1))
    capacity = math.inf if factor is None else max(1, math.ceil(factor * tokens * top_k / experts))
    x, logits = case(seed, tokens, experts)
    all_matrices = matrices(experts)
    sizes: list[int] = []
    models = [
        failing(OSError("gone")) if number in broken else expert_of(matrix, sizes)
        for number, matrix in enumerate(all_matrices)
    ]
    output, weights = dense(
        x,
        logits,
        [lambda rows, matrix=matrix: rows @ matrix for matrix in all_matrices],
        top_k=top_k,
        capacity=capacity,
        overflow=overflow,
        broken=broken,
        normalise=normalise,
    )

    async def main() -> Routed | None:
        options = {"top_k": top_k, "capacity_factor": factor, "overflow": overflow, "normalise": normalise}
        async with ta.open_system("test") as system:
            try:
                return await route(system, x, logits, models, **options)
            except ExpertsFailedError:
                return None

    routed = trio.run(main)
    assert max(sizes, default=0) <= capacity
    if routed is None:
        assert not any(weights)
        return
    np.testing.assert_allclose(routed.output, output, rtol=1e-12, atol=1e-13)
    for found, expected in zip(weights_of(routed), weights, strict=True):
        assert found == pytest.approx(expected, rel=1e-12)
    assert routed.is_lost.tolist() == [not row for row in weights]
    assert set(routed.errors) <= broken
    statistics = routed.statistics
    assert sum(statistics.counts) == tokens * top_k
    assert sum(statistics.served) + statistics.dropped == tokens * top_k
    assert sum(statistics.importance) <= tokens * (1 + 1e-12)


async def test_the_load_is_counted_as_the_papers_define_it(system: ta.System) -> None:
    x, logits = case(3, 40, 4)
    router = await system.spawn(MoeRouter, gate_of(logits), [expert_of(one) for one in matrices(4)], top_k=2)
    routed: Routed = await router.ask(Submit(x))
    statistics = routed.statistics
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-p, axis=1, kind="stable")
    # Fedus et al. 2022, equations 4 to 6.
    f = [(order[:, 0] == expert).mean() for expert in range(4)]
    loss = 4 * sum(share * mean for share, mean in zip(f, p.mean(axis=0), strict=True))
    assert statistics.auxiliary_loss == pytest.approx(loss)
    # Shazeer et al. 2017, equations 6 and 7: the gate's values are zero but for the top k.
    gates = np.where(np.argsort(order, axis=1) < 2, p, 0)
    importance = (gates / gates.sum(axis=1, keepdims=True)).sum(axis=0)
    assert statistics.importance == pytest.approx(importance.tolist())
    assert statistics.importance_loss == pytest.approx((importance.std() / importance.mean()) ** 2)
    assert list(statistics.counts) == [int((order[:, :2] == expert).sum()) for expert in range(4)]
    # Twice the same has twice the counts, and the same losses.
    await router.ask(Submit(x))
    counted: MoeStatistics = await router.ask(GetStatistics())
    both = counted.routing
    assert (both.tokens, sum(both.served)) == (80, 160)
    assert both.counts == tuple(2 * number for number in statistics.counts)
    assert both.auxiliary_loss == pytest.approx(loss)
    assert both.importance_loss == pytest.approx(statistics.importance_loss)


def test_an_even_load_has_a_loss_of_one_and_none_has_no_loss() -> None:
    even = RoutingStatistics(
        tokens=8,
        counts=(2,) * 4,
        first_choices=(2,) * 4,
        probability=(2.0,) * 4,
        importance=(2.0,) * 4,
        served=(2,) * 4,
        failures=(0,) * 4,
    )
    assert even.auxiliary_loss == 1
    assert even.importance_loss == 0
    none = RoutingStatistics.zeros(4)
    assert math.isnan(none.auxiliary_loss)
    assert math.isnan(none.importance_loss)
    assert none + even == even


async def test_all_experts_compute_at_once(autojump_clock: MockClock, system: ta.System) -> None:
    async def slow(tokens: Rows) -> Rows:
        await trio.sleep(10)
        return tokens

    x, logits = case(1, 20, 4)
    begun = trio.current_time()
    routed = await route(system, x, logits, [slow] * 4, top_k=4)
    assert trio.current_time() - begun == pytest.approx(10)
    np.testing.assert_allclose(routed.output, x, rtol=1e-12)


async def test_only_the_full_expert_has_a_second_round(autojump_clock: MockClock, system: ta.System) -> None:
    async def slow(tokens: Rows) -> Rows:
        await trio.sleep(10)
        return tokens

    x = np.ones((6, WIDTH))
    logits = [[1.0, 0.0]] * 5 + [[0.0, 1.0]]
    begun = trio.current_time()
    routed = await route(system, x, logits, [slow] * 2, top_k=1, capacity_factor=1, overflow="wait")
    assert trio.current_time() - begun == pytest.approx(20)
    assert routed.statistics.served == (5, 1)
    assert not routed.is_lost.any()


async def test_each_round_of_an_expert_may_have_a_dtype_of_its_own(system: ta.System) -> None:
    dtypes = iter([np.complex64, np.float64])

    async def changing(tokens: Rows) -> Any:
        return np.ones((len(tokens), WIDTH), dtype=next(dtypes))

    x = np.ones((2, WIDTH))
    options = {"top_k": 1, "capacity_factor": 0.5, "overflow": "wait"}
    routed = await route(system, x, [[0.0]] * 2, [changing], **options)
    assert routed.output.dtype == "complex128"
    np.testing.assert_array_equal(routed.output, 1.0)


async def test_a_capacity_beyond_floats_is_not_a_bound(system: ta.System) -> None:
    x = np.ones((6, WIDTH))
    routed = await route(system, x, [[0.0]] * 6, [gate_of(x)], top_k=1, capacity_factor=1e308)
    assert routed.statistics.served == (6,)


async def test_a_failure_can_be_the_askers_and_ends_the_other_experts(system: ta.System) -> None:
    error, ended = OSError("gone"), list[int]()

    async def hangs(tokens: Rows) -> Rows:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(len(tokens))
        raise AssertionError

    x, logits = case(1, 20, 3)
    router = await system.spawn(
        MoeRouter, gate_of(logits), [hangs, failing(error), hangs], top_k=3, on_failure="raise"
    )
    with pytest.raises(OSError, match="gone") as caught:
        await router.ask(Submit(x))
    assert caught.value is error
    assert ended == [20, 20]
    assert (await router.ask(GetStatistics())).routing.failures == (0, 1, 0)


async def test_if_all_experts_fail_the_asker_gets_the_error(system: ta.System) -> None:
    errors = [OSError("one"), KeyError("two")]
    x, logits = case(1, 4, 2)
    with pytest.raises(ExpertsFailedError, match="0: OSError: one; 1: KeyError: 'two'") as caught:
        await route(system, x, logits, [failing(error) for error in errors])
    assert caught.value.__cause__ is errors[0]
    assert dict(caught.value.errors) == dict(enumerate(errors))


async def test_only_tokens_of_a_broken_expert_are_lost(
    system: ta.System,
) -> None:
    x = np.ones((3, WIDTH))
    logits = [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    routed = await route(system, x, logits, [expert_of(matrices(1)[0]), failing(OSError("gone"))], top_k=1)
    assert routed.is_lost.tolist() == [True, False, True]
    assert routed.output[routed.is_lost].tolist() == [[0.0] * WIDER] * 2
    np.testing.assert_allclose(routed.output[1], matrices(1)[0].sum(axis=0), rtol=1e-12)
    assert isinstance(routed.errors[1], OSError)
    assert routed.statistics.failures == (0, 1)


async def test_an_expert_may_have_a_limit_of_time(autojump_clock: MockClock, system: ta.System) -> None:
    async def hangs(tokens: Rows) -> Rows:
        with trio.fail_after(5):
            await trio.sleep_forever()
        raise AssertionError

    x, logits = np.ones((3, WIDTH)), [[0.0, 0.0]] * 3
    routed = await route(system, x, logits, [expert_of(matrices(1)[0]), hangs])
    assert isinstance(routed.errors[1], trio.TooSlowError)
    np.testing.assert_allclose(routed.output, x @ matrices(1)[0], rtol=1e-12)


async def test_a_cancelled_asker_ends_all_experts(system: ta.System) -> None:
    ended: list[int] = []

    async def hangs(tokens: Rows) -> Rows:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(len(tokens))
        raise AssertionError

    router = await system.spawn(MoeRouter, gate_of([[0.0, 0.0]] * 3), [hangs] * 2, name="moe")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(router.ask, Submit(np.ones((3, WIDTH))))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ended == [3, 3]
    assert system.tree().find("test/moe").restarts == 0


@pytest.mark.parametrize("result", ["text", [1.0, 2.0], [[1.0]], [[[1.0]]] * 3, [[1.0], [1.0, 2.0], [1.0]]])
async def test_an_expert_that_returns_no_row_for_each_token_has_failed(
    system: ta.System, result: Any
) -> None:
    x, logits = np.ones((3, WIDTH)), [[0.0, 0.0]] * 3
    routed = await route(system, x, logits, [gate_of(result), expert_of(matrices(1)[0])])
    assert "expert 0" in str(routed.errors[0])
    assert isinstance(routed.errors[0], ModelOutputError)
    np.testing.assert_allclose(routed.output, x @ matrices(1)[0], rtol=1e-12)


async def test_rows_of_several_widths_are_refused(system: ta.System) -> None:
    x, logits = np.ones((3, WIDTH)), [[0.0, 0.0]] * 3
    with pytest.raises(ModelOutputError, match="one width, got: expert 0 7, expert 1 1"):
        await route(system, x, logits, [expert_of(matrices(1)[0]), gate_of([[1.0]] * 3)])


@pytest.mark.parametrize(
    ("logits", "text"),
    [
        ([[0.0, 0.0]] * 3, r"shape \(3, 3\), got \(3, 2\)"),
        ([[0.0] * 3] * 2, r"shape \(3, 3\), got \(2, 3\)"),
        ([0.0] * 3, r"shape \(3, 3\), got \(3,\)"),
        ([[0.0] * 3, [0.0, math.nan, 0.0], [0.0] * 3], "NaN, infinity, .* in row 1"),
        ([[0.0] * 3, [0.0, math.inf, 0.0], [0.0] * 3], "NaN, infinity, .* in row 1"),
        ([[0.0] * 3, [-math.inf] * 3, [0.0] * 3], "nothing but -inf in row 1"),
        ([[0.0] * 3, [0.0, -math.inf, -math.inf], [0.0] * 3], "leaves token 1 fewer than 2 experts"),
        ([[0j] * 3] * 3, "real numbers"),
        ([[None] * 3] * 3, "array of numbers"),
    ],
)
async def test_a_gate_of_the_wrong_form_is_refused(system: ta.System, logits: Any, text: str) -> None:
    router = await system.spawn(
        MoeRouter, gate_of(logits), [expert_of(one) for one in matrices(3)], name="moe"
    )
    with pytest.raises(ModelOutputError, match=f"the gate .*{text}"):
        await router.ask(Submit(np.ones((3, WIDTH))))
    assert system.tree().find("test/moe").restarts == 0


async def test_an_expert_with_a_logit_of_minus_infinity_gets_nothing(system: ta.System) -> None:
    sizes: list[int] = []
    models = [expert_of(matrices(1)[0]), expert_of(matrices(1)[0], sizes), expert_of(matrices(1)[0])]
    logits = [[0.0, -math.inf, -1.0]] * 6
    options = {"top_k": 1, "capacity_factor": 0.5}
    routed = await route(system, np.ones((6, WIDTH)), logits, models, **options)
    assert not sizes
    assert routed.statistics.served == (1, 0, 0)
    assert routed.statistics.dropped == 5


async def test_a_failing_gate_is_the_askers_error(system: ta.System) -> None:
    error = OSError("gone")
    router = await system.spawn(MoeRouter, failing(error), [expert_of(one) for one in matrices(2)])
    with pytest.raises(OSError, match="gone") as caught:
        await router.ask(Submit(np.ones((3, WIDTH))))
    assert caught.value is error


@pytest.mark.parametrize("item", [np.ones(3), np.ones((0, 3)), np.ones((1, 2, 3)), "text"])
async def test_invalid_tokens_are_refused(system: ta.System, item: Any) -> None:
    with pytest.raises(ValueError, match="the item must be of shape"):
        await route(system, item, [[0.0, 0.0]], [expert_of(one) for one in matrices(2)])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 3},
        {"top_k": True},
        {"top_k": 1.0},
        {"capacity_factor": 0},
        {"capacity_factor": -1.0},
        {"capacity_factor": math.nan},
        {"capacity_factor": math.inf},
        {"capacity_factor": "1"},
        {"overflow": "lose"},
        {"on_failure": "ignore"},
    ],
)
async def test_options_that_make_no_sense_are_refused(system: ta.System, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match="MoeRouter: "):
        await system.spawn(MoeRouter, gate_of([]), [expert_of(one) for one in matrices(2)], **options)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float32", "float32"), "float32"),
        (("float16", "float32"), "float64"),
        (("complex64", "complex64"), "complex64"),
        (("complex64", "float64"), "complex128"),
        (("int32", "int32"), "float64"),
    ],
)
async def test_the_output_has_the_common_dtype_of_the_experts(
    system: ta.System, dtypes: tuple[str, str], expected: str
) -> None:
    results = [np.full((2, 3), number + 1, dtype=dtype) for number, dtype in enumerate(dtypes)]
    logits = np.log([[0.25, 0.75]] * 2)
    routed = await route(system, np.ones((2, 1)), logits, [gate_of(result) for result in results])
    assert routed.output.dtype == expected
    np.testing.assert_allclose(routed.output, 1.75, rtol=1e-6)


async def test_tokens_gate_and_experts_may_be_of_a_device(system: ta.System, device: ta.Device) -> None:
    x, _ = case(5, 16, 3)
    weights, all_matrices = np.random.default_rng(1).standard_normal((WIDTH, 3)), matrices(3)

    def on_device(matrix: ta.AccelRef) -> Any:
        async def model(tokens: Rows) -> ta.AccelRef:
            return await ta.linalg.matmul(tokens, matrix)

        return model

    gate = on_device(await device.put(weights))
    experts = [on_device(await device.put(matrix)) for matrix in all_matrices]
    router = await system.spawn(MoeRouter, gate, experts, top_k=2, capacity_factor=1.0)
    routed: Routed = await router.ask(Submit(await device.put(x)))
    output, _ = dense(
        x,
        x @ weights,
        [lambda rows, matrix=matrix: rows @ matrix for matrix in all_matrices],
        top_k=2,
        capacity=math.ceil(16 * 2 / 3),
    )
    np.testing.assert_allclose(routed.output, output, rtol=1e-12, atol=1e-13)
