"""Launches of kernels: against NumPy, on every backend and through a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from own_kernels import combine, one, saxpy, tail_cpu

import trio_accel as ta
from trio_accel import jit

on_cuda = pytest.mark.skipif(BACKEND != "cuda", reason="compiles CUDA code")
C_TYPES = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}


async def test_a_kernel_updates_its_array(device: ta.Device) -> None:
    x = np.linspace(-1.0, 1.0, 1000, dtype=np.float32)
    y = await device.put(np.ones(1000, np.float32))
    refs = await device.put(x)
    for _ in range(3):
        (changed,) = await saxpy(1000, 0.5, refs, y)
    assert changed is y
    np.testing.assert_allclose(await y.to_host(), x.astype(float) * 1.5 + 1, rtol=1e-5, atol=1e-6)


async def test_arguments_by_name_and_a_host_array(device: ta.Device) -> None:
    y = await device.zeros(4, "float32")
    await saxpy(n=3, y=y, a=2, x=np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(await y.to_host(), [0.0, 2.0, 4.0, 0.0])


async def test_a_message_is_asked_of_the_device(device: ta.Device) -> None:
    x, y = await device.full(5, 3, "float32"), await device.zeros(5, "float32")
    message = saxpy.launch(5, -1.0, x, y)
    assert message.operation == "jit.saxpy"
    pending = device.submit(message)
    await device.ask(saxpy.launch(5, 2.0, x, y))
    (again,) = await pending.wait()
    np.testing.assert_array_equal(await again.to_host(), np.full(5, 3.0))


@pytest.mark.parametrize("dtype", [*C_TYPES])
async def test_instances_of_a_template_make_their_output(device: ta.Device, dtype: str) -> None:
    kernel = combine(dtype, C_TYPES[dtype])
    x = np.arange(300).reshape(3, 100).astype(dtype)
    y = (7 - x).astype(dtype)
    (out,) = await kernel(2, await device.put(x), await device.put(y), n=300)
    assert (out.shape, out.dtype) == ((3, 100), ta.DType.of(dtype))
    np.testing.assert_array_equal(await out.to_host(), 2 * x + 3 * y)
    given = await device.empty((3, 100), dtype)
    (same,) = await kernel(-1, out, out, given, 300)
    assert same is given
    np.testing.assert_array_equal(await given.to_host(), 2 * (2 * x + 3 * y))


async def test_views_that_lie_without_gaps_start_at_their_first_element(device: ta.Device) -> None:
    x = await device.put(np.arange(10, dtype=np.float32))
    y = await device.zeros(10, "float32")
    await saxpy(4, 1.0, x[3:7], y[2:6])
    np.testing.assert_array_equal(await y.to_host(), [0, 0, 3, 4, 5, 6, 0, 0, 0, 0])


async def test_packed_arrays_are_copied_there_and_back(device: ta.Device) -> None:
    kernel = combine("float64", "double", layout="packed")
    x = np.arange(12.0).reshape(3, 4)
    held = await device.put(x)
    out = await device.zeros((8, 3), "float64")
    target = out[::2]
    await kernel(2.0, held.T, held.T, target, 12)
    expected = np.zeros((8, 3))
    expected[::2] = 5 * x.T
    np.testing.assert_array_equal(await out.to_host(), expected)


async def test_an_updated_packed_array_keeps_the_rest(device: ta.Device) -> None:
    kernel = one(
        "tail",
        'extern "C" __global__ void tail(double* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 10; }',
        parameters={"x": jit.updates("float64", layout="packed"), "n": jit.scalar("int32")},
        cpu=tail_cpu,
    )
    x = await device.put(np.arange(16.0))
    await kernel(x[::2], 3)
    expected = np.arange(16.0)
    expected[[0, 2, 4]] += 10
    np.testing.assert_array_equal(await x.to_host(), expected)


async def test_an_array_of_any_layout_is_passed_without_a_copy(device: ta.Device) -> None:
    kernel = jit.Kernel(
        "diagonal",
        'extern "C" __global__ void diagonal(const double* x, long long step, double* out) {'
        " out[threadIdx.x] = x[threadIdx.x * step]; }",
        parameters={
            "x": jit.reads("float64", layout="any"),
            "step": jit.scalar("int64"),
            "out": jit.writes("float64", shape=lambda x: x.size),
        },
        grid=1,
        block=lambda x: x.size,
        cpu="own_kernels:strided_cpu",
    )
    x = await device.put(np.arange(25.0).reshape(5, 5))
    (out,) = await kernel(x[:, 2], 5)
    np.testing.assert_array_equal(await out.to_host(), [2, 7, 12, 17, 22])


async def test_an_array_without_axes(device: ta.Device) -> None:
    x = await device.put(np.array(2.5, np.float32))
    (out,) = await combine("float32", "float")(2.0, x, x, n=1)
    assert out.shape == ()
    assert await out.to_host() == 12.5


async def test_an_empty_array_launches_nothing_if_so_declared(device: ta.Device) -> None:
    x, y = await device.zeros(0, "float32"), await device.zeros(0, "float32")
    (same,) = await saxpy(0, 1.0, x, y)
    assert same is y
    (made,) = await combine("float32", "float")(1.0, x, y, n=0)
    assert made.shape == (0,)


SCALARS = {
    "float64": ("double", -1.25e300),
    "float32": ("float", 0.1),
    "int8": ("signed char", -128),
    "uint8": ("unsigned char", 255),
    "int16": ("short", -300),
    "uint16": ("unsigned short", 65535),
    "int32": ("int", -(2**31)),
    "uint32": ("unsigned", 2**32 - 1),
    "int64": ("long long", -(2**53)),
    "uint64": ("unsigned long long", 2**52 + 1),
    "bool": ("bool", True),
}


@pytest.mark.parametrize("cpu", ["own_kernels:numbers_cpu", None], ids=["function", "source"])
async def test_scalars_arrive_as_they_were_declared(device: ta.Device, cpu: str | None) -> None:
    # In an order in which each has to be aligned anew.
    order = [
        "int8",
        "float64",
        "bool",
        "int32",
        "uint8",
        "int16",
        "uint64",
        "uint16",
        "float32",
        "int64",
        "uint32",
    ]
    arguments = ", ".join(f"{SCALARS[name][0]} v{n}" for n, name in enumerate(order))
    body = "".join(f"out[{n}] = (double)v{n};" for n in range(len(order)))
    kernel = jit.Kernel(
        "numbers",
        f'extern "C" __global__ void numbers({arguments}, double* out) {{ {body} }}',
        parameters={
            **{f"v{n}": jit.scalar(name) for n, name in enumerate(order)},
            "out": jit.writes("float64", shape=lambda: len(order)),
        },
        grid=1,
        block=1,
        cpu=cpu,
    )
    values = {f"v{n}": SCALARS[name][1] for n, name in enumerate(order)}
    try:
        (out,) = await device.ask(kernel.launch(**values))
    except ta.NotSupportedError as error:
        if cpu is not None or BACKEND == "cuda":
            raise
        pytest.skip(f"this device does not compile the source: {error}")
    expected = [float(np.dtype(name).type(SCALARS[name][1])) for name in order]
    np.testing.assert_array_equal(await out.to_host(), expected)


@on_cuda
async def test_macros_dialect_and_headers_of_a_folder(device: ta.Device, tmp_path: Path) -> None:
    (tmp_path / "factor.h").write_text(
        "template <class T> inline __device__ T factor(T x) { return 3 * x; }\n"
    )
    kernel = one(
        "fill",
        '#include "factor.h"\n#if __cplusplus < 202002L\n#error "no C++20"\n#endif\n'
        'extern "C" __global__ void fill(double* x) { x[threadIdx.x] = factor(START) + threadIdx.x; }',
        options=jit.CompileOptions(std="c++20", macros={"START": 2.5}, include_path=tmp_path),
    )
    (out,) = await kernel(await device.zeros(8))
    np.testing.assert_array_equal(await out.to_host(), 7.5 + np.arange(8))


@on_cuda
@pytest.mark.parametrize("isolation", ["inline"])
async def test_headers_of_cuda_are_found_after_the_given_folders(
    device: ta.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trio_accel.backends.cuda.runtime import _compiler

    for folder, text in (("own", "2.0"), ("cuda", "3.0")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both.h").write_text(f"#define BOTH {text}\n")
    (tmp_path / "cuda" / "installed.h").write_text("#define INSTALLED 0.5\n")
    monkeypatch.setattr(_compiler, "_header_folders", lambda: (str(tmp_path / "cuda"),))
    kernel = one(
        "fill",
        '#include <installed.h>\n#include "both.h"\n'
        'extern "C" __global__ void fill(double* x) { x[threadIdx.x] = BOTH + INSTALLED; }',
        options=jit.CompileOptions(include_path=[tmp_path / "own"]),
    )
    (out,) = await kernel(await device.zeros(8))
    np.testing.assert_array_equal(await out.to_host(), np.full(8, 2.5))


@on_cuda
async def test_a_kernel_without_c_linkage_is_found_by_its_name(device: ta.Device) -> None:
    kernel = one(
        "inner::plain", "namespace inner { __global__ void plain(double* x) { x[threadIdx.x] = 4; } }"
    )
    (out,) = await kernel(await device.zeros(8))
    np.testing.assert_array_equal(await out.to_host(), np.full(8, 4.0))


@on_cuda
async def test_a_kernel_compiled_elsewhere(device: ta.Device) -> None:
    from cuda.core import Program, ProgramOptions

    text = 'extern "C" __global__ void filled(double* x) { x[threadIdx.x] = 2 * threadIdx.x; }'
    code = Program(text, "c++", ProgramOptions(arch="sm_90")).compile("cubin").code
    for made in (jit.cubin(code), jit.fatbin(code)):
        (out,) = await one("filled", made)(await device.zeros(8))
        np.testing.assert_array_equal(await out.to_host(), 2.0 * np.arange(8))


@on_cuda
async def test_the_occupancy_of_a_kernel(device: ta.Device) -> None:
    found = await saxpy.occupancy(device)
    assert found.max_active_blocks * 128 <= 2048
    assert 0 < found.suggested_block <= found.max_threads <= 1024
    assert found.max_dynamic_shared >= 48 * 1024
    assert found.multiprocessors > 0
    assert (await saxpy.occupancy(device, 1024)).max_active_blocks < found.max_active_blocks
    assert (await saxpy.occupancy(device, shared=1 << 30)).max_active_blocks == 0


@on_cuda
@pytest.mark.parametrize("isolation", ["inline"])
async def test_a_kernel_is_compiled_once(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from trio_accel.backends.cuda.libraries import compiled as library

    compiled: list[str] = []
    compile_kernel = library.compile_kernel

    def counted(definition: Any, architecture: str) -> Any:
        compiled.append(definition.name)
        return compile_kernel(definition, architecture)

    monkeypatch.setattr(library, "compile_kernel", counted)
    for size in (3, 200, 3):
        x = await device.full(size, 1, "float32")
        await saxpy(size, 1.0, x, await x.copy())
    await combine("float32", "float")(1.0, x, x, n=3)
    assert compiled == ["saxpy", "combine<float, 3>"]


@on_cuda
@pytest.mark.parametrize("isolation", ["inline"])
async def test_kernels_that_make_way_are_unloaded(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    from trio_accel.backends.cuda.libraries.compiled import JitLibrary

    unloaded: list[int] = []
    unload = driver.cuLibraryUnload

    def counted(library: Any) -> Any:
        unloaded.append(int(library))
        return unload(library)

    monkeypatch.setattr(driver, "cuLibraryUnload", counted)
    monkeypatch.setattr(JitLibrary, "most_plans", 2)
    kernels = [
        one(f"plus{n}", f'extern "C" __global__ void plus{n}(double* x) {{ x[threadIdx.x] += {n}; }}')
        for n in range(1, 5)
    ]
    x = await device.zeros(8)
    for kernel in (*kernels, *kernels):
        await kernel(x)
    np.testing.assert_array_equal(await x.to_host(), np.full(8, 20.0))
    assert len(unloaded) == 6
