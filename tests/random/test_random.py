"""Random numbers: against Random123's known answers, cuRAND's own, and the distributions."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import scipy.stats
import trio
from chosen import BACKEND, INLINE

import trio_accel as ta
from trio_accel.backends.cpu.libraries.random import philox4x32

# Known answers of philox4x32 with 10 rounds: tests/kat_vectors of Random123 1.14.0 (Salmon et al.;
# D. E. Shaw Research, BSD 3-clause): counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

# The numbers of cuRAND 10.4.4's host generator PHILOX4_32_10 for this seed; uniform ones at offset 2 << 18.
SEED = 0x0123456789ABCDEF
CURAND_BITS = {
    0: 0xB850222E,
    1: 0xC58CB04B,
    2: 0x14A7A020,
    3: 0x7A84FFF9,
    4: 0xFA9DFF5E,
    262143: 0xA2B781BA,
    262144: 0xADCA1466,
    262145: 0x523E0D85,
    300003: 0xFCB8C938,
}
CURAND_UNIFORM = {
    "float32": {
        0: "0x1.ef9c54p-1",
        1: "0x1.047996p-1",
        262144: "0x1.5860f2p-1",
        300003: "0x1.f3b23cp-2",
    },
    "float64": {
        0: "0x1.047999fce29a0p-1",
        1: "0x1.a8fe4c97f1e64p-4",
        2: "0x1.fefa370e0f1e1p-2",
        3: "0x1.fc270cde8e918p-1",
        262144: "0x1.a4337d64a30bap-1",
        300003: "0x1.5729a18e36122p-1",
    },
}
CURAND_NORMAL = {
    "float32": {
        0: -0.8030993938446045,
        1: 0.11006899178028107,
        2: 0.300900936126709,
        262144: 0.7933948040008545,
        300003: 1.1994473934173584,
    },
    "float64": {
        0: 0.09655394047443411,
        1: -0.7134790715091881,
        2: -1.426230008354764,
        3: -0.4867060118006284,
        262144: 0.7053753208590193,
        300003: -0.7694805052168326,
    },
}
LENGTH = 300_004


def _hex(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_cipher_gives_random123s_known_answers(counter: str, key: str, expected: str) -> None:
    first, second, third, fourth = (np.array([word], np.uint64) for word in _hex(counter))
    key0, key1 = _hex(key)
    words = philox4x32((first, second, third, fourth), key1 << 32 | key0)
    assert [int(word[0]) for word in words] == _hex(expected)


async def test_bits_match_curand(device: ta.Device) -> None:
    host = await (await ta.random.Generator(device, seed=SEED).bits(LENGTH)).to_host()
    assert host.dtype == np.uint32
    assert {index: int(host[index]) for index in CURAND_BITS} == CURAND_BITS


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_uniform_numbers_match_curand(device: ta.Device, dtype: str) -> None:
    generator = ta.random.Generator(device, seed=SEED)
    await generator.bits(1)  # takes the first two rows
    host = await (await generator.uniform(LENGTH, dtype)).to_host()
    expected = {index: float.fromhex(value) for index, value in CURAND_UNIFORM[dtype].items()}
    assert {index: float(host[index]) for index in expected} == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
async def test_normal_numbers_match_curand(device: ta.Device, dtype: str, tolerance: float) -> None:
    host = await (await ta.random.Generator(device, seed=SEED).normal(LENGTH, dtype)).to_host()
    for index, expected in CURAND_NORMAL[dtype].items():
        assert float(host[index]) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_distributions(device: ta.Device, dtype: str) -> None:
    generator = ta.random.Generator(device, seed=7)
    uniform = await (await generator.uniform(200_000, dtype)).to_host()
    assert uniform.min() > 0
    assert uniform.max() <= 1
    assert scipy.stats.kstest(uniform, "uniform").pvalue > 0.001
    normal = await (await generator.normal((400, 500), dtype)).to_host()
    assert scipy.stats.kstest(normal.reshape(-1), "norm").pvalue > 0.001
    exponential = await (await generator.exponential(200_000, dtype, scale=2.5)).to_host()
    assert exponential.min() >= 0
    assert scipy.stats.kstest(exponential, "expon", (0, 2.5)).pvalue > 0.001
    lognormal = await (await generator.lognormal(200_000, dtype, mean=-1.0, sigma=0.5)).to_host()
    assert scipy.stats.kstest(lognormal, "lognorm", (0.5, 0, np.exp(-1.0))).pvalue > 0.001


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-5, 12), (1 << 40, (1 << 40) + 1000)])
async def test_whole_numbers(device: ta.Device, low: int, high: int) -> None:
    out = await device.zeros((400, 500), "int64")
    assert await ta.random.Generator(device, seed=8).integers((400, 500), low, high, out=out) is out
    drawn = await out.to_host()
    assert (drawn.min(), drawn.max()) == (low, high - 1)
    counts = np.bincount(drawn.reshape(-1) - low, minlength=high - low)
    assert scipy.stats.chisquare(counts).pvalue > 0.001 or high - low == 1


async def test_whole_numbers_of_the_widest_range(device: ta.Device) -> None:
    drawn = await (await ta.random.Generator(device, seed=8).integers(200_000, -(1 << 31), 1 << 31)).to_host()
    assert scipy.stats.kstest(drawn / 2.0**32 + 0.5, "uniform").pvalue > 0.001


async def test_wrong_parameters_of_the_others(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    for low, high in ((3, 3), (4, 3), (0, (1 << 63) + 1), (-(1 << 64), 0)):
        with pytest.raises(ValueError, match=rf"random.integers: high must .* got {low} and {high}"):
            await generator.integers(3, low, high)
    with pytest.raises(TypeError):
        await generator.integers(3, 0, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exponential: scale must be at least 0, and finite, got scale -1"):
        await generator.exponential(3, scale=-1)
    with pytest.raises(ValueError, match="lognormal: sigma must be at least 0, and finite, got mean nan"):
        await generator.lognormal(3, mean=float("nan"))
    with pytest.raises(ta.NotSupportedError, match="dtype must be float32 or float64, got float16"):
        await generator.lognormal(3, "float16")
    assert (await device.statistics()).launched == 0


async def test_bounds_mean_and_deviation(device: ta.Device) -> None:
    plain = await (await ta.random.Generator(device, seed=3).uniform(1000, "float64")).to_host()
    moved = await (
        await ta.random.Generator(device, seed=3).uniform(1000, "float64", low=-2, high=6)
    ).to_host()
    np.testing.assert_allclose(moved, -2 + 8 * plain, rtol=1e-12)
    plain = await (await ta.random.Generator(device, seed=3).normal(1000, "float64")).to_host()
    moved = await (
        await ta.random.Generator(device, seed=3).normal(1000, "float64", loc=5, scale=0.5)
    ).to_host()
    np.testing.assert_allclose(moved, 5 + 0.5 * plain, rtol=1e-12)


@pytest.mark.parametrize("shape", [0, 1, 3, (2, 3), (), (5, 0), 65_537])
async def test_every_size_is_a_beginning_of_the_same_sequence(
    device: ta.Device, shape: int | tuple[int, ...]
) -> None:
    long = await (await ta.random.Generator(device, seed=5).normal(70_000)).to_host()
    short = await (await ta.random.Generator(device, seed=5).normal(shape)).to_host()
    assert short.shape == ((shape,) if isinstance(shape, int) else shape)
    np.testing.assert_array_equal(short.reshape(-1), long[: short.size])


async def test_no_part_of_the_sequence_is_drawn_twice(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=11)
    words: list[np.ndarray] = []

    async def draw() -> None:
        for size in (1, 1000, 262_145):
            drawn = await generator.bits(size)
            words.append(await drawn.to_host())

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(draw)
    # Four words a counter: equal words at equal places in two draws would be the same counter.
    counters = np.concatenate([part[: part.size // 4 * 4].reshape(-1, 4) for part in words])
    assert len(np.unique(counters, axis=0)) == len(counters)


async def test_single_and_double_precision_draw_different_counters(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=11)
    before = generator.state["position"]
    await generator.uniform(3 * 262_144, "float64")
    # Three times 65536 counters, each with the counter of the next row.
    assert int(generator.state["position"]) - int(before) == 6 * 262_144


async def test_a_restart_does_not_repeat_the_stream(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=13)
    first = await (await generator.bits(100)).to_host()
    ta.testing.inject_fault(device, ta.random.Bits, fail=RuntimeError("crash"))
    with pytest.raises(ta.ActorFailedError):
        await generator.bits(100)
    second = await (await generator.bits(100)).to_host()
    assert not np.intersect1d(first, second).size


async def test_out_is_filled_and_returned(device: ta.Device) -> None:
    out = await device.zeros((3, 4), "float32")
    result = await ta.random.Generator(device, seed=1).normal((3, 4), out=out)
    assert result is out
    expected = await (await ta.random.Generator(device, seed=1).normal(12)).to_host()
    np.testing.assert_array_equal((await out.to_host()).reshape(-1), expected)


async def test_two_generators_without_a_seed_differ(device: ta.Device) -> None:
    first, second = ta.random.Generator(device), ta.random.Generator(device)
    assert first.seed != second.seed
    assert str(first.seed) in repr(first)


async def test_wrong_arguments_are_refused_before_anything_is_launched(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    with pytest.raises(ta.NotSupportedError, match="kind 'mt19937' is not there"):
        ta.random.Generator(device, "mt19937")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed must be from 0 to 2\*\*64 - 1, got -1"):
        ta.random.Generator(device, seed=-1)
    with pytest.raises(ValueError, match="sizes of at least 0, got -3"):
        await generator.bits(-3)
    with pytest.raises(ta.NotSupportedError, match="dtype must be float32 or float64, got float16"):
        await generator.uniform(3, "float16")
    with pytest.raises(ValueError, match="low must not be above high"):
        await generator.uniform(3, low=2, high=1)
    with pytest.raises(ValueError, match="scale must be at least 0"):
        await generator.normal(3, scale=-1)
    with pytest.raises(ValueError, match=r"out must have shape \(3,\) and dtype uint32"):
        await generator.bits(3, out=await device.zeros(4, "uint32"))
    launched = (await device.statistics()).launched
    assert launched == 1  # the zeros


async def test_parameters_that_the_dtype_cannot_hold(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    with pytest.raises(ValueError, match=r"uniform: high 1e\+39 is outside the range of float32"):
        await generator.uniform(3, high=1e39)
    with pytest.raises(ValueError, match="uniform: high - low is outside the range of float64"):
        await generator.uniform(3, "float64", low=-1e308, high=1.7e308)
    with pytest.raises(ValueError, match=r"uniform: high - low 6e\+38 is outside the range of float32"):
        await generator.uniform(3, low=-3e38, high=3e38)
    with pytest.raises(ValueError, match=r"normal: loc -1e\+39 is outside the range of float32"):
        await generator.normal(3, loc=-1e39)
    with pytest.raises(TypeError, match="normal: scale must be a number, got str"):
        await generator.normal(3, scale="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="uniform: low 1j is complex, the arrays are float32"):
        await generator.uniform(3, low=1j)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Generator: seed must be an integer or None, got '7'"):
        ta.random.Generator(device, seed="7")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Generator: device must be an open Device, got str"):
        ta.random.Generator("cpu", seed=7)  # type: ignore[arg-type]
    assert np.isfinite(await (await generator.uniform(9, low=-1e38, high=2e38)).to_host()).all()


@pytest.mark.skipif(BACKEND != "cpu", reason="the compiler is the CPU backend's")
async def test_compiled_code_draws_the_numbers_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = import_module("trio_accel.backends.cpu.libraries.random")._compiled
    drawn: dict[str, list[np.ndarray]] = {}
    for way in ("never", "always"):
        monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", way)
        kept.cache_clear()
        async with ta.open_system("draws") as system, system.open_device("cpu", options=INLINE) as device:
            generator = ta.random.Generator(device, seed=SEED)
            # More than a piece, and no multiple of four.
            refs = [
                await generator.bits(70_001),
                await generator.uniform(70_001, dtype="float64"),
                await generator.integers(70_001, -5, 2**40),
                await generator.gamma(5000, dtype="float64", a=2.5),
                await generator.normal(70_001, dtype="float64"),
            ]
            drawn[way] = [await ref.to_host() for ref in refs]
    kept.cache_clear()
    *exact, (one, other) = zip(*drawn.values(), strict=True)
    for mine, numpys in exact:
        np.testing.assert_array_equal(mine, numpys)
    # Logarithm, sine and cosine are functions of our own in compiled code.
    np.testing.assert_allclose(one, other, rtol=2e-15, atol=2e-15)
