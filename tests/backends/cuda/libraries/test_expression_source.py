"""C++ of expressions, compiled by the host's compiler: functions, types, index arithmetic and reductions."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from expression_cases import DTYPES, NUMPY_NAMES, Case, cases, data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.device_array import merged
from trio_accel.backends.base.expressions import (
    FUNCTIONS,
    Argument,
    TypedExpression,
    TypedStep,
    evaluate,
    pack_scalars,
    parse,
    typed,
)
from trio_accel.backends.base.expressions._source import Layouts, elementwise_source, prelude
from trio_accel.backends.cpu import compiled

HEADER = Path(compiled.__file__).with_name("kernels.h")

pytestmark = [pytest.mark.one_backend, pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")]

TOLERANCES = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "complex64": 1e-5}


@attrs.frozen
class Kernel:
    """One kernel, with its arguments and its expected results."""

    expression: TypedExpression
    source: str
    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    arrays: list[npt.NDArray[Any]]
    scalars: bytes
    results: list[npt.NDArray[Any]]
    wanted: list[npt.NDArray[Any]]


def kernel_of(case: Case, wanted: list[npt.NDArray[Any]] | None = None) -> Kernel:
    """The kernel of a case, as the library would make it."""
    expression = typed(parse(case.text, case.names), tuple(argument.kind for argument in case.arguments))
    if wanted is None:
        wanted = evaluate(expression, case.values)
    pairs = list(zip(case.arguments, case.values, strict=True))
    given = [np.asarray(value) for argument, value in pairs if argument.is_array]
    shape = np.broadcast_shapes(*(array.shape for array in given))
    arrays = [np.broadcast_to(array, shape) for array in given]
    results = [np.empty(shape, dtype.dtype) for dtype in expression.dtypes]
    extents, strides = merged(shape, tuple(array.strides for array in (*results, *arrays)))
    numbers = [(argument.dtype, value) for argument, value in pairs if not argument.is_array]
    layouts = Layouts(len(extents), ("strided",) * (len(arrays) + len(results)))
    source = elementwise_source(expression, case.arguments, layouts)
    packed = pack_scalars([value for _, value in numbers], [dtype for dtype, _ in numbers])
    return Kernel(expression, source, extents, strides, arrays, packed, results, wanted)


def compile_and_run(kernels: Sequence[Kernel], folder: Path) -> None:
    """Compile all kernels as one program, and launch each in blocks that do not divide the elements."""
    parts = [
        f"namespace case_{number} {{\n"
        + kernel.source.removeprefix(prelude()).replace("KERNEL(elementwise,", f"KERNEL(k{number},")
        + "\n}"
        for number, kernel in enumerate(kernels)
    ]
    loaded = compiled_library("\n".join([prelude(), *parts]), folder)
    for number, kernel in enumerate(kernels):
        buffer = ctypes.create_string_buffer(_arguments(kernel))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        getattr(loaded, f"stand_in_k{number}")(pointers, (ctypes.c_uint * 6)(2, 1, 1, 7, 1, 1))


def compiled_library(text: str, folder: Path) -> ctypes.CDLL:
    """Compile a source, and load it."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text)
    flags = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
    command = ["g++", *flags, "-include", str(HEADER), str(source), "-o", str(library)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[:3000]
    return ctypes.CDLL(str(library))


def _arguments(kernel: Kernel) -> bytes:
    addresses = [array.ctypes.data for array in (*kernel.results, *kernel.arrays)]
    shape, strides = kernel.shape or (0,), [step for each in kernel.strides for step in (each or (0,))]
    scalars = kernel.scalars or bytes(16)
    form = f"<q{len(addresses)}Q{len(scalars)}s{len(shape)}q{len(strides)}q"
    return struct.pack(form, kernel.results[0].size, *addresses, scalars, *shape, *strides)


def assert_close(got: npt.NDArray[Any], want: npt.NDArray[Any], what: str) -> None:
    """Require the same numbers; transcendental functions differ in the last bits."""
    want = np.broadcast_to(want, got.shape)
    if want.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    tolerance = TOLERANCES.get(want.dtype.name, 1e-14)
    wide = complex if want.dtype.kind == "c" else float
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(
            got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance * 1e-3, err_msg=what
        )


@pytest.mark.parametrize("name", DTYPES)
def test_functions_match_numpy(name: str, tmp_path: Path) -> None:
    dtype = DType(name)
    kernels: list[Kernel] = []
    names: list[list[str]] = []
    for arity in (1, 2):
        arrays = [data(dtype, 64, seed) for seed in range(arity)]
        found: list[str] = []
        for function in sorted(NUMPY_NAMES):
            text = f"{function}({', '.join('xy'[:arity])})"
            if FUNCTIONS[function].arity == arity and _is_there(text, dtype, arity):
                found.append(text)
        text = "; ".join(f"o{number} = {each}" for number, each in enumerate(found))
        kernels.append(_of_many(text, dtype, arrays, len(found)))
        names.append(found)
    compile_and_run(kernels, tmp_path)
    for kernel, texts in zip(kernels, names, strict=True):
        for text, got, want in zip(texts, kernel.results, kernel.wanted, strict=True):
            assert_close(got, want, f"{text} of {name}")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_error_functions_match_scipy(name: str, tmp_path: Path) -> None:
    dtype = DType(name)
    kernel = _of_many("o0 = erf(x); o1 = erfc(x)", dtype, [data(dtype, 64, 0)], 2)
    compile_and_run([kernel], tmp_path)
    for got, want in zip(kernel.results, kernel.wanted, strict=True):
        assert_close(got, want, f"the error functions of {name}")


def _is_there(text: str, dtype: DType, arity: int) -> bool:
    try:
        typed(parse(text), (dtype,) * arity)
    except (TypeError, ValueError):
        return False
    return True


def _of_many(text: str, dtype: DType, arrays: list[npt.NDArray[Any]], count: int) -> Kernel:
    outputs = tuple(f"o{number}" for number in range(count))
    expression = typed(parse(text, tuple("xy"[: len(arrays)]), outputs), (dtype,) * len(arrays))
    results = [np.empty(arrays[0].shape, each.dtype) for each in expression.dtypes]
    source = elementwise_source(
        expression, [Argument(dtype, True)] * len(arrays), Layouts(1, ("dense",) * (count + len(arrays)))
    )
    strides = tuple((array.itemsize,) for array in (*results, *arrays))
    wanted = evaluate(expression, arrays)
    return Kernel(expression, source, arrays[0].shape, strides, arrays, b"", results, wanted)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(several=st.lists(cases(), min_size=25, max_size=25))
def test_random_expressions_match_python_and_numpy(
    several: list[Case], tmp_path_factory: pytest.TempPathFactory
) -> None:
    kernels = [kernel_of(case, [case.by_numpy()]) for case in several]
    compile_and_run(kernels, tmp_path_factory.mktemp("kernels"))
    for case, kernel in zip(several, kernels, strict=True):
        assert_close(kernel.results[0], kernel.wanted[0], case.text)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_axes_that_lie_in_one_go_are_one(draw: st.DataObject) -> None:
    shape = tuple(draw.draw(st.lists(st.integers(1, 4), max_size=5)))
    count = int(np.prod(shape))
    whole = np.arange(count).reshape(shape)
    order = draw.draw(st.permutations(range(len(shape))))
    row = np.broadcast_to(whole[:1] if shape else whole, shape)
    views = [whole.transpose(order), row.transpose(order)]
    extents, strides = merged(views[0].shape, tuple(view.strides for view in views))
    assert all(extent > 1 for extent in extents)
    for view, steps in zip(views, strides, strict=True):
        flat = np.lib.stride_tricks.as_strided(view, extents, steps)
        np.testing.assert_array_equal(flat.reshape(-1), view.reshape(-1))
        assert flat.size == view.size


def test_axes_are_merged_as_far_as_they_can_be() -> None:
    assert merged((2, 3, 4), ((48, 16, 4), (96, 32, 8))) == ((24,), ((4,), (8,)))
    assert merged((2, 3, 4), ((48, 16, 4), (0, 0, 4))) == ((6, 4), ((16, 4), (0, 4)))
    assert merged((1, 3, 1), ((0, 8, 0),)) == ((3,), ((8,),))
    assert merged((), ((),)) == ((), ((),))
    assert merged((2, 3), ((-24, -8),)) == ((6,), ((-8,),))


def test_stores_may_be_in_loops_and_of_several_arrays(tmp_path: Path) -> None:
    steps = (
        TypedStep("argument", DType.float64),
        TypedStep("index", DType.int64),
        TypedStep("constant", DType.int64, (), 0),
        TypedStep("constant", DType.int64, (), 3),
        TypedStep("loop", DType.int64, (2, 3), 7),
        TypedStep("add", DType.int64, (1, 4)),
        TypedStep("store_add", DType.float64, (0, 5), 1),
        TypedStep("end", DType.int64, (4,)),
        TypedStep("cast", DType.float32, (0,)),
        TypedStep("subtract", DType.int64, (1, 1)),
        TypedStep("store_max", DType.float32, (8, 9), 2),
    )
    program = TypedExpression(steps, (), elements=(0,), axes=(0,), loads=((1, 1), (2, 1)))
    arguments = [Argument(dtype, True) for dtype in (DType.float64, DType.float64, DType.float32)]
    x, count = data(DType.float64, 50, 3), 50
    sums, largest = np.zeros(count), np.full(1, -np.inf, np.float32)
    wanted: list[npt.NDArray[Any]] = [sums.copy(), largest.copy()]
    evaluate(program, [x], {0: np.arange(count)}, dict(enumerate(wanted, 1)), shape=(count,))
    source = elementwise_source(program, arguments, Layouts(1, ("dense",)))
    library = compiled_library(source, tmp_path)
    addresses = [array.ctypes.data for array in (sums, largest)]
    numbers = [count, 0, *addresses, 1, count, count, 8, 1, 4]
    buffer = ctypes.create_string_buffer(
        struct.pack("<qQQ16s2q2Q6q", count, 0, x.ctypes.data, bytes(16), *numbers)
    )
    library.stand_in_elementwise(
        (ctypes.c_void_p * 1)(ctypes.addressof(buffer)), (ctypes.c_uint * 6)(2, 1, 1, 7, 1, 1)
    )
    np.testing.assert_allclose(sums, wanted[0], rtol=1e-14)
    np.testing.assert_array_equal(largest, wanted[1])
