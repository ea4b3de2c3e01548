"""Solvers and bad matrices: refused by name before the launch, or reported with the index after it."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND, IS_STAND_IN, NAME

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec, contiguous_strides
from trio_accel.devices import Planned, Planner

pytestmark = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no cuSOLVER")

Ask = Callable[[ta.AccelRef], Awaitable[Any]]

both = pytest.mark.parametrize("isolation", ["inline", "process"])


def stack_with(value: float, place: tuple[int, int] = (4, 4)) -> np.ndarray:
    """Twelve positive definite matrices, except that one has this value in one place."""
    matrices = np.tile(np.diag([3.0, 4, 5, 6, 7, 8]), (4, 3, 1, 1))
    matrices[3, 1][place] = value
    return matrices


NOT_FINITE = r"matrix \(3, 1\) of the stack holds a NaN or an infinity"
INDEFINITE = (
    r"cholesky: matrix \(3, 1\) of the stack is not positive definite: its leading minor of order 5 is not"
)
BAD: dict[str, tuple[Ask, np.ndarray, int | str, str]] = {
    "indefinite": (linalg.cholesky, stack_with(-1.0), 5, INDEFINITE),
    "indefinite, upper": (lambda a: linalg.cholesky(a, upper=True), stack_with(0.0), 5, INDEFINITE),
    "NaN of cholesky": (linalg.cholesky, stack_with(np.nan), 5, INDEFINITE),
    "NaN of cholesky, below": (linalg.cholesky, stack_with(np.nan, (4, 1)), 5, INDEFINITE),
    "infinity of cholesky": (linalg.cholesky, stack_with(np.inf), 5, INDEFINITE),
    "singular": (
        lambda a: linalg.solve(a, np.ones(6)),
        stack_with(0.0),
        5,
        r"solve: matrix \(3, 1\) of the stack is singular: its pivot 5 is zero",
    ),
    "singular, one of many right sides": (
        lambda a: linalg.solve(a, np.ones((2, 1, 1, 6, 1))),
        stack_with(0.0),
        5,
        r"solve: matrix \(3, 1\) of the stack is singular",
    ),
    "singular of lu": (
        linalg.lu,
        stack_with(0.0),
        5,
        r"lu: matrix \(3, 1\) of the stack is singular: its pivot 5 is zero",
    ),
    "singular of inv": (
        linalg.inv,
        stack_with(0.0),
        5,
        r"inv: matrix \(3, 1\) of the stack is singular: its pivot 5 is zero",
    ),
    "NaN of svdvals": (linalg.svdvals, stack_with(np.nan), -1, f"svdvals: {NOT_FINITE}"),
    "NaN of svd": (linalg.svd, stack_with(np.nan, (0, 5)), -1, f"svd: {NOT_FINITE}"),
    "infinity of svd": (linalg.svd, stack_with(-np.inf), -1, f"svd: {NOT_FINITE}"),
    "NaN of eigh": (linalg.eigh, stack_with(np.nan), -1, f"eigh: {NOT_FINITE}"),
    "infinity of eigvalsh": (linalg.eigvalsh, stack_with(np.inf, (4, 2)), -1, f"eigvalsh: {NOT_FINITE}"),
}
if BACKEND in ("cpu", "cuda"):
    BAD |= {
        "NaN of eig": (linalg.eig, stack_with(np.nan), -1, f"eig: {NOT_FINITE}"),
        "infinity of eigvals": (linalg.eigvals, stack_with(np.inf, (0, 5)), -1, f"eigvals: {NOT_FINITE}"),
        "b is indefinite": (
            lambda b: linalg.eigh(stack_with(1.0), b=b),
            stack_with(-1.0),
            5,
            r"eigh: b, matrix \(3, 1\) of the stack is not positive definite: its leading minor of order 5",
        ),
        "NaN of b": (
            lambda b: linalg.eigvalsh(stack_with(1.0), b=b),
            stack_with(np.nan, (4, 2)),
            -1,
            f"eigvalsh: {NOT_FINITE}",
        ),
    }


@both
async def test_one_of_a_stack_is_bad(system: ta.System, device: ta.Device) -> None:
    for name, (ask, matrices, code, message) in BAD.items():
        ref = await device.put(matrices)
        with pytest.raises(ta.LinAlgError, match=message) as caught:
            await ask(ref)
        error = caught.value
        assert isinstance(error, np.linalg.LinAlgError), name
        assert (error.index, error.code, error.library, error.device) == ((3, 1), code, "solver", NAME), name
        assert error.operation is not None
        assert error.operation.startswith("linalg."), name
        # The rest of the stack is as good as before, and the operand unchanged.
        good = await linalg.cholesky(ref[:3])
        np.testing.assert_allclose(await good.to_host(), np.sqrt(matrices[:3]), rtol=1e-14)
        np.testing.assert_array_equal(await ref.to_host(), matrices)
    assert device.generation == 1
    assert all(node.restarts == 0 for node in system.tree().walk())
    del caught, error, good, ref
    gc.collect()
    await device.synchronize()
    assert (await device.statistics()).memory.used == 0


async def test_a_single_matrix_and_the_first_of_several(device: ta.Device) -> None:
    with pytest.raises(ta.LinAlgError, match=r"cholesky: the matrix is not positive definite") as caught:
        await linalg.cholesky(await device.put(-np.eye(3)))
    assert (caught.value.index, caught.value.code) == ((), 1)
    with pytest.raises(np.linalg.LinAlgError, match=r"solve: matrix 2 of the stack") as other:
        await linalg.solve(await device.put(np.array([1.0, 1, 0, 0]).reshape(4, 1, 1)), np.ones(1))
    assert isinstance(other.value, ta.LinAlgError)
    assert other.value.index == (2,)


@both
async def test_status_words_of_empty_matrices_are_clear(device: ta.Device) -> None:
    # Words of operations before are left in the memory of a worker.
    with pytest.raises(ta.LinAlgError):
        await linalg.cholesky(await device.put(-np.ones((50, 1, 1))))
    empty = await device.put(np.ones((50, 0, 0)))
    for ask in (linalg.cholesky, linalg.eigvalsh, linalg.svd, linalg.lu, lambda a: linalg.solve(a, a)):
        await ask(empty)


async def test_nan_if_numpy_lets_it_pass(device: ta.Device) -> None:
    a = stack_with(np.nan)
    x = await (await linalg.solve(await device.put(a), np.ones(6))).to_host()
    np.testing.assert_array_equal(np.isnan(x).any(-1), np.isnan(a).any((-2, -1)))
    q, r = await linalg.qr(await device.put(a))
    product = await q.to_host() @ await r.to_host()
    np.testing.assert_array_equal(np.isnan(product).any((-2, -1)), np.isnan(a).any((-2, -1)))
    w = await (await linalg.eigvalsh(await device.put(stack_with(np.nan, (1, 4))))).to_host()
    assert np.isfinite(w).all()  # of the unread triangle


async def test_pivots_out_of_range(device: ta.Device) -> None:
    ref = await device.put(stack_with(1.0))
    for wrong in (-1, 6, 2**31 - 1):
        pivots = np.zeros((4, 3, 6), np.int32)
        pivots[3, 1, 4] = wrong
        with pytest.raises(
            ta.LibraryError, match=r"lu_solve: pivot 5 of matrix \(3, 1\) .* is not a row; piv is"
        ):
            await linalg.lu_solve((ref, pivots), np.ones(6))
    with pytest.raises(ta.LibraryError, match="lu_solve: pivot 1 of the matrix is not a row"):
        await linalg.lu_solve((ref[0, 0], np.full(6, 9, np.int32)), np.ones(6))


async def test_work_on_a_failed_factor_fails_too(device: ta.Device) -> None:
    ref = await device.put(stack_with(-1.0))
    factor = device.submit(linalg.Cholesky(ref))
    product = device.submit(linalg.Matmul(factor.value, np.eye(6)))
    with pytest.raises(ta.LinAlgError):
        await factor.wait()
    # It was launched before that was known, or after it.
    with pytest.raises(ta.InputFailedError, match=r"written by linalg\.cholesky, which failed"):
        await product.wait()
    with pytest.raises(ta.StaleRefError):
        await factor.value.to_host()


@both
async def test_a_cancelled_asker_leaves_the_device_in_order(device: ta.Device) -> None:
    a = np.eye(100) * 4
    ref = await device.put(a)
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(linalg.svd, ref)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    s = await linalg.svd(ref, compute_uv=False)
    np.testing.assert_allclose(await s.to_host(), np.full(100, 4.0))
    del s
    await device.synchronize()
    assert (await device.statistics()).memory.used == a.nbytes


@attrs.frozen
class Arrays:
    """The arguments of the wrong requests."""

    device: ta.Device
    matrix: ta.AccelRef
    tall: ta.AccelRef
    vector: ta.AccelRef
    scalar: ta.AccelRef
    single: ta.AccelRef
    whole: ta.AccelRef
    half: ta.AccelRef


WRONG: dict[str, tuple[Callable[[Arrays], Awaitable[object]], type[Exception], str]] = {
    "0-d": (
        lambda a: linalg.svd(a.scalar),
        np.linalg.LinAlgError,
        r"linalg\.svd: a must be at least two-dimensional, got shape \(\)",
    ),
    "1-d": (
        lambda a: linalg.cholesky(a.vector),
        np.linalg.LinAlgError,
        r"linalg\.cholesky: a must be at least two-dimensional, got shape \(3,\)",
    ),
    "1-d of lu": (lambda a: linalg.lu(a.vector), np.linalg.LinAlgError, "at least two-dimensional"),
    "1-d of qr": (lambda a: linalg.qr(a.vector), np.linalg.LinAlgError, "at least two-dimensional"),
    "1-d of solve": (lambda a: linalg.solve(a.vector, a.vector), np.linalg.LinAlgError, "a must be at least"),
    "not square": (
        lambda a: linalg.cholesky(a.tall),
        np.linalg.LinAlgError,
        r"last 2 dimensions of a must be square, got shape \(4, 3\)",
    ),
    "eigh not square": (lambda a: linalg.eigh(a.tall), np.linalg.LinAlgError, "must be square"),
    "eigvalsh not square": (lambda a: linalg.eigvalsh(a.tall), np.linalg.LinAlgError, "must be square"),
    "solve not square": (lambda a: linalg.solve(a.tall, a.vector), np.linalg.LinAlgError, "must be square"),
    "lu_solve not square": (
        lambda a: linalg.lu_solve((a.tall, np.zeros(3, np.int32)), a.vector),
        np.linalg.LinAlgError,
        "last 2 dimensions of lu must be square",
    ),
    "inv not square": (lambda a: linalg.inv(a.tall), np.linalg.LinAlgError, "must be square"),
    "det not square": (lambda a: linalg.det(a.tall), np.linalg.LinAlgError, "must be square"),
    "slogdet of a vector": (lambda a: linalg.slogdet(a.vector), np.linalg.LinAlgError, "at least two-dim"),
    "eig not square": (lambda a: linalg.eig(a.tall), np.linalg.LinAlgError, "must be square"),
    "eigvals of integers": (lambda a: linalg.eigvals(a.whole), TypeError, "a has dtype int64"),
    "svdvals of a vector": (lambda a: linalg.svdvals(a.vector), np.linalg.LinAlgError, "at least two-dim"),
    "b not square": (lambda a: linalg.eigh(a.matrix, b=a.tall), np.linalg.LinAlgError, "of b must be square"),
    "b of another size": (
        lambda a: linalg.eigvalsh(a.matrix, b=np.eye(2)),
        ValueError,
        r"b must have shape \(\.\.\., 3, 3\), got a of shape \(3, 3\) and b of shape \(2, 2\)",
    ),
    "b of another dtype": (lambda a: linalg.eigh(a.matrix, b=a.single), TypeError, "a float64, b float32"),
    "integers": (
        lambda a: linalg.qr(a.whole),
        TypeError,
        r"qr: a has dtype int64; allowed: float32, float64, complex64, complex128 \(use cast\(\)\)",
    ),
    "half precision": (lambda a: linalg.eigh(a.half), TypeError, "a has dtype float16; allowed: float32"),
    "two dtypes": (
        lambda a: linalg.solve(a.matrix, a.single),
        TypeError,
        r"operands must share a dtype, got a float64, b float32; write ",
    ),
    "rows of b": (
        lambda a: linalg.solve(a.matrix, np.ones((4, 2))),
        ValueError,
        r"b must have shape \(3,\) or \(\.\.\., 3, c\), got a of shape \(3, 3\) and b of shape \(4, 2\)",
    ),
    "length of b": (lambda a: linalg.solve(a.matrix, np.ones(4)), ValueError, r"b of shape \(4,\)"),
    "0-d b": (lambda a: linalg.solve(a.matrix, a.scalar), ValueError, r"b of shape \(\)"),
    "a stack of vectors": (
        lambda a: linalg.solve(np.ones((2, 3, 3)), a.matrix[:2]),
        ValueError,
        r"b of shape \(2, 3\)",
    ),
    "stacks": (
        lambda a: linalg.solve(np.ones((2, 3, 3)), a.matrix.reshape(3, 3, 1)),
        ValueError,
        r"with leading axes that broadcast, got a of shape \(2, 3, 3\) and b of shape \(3, 3, 1\)",
    ),
    "mode": (
        lambda a: linalg.qr(a.matrix, "raw"),  # type: ignore[call-overload]
        ValueError,
        "mode must be 'reduced', 'complete' or 'r', got 'raw'",
    ),
    "UPLO": (
        lambda a: linalg.eigh(a.matrix, "lower"),  # type: ignore[arg-type]
        ValueError,
        "UPLO must be 'L', 'U', 'l' or 'u', got 'lower'",
    ),
    "UPLO is not text": (
        lambda a: linalg.eigvalsh(a.matrix, 1),  # type: ignore[arg-type]
        ValueError,
        "UPLO must be 'L', 'U', 'l' or 'u', got 1",
    ),
    "trans": (
        lambda a: linalg.lu_solve((a.matrix, np.zeros(3, np.int32)), a.vector, 3),  # type: ignore[arg-type]
        ValueError,
        "trans must be 0, 1 or 2, got 3",
    ),
    "pivots of another type": (
        lambda a: linalg.lu_solve((a.matrix, np.zeros(3, np.int64)), a.vector),
        TypeError,
        r"piv has dtype int64; allowed: int32",
    ),
    "number of pivots": (
        lambda a: linalg.lu_solve((a.matrix, np.zeros(2, np.int32)), a.vector),
        ValueError,
        r"piv must have shape \(\.\.\., 3\), got lu of shape \(3, 3\) and piv of shape \(2,\)",
    ),
    "no device": (lambda a: linalg.svd(np.eye(3)), TypeError, "svd: no operand is on a device"),
    "a list": (lambda a: linalg.solve(a.matrix, [1.0]), TypeError, "b must be an AccelRef or a NumPy"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG.values(), ids=WRONG.keys())
async def test_refused_before_anything_is_launched(
    device: ta.Device, wrong: Callable[[Arrays], Awaitable[object]], error: type[Exception], message: str
) -> None:
    arrays = Arrays(
        device,
        matrix=await device.put(np.eye(3)),
        tall=await device.put(np.ones((4, 3))),
        vector=await device.put(np.ones(3)),
        scalar=await device.put(2.0),
        single=await device.put(np.eye(3, dtype=np.float32)),
        whole=await device.put(np.eye(3, dtype=np.int64)),
        half=await device.put(np.eye(3, dtype=np.float16)),
    )
    before = await device.statistics()
    with pytest.raises(error, match=message):
        await wrong(arrays)
    await device.synchronize()
    after = await device.statistics()
    assert (after.launched, after.memory.used) == (before.launched, before.memory.used)


def _spec(shape: tuple[int, ...], dtype: str = "float64", block: int = 1) -> ArraySpec:
    return ArraySpec(block, 0, DType(dtype), shape, contiguous_strides(shape, DType(dtype).itemsize))


SPECS: dict[str, tuple[Callable[[], Any], str]] = {
    "q of another shape": (
        lambda: linalg.qr.spec(_spec((4, 3)), "reduced", _spec((4, 2)), _spec((2, 3))),
        "QrSpec.q must have",
    ),
    "one of u and vh": (
        lambda: linalg.svd.spec(
            _spec((4, 3)), True, False, _spec((4, 4)), _spec((3,)), None, np.zeros(1, np.int32)
        ),
        "SvdSpec.u must be None here",
    ),
    "too few words": (
        lambda: linalg.svd.spec(
            _spec((2, 4, 3)), True, False, None, _spec((2, 3)), None, np.zeros(1, np.int32)
        ),
        "info must have shape .*, one word for each matrix",
    ),
    "complex eigenvalues": (
        lambda: linalg.eigvalsh.spec(
            _spec((3, 3), "complex64"), "L", None, _spec((3,), "complex64"), np.zeros(1, np.int32)
        ),
        "EigvalshSpec.w must have dtype float32, got complex64",
    ),
    "an inverse of another size": (
        lambda: linalg.inv.spec(_spec((3, 3)), _spec((3, 2)), np.zeros(1, np.int32)),
        r"InvSpec.out must have shape \(3, 3\), got \(3, 2\)",
    ),
    "real values of eig": (
        lambda: linalg.eigvals.spec(_spec((3, 3)), _spec((3,)), np.zeros(1, np.int32)),
        "EigvalsSpec.w must have dtype complex128, got float64",
    ),
    "no triangle": (
        lambda: linalg.eigvalsh.spec(_spec((3, 3)), "lower", None, _spec((3,)), np.zeros(1, np.int32)),
        "EigvalshSpec: UPLO must be 'L', 'U', 'l' or 'u', got 'lower'",
    ),
}


@pytest.mark.parametrize(("make", "message"), SPECS.values(), ids=SPECS.keys())
def test_specifications_that_do_not_fit(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make().check_shapes("a test")


@attrs.define(eq=False)
class TooLarge(linalg.Svd):
    """Asks for more than LAPACK's 32 bits can count, of memory that does not exist."""

    def plan(self, planner: Planner) -> Planned[Any]:
        planned = super().plan(planner)
        spec: Any = planned.spec
        size = 2**15
        a = attrs.evolve(spec.a, shape=(size, size), strides=(0, 0))
        s = attrs.evolve(spec.s, shape=(size,), strides=(0,))
        return Planned(attrs.evolve(spec, a=a, s=s), planned.reply)


@pytest.mark.skipif(BACKEND != "cpu", reason="LAPACK is the CPU backend's")
async def test_sizes_that_lapack_cannot_count(device: ta.Device) -> None:
    ref = await device.put(np.eye(2))
    with pytest.raises(ta.NotSupportedError, match=r"counts in 32 bits, svd of 32768 × 32768 need"):
        await device.ask(TooLarge(ref, compute_uv=False))
    np.testing.assert_array_equal(await (await linalg.svd(ref, compute_uv=False)).to_host(), [1, 1])
