"""`VectorIndex` against NumPy: which ids are found, scores, ties, changes, filters, files and bad input."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import trio.testing
from chosen import INLINE, NAME
from hypothesis import given, settings
from index_model import exact_vectors, expected_ids, nearness

import trio_accel as ta
from trio_accel.agents import VectorIndex
from trio_accel.devices import Put, opened

WIDTH = 16
METRICS = ("cosine", "dot", "l2")
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", METRICS)
async def test_ids_match_exact_products_with_ties_by_id(device: ta.Device, metric: Any, dtype: str) -> None:
    rng = np.random.default_rng(3)
    vectors = exact_vectors(metric, rng, 300, WIDTH)
    ids = rng.permutation(1000)[:300] - 500
    index = VectorIndex(device, WIDTH, metric=metric, dtype=dtype)
    for start in range(0, 300, 41):
        await index.add(ids[start : start + 41], vectors[start : start + 41])
    held = dict(zip(ids.tolist(), vectors, strict=True))
    np.testing.assert_array_equal(index.ids, np.sort(ids))
    assert len(index) == 300
    queries = exact_vectors(metric, rng, 9, WIDTH)
    found = await index.search(queries, 25)
    np.testing.assert_array_equal(found.ids, expected_ids(metric, queries, held, 25))
    near = np.take_along_axis(
        nearness(metric, queries, np.stack([held[number] for number in index.ids])),
        np.searchsorted(index.ids, found.ids),
        axis=1,
    )
    np.testing.assert_allclose(found.scores, np.sqrt(-near) if metric == "l2" else near, rtol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", METRICS)
async def test_excluded_vectors_are_not_nearer_except_by_rounding(
    device: ta.Device, metric: Any, dtype: str
) -> None:
    rng = np.random.default_rng(5)
    vectors, queries = rng.standard_normal((3000, 64)), rng.standard_normal((7, 64))
    index = VectorIndex(device, 64, metric=metric, dtype=dtype)
    await index.add(np.arange(3000), vectors)
    found = await index.search(queries, 10)
    near = nearness(metric, queries, vectors)
    last = np.take_along_axis(near, found.ids, axis=1).min(axis=1)
    np.put_along_axis(near, found.ids, -math.inf, axis=1)
    # Elements and products are rounded, both relative to the lengths.
    lengths = 1.0 if metric == "cosine" else np.linalg.norm(queries, axis=1).max() * 12
    rounding = 4 * float(ml_dtypes.finfo(ta.DType.of(dtype).dtype).eps) * lengths
    assert (near.max(axis=1) <= last + rounding).all()


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_hundred_thousand_vectors(device: ta.Device) -> None:
    rng = np.random.default_rng(6)
    vectors = rng.standard_normal((100_000, 384), dtype=np.float32)
    queries = vectors[:32] + 0.5 * rng.standard_normal((32, 384), dtype=np.float32)
    index = VectorIndex(device, 384)
    for start in range(0, 100_000, 30_000):
        await index.add(np.arange(start, min(start + 30_000, 100_000)), vectors[start : start + 30_000])
    found = await index.search(queries, 10)
    near = nearness("cosine", queries.astype(np.float64), vectors.astype(np.float64))
    last = np.take_along_axis(near, found.ids, axis=1)
    rounding = np.finfo(np.float32).eps * math.sqrt(384)
    np.testing.assert_allclose(found.scores, last, atol=rounding)
    np.put_along_axis(near, found.ids, -math.inf, axis=1)
    assert (near.max(axis=1) <= last.min(axis=1) + rounding).all()


async def test_a_search_is_one_request(device: ta.Device) -> None:
    index = VectorIndex(device, WIDTH)
    rng = np.random.default_rng(1)
    # Sizes without merges.
    for first, count in ((0, 64), (100, 16), (200, 4)):
        await index.add(np.arange(first, first + count), rng.standard_normal((count, WIDTH)))
    requests: list[str] = []

    def seen(phase: Any, launch: Any) -> None:
        if phase.value == "validate":
            requests.append(launch.name)

    with opened(device).observed(seen, lambda ask: ask):
        await index.search(rng.standard_normal((3, WIDTH)), 5)
    assert len(requests) == 1


async def test_queries_may_be_arrays_and_calls_of_a_device(device: ta.Device) -> None:
    rng = np.random.default_rng(2)
    host = exact_vectors("dot", rng, 50, WIDTH)
    vectors = await device.put(host)
    index = VectorIndex(device, WIDTH, metric="dot")
    await index.add(range(25), vectors[:25])
    await index.add(range(25, 50), vectors[25:] * 1.0)
    held = dict(enumerate(host))
    for queries in (host[:3], vectors[:3], vectors[:3] * 1.0, host[:3].tolist()):
        found = await index.search(queries, 4)
        np.testing.assert_array_equal(found.ids, expected_ids("dot", host[:3], held, 4))
    one = await index.search(vectors[2], 4)
    assert (one.ids.shape, one.scores.shape) == ((4,), (4,))
    np.testing.assert_array_equal(one.ids, expected_ids("dot", host[2:3], held, 4)[0])


async def test_many_queries_go_in_pieces(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.agents._index._MAX_SCORES", 100)
    rng = np.random.default_rng(2)
    host, queries = exact_vectors("l2", rng, 40, WIDTH), exact_vectors("l2", rng, 11, WIDTH)
    index = VectorIndex(device, WIDTH, metric="l2")
    await index.add(range(40), host)
    found = await index.search(queries, 4)
    np.testing.assert_array_equal(found.ids, expected_ids("l2", queries, dict(enumerate(host)), 4))


async def test_few_segments_hold_many_small_additions(device: ta.Device) -> None:
    index = VectorIndex(device, WIDTH)
    vectors = np.random.default_rng(1).standard_normal((200, WIDTH))
    for number in range(200):
        await index.add([number], vectors[number : number + 1])
        assert len(index._segments) <= math.log2(number + 1) + 1
    assert len(index) == 200


async def test_lengths_near_the_ends_of_float64_have_a_direction(device: ta.Device) -> None:
    index = VectorIndex(device, 2)
    await index.add([1, 2, 3], [[1e-300, 0.0], [0.0, 1e300], [5e-324, 5e-324]])
    found = await index.search([1e200, 1e200], 3)
    assert found.ids.tolist() == [3, 1, 2]
    np.testing.assert_allclose(found.scores, [1.0, math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-6)


async def test_nothing_to_find(device: ta.Device) -> None:
    index = VectorIndex(device, 2)
    await index.add([], np.empty((0, 2)))
    with trio.testing.assert_checkpoints():
        await index.search([1, 2], 3)
    assert (await index.search([1, 2], 3)).ids.shape == (0,)
    assert (await index.search(np.ones((4, 2)), 3)).scores.shape == (4, 0)
    await index.add([1, 2], np.eye(2))
    assert (await index.search(np.ones((4, 2)), 3, where=[False, False])).ids.shape == (4, 0)
    assert (await index.search(np.empty((0, 2)), 3)).ids.shape == (0, 2)
    await index.remove([2, 1])
    assert index._segments == ()
    assert (await index.search([1, 2], 3)).ids.shape == (0,)
    await index.compact()


Step = tuple[str, int]
STEPS: Any = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "search", "filter", "compact", "load"]), st.integers(0, 9)
    ),
    max_size=25,
)


async def play(steps: list[Step], metric: Any, path: Path) -> None:
    """Change an index at random, and search in it."""
    rng = np.random.default_rng(len(steps))
    held: dict[int, Any] = {}
    async with ta.open_system("index") as system, system.open_device(NAME, options=INLINE) as device:
        index = VectorIndex(device, WIDTH, metric=metric, dtype="float16")
        for name, number in steps:
            if name == "add":
                ids = [one for one in rng.permutation(60)[: 2 * number].tolist() if one not in held]
                vectors = exact_vectors(metric, rng, len(ids), WIDTH)
                await index.add(ids, vectors)
                held.update(zip(ids, vectors, strict=True))
            elif name == "remove":
                ids = rng.permutation(sorted(held))[: 2 * number].tolist()
                await index.remove(ids)
                held = {one: vector for one, vector in held.items() if one not in ids}
            elif name == "compact":
                await index.compact()
            elif name == "load":
                await index.save(path)
                index = await VectorIndex.load(device, path)
            else:
                queries, chosen = exact_vectors(metric, rng, 3, WIDTH), held
                where: Any = None
                if name == "filter":
                    chosen = {one: vector for one, vector in held.items() if one % 3 == number % 3}
                    where = [one % 3 == number % 3 for one in sorted(held)]
                    where = where if number < 5 and where else lambda ids: ids % 3 == number % 3  # noqa: B023
                found = await index.search(queries, number + 1, where=where)
                expected = expected_ids(metric, queries, chosen, number + 1)
                np.testing.assert_array_equal(found.ids, expected)
            assert index.ids.tolist() == sorted(held)


@settings(max_examples=30)
@given(STEPS, st.sampled_from(METRICS))
def test_it_behaves_like_a_dictionary(steps: list[Step], metric: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trio.run(play, steps, metric, Path(folder) / "index.safetensors")


async def test_a_change_that_fails_changes_nothing(device: ta.Device) -> None:
    index = VectorIndex(device, 2, metric="dot")
    await index.add([1, 2, 3], [[1, 0], [0, 1], [1, 1]])
    before = index._segments
    for change in (
        lambda: index.add([4, 2], [[1, 0], [0, 1]]),
        lambda: index.add([4, 5], [[1, 0], [0, math.nan]]),
        lambda: index.remove([1, 7]),
    ):
        with pytest.raises((ValueError, KeyError)):
            await change()
    error = ta.LibraryError("no", library="memory", code=1)
    for operation, change in (
        (Put, lambda: index.add([4, 5], [[1, 0], [0, 1]])),
        ("arrays.concat", lambda: index.add([4, 5, 6], [[1, 0], [0, 1], [1, 1]])),
        (Put, lambda: index.remove([1])),
        ("arrays.take", lambda: index.remove([1, 2])),
    ):
        ta.testing.inject_fault(device, operation, fail=error)
        with pytest.raises(ta.LibraryError):
            await change()
    assert index._segments is before


async def test_a_search_sees_the_index_of_its_beginning(device: ta.Device) -> None:
    index = VectorIndex(device, 2, metric="dot")
    await index.add([1, 2], [[1, 0], [2, 0]])
    found: list[Any] = []

    def where(ids: Any) -> Any:
        found.append(ids)
        return ids > 1

    async def change() -> None:
        await index.remove([2])
        await index.add([3], [[3, 0]])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        result = await index.search([1, 0], 5, where=where)
    assert result.ids.tolist() == [one for one in found[0] if one > 1]
    assert (await index.search([1, 0], 5)).ids.tolist() == [3, 1]


async def test_a_file_of_an_index_is_checked(device: ta.Device, tmp_path: Path) -> None:
    good: dict[str, Any] = {"vectors": np.eye(2, dtype="float32"), "ids": np.array([3, 5])}
    path = tmp_path / "index.safetensors"
    bad: list[tuple[dict[str, Any], str]] = [
        ({"ids": np.array([5, 3])}, "do not fit"),
        ({"ids": np.array([3, 3])}, "do not fit"),
        ({"ids": np.array([3.0, 5.0])}, "do not fit"),
        ({"ids": np.array([3, 5, 7])}, "do not fit"),
        ({"vectors": np.eye(2, dtype="int32")}, "do not fit"),
        ({"vectors": np.ones(2)}, "do not fit"),
        ({"vectors": np.ones((2, 0))}, "do not fit"),
        ({"vectors": np.array([[1.0, 0.0], [0.0, math.nan]])}, "the vector 5 has the length nan"),
        ({"vectors": np.array([[1.0, 0.0], [0.0, 2.0]])}, "the vector 5 has the length 2"),
    ]
    for changes, text in [*bad, ({}, "")]:
        arrays = {name: await device.put(host) for name, host in (good | changes).items()}
        await ta.weights.save(path, arrays, metadata={"metric": "cosine"})
        if text:
            with pytest.raises(ta.weights.WeightsError, match=text):
                await VectorIndex.load(device, path)
    assert (await VectorIndex.load(device, path)).ids.tolist() == [3, 5]
    await ta.weights.save(path, {"ids": arrays["ids"]}, metadata={"metric": "cosine"})
    with pytest.raises(ta.weights.WeightsError, match="it needs vectors, ids and a metric"):
        await VectorIndex.load(device, path)
    await ta.weights.save(path, arrays, metadata={"metric": "taxi"})
    with pytest.raises(ta.weights.WeightsError, match="it needs vectors, ids and a metric"):
        await VectorIndex.load(device, path)


Ask = Callable[[VectorIndex], Awaitable[object]]
NAN, INF = math.nan, math.inf
FILTER = r"where must have the shape \(3,\) of ids"
BAD: list[tuple[Ask, type[Exception], str]] = [
    (lambda x: x.add([5], [[1, 2, 3]]), ValueError, r"vectors must have 2 elements, got the shape \(1, 3\)"),
    (lambda x: x.add([5], [1, 2]), ValueError, r"add: vectors must have the shape \(1, 2\), got \(2,\)"),
    (lambda x: x.add([5, 6], [[1, 2]]), ValueError, r"must have the shape \(2, 2\), got \(1, 2\)"),
    (lambda x: x.add([5, 6], [[1, 2], [NAN, 1]]), ValueError, "add: vector 1 has NaN or infinity as float32"),
    (lambda x: x.add([5], [[1, INF]]), ValueError, "add: vector 0 has NaN or infinity"),
    (lambda x: x.add([5], [[0, 0]]), ValueError, "add: vector 0 has the length 0"),
    (lambda x: x.add([5], [[1j, 0]]), TypeError, "add: vectors must be real numbers, got complex128"),
    (lambda x: x.add([5], [["1", "2"]]), TypeError, "add: vectors must be real numbers"),
    (lambda x: x.add([5], [[1], [2, 3]]), ValueError, "inhomogeneous"),
    (lambda x: x.add([5, 5], np.eye(2)), ValueError, "add: the id 5 is given twice"),
    (lambda x: x.add([5, 1], np.eye(2)), ValueError, "add: the id 1 is there already"),
    (lambda x: x.add([1.5], [[1, 2]]), TypeError, "add: ids must be integers of int64, got float64"),
    (lambda x: x.add([2**63], [[1, 2]]), TypeError, "add: ids must be integers of int64"),
    (lambda x: x.add([2**70], [[1, 2]]), TypeError, "add: ids must be integers of int64"),
    (lambda x: x.add([True], [[1, 2]]), TypeError, "add: ids must be integers of int64"),
    (lambda x: x.add(5, [[1, 2]]), ValueError, r"add: ids must be a vector, got the shape \(\)"),
    (lambda x: x.remove([9]), KeyError, "remove: the id 9 is not there"),
    (lambda x: x.remove([1, 1]), ValueError, "remove: the id 1 is given twice"),
    (lambda x: x.search([1, 2, 3], 1), ValueError, r"vectors must have 2 elements, got the shape \(3,\)"),
    (lambda x: x.search(np.ones((1, 1, 2)), 1), ValueError, "search: vectors must have 2 elements"),
    (lambda x: x.search([NAN, 1], 1), ValueError, "search: vector 0 has NaN"),
    (lambda x: x.search([0, 0], 1), ValueError, "search: vector 0 has the length 0"),
    (lambda x: x.search([1, 2], 0), ValueError, "search: k must be at least 1, got 0"),
    (lambda x: x.search([1, 2], 1.5), TypeError, "search: k must be an integer, got 1.5"),
    (lambda x: x.search([1, 2], 1, where=[True]), ValueError, FILTER),
    (lambda x: x.search([1, 2], 1, where=lambda ids: ids[:2] > 0), ValueError, FILTER),
    (lambda x: x.search([1, 2], 1, where=[1, 0, 1]), TypeError, "where must be truth values, got int64"),
]


@pytest.mark.parametrize(("ask", "error", "text"), BAD, ids=[text[:40] for _, _, text in BAD])
async def test_bad_input(device: ta.Device, ask: Ask, error: type[Exception], text: str) -> None:
    index = VectorIndex(device, 2)
    await index.add([1, 2, 3], [[1, 0], [0, 1], [1, 1]])
    with pytest.raises(error, match=text):
        await ask(index)
    assert index.ids.tolist() == [1, 2, 3]


async def test_scores_that_exceed_the_dtype(device: ta.Device) -> None:
    index = VectorIndex(device, 2, metric="dot", dtype="float16")
    await index.add([1, 2], [[60000, 0], [-60000, 0]])
    for k in (1, 2):
        with pytest.raises(ValueError, match="search: the scores exceed float16"):
            await index.search([10, 0], k)
    with pytest.raises(ValueError, match="add: vector 0 has NaN or infinity as float16"):
        await index.add([3], [[70000, 0]])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"width": 0}, "VectorIndex: width must be at least 1, got 0"),
        ({"width": 2.0}, "VectorIndex: width must be an integer, got 2.0"),
        ({"metric": "taxi"}, "VectorIndex: metric must be one of"),
        ({"dtype": "int32"}, "VectorIndex: dtype must be one of"),
        ({"dtype": "complex64"}, "VectorIndex: dtype must be one of"),
        ({"dtype": "words"}, "is not an element type of a device"),
    ],
)
async def test_wrong_options(device: ta.Device, options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        VectorIndex(device, **({"width": 2} | options))
    any_index: Any = VectorIndex
    with pytest.raises(TypeError, match="VectorIndex"):
        any_index("cpu", 2)


async def test_a_closed_device(system: ta.System) -> None:
    async with system.open_device(NAME) as device:
        index = VectorIndex(device, 2)
        await index.add([1], [[1, 2]])
    with pytest.raises(ta.DeviceLostError):
        await index.search([1, 2], 1)
