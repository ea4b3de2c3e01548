"""Which routines of cuSOLVER and cuBLAS the dense solvers call, with what: as they ran on an H200.

The routines are LAPACK's, on the memory of the stand-in; addresses are written as ``@``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND, IS_STAND_IN

from trio_accel import linalg
from trio_accel.backends.base import DType, LinAlgError
from trio_accel.backends.base.contract.ops import ArraySpec, OperationSpec, real_of
from trio_accel.devices import DECLARED

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(
        BACKEND != "cuda" or not IS_STAND_IN, reason="bindings that the stand-in can stand for"
    ),
]

Array = npt.NDArray[Any]


class Bench:
    """The library with such bindings, and the objects its operations make."""

    def __init__(self, rig: Any, bindings: Any) -> None:
        from trio_accel.backends.cuda.libraries.solver import SolverLibrary

        self.rig = rig
        self.bindings = bindings
        with rig.device.context:
            self.library = SolverLibrary(rig.device)

    def calls(self, spec: OperationSpec) -> list[str]:
        """The calls of an operation, once it has run before."""
        for _ in range(2):
            self.bindings.calls.clear()
            self.library.enqueue(spec, self.rig.stream)
            self.rig.finish(self.rig.stream)
        return [" ".join(map(str, call)) for call in self.bindings.calls if call[0] != "set_stream"]

    def empty(self, *shape: int, dtype: Any) -> ArraySpec:
        array: ArraySpec = self.rig.empty(shape, dtype)
        return array


@pytest.fixture
def bench(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    from solver_bindings import Bindings

    from trio_accel.backends.cuda.libraries import _cusolver

    bindings = Bindings()
    for name in ("cublas", "cusolverDn"):
        monkeypatch.setattr(_cusolver, name, bindings)
    made = Bench(rig, bindings)
    yield made
    made.library.close()
    assert [call[0] for call in bindings.calls[-4:]] == [
        "destroy_gesvdj_info",
        "destroy",
        "destroy_params",
        "destroy",
    ]


def definite(*shape: int, dtype: str) -> Array:
    values = np.random.default_rng(0).normal(size=shape)
    made = values + 1j * values[..., ::-1] if "complex" in dtype else values
    return (made @ made.conj().swapaxes(-1, -2) + np.eye(shape[-1])).astype(dtype)


# For one matrix of 5 × 5, and for a stack of three: code and letter of the type, and of its real type.
LETTERS = {
    "float32": ("s", 0, 0),
    "float64": ("d", 1, 1),
    "complex64": ("c", 4, 0),
    "complex128": ("z", 5, 1),
}
# Handles: 1 of cuSOLVER, 2 its parameters, 3 of cuBLAS, 4 of Jacobi's iteration.
ONE = {
    "cholesky": ["xpotrf 1 2 1 5 {T} @ 5 {T} @ 1024 @ 512 @"],
    "lu": ["xgetrf 1 2 5 5 {T} @ 5 @ {T} @ 1024 @ 512 @"],
    "solve": ["xgetrf 1 2 5 5 {T} @ 5 @ {T} @ 1024 @ 512 @", "xgetrs 1 2 0 5 2 {T} @ 5 @ {T} @ 5 @"],
    "inv": ["xgetrf 1 2 5 5 {T} @ 5 @ {T} @ 1024 @ 512 @", "xgetrs 1 2 0 5 5 {T} @ 5 @ {T} @ 5 @"],
    "det": ["xgetrf 1 2 5 5 {T} @ 5 @ {T} @ 1024 @ 512 @"],
    "lu_solve": ["xgetrs 1 2 1 5 2 {T} @ 5 @ {T} @ 5 @"],
    "qr": ["xgeqrf 1 2 5 5 {T} @ 5 {T} @ {T} @ 1024 @ 512 @", "{t}{q}gqr 1 5 5 5 @ 5 @ @ 64 @"],
    "svd": ["xgesvd 1 2 83 83 5 5 {T} @ 5 {R} @ {T} @ 5 {T} @ 5 {T} @ 1024 @ 512 @"],
    "eigh": ["xsyev_batched 1 2 1 1 5 {T} @ 5 {R} @ {T} @ 1024 @ 512 @ 1"],
}
STACK = {
    "cholesky": ["{t}potrf_batched 1 1 5 @ 5 @ 3"],
    "lu": ["{t}getrf_batched 3 5 @ 5 @ @ 3"],
    "solve": ["{t}getrf_batched 3 5 @ 5 @ @ 3", "{t}getrs_batched 3 0 5 2 @ 5 @ @ 5 @ 3"],
    "inv": ["{t}getrf_batched 3 5 @ 5 @ @ 3", "{t}getrs_batched 3 0 5 5 @ 5 @ @ 5 @ 3"],
    "det": ["{t}getrf_batched 3 5 @ 5 @ @ 3"],
    "lu_solve": ["{t}getrs_batched 3 1 5 2 @ 5 @ @ 5 @ 3"],
    "qr": 3 * ONE["qr"][:1] + 3 * ONE["qr"][1:],
    "svd": ["{t}gesvdj_batched 1 1 5 5 @ 5 @ @ 5 @ 5 @ 64 @ 4 3"],
    "eigh": ["xsyev_batched 1 2 1 1 5 {T} @ 5 {R} @ {T} @ 1024 @ 512 @ 3"],
}


@pytest.mark.parametrize("dtype", LETTERS)
@pytest.mark.parametrize("stack", [(), (3,)], ids=str)
def test_calls(bench: Bench, dtype: str, stack: tuple[int, ...]) -> None:
    rig, kind, real = bench.rig, DType(dtype), real_of(DType(dtype))
    a, b = definite(*stack, 5, 5, dtype=dtype), np.ones((*stack, 5, 2), dtype)
    given, sides, info = rig.put(a), rig.put(b), np.zeros(len(a) if stack else 1, np.int32)
    out, x = bench.empty(*stack, 5, 5, dtype=kind), bench.empty(*stack, 5, 2, dtype=kind)
    v, w = bench.empty(*stack, 5, 5, dtype=kind), bench.empty(*stack, 5, dtype=real)
    piv, inverse = bench.empty(*stack, 5, dtype=DType.int32), bench.empty(*stack, 5, 5, dtype=kind)
    det, sign, logs = (bench.empty(*stack, dtype=each) for each in (kind, kind, real))
    specs = {
        "cholesky": linalg.cholesky.spec(given, False, out, info),
        "lu": linalg.lu.spec(given, out, piv, info),
        "solve": linalg.solve.spec(given, sides, x, info),
        "inv": linalg.inv.spec(given, inverse, info),
        "det": linalg.det.spec(given, det),
        "qr": linalg.qr.spec(given, "reduced", out, v),
        "svd": linalg.svd.spec(given, False, True, out, w, v, info),
        "eigh": linalg.eigh.spec(given, "L", None, w, out, info),
    }
    t, code, of_real = LETTERS[dtype]
    told = {"T": code, "R": of_real, "t": t, "q": "un" if t in "cz" else "or"}
    for name, spec in specs.items():
        expected = [call.format(**told) for call in (STACK if stack else ONE)[name]]
        assert (name, bench.calls(spec)) == (name, expected)
    np.testing.assert_allclose(np.abs(a @ rig.get(x) - b), 0, atol=1e-3)
    np.testing.assert_allclose(rig.get(w), np.linalg.eigvalsh(a), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(a @ rig.get(inverse), np.broadcast_to(np.eye(5), a.shape), atol=1e-3)
    np.testing.assert_allclose(rig.get(det), np.linalg.det(a), rtol=1e-3)
    slogdet = [call.format(**told) for call in (STACK if stack else ONE)["det"]]
    assert bench.calls(linalg.slogdet.spec(given, sign, logs)) == slogdet
    np.testing.assert_allclose(rig.get(sign) * np.exp(rig.get(logs)), np.linalg.det(a), rtol=1e-3)
    assert bench.calls(DECLARED["linalg.check_diagonal"].spec(given, info)) == []
    bench.calls(specs["lu"])
    expected = [call.format(**told) for call in (STACK if stack else ONE)["lu_solve"]]
    assert bench.calls(DECLARED["linalg.lu_solve"].spec(out, piv, sides, 1, x, info)) == expected
    np.testing.assert_allclose(np.abs(a.swapaxes(-1, -2) @ rig.get(x) - b), 0, atol=1e-3)


def test_bad_diagonals(bench: Bench) -> None:
    rig, a = bench.rig, np.tile(np.eye(4), (3, 1, 1)) * 2
    a[1, 2, 2], a[2, 3, 3], a[2, 0, 0] = 0, np.nan, -2
    given, info = rig.put(a), np.zeros(3, np.int32)
    results = [bench.empty(3, dtype=DType.float64) for _ in range(3)]
    bench.calls(linalg.det.spec(given, results[0]))
    bench.calls(linalg.slogdet.spec(given, *results[1:]))
    det, sign, logs = map(rig.get, results)
    np.testing.assert_allclose(det, [16, 0, np.nan])
    np.testing.assert_array_equal(sign, [1, 0, -1])
    np.testing.assert_allclose(logs, [4 * np.log(2), -np.inf, np.nan])
    with pytest.raises(LinAlgError, match="matrix 1 of the stack is singular: element 3 of its"):
        bench.calls(DECLARED["linalg.check_diagonal"].spec(given, info))
    assert info.tolist() == [0, 3, 0]
