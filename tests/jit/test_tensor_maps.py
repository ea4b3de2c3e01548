"""Tensor maps as parameters of kernels: rules of the driver's manual, and the kernel's view."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from chosen import BACKEND, IS_STAND_IN
from hypothesis import given
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends.base.contract.ops import ArraySpec, KernelDefinition

on_cuda = pytest.mark.skipif(BACKEND != "cuda", reason="compiles CUDA code")
on_stand_in = pytest.mark.skipif(not IS_STAND_IN, reason="reads the stand-in's own maps")
inline = pytest.mark.parametrize("isolation", ["inline"])
isolated = pytest.mark.parametrize("isolation", ["process"])
# A kernel cannot know what a GPU has in a map; the bits of the stand-in's are its arguments.
WORDS = """
extern "C" __global__ void words(double a, const __grid_constant__ CUtensorMap x, unsigned long long* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = x.opaque[threadIdx.x];
}
"""
# Reads by the address and the strides of the stand-in's map.
COPIED = """
extern "C" __global__ void copied(const __grid_constant__ CUtensorMap x, float* out) {
    const unsigned long long *words = x.opaque, width = words[1], number = blockIdx.x * width + threadIdx.x;
    if (threadIdx.x < width) out[number] = ((const float*)(words[0] + blockIdx.x * words[6]))[threadIdx.x];
}
"""


def described(x: jit.Parameter, grid: Any = 1, **more: Any) -> jit.Kernel:
    """A kernel that reports the value of a parameter."""
    return jit.Kernel(
        "words",
        WORDS,
        parameters={
            "a": jit.scalar("float64"),
            "x": x,
            "out": jit.writes("uint64", shape=lambda x: 16),
        },
        grid=grid,
        block=32,
        cpu="test_tensor_maps:words_cpu",
        **more,
    )


def words_cpu(a: float, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    out[:] = x.shape[-1]


def copied() -> jit.Kernel:
    return jit.Kernel(
        "copied",
        COPIED,
        parameters={
            "x": jit.reads("float32", layout=jit.TensorMap(box=(1, 4))),
            "out": jit.writes("float32", shape=lambda x: x.shape),
        },
        grid=lambda x: x.shape[0],
        block=64,
        cpu="test_tensor_maps:copied_cpu",
    )


def copied_cpu(x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    out[...] = x


Made = Callable[[], object]
MAP: Any = jit.TensorMap  # mistakes are given to it
READS: Any = jit.reads
DECLARATIONS: dict[str, tuple[Made, str]] = {
    "no axes": (lambda: MAP(box=()), r"box must have 1 to 5 axes .*\(tensorRank\), .* got \(\)"),
    "six axes": (lambda: MAP(box=(1,) * 6), "box must have 1 to 5 axes"),
    "two axes with channels": (
        lambda: MAP(box=(8, 8), interleave="16B"),
        "box must have 3 to 5 axes with interleave='16B'",
    ),
    "empty box": (lambda: MAP(box=(0, 16)), r"box must be integers from 1 to 256 \(boxDim\)"),
    "large box": (lambda: MAP(box=(257,)), r"box must be integers from 1 to 256 \(boxDim\)"),
    "no number": (
        lambda: MAP(box="ab"),
        r"box must be integers from 1 to 256 \(boxDim\), got \('ab',\)",
    ),
    "steps": (
        lambda: MAP(box=(16, 16), element_strides=(1, 9)),
        r"element_strides must be integers from 1 to 8 \(elementStrides\)",
    ),
    "one step": (lambda: MAP(box=(16, 16), element_strides=(1,)), "and element_strides as many, got"),
    "swizzle": (lambda: MAP(box=4, swizzle="16B"), "swizzle must be one of None, '32B', '64B', '128B', got"),
    "interleave": (lambda: MAP(box=4, interleave="64B"), "interleave must be one of None, '16B', '32B'"),
    "promotion": (lambda: MAP(box=4, l2_promotion="32B"), "l2_promotion must be one of None, '64B'"),
    "fill": (lambda: MAP(box=4, fill=0), "fill must be one of 'zero', 'nan', got 0"),
    "channels of 32 bytes": (
        lambda: MAP(box=(4, 4, 4), interleave="32B"),
        "swizzle must be '32B' with interleave='32B', got None",
    ),
    "row": (
        lambda: READS("int8", layout=MAP(box=(4, 8))),
        r"a row of the box must be a multiple of 16 bytes \(boxDim\[0\]\); box \(4, 8\) of int8 has 8",
    ),
    "row of a swizzle": (
        lambda: READS("float32", layout=MAP(box=(4, 36), swizzle="128B")),
        r"a multiple of 16 bytes, and at most 128 with swizzle='128B' \(boxDim\[0\]\); box \(4, 36\)",
    ),
    "row of channels": (
        lambda: READS("float32", layout=MAP(box=(4, 4, 6), interleave="16B")),
        r"a row of the box must be a multiple of 16 bytes \(boxDim\[0\]\)",
    ),
    # A driver took neither this one nor any other of more bytes, of 20 000 sets of parameters, except some
    # with steps, and no block has space for their boxes either.
    "shared memory": (
        lambda: READS("float64", layout=MAP(box=(56, 143, 4))),
        r"must fit into the 232448 bytes of shared memory .* box \(56, 143, 4\) of float64 takes 256256",
    ),
    "shared memory, by steps": (
        lambda: READS("float64", layout=MAP(box=(256, 256, 2), element_strides=(2, 2, 8))),
        r"of float64 takes 262144",
    ),
    "complex128": (
        lambda: READS("complex128", layout=MAP(box=4)),
        r"a tensor map has elements of 1 to 8 bytes \(tensorDataType\), got complex128",
    ),
    "NaN of integers": (
        lambda: READS("int16", layout=MAP(box=8, fill="nan")),
        r"fill='nan' must be of floating-point elements \(oobFill\), got int16",
    ),
    "axes": (
        lambda: READS("int32", ndim=1, layout=MAP(box=(4, 4))),
        "ndim: must be 2, as the box of the tensor map has, got 1",
    ),
    "no map": (lambda: READS("int32", layout=(4, 4)), r"'any' or a TensorMap, got \(4, 4\)"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(("make", "text"), DECLARATIONS.values(), ids=DECLARATIONS.keys())
def test_an_impossible_map_is_refused_at_its_declaration(make: Made, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def array(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> ArraySpec:
    return ArraySpec(1, offset, ta.DType.float32, shape, strides)


CHANNELS = MAP(box=(1, 8, 8), interleave="32B", swizzle="32B")
ARRAYS: dict[str, tuple[jit.TensorMap, ArraySpec, str]] = {
    "no elements": (MAP(box=(1, 4)), array((0, 4), (16, 4)), r"have 1 to 2\*\*32 elements \(globalDim\)"),
    "many": (MAP(box=4), array(((1 << 32) + 1,), (4,)), r"have 1 to 2\*\*32 elements \(globalDim\)"),
    "last axis": (MAP(box=(4, 4)), array((4, 4), (4, 16)), "of the last axis must lie side by side"),
    "strides": (
        MAP(box=(1, 4)),
        array((5, 3), (12, 4)),
        r"multiples of 16 bytes, and below 2\*\*40 \(globalStrides\), got \(12, 4\) for shape \(5, 3\)",
    ),
    "far": (MAP(box=(1, 4)), array((2, 4), (1 << 40, 4)), "multiples of 16 bytes, and below"),
    "backwards": (MAP(box=(1, 4)), array((2, 4), (-16, 4), 16), "multiples of 16 bytes, and below"),
    "strides of channels": (CHANNELS, array((2, 3, 4), (48, 16, 4)), "strides must be multiples of 32 bytes"),
    "address": (MAP(box=4), array((8,), (4,), 8), r"multiple of 16 bytes \(globalAddress\), got a view that"),
    "address of channels": (CHANNELS, array((2, 3, 8), (96, 32, 4), 16), "lie at a multiple of 32 bytes"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(("tensor_map", "given_array", "text"), ARRAYS.values(), ids=ARRAYS.keys())
def test_an_array_that_no_map_describes_is_refused(
    tensor_map: jit.TensorMap, given_array: ArraySpec, text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        tensor_map.check("jit.words: x", given_array)
    assert str(caught.value).startswith("jit.words: x: ")


@pytest.mark.one_backend
def test_an_axis_of_one_element_has_any_stride() -> None:
    one_row = array((1, 3), (12, 4))
    MAP(box=(1, 4)).check("x", one_row)
    assert MAP(box=(1, 4)).strides(one_row) == (16,)


@pytest.mark.one_backend
@given(
    st.builds(
        jit.TensorMap,
        box=st.lists(st.integers(1, 256), min_size=3, max_size=5),
        swizzle=st.sampled_from([None, "32B", "64B", "128B"]),
        interleave=st.sampled_from([None, "16B"]),
        l2_promotion=st.sampled_from([None, "64B", "128B", "256B"]),
        fill=st.sampled_from(["zero", "nan"]),
    )
)
def test_a_definition_with_a_map_crosses_to_another_process(tensor_map: jit.TensorMap) -> None:
    plain = described(jit.reads("float64")).definition
    parameters = tuple(
        attrs.evolve(each, layout=tensor_map) if each.name == "x" else each for each in plain.parameters
    )
    definition = attrs.evolve(plain, parameters=parameters)
    assert KernelDefinition.decode(definition.encode()) == definition
    assert definition.encode() != plain.encode()


async def test_an_array_is_checked_before_its_launch(device: ta.Device) -> None:
    kernel = described(jit.reads("float32", layout=MAP(box=(1, 4))))
    x = await device.zeros((4, 12), "float32")
    for view, text in ((x[:, ::2], "lie side by side"), (x[:, 1:], "globalAddress")):
        with pytest.raises(ValueError, match=rf"jit\.words: x: .*{text}"):
            await kernel(0.0, view)
    with pytest.raises(ValueError, match="x must have 2 axes"):
        await kernel(0.0, x[0])
    # Nothing is launched, so nothing is described.

    def rows(x: ArraySpec) -> int:
        return x.shape[0]

    nothing = described(jit.reads("float32", layout=MAP(box=(1, 4))), rows, skip_empty=True)
    (out,) = await nothing(0.0, await device.zeros((0, 3), "float32"))
    assert out.shape == (16,)


@on_stand_in
@inline
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "complex64", "uint8"])
async def test_the_driver_gets_the_declared_values(device: ta.Device, dtype: str) -> None:
    """The stand-in's map is the arguments of the driver's function, axes in its order."""
    tensor_map = MAP(
        box=(2, 3, 256), element_strides=(8, 2, 1), interleave="16B", swizzle="64B", l2_promotion="256B"
    )
    kernel = described(jit.reads(dtype, layout=tensor_map))
    x = await device.zeros((4, 6, 32), dtype)
    (out,) = await kernel(0.5, x[1:, ::2, :16])
    found = (await out.to_host()).tobytes()
    size = x.dtype.itemsize
    address, *extents = struct.unpack_from("<6Q", found)
    assert (address % 512, extents) == (6 * 32 * size % 512, [16, 3, 3, 0, 0])
    assert struct.unpack_from("<4Q", found, 48) == (2 * 32 * size, 6 * 32 * size, 0, 0)
    types = {"float32": 7, "bfloat16": 9, "int16": 1, "complex64": 4, "uint8": 0}
    assert list(found[80:96]) == [0, 3, 2, 0, 0, 1, 2, 8, 0, 0, types[dtype], 3, 1, 2, 3, 0]


@on_stand_in
async def test_a_kernel_reads_through_its_map(device: ta.Device) -> None:
    x = np.arange(9 * 40, dtype=np.float32).reshape(9, 40)
    ref = await device.put(x)
    for view in (np.s_[:], np.s_[1::3, 8:28], np.s_[2:, 4:8]):
        for _ in range(2):
            (out,) = await copied()(ref[view])
            np.testing.assert_array_equal(await out.to_host(), x[view])


@on_stand_in
@isolated
async def test_maps_are_made_again_in_the_next_worker(device: ta.Device) -> None:
    x = np.arange(640, dtype=np.float32).reshape(16, 40)
    ref, kernel = await device.put(x), copied()
    (out,) = await kernel(ref)
    for _ in range(2):
        pid = (await device.statistics()).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        (out,) = await kernel(ref)
        np.testing.assert_array_equal(await out.to_host(), x)
    assert device.generation == 3


@on_cuda
@inline
async def test_a_device_or_a_driver_without_maps(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    attribute = driver.cuDeviceGetAttribute
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    kernel = described(jit.reads("float32", layout=MAP(box=4)))
    x = await device.zeros(8, "float32")
    with monkeypatch.context() as patch:

        def of_old(asked: Any, number: Any) -> Any:
            return (0, 8) if asked == major else attribute(asked, number)

        patch.setattr(driver, "cuDeviceGetAttribute", of_old)
        text = r"kernel 'words' has tensor maps, which need compute capability 9\.0; this device has 8"
        with pytest.raises(ta.NotSupportedError, match=text):
            await kernel(0.0, x)
    with monkeypatch.context() as patch:
        missing = driver.CUresult.CUDA_ERROR_NOT_FOUND

        def of_none(*_: object) -> object:
            return missing, 0, None

        patch.setattr(driver, "cuGetProcAddress", of_none)
        text = "kernel 'words' has tensor maps, which need cuTensorMapEncodeTiled, which this driver lacks"
        with pytest.raises(ta.NotSupportedError, match=text):
            await kernel(0.0, x)
    await kernel(0.0, x)


@on_cuda
@inline
async def test_the_address_and_the_driver_have_the_last_word(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of others may lie anywhere."""
    kernel = described(jit.reads("float32", layout=MAP(box=4)))
    x = await device.zeros(12, "float32")
    with monkeypatch.context() as patch:

        def anything(*_: object) -> None: ...

        patch.setattr(jit.TensorMap, "check", anything)
        with pytest.raises(ta.LibraryError, match=r"x must lie at a multiple of 16 bytes \(globalAddress\)"):
            await kernel(0.0, x[2:])
        patch.setattr(jit.TensorMap, "alignment", 4)
        with pytest.raises(ta.LibraryError, match=r"no TensorMap\(box=.* of x, ArraySpec"):
            await kernel(0.0, x[2:])
    await kernel(0.0, x[4:])


@on_cuda
async def test_a_kernel_takes_a_pointer_in_place_of_a_declared_map(device: ta.Device) -> None:
    kernel = jit.Kernel(
        "pointer",
        'extern "C" __global__ void pointer(const float* x) {}',
        parameters={"x": jit.reads("float32", layout=MAP(box=4))},
        grid=1,
        block=1,
    )
    with pytest.raises(
        ta.LibraryError, match=r"takes 1 parameters of \[8\] bytes; declared are 1, in bytes: x \(128\)"
    ):
        await kernel(await device.zeros(8, "float32"))


@on_cuda
@inline
async def test_lines_of_errors_match_the_source(device: ta.Device) -> None:
    kernel = jit.Kernel(
        "wrong",
        'extern "C" __global__\nvoid wrong(const __grid_constant__ CUtensorMap x) {\n    nowhere = 1;\n}',
        parameters={"x": jit.reads("float32", layout=MAP(box=4))},
        grid=1,
        block=1,
    )
    with pytest.raises(ta.CompilationError, match=r"wrong\.cu[:(]3"):
        await kernel(await device.zeros(8, "float32"))
