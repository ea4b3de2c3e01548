"""Each operation with status words, on two inline devices at once: an error belongs to one of them.

Both kernels run before either device looks at its words. So words that the devices share, as by a recipe of
graphs that both run, hold what the later kernel wrote, and one of the devices is wrong in each turn.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import trio
from chosen import BACKEND, INLINE
from two_devices_program import Told

import trio_accel as ta
from trio_accel import arrays, linalg, sparse
from trio_accel.backends.base.contract.ops import OperationSpec
from trio_accel.backends.cpu.manifest import LIBRARIES, load_library

Host = npt.NDArray[Any]
Run = Callable[..., Any]

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="kernels of two devices meet in threads of streams")

TURNS = 5
N = 4
EYE, ONES = np.eye(N), np.ones(N)
DEFINITE = EYE * N + 0.5 * np.random.default_rng(0).random((N, N)) + 0.5
DEFINITE = (DEFINITE + DEFINITE.T) / 2
NONE, NAN = np.zeros((N, N)), np.full((N, N), np.nan)
BANDS = np.stack([np.r_[0, ONES[1:]], 4 * ONES])


@attrs.frozen
class Case:
    """A function with status words.

    Attributes:
        run: Asks for it, given arrays of a device.
        good: Host arrays for which the operation has a result.
        bad: The same shapes and dtypes, for which it fails, or has another result.
        expected: The result for the good arrays, or a check of it.
        fails: Text of the error; None where `bad` has a result, `other`.
        other: The result for `bad`.
    """

    run: Run
    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    expected: Any
    fails: str | None = None
    other: Any = None


def _of_matrix(run: Run, expected: Callable[[Host], Any], fails: str, bad: Host = NAN) -> Case:
    return Case(run, (DEFINITE,), (bad,), expected(DEFINITE), fails)


def _system(run: Run, fails: str, *more: Host, bad: Host = NONE, matrix: Host = DEFINITE) -> Case:
    return Case(run, (matrix, *more), (bad, *more), np.linalg.solve(DEFINITE, ONES), fails)


def _lower(matrix: Host) -> Host:
    return np.tril(matrix)


def _of_csr(run: Run, expected: Any, fails: str, good: Host = DEFINITE, bad: Host = NONE) -> Case:
    return Case(run, (good.ravel(),), (bad.ravel(),), expected, fails)


_LU, _PIV = scipy.linalg.lu_factor(DEFINITE)
_PIV = _PIV.astype(np.int32)
_L = np.linalg.cholesky(DEFINITE)
_ROOTS = _L.diagonal()
SEGMENTS = np.array([0, 1, 3, N], np.int64)


async def _with_csr(data: Any, run: Run) -> Any:
    """Ask for a function of a matrix that stores all elements."""
    indptr = await data.device.put(np.arange(0, N * N + 1, N, dtype=np.int32))
    indices = await data.device.put(np.tile(np.arange(N, dtype=np.int32), N))
    made = await run(sparse.CsrMatrix((N, N), indptr, indices, data))
    return await sparse.to_dense(made) if isinstance(made, sparse.CsrMatrix) else made


async def _factored(matrix: Any) -> Any:
    return await (await sparse.factor(matrix)).solve(ONES)


async def _by_steps(matrix: Any) -> Any:
    return (await sparse.cg(matrix, await matrix.data.device.put(ONES), rtol=1e-12)).x


async def _drawn(lam: Any) -> Any:
    generator = ta.random.Generator(lam.device, seed=1)
    return await generator.poisson(lam.shape, lam)


async def _asked(x: Any, method: Any) -> Any:
    async with ta.open_program(x.device, Told, x) as program:
        return await program.ask(method)


async def _streamed(x: Any) -> Any:
    async with ta.open_program(x.device, Told, x) as program, program.stream(Told.items) as items:
        return [item async for item in items]


CASES: dict[str, Case] = {
    "linalg.cholesky": _of_matrix(
        lambda a: linalg.cholesky(a * 1.0), np.linalg.cholesky, "not positive definite", -EYE
    ),
    "linalg.lu": _of_matrix(
        lambda a: linalg.lu(a * 1.0), lambda a: (scipy.linalg.lu_factor(a)[0], _PIV), "singular", NONE
    ),
    "linalg.solve": _system(lambda a, b: linalg.solve(a, b) + 0.0, "singular", ONES),
    "linalg.inv": _of_matrix(lambda a: linalg.inv(a) + 0.0, np.linalg.inv, "singular", NONE),
    "linalg.lu_solve": Case(
        lambda lu, piv, b: linalg.lu_solve((lu, piv), b) + 0.0,
        (_LU, _PIV, ONES),
        (_LU, _PIV + 99, ONES),
        np.linalg.solve(DEFINITE, ONES),
        "piv",
    ),
    "linalg.check_diagonal": Case(
        lambda a, b: linalg.solve_triangular(a, b, lower=True) + 0.0,
        (_lower(DEFINITE), ONES),
        (NONE, ONES),
        np.linalg.solve(_lower(DEFINITE), ONES),
        "singular",
    ),
    "linalg.solve_banded": Case(
        lambda ab, b: linalg.solve_banded((0, 1), ab, b) + 0.0,
        (BANDS, ONES),
        (np.zeros_like(BANDS), ONES),
        scipy.linalg.solve_banded((0, 1), BANDS, ONES),
        "singular",
    ),
    "linalg.solveh_banded": Case(
        lambda ab, b: linalg.solveh_banded(ab, b) + 0.0,
        (BANDS, ONES),
        (-BANDS, ONES),
        scipy.linalg.solveh_banded(BANDS, ONES),
        "not positive definite",
    ),
    "linalg.solve_tridiagonal": Case(
        lambda dl, d, du, b: linalg.solve_tridiagonal(dl, d, du, b) + 0.0,
        (ONES, 4 * ONES, ONES, ONES),
        (0 * ONES, 0 * ONES, 0 * ONES, ONES),
        np.linalg.solve(4 * EYE + np.eye(N, k=1) + np.eye(N, k=-1), ONES),
        "singular",
    ),
    "linalg.solve_toeplitz": Case(
        lambda c, b: linalg.solve_toeplitz(c, b) + 0.0,
        (np.array([4.0, 1.0, 0.5, 0.25]), ONES),
        (np.zeros(N), ONES),
        scipy.linalg.solve_toeplitz(np.array([4.0, 1.0, 0.5, 0.25]), ONES),
        "singular",
    ),
    "linalg.svd": _of_matrix(
        lambda a: linalg.svdvals(a) + 0.0, lambda a: np.linalg.svd(a, compute_uv=False), "NaN"
    ),
    "linalg.eigh": _of_matrix(lambda a: linalg.eigh(a * 1.0), np.linalg.eigh, "NaN"),
    "linalg.eigvalsh": _of_matrix(lambda a: linalg.eigvalsh(a) + 0.0, np.linalg.eigvalsh, "NaN"),
    "linalg.eig": _of_matrix(lambda a: linalg.eig(a * 1.0), np.linalg.eig, "NaN"),
    "linalg.eigvals": _of_matrix(lambda a: linalg.eigvals(a) + 0.0, np.linalg.eigvals, "NaN"),
    "linalg.schur": _of_matrix(lambda a: linalg.schur(a * 1.0), scipy.linalg.schur, "NaN"),
    "linalg.hessenberg": _of_matrix(lambda a: linalg.hessenberg(a) + 0.0, scipy.linalg.hessenberg, "NaN"),
    "linalg.ldl": _of_matrix(lambda a: linalg.ldl(a * 1.0), scipy.linalg.ldl, "NaN"),
    "linalg.sqrtm": _of_matrix(lambda a: linalg.sqrtm(a) + 0.0, scipy.linalg.sqrtm, "NaN"),
    "sparse.spsolve": _of_csr(
        lambda data: _with_csr(data, lambda a: sparse.spsolve(a, ONES)),
        np.linalg.solve(DEFINITE, ONES),
        "singular",
    ),
    "sparse.factor": _of_csr(
        lambda data: _with_csr(data, _factored), np.linalg.solve(DEFINITE, ONES), "singular"
    ),
    "sparse.solve_factored": Case(
        lambda data: _with_csr(data, _factored),
        (DEFINITE.ravel(),),
        (2 * DEFINITE.ravel(),),
        np.linalg.solve(DEFINITE, ONES),
        None,
        np.linalg.solve(2 * DEFINITE, ONES),
    ),
    "sparse.cg_steps": Case(
        lambda data: _with_csr(data, _by_steps),
        (DEFINITE.ravel(),),
        (2 * DEFINITE.ravel(),),
        np.linalg.solve(DEFINITE, ONES),
        None,
        np.linalg.solve(2 * DEFINITE, ONES),
    ),
    "sparse.spsolve_triangular": _of_csr(
        lambda data: _with_csr(data, lambda a: sparse.spsolve_triangular(a, ONES, lower=True)),
        np.linalg.solve(_lower(DEFINITE), ONES),
        "singular",
        _lower(DEFINITE),
    ),
    # A whole matrix has the factors of its LU decomposition, and of Cholesky's.
    "sparse.ilu0": _of_csr(
        lambda data: _with_csr(data, sparse.ilu0), _L / _ROOTS + np.triu((_L * _ROOTS).T) - EYE, "0"
    ),
    "sparse.ic0": _of_csr(lambda data: _with_csr(data, sparse.ic0), _L + np.tril(_L, -1).T, "positive"),
    "sparse.make": Case(
        lambda data: _with_csr(data, sparse.eliminate_zeros),
        (EYE.ravel(),),
        (DEFINITE.ravel(),),
        EYE,
        None,
        DEFINITE,
    ),
    "CountSpec": Case(
        lambda x: arrays.bincount(x, minlength=N), (np.arange(N),), (np.arange(N) - 2,), ONES, "negative"
    ),
    "SearchSpec": Case(
        lambda edges, x, sorter: arrays.searchsorted(edges, x, sorter=sorter) + 0,
        (ONES, ONES, np.arange(N)),
        (ONES, ONES, np.arange(N) + 9),
        np.zeros(N),
        "out of range",
    ),
    "SegmentSpec": Case(
        lambda x, offsets: arrays.segmented_reduce(x, offsets) + 0,
        (ONES, SEGMENTS),
        (ONES, SEGMENTS[::-1].copy()),
        np.diff(SEGMENTS),
        "ascend",
    ),
    "SelectSpec": Case(
        arrays.nonzero, (np.array([0.0, 1.0, 1.0]),), (np.array([1.0, 0.0, 0.0]),), ([1, 2],), None, ([0],)
    ),
    "GroupSpec": Case(
        arrays.unique_values, (np.array([1.0, 2.0, 2.0]),), (np.array([3.0, 3.0, 3.0]),), [1, 2], None, [3]
    ),
    "RejectionSpec": Case(_drawn, (np.zeros(N),), (np.full(N, -1.0),), np.zeros(N), "lam must be"),
    "ChainSpec": Case(lambda x: (x * 2.0 + 1.0).to_host(), (ONES,), (0 * ONES,), 3 * ONES, None, ONES),
    "ProgramReturn": Case(lambda x: _asked(x, Told.number), (np.array([7]),), (np.array([8]),), 7, None, 8),
    "ProgramNext": Case(_streamed, (np.array([7, 8]),), (np.array([8, 9]),), [7, 8], None, [8, 9]),
    "ProgramResult": Case(
        lambda x: _asked(x, Told.text), (np.array([7]),), (np.array([8]),), "7" * 2000, None, "8" * 2000
    ),
}

CHECKED: dict[str, Case] = {
    "a load by an index": Case(
        lambda x, at: arrays.take(x, at) + 0.0,
        (ONES, np.arange(N)),
        (ONES, np.arange(N) + 2),
        ONES,
        "is outside axis 0",
    ),
    "a load along an axis": Case(
        lambda x, at: arrays.take_along_axis(x, at, axis=0) + 0.0,
        (ONES, np.arange(N)),
        (ONES, np.arange(N) - 9),
        ONES,
        "is outside axis 0",
    ),
}


def _specs() -> dict[str, type[OperationSpec]]:
    """Find all specifications with status words, by the name of their operation or class."""
    for module in pkgutil.walk_packages(ta.__path__, "trio_accel."):
        if ".cuda" not in module.name and "__main__" not in module.name and ".cli" not in module.name:
            importlib.import_module(module.name)
    found: dict[str, type[OperationSpec]] = {}
    waiting: list[type[OperationSpec]] = [OperationSpec]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        is_ours = cls.__module__.startswith("trio_accel.") and attrs.has(cls)
        if is_ours and cls.descriptor().has_status:
            found[cls.operation if cls.operation.count(".") == 1 else cls.__name__] = cls
    return found


def test_each_specification_with_a_status_has_a_case() -> None:
    specs, kernels = _specs(), set[str]()
    for library in LIBRARIES:
        kernels |= set(load_library(library)[1])
    without = {name for name, cls in specs.items() if cls.operation not in kernels} - CASES.keys()
    # The backend of the CPU lacks compiled kernels to ask for, and communicators of a vendor.
    assert without == {"CommunicatorIdSpec", "KernelInfoSpec"}
    assert set(CASES) == set(specs) - without


class Meeting:
    """Has the kernels of both devices run before either looks at its status words, once in each turn."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._came = itertools.count()

    def begin(self) -> None:
        """Begin a turn."""
        self._came = itertools.count()

    def come(self) -> None:
        """Wait for the other device, in the thread of a stream."""
        # A call that fails in a graph is asked again step by step, after both were here.
        if next(self._came) < 2:
            self._barrier.wait(10)


@pytest.fixture
async def two() -> AsyncIterator[tuple[ta.Device, ta.Device]]:
    async with (
        ta.open_system("two") as system,
        system.open_device("cpu", name="first", options=INLINE) as first,
        system.open_device("cpu", name="second", options=INLINE) as second,
    ):
        yield first, second


@pytest.mark.parametrize(("name", "case"), (CASES | CHECKED).items(), ids=[*CASES, *CHECKED])
async def test_an_error_belongs_to_the_device_that_computed(
    two: tuple[ta.Device, ta.Device], name: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, spec = Meeting(), _specs().get(name)
    if spec is not None:
        check = spec.check_status

        def check_status(self: OperationSpec) -> None:
            meeting.come()
            check(self)

        monkeypatch.setattr(spec, "check_status", check_status)
    ends: dict[bool, list[object]] = {True: [], False: []}
    given = [
        [await device.put(host) for host in hosts]
        for device, hosts in zip(two, (case.good, case.bad), strict=True)
    ]

    async def run(operands: list[Any], is_good: bool) -> None:
        try:
            made: object = await _to_host(await case.run(*operands))
        except ta.AccelError as error:
            made = error
        ends[is_good].append(made)

    with trio.fail_after(60):
        for _ in range(TURNS):
            meeting.begin()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, given[0], True)
                nursery.start_soon(run, given[1], False)
    for good, bad in zip(*ends.values(), strict=True):
        _check(good, case.expected)
        if case.fails is None:
            _check(bad, case.other)
        else:
            assert isinstance(bad, ta.AccelError)
            with pytest.raises(ta.AccelError, match=case.fails):
                raise bad


async def _to_host(made: Any) -> Any:
    if isinstance(made, ta.AccelRef):
        return await made.to_host()
    if isinstance(made, tuple):
        return [await _to_host(each) for each in made]
    return made


def _check(made: Any, expected: Any) -> None:
    assert not isinstance(made, BaseException), made
    if isinstance(expected, tuple):
        assert len(made) == len(expected)
        for one, other in zip(made, expected, strict=True):
            _check(one, other)
    elif isinstance(expected, str):
        assert made == expected
    else:
        np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-9)
