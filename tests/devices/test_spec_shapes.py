"""Specifications of own operations with mismatched arrays: refused in the caller's task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

import trio_accel as ta
from trio_accel import linalg, sparse
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopySpec,
    CopyToHostSpec,
    FftSpec,
    JoinSpec,
    MatmulSpec,
    OperationSpec,
)
from trio_accel.devices import LibraryActor, Operation, Planned, Planner

Make = Callable[..., OperationSpec]
Shape = tuple[int, ...]


@attrs.frozen(eq=False)
class Own(Operation[LibraryActor, ta.AccelRef]):
    """Any specification, of operands as they are given and a new result."""

    make: Make
    operands: tuple[Any, ...]
    shape: Shape
    dtype: ta.DType = ta.DType.float64
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        arrays = [planner.read(f"operand {i}", operand) for i, operand in enumerate(self.operands)]
        out = planner.output(self.shape, self.dtype)
        return Planned(self.make(*arrays, out.spec), out)


def gemm(transpose_a: Any, transpose_b: Any) -> Make:
    def make(a: ArraySpec, b: ArraySpec, c: ArraySpec) -> OperationSpec:
        return linalg.gemm.spec(1.0, a, b, 0.0, transpose_a, transpose_b, c)

    return make


def fft(lengths: Shape, axes: Shape, kind: Any = "c2c") -> Make:
    def make(source: ArraySpec, out: ArraySpec) -> FftSpec:
        return FftSpec(kind, "forward", lengths, axes, "backward", source, out)

    return make


def axpy(x: ArraySpec, y: ArraySpec) -> OperationSpec:
    return linalg.axpy.spec(1.0, x, y)


def spmv(rows: int, columns: int) -> Make:
    def make(*arrays: ArraySpec) -> OperationSpec:
        return sparse.spmv.spec((rows, columns), *arrays)

    return make


def from_host(host: np.ndarray[Any, Any]) -> Make:
    def make(out: ArraySpec) -> CopyFromHostSpec:
        return CopyFromHostSpec(host, out)

    return make


def to_host(source: ArraySpec, unused: ArraySpec) -> CopyToHostSpec:
    return CopyToHostSpec(np.ones(3), source)


def join(*arrays: ArraySpec) -> JoinSpec:
    *sources, out = arrays
    return JoinSpec(0, tuple(sources), 0, out)


MISSHAPEN: dict[str, tuple[Make, tuple[Shape, ...], Shape, str]] = {
    "gemm inner": (
        gemm("N", "N"),
        ((2, 3), (2, 3)),
        (2, 3),
        r"GemmSpec: op\(b\) must have shape \(3, n\), got a",
    ),
    "gemm long inner": (gemm("N", "N"), ((2, 300), (3, 4)), (2, 4), r"a of shape \(2, 300\)"),
    "gemm out": (
        gemm("N", "N"),
        ((2, 3), (3, 4)),
        (5, 5),
        r"GemmSpec\.c must have shape \(2, 4\), got \(5, 5\)",
    ),
    "gemm transposed": (gemm("T", "N"), ((2, 3), (3, 4)), (2, 4), r"op\(b\) must have shape \(2, n\)"),
    "gemm letter": (gemm("X", "N"), ((2, 3), (3, 4)), (2, 4), "trans_a must be 'N', 'T' or 'C', got 'X'"),
    "gemm stack": (gemm("N", "N"), ((1, 2, 3), (3, 4)), (2, 4), "a must have two axes"),
    "matmul inner": (MatmulSpec, ((2, 3), (2, 3)), (2, 3), r"a of shape \(2, 3\) and b of shape \(2, 3\)"),
    "matmul out": (
        MatmulSpec,
        ((2, 3), (3, 4)),
        (5, 5),
        r"MatmulSpec: out .*\(2, 4\).*out of shape \(5, 5\)",
    ),
    "axpy": (axpy, ((3,),), (4,), r"AxpySpec: arrays must share a shape, got x of shape \(3,\)"),
    "dot": (linalg.dot.spec, ((3,), (4,)), (), r"DotSpec: y must have shape \(3,\), got x of shape \(3,\)"),
    "dot out": (linalg.dot.spec, ((3,), (3,)), (1,), r"DotSpec.out must have shape \(\), got \(1,\)"),
    "nrm2": (linalg.nrm2.spec, ((3, 2),), (), r"Nrm2Spec: x must have one axis, got shape \(3, 2\)"),
    "copy": (
        CopySpec,
        ((3,),),
        (4,),
        r"CopySpec: source and out .*source of shape \(3,\), out of shape \(4,\)",
    ),
    "join count": (join, ((1, 3), (1, 3)), (3, 3), r"JoinSpec: out must have a place for each element"),
    "join no axis": (join, ((),), (), r"along axis 0"),
    "join long": (
        join,
        ((1, 3), (1, 4)),
        (2, 3),
        r"its place.*source of shape \(1, 4\), out of",
    ),
    "join axes": (join, ((1, 3), (3,)), (2, 3), r"fit into its place"),
    "fft axis": (fft((4,), (1,)), ((4,),), (4,), r"FftSpec: axes=\(1,\)"),
    "fft lengths": (fft((4, 4), (0,)), ((4,),), (4,), r"FftSpec: axes=\(0,\)"),
    "fft no points": (fft((0,), (0,)), ((4,),), (0,), r"lengths=\(0,\)"),
    "fft out": (fft((4,), (0,)), ((4,),), (5,), r"FftSpec: out must have shape \(4,\)"),
    "fft half": (fft((4,), (0,), "r2c"), ((4,),), (4,), r"FftSpec: out must have shape \(3,\)"),
    "spmv": (
        spmv(2, 3),
        ((3,), (4,), (4,), (2,)),
        (2,),
        r"SpmvSpec: x must have shape \(3,\), got .*x of shape \(2,\)",
    ),
    "spmv out": (
        spmv(2, 3),
        ((3,), (4,), (4,), (3,)),
        (3,),
        r"SpmvSpec.out must have shape \(2,\), got \(3,\)",
    ),
    "from host": (from_host(np.ones(3)), (), (4,), r"shape \(3,\) of host.*\(4,\)"),
    "to host": (to_host, ((4,),), (1,), r"shape \(3,\) of host.*\(4,\)"),
}

MIXED: dict[str, tuple[Make, tuple[Any, ...], Shape, str]] = {
    "gemm": (gemm("N", "N"), (np.ones((2, 2), "f4"), np.ones((2, 2))), (2, 2), "b must have dtype float32"),
    "matmul": (MatmulSpec, (np.ones((2, 2), "f4"), np.ones((2, 2))), (2, 2), "a of float32, b of float64"),
    "axpy": (axpy, (np.ones(2, "f4"),), (2,), "AxpySpec.y must have dtype float32, got float64"),
    "dot": (linalg.dot.spec, (np.ones(2, "f4"), np.ones(2)), (), "y must have dtype float32, got float64"),
    "fft": (
        fft((2,), (0,)),
        (np.ones(2),),
        (2,),
        "forward c2c transform of float64 to float64 does not exist",
    ),
    "spmv": (
        spmv(1, 1),
        (np.ones(2, "i4"), np.ones(1, "i8"), np.ones(1), np.ones(1)),
        (1,),
        "indptr and matrix.indices must all be int32 or int64, got int32 and int64",
    ),
    "from host": (from_host(np.ones(4, "f4")), (), (4,), "float32 of host"),
}


@pytest.mark.parametrize("name", MISSHAPEN)
async def test_shapes_that_do_not_fit(
    system: ta.System, device: ta.Device, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make, shapes, shape, text = MISSHAPEN[name]
    own = Own(make, tuple(np.ones(extents) for extents in shapes), shape)
    for _ in range(2):
        with pytest.raises(ValueError, match=text) as caught:
            await device.ask(own)
        assert str(caught.value).startswith("test_spec_shapes.Own: ")
    with pytest.raises(ValueError, match=text):
        device.submit(own)
    assert capfd.readouterr() == ("", "")
    assert {node.restarts for node in system.tree().walk()} == {0}


@pytest.mark.parametrize("name", MIXED)
async def test_dtypes_that_do_not_fit(device: ta.Device, name: str) -> None:
    make, operands, shape, text = MIXED[name]
    with pytest.raises(TypeError, match=text):
        await device.ask(Own(make, operands, shape))


async def test_shapes_that_fit(device: ta.Device) -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    product = await device.ask(Own(gemm("N", "T"), (a, b), (2, 4)))
    np.testing.assert_allclose(await product.to_host(), a @ b.T)
    stacked = await device.ask(Own(MatmulSpec, (np.ones((5, 1, 2, 3)), np.ones((4, 3))[:3]), (5, 1, 2, 3)))
    np.testing.assert_array_equal(await stacked.to_host(), np.full((5, 1, 2, 3), 3.0))
