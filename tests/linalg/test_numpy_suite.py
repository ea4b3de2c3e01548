"""NumPy's own tests of `numpy.linalg`, run against the solvers of a device.

The adapter `OnDevice` takes the place of the module `numpy.linalg`: it puts the arguments on the device, asks
from the test's thread, and reads the results. Refused tests are in `REFUSED`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.from_thread
import trio.to_thread
from chosen import BACKEND, IS_STAND_IN

import trio_accel as ta
from trio_accel import linalg

if IS_STAND_IN:
    pytest.skip("the stand-in has no cuSOLVER", allow_module_level=True)

suite: Any = pytest.importorskip("numpy.linalg.tests.test_linalg")

WITH_EIG = ("TestEigvals", "TestEig")
CLASSES = [
    "TestSolve",
    "TestInv",
    "TestDet",
    "TestLstsq",
    *(WITH_EIG if BACKEND in ("cpu", "cuda") else ()),
    "TestSVD",
    "TestSVDHermitian",
    "TestEigvalshCases",
    "TestEigvalsh",
    "TestEighCases",
    "TestEigh",
    "TestQR",
    "TestCholesky",
]
INTEGERS = "arrays of integers: devices do not convert silently"
SUBCLASSES = "subclasses of ndarray: results are arrays of a device"
REFUSED = {
    "TestSolve.test_1_d": f"{INTEGERS}; {SUBCLASSES}",
    "TestSolve.test_0_size": f"{INTEGERS}; {SUBCLASSES}",
    "TestSolve.test_0_size_k": f"{INTEGERS}; {SUBCLASSES}",
    "TestInv.test_0_size": f"{INTEGERS}; {SUBCLASSES}",
    "TestEig.test_0_size": f"{INTEGERS}; {SUBCLASSES}",
    "TestEigvals.test_0_size": f"{INTEGERS}; {SUBCLASSES}",
    "TestEigvals.test_types": "eigenvalues of type float: no dtype follows from values, so all are complex",
    "TestEig.test_types": "calls NumPy itself",
    "TestLstsq.test_empty_a_b": INTEGERS,
    "TestLstsq.test_rcond": INTEGERS,
    "TestDet.test_zero": "lists: operands are arrays",
    "TestEigvalsh.test_0_size": f"{INTEGERS}; {SUBCLASSES}",
    "TestEigh.test_0_size": f"{INTEGERS}; {SUBCLASSES}",
    "TestCholesky.test_0_size": f"{INTEGERS}; {SUBCLASSES}",
    "TestSVDHermitian": "svd(hermitian=True): there is no such option; use eigh",
    "TestQR.test_mode_raw": "qr(mode='raw'): there is no such mode",
    "TestQR.test_qr_empty": "qr(mode='raw'): there is no such mode",
}


# Which classes get no arrays of single precision.
ONLY_DOUBLE = {"TestLstsq": "to six places: NumPy computes with twice as many"}
REFUSED_CASES = {
    "nonarray": "lists: operands are arrays",
    "hnonarray": "lists: operands are arrays",
}


class OnDevice:
    """`numpy.linalg` of one device, for a thread."""

    LinAlgError = np.linalg.LinAlgError

    def __init__(self, device: ta.Device, *, has_eig: bool) -> None:
        self._device = device
        if not has_eig:  # the references of the tests
            self.eig, self.eigvals = np.linalg.eig, np.linalg.eigvals

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(linalg, name)

        async def ask(*arguments: Any, **options: Any) -> Any:
            refs = [await self._put(value) for value in arguments]
            reply = await function(*refs, **options)
            if isinstance(reply, tuple):
                parts = [part if isinstance(part, int) else await part.to_host() for part in reply]
                return type(reply)(*parts)
            return await reply.to_host()

        def run(*arguments: Any, hermitian: bool = False, **options: Any) -> Any:
            assert not hermitian  # NumPy's default
            return trio.from_thread.run(lambda: ask(*arguments, **options))

        return run

    async def _put(self, value: Any) -> Any:
        return await self._device.put(value) if isinstance(value, np.ndarray) else value


def cases() -> Iterator[Any]:
    """NumPy's tests of our functions, except for the refused ones."""
    for name in CLASSES:
        for test in sorted(dir(getattr(suite, name))):
            full = f"{name}.{test}"
            if test.startswith("test_") and name not in REFUSED and full not in REFUSED:
                yield from _parameters(full, getattr(getattr(suite, name), test))


def _parameters(full: str, function: Any) -> Iterator[Any]:
    """The parameter sets that pytest would make of a test."""
    sets: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = (
                [name.strip() for name in mark.args[0].split(",")]
                if isinstance(mark.args[0], str)
                else mark.args[0]
            )
            rows = [[row] if len(names) == 1 else row for row in mark.args[1]]
            sets = [{**one, **dict(zip(names, row, strict=True))} for one in sets for row in rows]
    for number, one in enumerate(sets):
        yield pytest.param(full, one, id=f"{full}-{number}")


@pytest.mark.parametrize(("name", "parameters"), list(cases()))
async def test_of_numpy(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch, name: str, parameters: Any
) -> None:
    cls, _, test = name.partition(".")
    adapter = OnDevice(device, has_eig=cls in WITH_EIG)
    monkeypatch.setattr(suite, "linalg", adapter)
    monkeypatch.setattr(suite, "np", _NumPy(adapter))
    # Of 18, the last place of single precision is the sixth decimal. cuSOLVER rounds otherwise, and so do
    # OpenBLAS's kernels for processors without AVX-512.
    compare = partial(suite.assert_almost_equal, single_decimal=5)
    monkeypatch.setattr(suite, "assert_almost_equal", compare)
    # Results of arrays of a subclass are plain arrays, as explained in REFUSED.
    monkeypatch.setattr(suite, "consistent_subclass", lambda out, _: type(out) is np.ndarray)
    tests = getattr(suite, cls)()
    # To put a strided array on a device makes it contiguous: test_solvers.py has views of device arrays.
    tests.TEST_CASES = [
        case
        for case in suite.CASES
        if case.name not in REFUSED_CASES and "strided" not in case.tags
        if cls not in ONLY_DOUBLE or "single" not in case.name
    ]
    await trio.to_thread.run_sync(lambda: getattr(tests, test)(**parameters))


class _NumPy:
    """NumPy, with another `linalg`."""

    def __init__(self, adapter: OnDevice) -> None:
        self.linalg = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def test_refused_tests_exist() -> None:
    for name in REFUSED:
        cls, _, test = name.partition(".")
        assert hasattr(suite, cls), name
        assert not test or hasattr(getattr(suite, cls), test), name
    assert {case.name for case in suite.CASES} >= REFUSED_CASES.keys()
