"""SciPy's own tests of scipy.sparse.linalg, with solvers of a device in place of SciPy's.

Nobody here wrote them: they come with the installed SciPy. They run in one process of their own, in a worker
thread of a Trio run (`scipy_sparse_suite.py`). A test of a missing function is skipped by name.
"""

from __future__ import annotations

from collections import Counter

import pytest
from chosen import BACKEND, IS_STAND_IN
from own_suites import Refused, Tests, check_refused, failures, run_suite

PACKAGE = "scipy.sparse.linalg"
ITERATIVE, MINRES, DIRECT, ARPACK = (
    f"{PACKAGE}.{module}"
    for module in (
        "_isolve.tests.test_iterative",
        "_isolve.tests.test_minres",
        "_dsolve.tests.test_linsolve",
        "_eigen.arpack.tests.test_arpack",
    )
)
DEADLINE = 400
pytestmark = [
    pytest.mark.timeout(DEADLINE + 30),
    pytest.mark.skipif(
        BACKEND not in ("cpu", "cuda") or IS_STAND_IN, reason="a backend without these solvers"
    ),
]

REFUSED = (
    Refused(
        r"test_iterative::test_precond_inverse\[poisson[12]d\]",
        2,
        "a cycle of gmres makes all its steps, because the host does not look at each",
        r"assert 22 <= 3",
    ),
    Refused(
        r"test_iterative::test_atol\[(bicgstab|cg|gmres)\]",
        3,
        "tolerances are finite",
        r"ValueError: sparse\.\w+: atol must be finite and not negative, got np\.float64\(inf\)",
    ),
    Refused(
        r"test_iterative::test_invalid_atol\[(bicgstab|cg|gmres)-(legacy|None)\]",
        6,
        "what is not a number is a TypeError, and SciPy's is a ValueError",
        r"TypeError: sparse\.\w+: atol must be a real number",
    ),
    Refused(
        r"test_arpack::test_symmetric_no_convergence",
        1,
        "an error of eigsh has no eigenvalues with it, even if some were found",
        r"ConvergenceError: sparse\.eigsh: a residual is",
    ),
    Refused(
        r"test_iterative::TestGMRES::test_defective_precond_breakdown",
        1,
        "one of the numbers must be exactly zero, and is off by a rounding",
        r"(?s)Not equal to tolerance rtol=1e-07, atol=0.*Mismatched elements: 1 / 3",
    ),
)

# They ask no solver of ours: they look at arguments, at printed text, and at SciPy's own parts.
WITHOUT_A_SOLUTION = (
    "bad_kwargs",
    "bad_shapes",
    "gh24358",
    "linearoperator_deallocation",
    "arpackng_1315",
    "1459_arpack_crash",
    "positional_error",
    "test_show",
    "gssv_badinput",
    "is_sptriangular_and_spbandwidth",
)


@pytest.mark.slow
def test_a_sample(tmp_path_factory: pytest.TempPathFactory) -> None:
    names = f"{DIRECT}::TestLinsolve", MINRES, f"{ITERATIVE}::test_x0_working"
    tests = run_suite("scipy_sparse_suite.py", tmp_path_factory.mktemp("sample"), names, DEADLINE)
    assert failures(tests, REFUSED, ("passed", "skipped")) == {}
    assert sum(test["outcome"] == "passed" and test["calls"] > 0 for test in tests.values()) >= 18


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Tests:
    names = ITERATIVE, MINRES, DIRECT, ARPACK
    return run_suite("scipy_sparse_suite.py", tmp_path_factory.mktemp("suite"), names, DEADLINE)


@pytest.mark.slow
def test_all_pass_except_the_listed_tests(tests: Tests) -> None:
    assert failures(tests, REFUSED, ("passed", "skipped")) == {}
    passed = {name: test for name, test in tests.items() if test["outcome"] == "passed"}
    idle = [name for name, test in passed.items() if not test["calls"]]
    assert [name for name in idle if not any(part in name for part in WITHOUT_A_SOLUTION)] == []
    counts = Counter(name.partition("::")[0] for name, test in passed.items() if test["calls"])
    # A suite without collected tests is not a success.
    least = {"test_iterative": 220, "test_linsolve": 280, "test_arpack": 40, "test_minres": 4}
    assert {module: count for module, count in least.items() if counts[module] < count} == {}


@pytest.mark.slow
@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.tests)
def test_listed_tests_fail_for_the_given_reason(tests: Tests, entry: Refused) -> None:
    check_refused(tests, entry)
