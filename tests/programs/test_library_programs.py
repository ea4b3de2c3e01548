"""The same program in NumPy, PyTorch, CuPy, Triton and JAX, where they are installed."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Generator
from importlib import import_module
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from library_programs import LibraryProgram, NumpyProgram, ReadingProgram

import trio_accel as ta
from trio_accel.testing import poison

if BACKEND == "cpu":
    # A worker inherits it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

RANDOM = np.random.default_rng(31)
WEIGHTS, BIAS = RANDOM.standard_normal((4, 3)), RANDOM.standard_normal(3)
X = RANDOM.standard_normal((5, 4))
NUMBERS = np.arange(20).reshape(5, 4)
REALS = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
COMPLEX = ("complex64", "complex128")
# NumPy does not export it, so only arrays of a GPU support it.
LOW = () if BACKEND == "cpu" else ("bfloat16",)


@attrs.frozen
class Library:
    """The attributes of a library.

    Attributes:
        name: Its name.
        cls: The program, as ``module:class``.
        backends: The backends on which it computes.
        dtypes: Of arrays that it takes and returns.
    """

    name: str
    cls: str
    backends: tuple[str, ...]
    dtypes: tuple[str, ...]


Check = Callable[[ta.Device, type[ReadingProgram], Library], Awaitable[None]]

LIBRARIES = (
    Library("numpy", "library_programs:NumpyProgram", ("cpu",), (*REALS, *COMPLEX)),
    Library("torch", "library_torch:TorchProgram", ("cpu", "cuda"), (*REALS, *COMPLEX, *LOW)),
    Library("cupy", "library_cupy:CupyProgram", ("cuda",), (*REALS, *COMPLEX)),
    Library(
        "triton",
        "library_triton:TritonProgram",
        ("cpu", "cuda") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",),
        (*REALS, *LOW),
    ),
    Library("jax", "library_jax:JaxProgram", ("cpu", "cuda"), (*REALS, *COMPLEX, *LOW)),
)


@pytest.fixture(scope="module", params=LIBRARIES, ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Library:
    """An installed library that computes on the device of the tests."""
    library: Library = request.param
    if BACKEND not in library.backends or IS_STAND_IN:
        pytest.skip(f"{library.name} has nothing for this backend")
    pytest.importorskip(library.name)
    return library


@pytest.fixture(scope="module")
def cls(library: Library) -> Generator[type[ReadingProgram], None, None]:
    """The program of the library."""
    module, _, name = library.cls.partition(":")
    cls: type[ReadingProgram] = getattr(import_module(module), name)
    if BACKEND == "cpu":
        yield cls
        return
    if library.name == "jax" and import_module("jax").default_backend() != "gpu":
        pytest.skip("JAX was installed without CUDA")
    # Caches of its first use are there before a test looks.
    ones = cls.xp.ones((4, 4), **({"device": "cuda"} if library.name in ("torch", "triton") else {}))
    float((ones @ ones).sum())
    del ones
    yield cls
    if library.name == "cupy":
        cls.xp.get_default_memory_pool().free_all_blocks()
    elif library.name in ("torch", "triton"):
        cls.xp.cuda.empty_cache()


async def open_layer(
    device: ta.Device, cls: type[ReadingProgram], total: ta.AccelRef
) -> ta.programs.Program[Any]:
    return await ta.open_program(device, cls, {"weights": WEIGHTS, "bias": BIAS}, total)


def expected(x: Any) -> Any:
    return np.tanh(x @ WEIGHTS + BIAS)


async def assert_close(found: ta.AccelRef, wanted: Any) -> None:
    host = await found.to_host()
    assert host.dtype == wanted.dtype
    np.testing.assert_allclose(host, wanted, rtol=1e-10, atol=1e-13)


async def reads(device: ta.Device, cls: type[ReadingProgram], library: Library) -> None:
    async with await open_layer(device, cls, await device.zeros(4)) as program:
        x = await device.put(X)
        turned = (await device.put(np.ascontiguousarray(X.T))).T
        for method in (cls.forward, cls.declared):
            for given in (X, x, turned):
                await assert_close(await program.ask(method, given), expected(X))
            await assert_close(await program.ask(method, x[1:3]), expected(X[1:3]))
        await assert_close(await program.ask(cls.positive, x), X[X > 0])
        several = await program.ask(cls.several, turned)
        await assert_close(several["sums"], X.sum(0))
        await assert_close(several["both"][0], X.T)
        await assert_close(several["both"][1], X[::2])
        assert several["rows"] == 5
        assert (await program.ask(cls.about))["calls"] == 4
        if (library.name, BACKEND) == ("jax", "cuda"):
            # It takes packed and transposed memory only.
            with pytest.raises(ta.ActorFailedError, match="striding"):
                await program.ask(cls.forward, x[::2])
        else:
            await assert_close(await program.ask(cls.forward, x[::2]), expected(X[::2]))


async def keeps_dtypes(device: ta.Device, cls: type[ReadingProgram], library: Library) -> None:
    async with await open_layer(device, cls, await device.zeros(4)) as program:
        for dtype in library.dtypes:
            numbers = NUMBERS.astype(ta.DType(dtype).dtype)
            if dtype in COMPLEX:
                numbers = numbers * (1 + 2j)
            found = await program.ask(cls.twice, await device.put(numbers))
            assert found.dtype == dtype
            np.testing.assert_array_equal(await found.to_host(), numbers + numbers, dtype)


async def writes(device: ta.Device, cls: type[ReadingProgram], _: Library) -> None:
    if not issubclass(cls, LibraryProgram):
        return
    total = await device.put(np.ones(4))
    async with await open_layer(device, cls, total) as program:
        host = np.concatenate([X, X])
        x, mine = await device.put(host), await device.zeros((5, 3))
        assert await program.ask(cls.written, x[::2], out=mine) is mine
        await assert_close(mine, expected(host[::2]))
        await program.ask(cls.double, x[::2].T)
        host[::2] *= 2
        await assert_close(x, host)
        for _ in range(3):
            await program.ask(cls.add, x)
        await assert_close(total, 1 + 3 * host.sum(0))
        # It has a view, so it sees what others write.
        await ta.linalg.scal(2.0, total)
        await program.ask(cls.add, x)
        for found in (total, await program.ask(cls.total_now)):
            await assert_close(found, 2 + 7 * host.sum(0))


async def survives(device: ta.Device, cls: type[ReadingProgram], _: Library) -> None:
    """A loss of the context costs no array, and the rest is made again."""
    total = await device.put(np.ones(4))
    async with await open_layer(device, cls, total) as program:
        if issubclass(cls, LibraryProgram):
            await program.ask(cls.add, X)
        kept = await total.to_host()
        await assert_close(await program.ask(cls.forward, X), expected(X))
        before = await program.ask(cls.about)
        assert before == {"calls": 1, "pid": before["pid"]}
        assert before["pid"] != os.getpid()
        poison(device, "for the test")
        with trio.fail_after(60):
            # A real fault shows when the driver has noticed it.
            while device.generation == 1:
                await (await program.ask(cls.forward, X)).to_host()
        after = await program.ask(cls.about)
        assert after["pid"] != before["pid"]
        await assert_close(await program.ask(cls.forward, X), expected(X))
        assert await program.ask(cls.about) == {**after, "calls": after["calls"] + 1}
        np.testing.assert_array_equal(await total.to_host(), kept)
        if issubclass(cls, LibraryProgram):
            await program.ask(cls.add, X)
            await assert_close(total, 1 + 2 * X.sum(0))
    assert device.generation == 2


@pytest.mark.parametrize("check", [reads, keeps_dtypes, writes], ids=lambda check: check.__name__)
async def test_in_this_process(
    system: ta.System, cls: type[ReadingProgram], library: Library, check: Check
) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        await check(device, cls, library)


@pytest.mark.timeout(180)
async def test_in_a_worker(system: ta.System, cls: type[ReadingProgram], library: Library) -> None:
    # One test, as a worker takes seconds to import some of them.
    options = ta.DeviceOptions(
        isolation="process", retry=1, retry_suspects=True, backoff=ta.Backoff(base=0.0)
    )
    async with system.open_device(BACKEND, options=options) as device:
        for check in (reads, keeps_dtypes, writes, survives):
            await check(device, cls, library)


def test_numpy_needs_no_device() -> None:
    total = np.zeros(4)
    program = NumpyProgram({"weights": WEIGHTS, "bias": BIAS}, total)
    program.add(X)
    np.testing.assert_array_equal(total, X.sum(0))
    np.testing.assert_array_equal(program.forward(X), expected(X))
