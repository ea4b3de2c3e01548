"""Iterative solvers and Lanczos' method, against SciPy, and a Laplacian with a known solution."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import trio
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_matrices import EXAMPLES, NEEDS_SYSTEMS, laplacian, on_device, random_matrix

import trio_accel as ta
from trio_accel import sparse

SOLVERS: dict[str, Any] = {
    "cg": sparse.cg,
    "bicgstab": sparse.bicgstab,
    "gmres": sparse.gmres,
    "minres": sparse.minres,
}
RTOL = {"float64": 1e-10, "float32": 1e-4, "complex128": 1e-10, "complex64": 1e-4}


def hermitian(n: int, dtype: str, seed: int, *, shift: float = 1.0) -> Any:
    """Make a Hermitian matrix: positive definite unless the shift is negative."""
    full = random_matrix(n, n, 0.3, dtype, seed=seed).toarray()
    made = full @ full.conj().T + shift * np.eye(n)
    return scipy.sparse.csr_array(made.astype(dtype))


async def check_solution(found: sparse.SolveResult, matrix: Any, b: Any, rtol: float) -> None:
    x = await found.x.to_host()
    assert x.dtype == b.dtype
    wide = np.result_type(b.dtype, np.float64)
    residual = np.linalg.norm(b.astype(wide) - matrix.astype(wide) @ x.astype(wide))
    assert residual <= rtol * np.linalg.norm(b) * (1 + 1e-2)
    assert abs(found.residual - residual) <= 0.05 * rtol * np.linalg.norm(b) + 1e-300


@pytest.mark.parametrize("name", SOLVERS)
@given(
    dtype=st.sampled_from(sorted(RTOL)), n=st.integers(1, 25), seed=st.integers(0, 99), begins=st.booleans()
)
@settings(max_examples=EXAMPLES // 3, deadline=None)
def test_random_systems(name: str, dtype: str, n: int, seed: int, begins: bool) -> None:
    matrix, generator = hermitian(n, dtype, seed), np.random.default_rng(seed)
    if name in ("bicgstab", "gmres"):
        matrix = scipy.sparse.csr_array((matrix.toarray() + np.triu(np.ones((n, n)), 1) * 0.1).astype(dtype))
    b, x0 = (generator.normal(size=n).astype(dtype) for _ in range(2))

    async def test(device: ta.Device) -> None:
        a = await sparse.csr(device, matrix)
        found = await SOLVERS[name](a, b, x0 if begins else None, rtol=RTOL[dtype], maxiter=40 * n)
        await check_solution(found, matrix, b, RTOL[dtype])

    on_device(test)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        ("float64", 1e-200),
        ("float64", 1e-300),
        ("float64", 1e250),
        ("complex128", 1e-200),
        ("float32", 1e-25),
    ],
)
async def test_right_hand_sides_with_squares_beyond_the_dtype(
    device: ta.Device, name: str, dtype: str, scale: float
) -> None:
    matrix, generator = hermitian(20, dtype, 5), np.random.default_rng(5)
    ones, begin = (generator.normal(size=20).astype(dtype) for _ in range(2))
    a, seen, rtol = await sparse.csr(device, matrix), list[ta.AccelRef](), RTOL[dtype]
    for atol, x0 in ((0.0, None), (0.0, begin * ones.dtype.type(scale)), (1e-2 * scale, None)):
        b = ones * ones.dtype.type(scale)
        found = await SOLVERS[name](
            a, b, x0, rtol=0.0 if atol else rtol, atol=atol, maxiter=400, callback=seen.append
        )
        # Relative to the true scale, because the check's own squares would be zeros.
        x = (await found.x.to_host()).astype("complex128") / scale
        residual = np.linalg.norm(matrix @ x - b.astype("complex128") / scale)
        assert residual <= 1.1 * (atol / scale or rtol * np.linalg.norm(ones))
        assert found.residual / scale == pytest.approx(residual, abs=0.1 * (atol / scale or rtol * 5))
        # A callback sees the solution of the given system.
        assert np.array_equal(await seen[-1].to_host(), await found.x.to_host())
    with pytest.raises(sparse.ConvergenceError) as caught:
        await SOLVERS[name](a, ones * ones.dtype.type(scale), rtol=0.0, maxiter=1)
    assert caught.value.x is not None
    x = (await caught.value.x.to_host()).astype("complex128") / scale
    assert caught.value.residual / scale == pytest.approx(
        np.linalg.norm(matrix @ x - ones), rel=1e-2, abs=1e-5
    )


@pytest.mark.parametrize("name", SOLVERS)
async def test_a_laplacian_with_a_known_solution(device: ta.Device, name: str) -> None:
    points = 16
    matrix = laplacian(points)
    # An eigenvector: sines. Its eigenvalue is known.
    wave = np.sin(np.pi * np.arange(1, points + 1) / (points + 1))
    x = np.outer(wave, wave).ravel()
    eigenvalue = 4 - 4 * np.cos(np.pi / (points + 1))
    found = await SOLVERS[name](await sparse.csr(device, matrix), eigenvalue * x, rtol=1e-12)
    np.testing.assert_allclose(await found.x.to_host(), x, atol=1e-11)
    assert found.iterations <= 20
    b = np.random.default_rng(2).normal(size=points**2)
    found = await SOLVERS[name](await sparse.csr(device, matrix), b, rtol=1e-9)
    np.testing.assert_allclose(
        await found.x.to_host(), scipy.sparse.linalg.spsolve(matrix.tocsc(), b), atol=1e-6
    )


async def test_as_many_steps_as_scipy(device: ta.Device) -> None:
    matrix, b = laplacian(12), np.random.default_rng(3).normal(size=144)
    a = await sparse.csr(device, matrix)
    for name in ("cg", "bicgstab"):
        steps: list[int] = []
        expected, info = getattr(scipy.sparse.linalg, name)(matrix, b, rtol=1e-8, callback=steps.append)
        found = await SOLVERS[name](a, b, rtol=1e-8, check_every=1)
        assert info == 0
        assert abs(found.iterations - len(steps)) <= 2
        np.testing.assert_allclose(await found.x.to_host(), expected, atol=1e-6)


@NEEDS_SYSTEMS
@pytest.mark.parametrize("kind", ["jacobi", "ilu0", "ic0"])
@pytest.mark.parametrize("name", SOLVERS)
async def test_preconditioners(device: ta.Device, name: str, kind: Any) -> None:
    scale = np.geomspace(1, 1e3, 100)
    matrix = scipy.sparse.csr_array(laplacian(10) * np.sqrt(scale)[:, None] * np.sqrt(scale)[None, :])
    b, a = np.random.default_rng(4).normal(size=100), await sparse.csr(device, matrix)
    m = await sparse.precondition(a, kind)
    assert repr(m) == f"<Preconditioner {kind} (100, 100)>"
    found = await SOLVERS[name](a, b, rtol=1e-9, M=m)
    await check_solution(found, matrix, b, 1e-9)
    rounds = -(-found.iterations // 20) if name == "gmres" else found.iterations
    with pytest.raises(sparse.ConvergenceError):
        await SOLVERS[name](a, b, rtol=1e-9, maxiter=rounds)


async def test_jacobi_is_a_division(device: ta.Device) -> None:
    a = await sparse.csr(device, scipy.sparse.diags_array(np.array([1.0, 2.0, 4.0])).tocsr())
    m = await sparse.precondition(a)
    assert (await (await m(await device.put(np.ones(3)))).to_host()).tolist() == [1.0, 0.5, 0.25]
    found = await sparse.cg(a, np.ones(3), M=m, rtol=1e-14, check_every=1)
    assert found.iterations == 1


@pytest.mark.parametrize("name", SOLVERS)
async def test_steps_become_one_operation(device: ta.Device, name: str) -> None:
    matrix, b = laplacian(30), np.random.default_rng(8).normal(size=900)
    a, there = await sparse.csr(device, matrix), await device.put(b)
    m, launched = await sparse.precondition(a), list[int]()

    async def product(x: ta.AccelRef) -> ta.AccelRef:
        return await sparse.spmv(a, x)

    for operand in (product, a):
        before = (await device.statistics()).launched
        found = await SOLVERS[name](operand, there, rtol=1e-10, M=m)
        await check_solution(found, matrix, b, 1e-10)
        launched.append((await device.statistics()).launched - before)
        steps = found.iterations
    if name == "gmres":
        # A replay and the read of its residual for each cycle, and the work before and after them.
        assert launched[1] <= 2 * -(-steps // 20) + 12
    # Of the others, the first four rounds are not recorded.
    assert launched[1] <= launched[0] * (40 / steps) + steps
    assert launched[1] < launched[0] * 0.9


async def test_steps_of_a_backend_without_graphs(device: ta.Device) -> None:
    matrix, b = laplacian(20), np.random.default_rng(9).normal(size=400)
    a = await sparse.csr(device, matrix)
    for solve in SOLVERS.values():
        refusal = ta.NotSupportedError("no graphs here", backend=BACKEND)
        # Without that operation, the steps of `cg` are those on a GPU.
        faults = [
            ta.testing.inject_fault(device, message, fail=refusal, count=1000)
            for message in (sparse.CgSteps, ta.graphs.Replay)
        ]
        found = await solve(a, b, rtol=1e-9)
        await check_solution(found, matrix, b, 1e-9)
        assert faults[1].hit > 0
        for fault in faults:
            fault.remove()


async def test_a_cycle_ends_when_it_is_good_enough(device: ta.Device) -> None:
    # Three eigenvalues: three steps are enough, and no more of the twenty count.
    values = np.tile([1.0, 2.0, 5.0], 8)
    a = await sparse.csr(device, scipy.sparse.diags_array(values).tocsr())
    found = await sparse.gmres(a, np.ones(24), rtol=1e-12)
    assert found.iterations == 3
    np.testing.assert_allclose(await found.x.to_host(), 1 / values, rtol=1e-13)
    turned = scipy.sparse.csr_array(np.roll(np.eye(24), 1, 0))
    b = np.random.default_rng(3).normal(size=24)
    # Nothing gets better before the last step.
    found = await sparse.gmres(await sparse.csr(device, turned), b, rtol=1e-10, restart=24)
    assert found.iterations == 24
    np.testing.assert_allclose(await found.x.to_host(), np.roll(b, -1), atol=1e-13)


async def test_functions_in_place_of_matrices(device: ta.Device) -> None:
    matrix, seen = laplacian(5), list[float]()
    a, b = await sparse.csr(device, matrix), np.ones(25)

    async def product(x: ta.AccelRef) -> ta.AccelRef:
        return await sparse.spmv(a, x)

    async def note(x: ta.AccelRef) -> None:
        seen.append(float((await x.to_host()).sum()))

    found = await sparse.cg(product, await device.put(b), rtol=1e-10, callback=note, check_every=4)
    await check_solution(found, matrix, b, 1e-10)
    assert len(seen) == -(-found.iterations // 4)
    np.testing.assert_allclose(seen[-1], np.linalg.solve(matrix.toarray(), b).sum(), rtol=1e-8)
    w = (await sparse.eigsh(product, 2, "LA", v0=await device.put(np.arange(25.0)))).eigenvalues
    np.testing.assert_allclose(await w.to_host(), np.linalg.eigvalsh(matrix.toarray())[-2:], rtol=1e-12)


@pytest.mark.parametrize("layout", [sparse.coo, sparse.bsr])
async def test_other_formats(device: ta.Device, layout: Any) -> None:
    matrix, b = laplacian(4), np.arange(16.0)
    found = await sparse.cg(await layout(device, matrix), b, rtol=1e-10)
    await check_solution(found, matrix, b, 1e-10)


async def test_an_indefinite_matrix_is_solved_by_minres(device: ta.Device) -> None:
    matrix = scipy.sparse.csr_array(laplacian(6) - 2.9 * scipy.sparse.eye_array(36))
    b = np.random.default_rng(1).normal(size=36)
    found = await sparse.minres(await sparse.csr(device, matrix), b, rtol=1e-10)
    await check_solution(found, matrix, b, 1e-10)


@pytest.mark.parametrize("name", SOLVERS)
async def test_nothing_to_do(device: ta.Device, name: str) -> None:
    a = await sparse.csr(device, laplacian(3))
    found = await SOLVERS[name](a, np.zeros(9))
    assert (found.iterations, found.residual, (await found.x.to_host()).any()) == (0, 0.0, False)
    x0 = np.arange(9.0)
    found = await SOLVERS[name](a, laplacian(3) @ x0, x0)
    assert (found.iterations, (await found.x.to_host()).tolist()) == (0, x0.tolist())


@pytest.mark.parametrize("name", SOLVERS)
async def test_no_convergence(device: ta.Device, name: str) -> None:
    matrix, b = laplacian(12), np.random.default_rng(0).normal(size=144)
    more = {"restart": 3} if name == "gmres" else {"check_every": 2}
    with pytest.raises(
        sparse.ConvergenceError, match=rf"{name}: the residual is .* after \d+ steps"
    ) as caught:
        await SOLVERS[name](await sparse.csr(device, matrix), b, rtol=1e-12, maxiter=2, **more)
    error = caught.value
    assert isinstance(error, ta.LinAlgError)
    assert error.iterations == (6 if name == "gmres" else 2)
    assert error.x is not None
    residual = np.linalg.norm(b - matrix @ await error.x.to_host())
    np.testing.assert_allclose(error.residual, residual, rtol=1e-10)


@pytest.mark.parametrize("name", SOLVERS)
async def test_a_singular_matrix_ends_it_soon(device: ta.Device, name: str) -> None:
    a = await sparse.csr(device, scipy.sparse.diags_array(np.array([1.0, 2.0, 0.0])).tocsr())
    with pytest.raises(sparse.ConvergenceError):
        await SOLVERS[name](a, np.ones(3), maxiter=30)
    with pytest.raises(ta.LinAlgError, match="b holds a NaN or an infinity"):
        await SOLVERS[name](a, np.array([1.0, np.nan, 0.0]))
    nan = await sparse.csr(device, scipy.sparse.diags_array(np.array([1.0, np.nan, 3.0])).tocsr())
    with pytest.raises(sparse.ConvergenceError, match="it broke down"):
        await SOLVERS[name](nan, np.ones(3), maxiter=30)


RANDOM = np.random.default_rng(3)
BASIS = RANDOM.normal(size=(8, 8))
# Matrices on which solvers break down, and right-hand sides.
BREAKING: dict[str, tuple[Any, Any]] = {
    "a row of zeros": (np.diag([1.0, 0, 2]), np.ones(3)),
    "zeros": (np.zeros((3, 3)), np.ones(3)),
    "rank 1": (np.ones((3, 3)), np.arange(1.0, 4)),
    "rank 2": (BASIS[:2].T @ BASIS[:2], BASIS[2]),
    "rank 4": (BASIS[:4].T @ BASIS[:4], BASIS[5]),
    "skew": (np.array([[0.0, 1], [-1, 0]]), np.array([1.0, 0])),
    "without a source": (np.diag([1.0, *[2.0] * 28, 1]) - np.eye(30, k=1) - np.eye(30, k=-1), np.eye(30)[0]),
    "nilpotent": (np.eye(6, k=1), np.ones(6)),
    "a turn": (np.roll(np.eye(6), 1, 0), np.eye(6)[0]),
    "far apart": (np.diag([1e30, 1e-30, 1]), np.ones(3)),
    "one zero of many": (np.diag(np.linspace(0, 1, 20)), np.ones(20)),
    "no numbers": (np.diag([1.0, np.nan]), np.ones(2)),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", BREAKING)
async def test_a_breakdown_gives_the_best_solution(device: ta.Device, kind: str, dtype: str) -> None:
    """Its residual is reported truly, and no larger than in the beginning."""
    matrix, b = (each.astype(dtype) for each in BREAKING[kind])
    a = await sparse.csr(device, scipy.sparse.csr_array(matrix))
    for name, solver in SOLVERS.items():
        for more in ({},) if name == "gmres" else ({"check_every": 1}, {"check_every": 10}):
            found: Any
            try:
                found = await solver(a, b, rtol=1e-10, maxiter=60, **more)
            except sparse.ConvergenceError as error:
                found = error
            x, residual = await found.x.to_host(), found.residual
            assert np.isfinite(x).all()
            assert residual <= (1 + 1e-6) * np.linalg.norm(b)
            if kind != "no numbers":
                wide = x.astype("float64")
                true = np.linalg.norm(b - matrix @ wide)
                scale = np.linalg.norm(b) + abs(matrix).max() * np.linalg.norm(wide)
                assert abs(residual - true) <= 50 * np.finfo(dtype).eps * scale


async def test_steps_before_a_breakdown_are_not_lost(device: ta.Device) -> None:
    """A look every ten steps would find only the start and the ruins."""
    a = await sparse.csr(device, scipy.sparse.diags_array(np.array([1.0, 0.0, 2.0])).tocsr())
    with pytest.raises(sparse.ConvergenceError, match="it broke down") as caught:
        await sparse.cg(a, np.ones(3), maxiter=60)
    assert caught.value.x is not None
    assert caught.value.residual < 1.5  # 1.73 in the beginning, and 1 at the least


async def wrong(x: ta.AccelRef) -> ta.AccelRef:
    return x[:1]


REFUSED: dict[str, tuple[Callable[[Any], Awaitable[object]], type[Exception], str]] = {
    "not square": (lambda a: sparse.cg(wider(a), np.ones(9)), ValueError, "A must be square"),
    "a length": (lambda a: sparse.cg(a, np.ones(8)), ValueError, r"A of shape \(9, 9\) and b of shape"),
    "no matrix": (lambda a: sparse.cg(a.data, np.ones(9)), TypeError, "A must be a sparse"),  # type: ignore[arg-type]
    "no array": (lambda a: sparse.cg(a, [1.0]), TypeError, "b must be an AccelRef or a NumPy array"),  # type: ignore[arg-type]
    "a dtype": (lambda a: sparse.cg(a, np.ones(9, np.float32)), TypeError, "float32"),
    "integers": (lambda a: sparse.cg(a, np.ones(9, np.int64)), TypeError, "b has dtype int64"),
    "x0": (lambda a: sparse.cg(a, np.ones(9), np.ones(8)), ValueError, r"x0 must have shape \(9,\)"),
    "M": (lambda a: sparse.cg(a, np.ones(9), M=1), TypeError, "M must be an async function"),  # type: ignore[arg-type]
    "what M returns": (lambda a: sparse.cg(a, np.ones(9), M=wrong), TypeError, "M must return an AccelRef"),
    "rtol": (lambda a: sparse.cg(a, np.ones(9), rtol=-1), ValueError, "rtol must be finite and not negative"),
    "maxiter": (lambda a: sparse.cg(a, np.ones(9), maxiter=0), ValueError, "maxiter must be at least 1"),
    "restart": (lambda a: sparse.gmres(a, np.ones(9), restart=1.5), TypeError, "restart must be"),  # type: ignore[arg-type]
    "k": (lambda a: sparse.eigsh(a, 9), ValueError, "k must be above 0 and below 9"),
    "which": (lambda a: sparse.eigsh(a, 2, "SM"), ValueError, "which must be"),  # type: ignore[arg-type]
    "ncv": (lambda a: sparse.eigsh(a, 2, ncv=2), ValueError, "ncv must be above 2"),
    "no v0": (lambda a: sparse.eigsh(wrong, 2), TypeError, "v0 must be given"),
}


def wider(a: sparse.CsrMatrix) -> sparse.CsrMatrix:
    return sparse.CsrMatrix((9, 10), a.indptr, a.indices, a.data)


@pytest.mark.parametrize(("ask", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_invalid_arguments_are_refused(
    device: ta.Device, ask: Callable[[Any], Awaitable[object]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await ask(await sparse.csr(device, laplacian(3)))


async def test_a_cancelled_solver_leaves_nothing(device: ta.Device) -> None:
    a, b = await sparse.csr(device, laplacian(10)), np.random.default_rng(6).normal(size=100)
    with trio.CancelScope() as scope:

        async def product(x: ta.AccelRef) -> ta.AccelRef:
            made = await sparse.spmv(a, x)
            scope.cancel()
            return made

        await sparse.cg(product, await device.put(b))
    assert scope.cancelled_caught
    await device.synchronize()
    assert device.pending == 0
    assert (await sparse.cg(a, b)).iterations > 0


@pytest.mark.parametrize("in_flight", [1, 4])
async def test_a_device_that_takes_few_operations(system: ta.System, in_flight: int) -> None:
    options = ta.DeviceOptions(isolation="inline", in_flight=in_flight)
    async with system.open_device(BACKEND, options=options) as device:
        found = await sparse.cg(await sparse.csr(device, laplacian(5)), np.ones(25), rtol=1e-10)
        await check_solution(found, laplacian(5), np.ones(25), 1e-10)


@pytest.mark.parametrize(
    "name", ["cg", "gmres", *[pytest.param(one, marks=pytest.mark.slow) for one in ("bicgstab", "minres")]]
)
@pytest.mark.parametrize("isolation", ["process"])
async def test_a_worker_killed_in_the_middle(system: ta.System, name: str, isolation: Any) -> None:
    matrix, b = laplacian(20), np.random.default_rng(6).normal(size=400)
    options = ta.DeviceOptions(isolation=isolation, retry=2)
    more: dict[str, Any] = {"restart": 8} if name == "gmres" else {}
    kills: tuple[Any, Any] = (ta.graphs.Replay if name == "gmres" else sparse.Spmv), ta.graphs.Replay
    if name == "cg" and BACKEND == "cpu":
        kills = sparse.CgSteps, sparse.CgSteps
    async with system.open_device(BACKEND, options=options) as device:
        a = await sparse.csr(device, matrix)
        undisturbed = await SOLVERS[name](a, b, rtol=1e-9, **more)
        looks = 0

        def kill(x: ta.AccelRef) -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                ta.testing.inject_fault(device, kills[0], kill=True)
            elif looks == 5:
                # By now the steps are a graph.
                ta.testing.inject_fault(device, kills[1], kill=True)

        found = await SOLVERS[name](a, b, rtol=1e-9, callback=kill, **more)
        assert device.generation == 3
        await check_solution(found, matrix, b, 1e-9)
        if BACKEND == "cpu":
            # On CUDA the first product with a structure is another kernel's, which rounds otherwise.
            assert found[1:] == undisturbed[1:]
            assert (await found.x.to_host()).tolist() == (await undisturbed.x.to_host()).tolist()


@pytest.mark.parametrize("which", ["LM", "LA", "SA"])
@pytest.mark.parametrize("dtype", RTOL)
async def test_eigenvalues(device: ta.Device, dtype: str, which: Any) -> None:
    matrix = hermitian(40, dtype, 7, shift=-8.0)
    wide = matrix.astype(complex if dtype.startswith("complex") else float)
    # There are equal ones among the smallest, which ARPACK does not always find.
    everything = np.linalg.eigvalsh(wide.toarray())
    order = {"LM": -np.abs(everything), "LA": -everything, "SA": everything}[which]
    expected = np.sort(everything[np.argsort(order)[:3]])
    if which != "SA":
        theirs = scipy.sparse.linalg.eigsh(wide, 3, which=which, return_eigenvectors=False)
        np.testing.assert_allclose(np.sort(theirs), expected, rtol=1e-6)
    found = await sparse.eigsh(await sparse.csr(device, matrix), 3, which)
    w, v = await found.eigenvalues.to_host(), await found.eigenvectors.to_host()
    tolerance = (1e-5 if dtype in ("float32", "complex64") else 1e-12) * np.abs(expected).max()
    assert (w.dtype.kind, v.dtype, v.shape) == ("f", np.dtype(dtype), (40, 3))
    np.testing.assert_allclose(w, expected, atol=tolerance)
    np.testing.assert_allclose(wide @ v, v * w, atol=10 * tolerance)
    np.testing.assert_allclose(v.conj().T @ v, np.eye(3), atol=10 * tolerance)


async def test_a_laplacians_smallest_eigenvalues(device: ta.Device) -> None:
    points = 12
    one = 2 - 2 * np.cos(np.pi * np.arange(1, points + 1) / (points + 1))
    expected = np.sort((one[:, None] + one[None, :]).ravel())[:5]
    found = await sparse.eigsh(await sparse.csr(device, laplacian(points)), 5, "SA")
    np.testing.assert_allclose(await found.eigenvalues.to_host(), expected, atol=1e-12)


@pytest.mark.parametrize(
    "values",
    [[1.0] * 30, [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 0.0, 0.0, -5.0], [0.0] * 5, [2.0, -2.0] * 20],
)
async def test_equal_eigenvalues(device: ta.Device, values: list[float]) -> None:
    a = await sparse.csr(device, scipy.sparse.diags_array(np.array(values)).tocsr())
    found = await sparse.eigsh(a, 4, "LA")
    np.testing.assert_allclose(await found.eigenvalues.to_host(), sorted(values)[-4:], atol=1e-13)


async def test_eigenvalues_not_found(device: ta.Device) -> None:
    a = await sparse.csr(device, laplacian(15))
    with pytest.raises(sparse.ConvergenceError, match=r"eigsh: a residual is .* after 1 rounds"):
        await sparse.eigsh(a, 2, "SA", ncv=4, maxiter=1)
    skew = await sparse.csr(device, scipy.sparse.csr_array(np.triu(np.ones((9, 9)))))
    with pytest.raises(sparse.ConvergenceError, match="A is not Hermitian"):
        await sparse.eigsh(skew, 2, "LA")
    nan = await sparse.csr(device, scipy.sparse.diags_array(np.array([1.0, np.nan, 3.0])).tocsr())
    with pytest.raises(ta.LinAlgError, match="holds a NaN or an infinity"):
        await sparse.eigsh(nan, 1)
