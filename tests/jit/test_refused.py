"""Refusals and their texts: declarations, arguments, code, and limits of the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from own_kernels import (
    combine,
    exhausts_cpu,
    exits_cpu,
    interrupts_cpu,
    keeps_cpu,
    keeps_read_cpu,
    not_a_function,
    one,
    poisons_cpu,
    raises_cpu,
    read_only_cpu,
    saxpy,
    sets_back_cpu,
    tail_cpu,
    unprintable_cpu,
    writes_kept_cpu,
)

import trio_accel as ta
from trio_accel import jit

on_cuda = pytest.mark.skipif(BACKEND != "cuda", reason="compiles CUDA code")
on_cpu = pytest.mark.skipif(BACKEND != "cpu", reason="calls functions of Python")
inline = pytest.mark.parametrize("isolation", ["inline"])
FILL = 'extern "C" __global__ void fill(double* x) { x[threadIdx.x] = 1; }'


def declared(**changes: Any) -> jit.Kernel:
    return one("fill", FILL, **changes)


DECLARATIONS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "name": (lambda: one("", FILL), ValueError, "Kernel: name must be the name of a kernel, got ''"),
    "code": (
        lambda: one("fill", b"bytes"),  # type: ignore[arg-type]
        TypeError,
        "code: must be CUDA C++ as a text, or made by source, ptx, cubin, fatbin or ltoir, got bytes",
    ),
    "empty code": (lambda: one("fill", "  "), ValueError, "source: must be a non-empty text"),
    "cubin": (lambda: jit.cubin("text"), TypeError, "cubin: must be bytes, got str; read it"),  # type: ignore[arg-type]
    "ptx": (lambda: jit.ptx(b"\xff\xfe"), ValueError, "ptx: must be a text; a cubin or fatbin is none"),
    "parameter": (
        lambda: declared(parameters={"x": "float64"}),
        TypeError,
        "Kernel 'fill': parameters: x must be made by reads, updates, writes or scalar, got 'float64'",
    ),
    "name of a parameter": (
        lambda: declared(parameters={"for": jit.reads("float64")}),
        ValueError,
        "Kernel 'fill': parameters: 'for' is not a name of an argument",
    ),
    "dtype": (lambda: jit.reads("float80"), TypeError, "'float80' is not an element type of a device"),
    "layout": (lambda: jit.reads("int8", layout="F"), ValueError, "layout: must be 'contiguous'"),  # type: ignore[arg-type]
    "ndim": (lambda: jit.reads("int8", ndim=-1), ValueError, "ndim: must be an integer of at least 0"),
    "shape": (lambda: jit.writes("int8", shape=(3,)), TypeError, "writes: shape must be a rule"),  # type: ignore[arg-type]
    "empty grid": (
        lambda: declared(grid=(1, 0)),
        ValueError,
        "Kernel 'fill': the grid must have at least one block along each axis, got (1, 0, 1)",
    ),
    "large grid": (
        lambda: declared(grid=(1, 1 << 16)),
        ValueError,
        "the grid must have at most (2147483647, 65535, 65535) blocks along x, y, z, got (1, 65536, 1)",
    ),
    "no grid": (
        lambda: declared(grid="1"),
        TypeError,
        "grid must be an integer, or one to three of them",
    ),
    "axes": (lambda: declared(grid=(1, 1, 1, 1)), TypeError, "grid must be an integer, or one to three"),
    "block": (
        lambda: declared(block=(32, 33)),
        ValueError,
        "at most 1024 threads, and (1024, 1024, 64) along x, y, z, got (32, 33, 1), which is 1056",
    ),
    "flat block": (lambda: declared(block=(1, 1, 65)), ValueError, "got (1, 1, 65), which is 65"),
    "no thread": (lambda: declared(block=0), ValueError, "a block must have at least one thread along each"),
    "shared": (lambda: declared(shared=-1), ValueError, "shared must be at least 0 bytes, and below 2**31"),
    "shared text": (lambda: declared(shared="48K"), TypeError, "shared must be an integer number of bytes"),
    "cluster": (
        lambda: declared(grid=2, cluster=17),
        ValueError,
        "Kernel 'fill': a cluster must have 1 to 16 blocks, got (17, 1, 1)",
    ),
    "half a cluster": (
        lambda: declared(grid=3, cluster=2),
        ValueError,
        "Kernel 'fill': the grid must be whole clusters of (2, 1, 1) blocks, got (3, 1, 1)",
    ),
    "rule": (
        lambda: declared(grid=lambda n: n),
        ValueError,
        "grid: its rule asks for n; there are out, block",
    ),
    "cpu": (
        lambda: jit.Kernel("fill", FILL, parameters={}, grid=1, block=1, cpu="__main__:fill"),
        ValueError,
        "cpu: '__main__:fill' must be an import path 'package.module:function'",
    ),
    "function": (
        lambda: jit.Kernel("fill", FILL, parameters={}, grid=1, block=1, cpu=raises_cpu),  # type: ignore[arg-type]
        TypeError,
        "Kernel 'fill': cpu must be an import path 'package.module:function', by which other processes find",
    ),
    "list of parameters": (
        lambda: declared(parameters=[("x", jit.reads("int8"))]),
        TypeError,
        "Kernel 'fill': parameters must be a dict by their names, got [",
    ),
    "one link": (lambda: declared(link=FILL), TypeError, "link must be a list of code, got str; give [code]"),
    "dict of options": (
        lambda: declared(options={"std": "c++17"}),
        TypeError,
        "Kernel 'fill': options must be CompileOptions or None, got {'std': 'c++17'}",
    ),
    "option": (
        lambda: jit.CompileOptions(macro={}),  # type: ignore[call-arg]
        TypeError,
        "CompileOptions: there is no option 'macro'; did you mean 'macros'?",
    ),
    "flag": (
        lambda: jit.CompileOptions(fast_math=1),  # type: ignore[arg-type]
        TypeError,
        "CompileOptions: fast_math must be True or False or None, got 1",
    ),
    "number": (
        lambda: jit.CompileOptions(max_registers=True),
        ValueError,
        "CompileOptions: max_registers must be an integer of at least 1, got True",
    ),
    "text": (
        lambda: jit.CompileOptions(undefine="FOO"),
        TypeError,
        "CompileOptions: undefine must be a list of str, got 'FOO'; give ['FOO']",
    ),
    "numbers": (
        lambda: jit.CompileOptions(diag_suppress=177),  # type: ignore[arg-type]
        TypeError,
        "CompileOptions: diag_suppress must be a list of int, got 177; give [177]",
    ),
    "path": (
        lambda: jit.CompileOptions(include_path=3),  # type: ignore[arg-type]
        TypeError,
        "CompileOptions: include_path must be a list of str or PathLike, got 3",
    ),
    "list of macros": (
        lambda: jit.CompileOptions(macros=["N"]),  # type: ignore[arg-type]
        TypeError,
        "CompileOptions: macros must be a dict, such as {'N': 4}, got ['N']",
    ),
    "name of a macro": (
        lambda: jit.CompileOptions(macros={"N=4": None}),
        ValueError,
        "CompileOptions: macros: 'N=4' is not a name of a macro",
    ),
    "macro": (
        lambda: jit.CompileOptions(macros={"N": [4]}),  # type: ignore[dict-item]
        TypeError,
        "CompileOptions: macros['N'] must be a text, a number or None, got [4]",
    ),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_a_wrong_declaration(case: str) -> None:
    declare, error, text = DECLARATIONS[case]
    with pytest.raises(error, match=re.escape(text)):
        declare()


async def test_wrong_arguments_launch_nothing(device: ta.Device) -> None:
    x, y = await device.full(10, 2, "float32"), await device.zeros(10, "float32")
    wide, table = await device.zeros(10, "float64"), await device.zeros((2, 5), "float32")
    combined = combine("float32", "float")
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: saxpy(10, 1.0, x),
            TypeError,
            "jit.saxpy takes 4 arguments (n, a, x, y), got 3; y is missing",
        ),
        (lambda: saxpy(10, 1.0, x, y, 3), TypeError, "jit.saxpy takes 4 arguments (n, a, x, y), got 5"),
        (lambda: saxpy(10, 1.0, x, z=y), TypeError, "no option 'z'; there are a, n, x, y"),
        (lambda: saxpy(10, 1.0, x, y, n=1), TypeError, "n is given twice"),
        (
            lambda: saxpy(10, 1.0, wide, y),
            TypeError,
            "jit.saxpy: x must have dtype float32, got float64; use",
        ),
        (lambda: saxpy(10, 1.0, table, y), ValueError, "jit.saxpy: x must have 1 axes, got shape (2, 5)"),
        (
            lambda: saxpy(5, 1.0, x[::2], y),
            ValueError,
            "jit.saxpy: x must be contiguous, got a view of shape (5,)",
        ),
        (lambda: saxpy(5, 1.0, x, [1.0]), TypeError, "jit.saxpy: y must be an AccelRef, got list"),
        (
            lambda: saxpy(5, 1.0, x, np.ones(5, np.float32)),
            TypeError,
            "jit.saxpy: y must be an AccelRef, got nd",
        ),
        (lambda: saxpy(5, x, x, y), TypeError, "jit.saxpy: a must be a number"),
        (lambda: saxpy(5, 1j, x, y), TypeError, "jit.saxpy: a 1j is complex, the array is float32"),
        (lambda: saxpy(5, 1e39, x, y), ValueError, "jit.saxpy: a 1e+39 is outside the range of float32"),
        (
            lambda: saxpy(1.5, 1.0, x, y),
            ValueError,
            "jit.saxpy: n 1.5 is not an integer, the array is int64",
        ),
        (
            lambda: saxpy(-1000, 1.0, x, y),
            ValueError,
            "the grid must have at least one block along each axis",
        ),
        (lambda: combined(1.0, x, x, y[:5], 10), ValueError, "out must have shape (10,), got shape (5,)"),
        (
            lambda: combined(1.0, x[:0], x, n=0, out=y[:1]),
            ValueError,
            "out must have shape (0,), got shape (1,)",
        ),
    ]
    for ask, error, text in cases:
        with pytest.raises(error, match=re.escape(text)):
            await ask()
    np.testing.assert_array_equal(await y.to_host(), np.zeros(10))


async def test_failing_rules_are_reported_as_such(device: ta.Device) -> None:
    x = await device.zeros(8)
    empty = declared(grid=lambda out: out.size - 8)
    with pytest.raises(ValueError, match="to launch nothing then, declare the kernel with skip_empty=True"):
        await empty(x)
    with pytest.raises(ValueError, match="a block must have at most 1024 threads"):
        await declared(block=lambda out: out.size * 1000)(x)
    with pytest.raises(TypeError, match="shared must be an integer number of bytes, got 4"):
        await declared(shared=lambda out: out.size / 2)(x)
    for shape in (lambda: 4.0, lambda: (2, -1), lambda: "8"):
        made = {"out": jit.writes("float64", shape=shape)}
        with pytest.raises(ValueError, match="the shape of out must be integers of at least 0, got"):
            await device.ask(declared(parameters=made).launch())
    with pytest.raises(ZeroDivisionError) as caught:
        await declared(grid=lambda out: 1 // (out.size - 8))(x)
    assert caught.value.__notes__ == ["in the rule of the kernel for its grid"]


async def test_an_array_of_another_device(device: ta.Device, system: ta.System) -> None:
    with pytest.warns(RuntimeWarning, match="open already"):
        other = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline"))
    async with other:
        x, y = await device.zeros(3, "float32"), await other.zeros(3, "float32")
        with pytest.raises(ValueError, match=r"jit\.saxpy: y is on .*, this runs on "):
            await saxpy(3, 1.0, x, y)


@on_cpu
async def test_faults_of_the_function_for_the_cpu(device: ta.Device) -> None:
    x = await device.zeros(8)
    with pytest.raises(ta.NotSupportedError, match="kernel 'fill' needs a function for the CPU"):
        await declared(cluster=1)(x)
    with pytest.raises(
        ta.LibraryError, match="own_kernels:raises_cpu raised KeyError: 'nothing of"
    ) as caught:
        await declared(cpu=raises_cpu)(x)
    assert caught.value.operation == "jit.fill"
    assert isinstance(caught.value.__cause__, KeyError)
    x = await device.zeros(8)
    for cpu, said in (
        (read_only_cpu, "assignment destination is read-only"),
        (sets_back_cpu, "cannot set WRITEABLE"),
    ):
        parameters = {"x": jit.reads("float64"), "out": jit.updates("float64")}
        with pytest.raises(ta.LibraryError, match=f"raised ValueError: {said}"):
            await one("read", FILL, parameters=parameters, cpu=cpu)(x, await device.zeros(8))
    for path, text in (
        ("own_kernels:nowhere", "module 'own_kernels' has no attribute 'nowhere'"),
        ("no_such_module:fill", "No module named 'no_such_module'"),
        ("own_kernels:not_a_function", "own_kernels:not_a_function for the CPU is not a function, but int"),
        ("broken_kernels:fill", "cannot be imported: SystemExit: no such machine"),
    ):
        kernel = jit.Kernel(
            "fill", FILL, parameters={"out": jit.updates("float64")}, grid=1, block=8, cpu=path
        )
        with pytest.raises(ta.LibraryError, match=re.escape(text)):
            await kernel(await device.zeros(8))
    assert not_a_function == 3
    with pytest.raises(ta.NotSupportedError, match="KernelInfoSpec"):
        await saxpy.occupancy(device)
    assert next(n for n in device.system.tree().walk() if n.actor_class == "JitActor").restarts == 0
    assert tail_cpu.__module__ == "own_kernels"


@on_cpu
@pytest.mark.parametrize("cpu", [exits_cpu, interrupts_cpu, poisons_cpu, unprintable_cpu])
async def test_all_errors_of_the_function_for_the_cpu_are_its_kernels_errors(
    device: ta.Device, cpu: Callable[..., object]
) -> None:
    kept = await device.full(8, 3.0)
    with pytest.raises(ta.LibraryError, match=rf"own_kernels:{cpu.__name__} raised \w+") as caught:
        await declared(cpu=cpu)(await device.zeros(8))
    assert caught.value.__cause__ is not None
    assert device.generation == 1
    assert next(n for n in device.system.tree().walk() if n.actor_class == "JitActor").restarts == 0
    assert (await kept.to_host()).tolist() == [3.0] * 8


@on_cpu
async def test_a_function_for_the_cpu_that_finds_no_memory_is_not_called_again(device: ta.Device) -> None:
    with pytest.raises(ta.OutOfMemoryError) as caught:
        await declared(cpu=exhausts_cpu)(await device.zeros(8))
    assert caught.value.operation == "jit.fill"


@on_cpu
async def test_a_function_for_the_cpu_that_keeps_a_writable_array_is_reported(device: ta.Device) -> None:
    for _ in range(3):
        with pytest.raises(
            ta.LibraryError, match="its function own_kernels:keeps_cpu keeps out after its call"
        ):
            await declared(cpu=keeps_cpu)(await device.zeros(8))
    (out,) = await declared(cpu=writes_kept_cpu)(await device.zeros(8))
    assert (await out.to_host()).tolist() == [2.0] * 8


@on_cpu
async def test_a_function_for_the_cpu_that_keeps_a_read_array_is_reported_once(
    device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"x": jit.reads("float64"), "out": jit.updates("float64")}
    for number in (3.0, 4.0):
        x, out = await device.full(8, number), await device.zeros(8)
        await declared(cpu=keeps_read_cpu, parameters=parameters)(x, out)
        assert (await out.to_host()).tolist() == [number] * 8
    (told,) = [record.getMessage() for record in caplog.records if record.name == "trio_accel.backends"]
    assert "its function own_kernels:keeps_read_cpu keeps x after its call" in told


@on_cuda
async def test_source_that_does_not_compile(device: ta.Device) -> None:
    kernel = one("fill", FILL.replace("= 1", "=\n\n nowhere"), options=jit.CompileOptions(macros={"N": 4}))
    x = await device.zeros(8)
    with pytest.raises(ta.CompilationError) as caught:
        await kernel(x)
    error = caught.value
    assert (error.source, error.code, error.operation) == ("fill.cu", "compile", "jit.fill")
    assert "--define-macro=N=4" in error.options
    assert "kernel 'fill' does not compile (source fill.cu, options " in str(error)
    # The line in the source.
    assert re.search(r"fill\.cu[:(]3", error.log)
    assert error.log in str(error)
    # The library lives on.
    (out,) = await declared()(await device.zeros(8))
    assert (await out.to_host() == 1).all()


@on_cuda
async def test_a_missing_name(device: ta.Device) -> None:
    text = FILL + "\n__global__ void __launch_bounds__(64, 2) bound(const int (*n)[3]) {}"
    with pytest.raises(
        ta.CompilationError, match=r"no kernel 'fil' in fil\.cu; it has fill, bound \("
    ) as caught:
        await one("fil", text)(await device.zeros(8))
    assert caught.value.code == "no_such_kernel"


@on_cuda
@inline
async def test_code_that_the_driver_cannot_load(device: ta.Device) -> None:
    for code in (
        jit.cubin(b"nothing", "a.cubin"),
        jit.fatbin(b"x" * 64, "a.fatbin"),
        jit.ptx(".version 1", "a.ptx"),
    ):
        with pytest.raises(ta.CompilationError, match=f"the driver does not load {code.name}") as caught:
            await one("fill", code)(await device.zeros(8))
        assert caught.value.source == code.name


@on_cuda
@inline
async def test_other_parameters_than_the_kernel_has(device: ta.Device) -> None:
    kernel = one("fill", 'extern "C" __global__ void fill(double* x, int n) {}')
    text = "kernel 'fill' takes 2 parameters of [8, 4] bytes; declared are 1, in bytes: out (8)"
    with pytest.raises(ta.LibraryError, match=re.escape(text)):
        await kernel(await device.zeros(8))


@on_cuda
async def test_more_than_the_device_has(device: ta.Device) -> None:
    x = await device.zeros(8)
    most = (await declared().occupancy(device)).max_dynamic_shared
    with pytest.raises(
        ta.LibraryError, match=rf"asks for {most + 1} bytes of dynamic shared .* are {most}: "
    ):
        await declared(shared=most + 1)(x)
    (out,) = await declared(shared=most)(await device.zeros(8))
    assert (await out.to_host() == 1).all()
    info = await declared().occupancy(device)
    fits = info.max_active_blocks * info.multiprocessors
    with pytest.raises(
        ta.LibraryError, match=f"is cooperative, so all blocks run at once: {fits} blocks of 8"
    ):
        await declared(grid=fits + 1, cooperative=True)(await device.zeros(8))
    (out,) = await declared(grid=fits, cooperative=True)(await device.zeros(8))
    assert (await out.to_host() == 1).all()
