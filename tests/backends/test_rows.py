"""Kernels for expressions of rows, in blocks of threads that wait for each other, as on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec, ExpressionSpec
from trio_accel.backends.base.expressions import (
    Argument,
    ParsedExpression,
    encode_program,
    evaluate,
    pack_scalars,
    parse,
    parts_of,
    typed,
)
from trio_accel.backends.base.expressions.compiled import ROW_THREADS, make_kernel, rows_arguments
from trio_accel.backends.cpu import compiled

SPECIAL = Path(compiled.__file__).with_name("special.h")

# Threads of a block are contexts that take turns at each barrier.
HARNESS = r"""
#include <math.h>
#include "@SPECIAL@"
#include <ucontext.h>
#include <vector>
#define __HIP__ 1
#define __device__
#define __global__
#define __shared__ static
struct Extents { unsigned x, y, z; };
static Extents threadIdx, blockIdx, blockDim, gridDim;
static ucontext_t host, threads[1024];
static unsigned waiting[1024];
static int atomicCAS(int *place, int old, int) { return *place == old ? old : *place; }
static void __threadfence() {}
static void __threadfence_system() {}
static void __syncthreads() { waiting[threadIdx.x]++; swapcontext(&threads[threadIdx.x], &host); }
@SOURCE@
static const Arguments *given;
static void one_thread() { rows(*given); waiting[threadIdx.x] = ~0u; }
// Returns the number of barriers that were passed, or -1 where threads passed different ones.
extern "C" long launch(const Arguments *arguments, unsigned blocks, unsigned count)
{
    static std::vector<char> stacks(1024 * 65536);
    given = arguments;
    gridDim.x = blocks;
    blockDim.x = count;
    long passed = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned i = 0; i < count; i++) {
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = &stacks[i * 65536];
            threads[i].uc_stack.ss_size = 65536;
            threads[i].uc_link = &host;
            waiting[i] = 0;
            makecontext(&threads[i], one_thread, 0);
        }
        while (waiting[0] != ~0u) {
            // The last ones first: a thread that counts on being first is found.
            for (unsigned i = count; i--;) {
                threadIdx.x = i;
                swapcontext(&host, &threads[i]);
            }
            for (unsigned i = 0; i < count; i++)
                if (waiting[i] != waiting[0])
                    return -1;
            passed++;
        }
    }
    return passed;
}
"""

TEXTS = {
    "softmax": ("e = exp(x - max(x)); y = e / sum(e)", ("x",)),
    "deviation": ("d = x - mean(x); y = sqrt(sum(d * d) / n)", ("x",)),
    "place": ("y = argmax(x) * n + argmin(x)", ("x",)),
    "loops": (
        "m = mean(x); q = sum(m / k for k in range(1, 40)); p = sum(x * k for k in range(40)); p / max(q)",
        ("x",),
    ),
    "weighted": ("y = (x - min(x)) * weight + any(x > 2) * scale", ("x", "weight", "scale")),
}
# Shapes and axes, and by how many threads a row is made: as neighbours, or side by side.
LAYOUTS = (
    ((70, 20), (1,), "GROUP = 1;", False),
    ((20, 70), (1,), "GROUP = 32;", False),
    ((3, 1500), (1,), "GROUP = 256;", False),
    ((3, 25, 7, 60), (1, 3), "GROUP = 256;", False),
    ((70, 45), (0,), "GROUP = 16;", True),
    ((2, 1100, 19), (1,), "GROUP = 16;", True),
)


def compiled(source: str, folder: Path) -> Any:
    path, library = folder / "rows.cpp", folder / "rows.so"
    path.write_text(HARNESS.replace("@SPECIAL@", str(SPECIAL)).replace("@SOURCE@", source), encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-o"]
    subprocess.run([*command, str(library), str(path)], check=True)
    launch = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_long
    return launch


def spec_of(array: np.ndarray, number: int, shape: Sequence[int] | None = None) -> ArraySpec:
    spread = array if shape is None else np.broadcast_to(array, shape)
    return ArraySpec(number, 0, DType.of(array.dtype), spread.shape, spread.strides)


@pytest.mark.skipif(shutil.which("g++") is None, reason="it is compiled by g++")
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("shape", "axes", "group", "is_across"), LAYOUTS)
def test_threads_of_a_row_match_numpy(
    shape: tuple[int, ...], axes: tuple[int, ...], group: str, is_across: bool, name: str, tmp_path: Path
) -> None:
    text, inputs = TEXTS[name]
    rng = np.random.default_rng(9)
    x = rng.normal(size=shape).astype(np.float32)
    arrays: list[Any] = [x]
    kinds = [Argument(DType.float32, True)]
    scalars: list[float] = []
    if "weight" in inputs:
        arrays.append(rng.normal(size=shape[-1:]))
        kinds += [Argument(DType.float64, True), Argument(DType.float64, False)]
        scalars.append(0.25)
    program = typed(parse(text, inputs, is_along=True), tuple(one.kind for one in kinds), (DType.float64,))
    kept = tuple(extent for axis, extent in enumerate(shape) if axis not in axes)
    is_whole = name in ("softmax", "loops", "weighted")
    out = np.full(shape if is_whole else kept, np.nan)
    packed = pack_scalars(scalars, [DType.float64] * len(scalars))
    specs = tuple(spec_of(array, number, shape) for number, array in enumerate(arrays))
    result = spec_of(out, len(arrays))
    spec = ExpressionSpec(encode_program(program, kinds), axes, specs, (), (result,), (), packed)
    kernel = make_kernel(spec, "cuda")
    assert group in kernel.text
    assert ("IS_ACROSS = true" in kernel.text) is is_across
    places = [array.ctypes.data for array in (*arrays, out)]
    values, threads = rows_arguments(spec, lambda array: places[array.block])
    launch = compiled(kernel.text, tmp_path)
    for blocks in (-(-threads // ROW_THREADS), 2):
        out[...] = np.nan
        assert launch(kernel.arguments.pack(*values), blocks, ROW_THREADS) > 0
        given = [*arrays, *map(np.float64, scalars)]
        want = np.broadcast_to(
            evaluate(program, given, shape=shape, axes=axes)[0],
            shape if is_whole else [1 if a in axes else n for a, n in enumerate(shape)],
        )
        np.testing.assert_allclose(out, want.reshape(out.shape), rtol=1e-6, atol=1e-12)


def reads(expression: ParsedExpression) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return expression.inputs, expression.outputs


def test_parts_have_their_operands() -> None:
    largest, total, last = parts_of(
        parse("e = exp(x - max(x)); unread = 2 * x; y = e / sum(e)", ("x",), is_along=True)
    )
    assert [one.name for part in (largest, total) for one in part.reductions] == ["max", "sum"]
    assert largest.inputs == ("x",)
    assert reads(total)[0] == ("x", *largest.outputs)
    assert reads(last) == (("x", *largest.outputs, *total.outputs), ("y",))
    absolute, shares, last = parts_of(parse("sum(x / sum(abs(x))) + n", ("x",), is_along=True))
    assert reads(shares)[0] == ("x", *absolute.outputs)
    assert set(last.inputs) == {*shares.outputs, "n"}
    assert not last.is_along
    *_, last = parts_of(parse("x = x - mean(x); x = x / max(x)", ("x",), is_along=True))
    assert len(last.inputs) == 3


@pytest.mark.parametrize(
    "text", ["e = exp(x - max(x)); y = e / sum(e)", "x = x - mean(x); x = x / max(x) + n"]
)
def test_parts_one_after_another_are_the_whole(text: str) -> None:
    x = np.random.default_rng(3).normal(size=(5, 7))
    whole = parse(text, ("x",), is_along=True)
    (want,) = evaluate(typed(whole, (DType.float64,)), [x], shape=x.shape, axes=(1,))
    values: dict[str, Any] = {"x": x, "n": np.int64(7)}
    for part in parts_of(whole):
        kinds = tuple(DType.of(values[name].dtype) for name in part.inputs)
        given = [values[name] for name in part.inputs]
        (values[part.outputs[0]],) = evaluate(typed(part, kinds), given, shape=x.shape, axes=(1,))
    np.testing.assert_array_equal(values["y" if "y" in values else "x"], want)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sum(y)", "reads y"),
        ("sum(x, 1)", "there is no function 'sum'"),
        ("sum(x) + nothing(x)", "no function 'nothing'"),
        ("t = 0.0\nfor k in range(3):\n    t = t + sum(x)", "neither in a loop"),
        ("t = 0.0\nif x > 0:\n    t = sum(x)", "neither in a loop nor under a condition"),
    ],
)
def test_invalid_rows_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text, ("x",), is_along=True)
