"""The parts of a launch: definitions as texts, scalars as bytes, names of kernels in a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_accel import DType, jit
from trio_accel.backends.base.contract.ops import (
    KernelCode,
    KernelDefinition,
    KernelParameter,
    scalar_offsets,
)
from trio_accel.jit._declarations import Scalars

DTYPES = st.sampled_from([*DType])
ROLES = st.sampled_from(["read", "update", "write", "scalar"])
NUMBERS = st.integers(0, 100)

parameters = st.lists(
    st.builds(
        KernelParameter,
        name=st.text(min_size=1),
        role=ROLES,
        dtype=DTYPES,
        ndim=st.none() | st.integers(0, 5),
        layout=st.sampled_from(["contiguous", "packed", "any"]),
    )
).map(tuple)
codes = st.lists(
    st.builds(KernelCode, st.just("c++"), st.text(), st.text())
    | st.builds(KernelCode, st.just("cubin"), st.binary(), st.text()),
    min_size=1,
).map(tuple)


@given(parameters, codes, st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS), st.booleans())
def test_a_definition_is_the_same_in_another_process(
    parameters: Any, codes: Any, cluster: Any, is_cooperative: bool
) -> None:
    options = {"define_macro": ["A=1", "B"], "fma": False}
    definition = KernelDefinition(
        name="f<int>",
        parameters=parameters,
        code=codes,
        options=options,
        cluster=cluster,
        is_cooperative=is_cooperative,
    )
    text = definition.encode()
    again = KernelDefinition.decode(text)
    assert (again, again.options) == (definition, options)
    assert again.encode() == text


@given(st.lists(st.tuples(DTYPES, NUMBERS), max_size=12))
def test_scalars_lie_as_in_a_structure_of_c(scalars: list[tuple[DType, int]]) -> None:
    dtypes = tuple(dtype for dtype, _ in scalars)
    offsets, size = scalar_offsets(dtypes)
    packed = Scalars(dtypes, offsets).pack([number for _, number in scalars])
    assert len(packed) == size
    # NumPy aligns complex numbers to their parts, CUDA to the whole.
    plain = [DType.float64 if dtype.kind == "complex" else dtype for dtype in dtypes]
    if plain == [*dtypes]:
        fields = np.dtype([(f"f{n}", dtype.dtype) for n, dtype in enumerate(dtypes)], align=True)
        assert [fields.fields[f"f{n}"][1] for n in range(len(dtypes))] == [*offsets]  # type: ignore[index]
    for (dtype, number), offset in zip(scalars, offsets, strict=True):
        found = np.frombuffer(packed, dtype.dtype, 1, offset)[0]
        assert found == dtype.dtype.type(number)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("", ()),
        ('extern "C" __global__ void one(int n) {}', ("one",)),
        ("template <class T>\n__global__ void\nmany(const T (*x)[3]);", ("many",)),
        ("__global__ void __launch_bounds__(128, MIN(2, 3)) bound(int) {}", ("bound",)),
        ("__global__ void a(int);\n__global__ void b(int) {}\n__global__ void a(int) {}", ("a", "b")),
        ("#define K __global__ void", ()),
    ],
)
def test_names_of_the_kernels_of_a_source(source: str, names: tuple[str, ...]) -> None:
    compiler = pytest.importorskip("trio_accel.backends.cuda.runtime._compiler")
    assert compiler.kernels_in(source) == names


def test_blocks_that_cover_elements() -> None:
    assert [jit.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_rule_may_be_of_all_arguments_or_have_values_of_its_own() -> None:
    kernel = jit.Kernel(
        "f",
        "f",
        parameters={"n": jit.scalar("int32")},
        grid=lambda **every: every["n"] * every["block"][0],
        block=lambda n, threads=32: (threads, n),
    )
    assert repr(kernel) == "<Kernel f(n: int32)>"
    assert kernel.operation == "jit.f"


def test_options_as_the_compiler_has_them() -> None:
    options = jit.CompileOptions(
        std="c++20",
        macros={"DEBUG": True, "QUIET": False, "N": 4, "X": 0.5, "T": "float", "BARE": None},
        undefine=["FOO"],
        include_path="a",
        pre_include=[Path("b.h")],
        fast_math=True,
        max_registers=32,
        diag_suppress=(177, 20),
    )
    assert options.plain() == {
        "std": "c++20",
        "define_macro": ["DEBUG=1", "QUIET=0", "N=4", "X=0.5", "T=float", "BARE"],
        "undefine_macro": ["FOO"],
        "include_path": ["a"],
        "pre_include": ["b.h"],
        "use_fast_math": True,
        "max_register_count": 32,
        "diag_suppress": [177, 20],
    }
    assert jit.CompileOptions().plain() == {}
