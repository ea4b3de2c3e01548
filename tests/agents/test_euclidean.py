"""The metric "l2" against NumPy in float64: clouds anywhere, equal distances, changes, and lost workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trio_accel as ta
from trio_accel.agents import VectorIndex
from trio_accel.devices import opened

Host = npt.NDArray[Any]
DTYPES = ("float16", "bfloat16", "float32", "float64")


def rounded(vectors: Host, dtype: str) -> Host:
    return vectors.astype(ta.DType.of(dtype).dtype).astype(np.float64)


def expected(queries: Host, held: dict[int, Host], k: int) -> tuple[Host, Host]:
    """Return ids and distances by differences in float64; equal distances by id."""
    ids = np.array(sorted(held), np.int64)
    vectors = np.stack([held[number] for number in ids])
    distances = np.sqrt(((queries[:, None, :] - vectors[None]) ** 2).sum(axis=2))
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return ids[order], np.take_along_axis(distances, order, 1)


def clouds(rng: np.random.Generator, count: int, width: int, dtype: str) -> dict[str, Host]:
    """Make vectors of several kinds that the dtype holds."""
    normal = rng.standard_normal((count, width))
    far = 1e3 if "16" in dtype else 1e6
    sides = rng.choice(np.array([-far, far]), (count, 1))
    kinds = {
        "origin": normal,
        "far": normal + far,
        "two clouds": normal + sides,
        "duplicates": normal[rng.integers(0, 5, count)] + far,
        "integers": rng.integers(-3, 4, (count, width)).astype(float),
        "far integers": rng.integers(-3, 4, (count, width)) + far,
        "outlier": np.where(np.arange(count)[:, None] == 7, far * 4, normal),
        "tiny": normal * (1e-6 if dtype == "float16" else 1e-30),
        "line": np.linspace(far, far + 1, count)[:, None] + np.zeros((1, width)),
    }
    return {name: rounded(vectors, dtype) for name, vectors in kinds.items()}


@pytest.mark.parametrize("width", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_the_nearest_match_the_differences(device: ta.Device, dtype: str, width: int) -> None:
    rng = np.random.default_rng(4)
    for name, vectors in clouds(rng, 150, width, dtype).items():
        ids = rng.permutation(400)[:150] - 100
        held = dict(zip(ids.tolist(), vectors, strict=True))
        index = VectorIndex(device, width, metric="l2", dtype=dtype)
        for start, stop in ((0, 100), (100, 140), (140, 150)):
            await index.add(ids[start:stop], vectors[start:stop])
        queries = np.concatenate([vectors[:4], rounded(vectors[:2] * 1.5 + 1, dtype), np.zeros((1, width))])
        for k in (1, 7, 200):
            found = await index.search(queries, k)
            right_ids, distances = expected(queries, held, k)
            np.testing.assert_array_equal(found.ids, right_ids, err_msg=f"{name} {k}")
            np.testing.assert_allclose(found.scores, distances, rtol=1e-12, err_msg=f"{name} {k}")
        found = await index.search(vectors[:5], 1)
        assert found.scores.ravel().tolist() == [0.0] * 5, name


async def test_changes_and_filters(device: ta.Device) -> None:
    rng = np.random.default_rng(8)
    held: dict[int, Host] = {}
    index = VectorIndex(device, 3, metric="l2")
    for number in range(8):
        ids = np.arange(50 * number, 50 * number + 50)
        # Each part of the index is at another place.
        vectors = rounded(rng.standard_normal((50, 3)) + 10.0**number, "float32")
        await index.add(ids, vectors)
        held |= dict(zip(ids.tolist(), vectors, strict=True))
        removed = rng.permutation(sorted(held))[:20].tolist()
        await index.remove(removed)
        held = {key: vector for key, vector in held.items() if key not in removed}
        if number == 5:
            await index.compact()
        queries = np.stack([*held.values()])[:: max(1, len(held) // 6)]
        found = await index.search(queries, 9)
        np.testing.assert_array_equal(found.ids, expected(queries, held, 9)[0])
        found = await index.search(queries, 9, where=lambda ids: ids % 3 == 1)
        chosen = {key: vector for key, vector in held.items() if key % 3 == 1}
        np.testing.assert_array_equal(found.ids, expected(queries, chosen, 9)[0])


async def test_one_vector_and_files(device: ta.Device, tmp_path: Any) -> None:
    index = VectorIndex(device, 2, metric="l2", dtype="float64")
    await index.add([5], [[1e9 + 1, 1e9]])
    await index.save(tmp_path / "index")
    for source in (index, await VectorIndex.load(device, tmp_path / "index")):
        found = await source.search([[1e9, 1e9], [1e9 + 1, 1e9]], 3)
        assert (found.ids.tolist(), found.scores.tolist()) == ([[5], [5]], [[1.0], [0.0]])


async def requests_of(device: ta.Device, work: Callable[[], Any]) -> int:
    requests: list[str] = []

    def seen(phase: Any, launch: Any) -> None:
        if phase.value == "validate":
            requests.append(launch.name)

    with opened(device).observed(seen, lambda ask: ask):
        await work()
    return len(requests)


@pytest.mark.parametrize("offset", [0.0, 1e4])
async def test_an_ordinary_search_is_one_request(device: ta.Device, offset: float) -> None:
    rng = np.random.default_rng(1)
    index = VectorIndex(device, 64, metric="l2")
    await index.add(np.arange(2000), rng.standard_normal((2000, 64)) + offset)
    await index.add(np.arange(2000, 2500), rng.standard_normal((500, 64)) + offset)
    queries = rng.standard_normal((5, 64)) + offset
    assert await requests_of(device, lambda: index.search(queries, 10)) == 1


async def test_products_in_pieces(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.agents._euclidean._MAX_ELEMENTS", 64)
    rng = np.random.default_rng(2)
    vectors = rounded(rng.choice(np.array([-1e6, 1e6]), (90, 1)) + rng.standard_normal((90, 2)), "float32")
    index = VectorIndex(device, 2, metric="l2")
    await index.add(range(90), vectors)
    found = await index.search(vectors[:9], 4)
    np.testing.assert_array_equal(found.ids, expected(vectors[:9], dict(enumerate(vectors)), 4)[0])


async def test_products_that_exceed_the_dtype(device: ta.Device) -> None:
    index = VectorIndex(device, 2, metric="l2")
    with pytest.raises(ValueError, match="add: vector 1 has a length whose square exceeds float32"):
        await index.add([1, 2], [[0, 0], [1e20, 0]])
    await index.add([1, 2], [[1e18, 0], [-1e18, 0]])
    with pytest.raises(ValueError, match="search: the products exceed float32; use a wider dtype"):
        await index.search([1e30, 0], 1)


async def test_a_killed_worker_loses_nothing() -> None:
    rng = np.random.default_rng(3)
    vectors = rounded(rng.standard_normal((60, 3)) + 1e6, "float32")
    options = ta.DeviceOptions(isolation="process", retry=2)
    async with ta.open_system("index") as system, system.open_device("cpu", options=options) as device:
        index = VectorIndex(device, 3, metric="l2")
        await index.add(range(60), vectors)
        pid = (await device.statistics()).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        found = await index.search(vectors[:5], 4)
    np.testing.assert_array_equal(found.ids, expected(vectors[:5], dict(enumerate(vectors)), 4)[0])
