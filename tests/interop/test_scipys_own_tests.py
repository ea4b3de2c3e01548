"""SciPy's own tests of scipy.fft, run with a device as the only backend.

Nobody here wrote them: they come with the installed SciPy. They run in one process of their own, in a worker
thread of a Trio run (`scipy_fft_suite.py`), with NumPy arrays.
"""

from __future__ import annotations

import re

import pytest
import scipy
from own_suites import Refused, Tests, check_counts, check_refused, failures, refused, run_suite

MODULES = ("test_basic", "test_multithreading", "test_real_transforms")
DEADLINE = 400
# The first test waits for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE + 30)]


REFUSED = (
    Refused(
        r"test_basic::TestFFT::test_dtypes_nonstandard\[longdouble\]",
        1,
        "devices have no element type wider than 64 bits",
        r"TypeError: x: float(128|96) is not an element type of a device",
    ),
    Refused(
        r"test_basic::test_fft_with_order\[i?fft[2n]?-(F|non-contiguous)-c?longdouble\]",
        24,
        "devices have no element type wider than 64 bits",
        r"TypeError: x: (float|complex)\d+ is not an element type of a device",
    ),
)

# They pass without transforming anything: they set and read options of SciPy.
WITHOUT_A_TRANSFORM = r"test_multithreading::test_set_(get_workers|workers_invalid)"
if scipy.__version__.startswith("1.15."):
    # There it has something to do for other array libraries only.
    WITHOUT_A_TRANSFORM += r"|test_basic::test_non_standard_params\[\w+\]"


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Tests:
    names = [f"scipy.fft.tests.{module}" for module in MODULES]
    return run_suite("scipy_fft_suite.py", tmp_path_factory.mktemp("suite"), names, DEADLINE)


def test_all_pass_except_the_listed_tests(tests: Tests) -> None:
    assert failures(tests, REFUSED) == {}


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.tests)
def test_listed_tests_are_refused_for_the_given_reason(tests: Tests, entry: Refused) -> None:
    check_refused(tests, entry)


def test_every_passing_test_used_the_device(tests: Tests) -> None:
    passed = {name: test for name, test in tests.items() if test["outcome"] == "passed"}
    assert {name for name, test in passed.items() if not test["calls"]} == {
        name for name in passed if re.fullmatch(WITHOUT_A_TRANSFORM, name)
    }
    assert sum(test["calls"] > 0 for test in passed.values()) >= 3200


@pytest.mark.parametrize("module", MODULES)
def test_the_suite_was_there(tests: Tests, module: str) -> None:
    # A suite without collected tests is not a success.
    passed = [
        name for name, test in tests.items() if name.startswith(f"{module}::") and not refused(name, REFUSED)
    ]
    assert len(passed) >= {"test_basic": 140, "test_multithreading": 50, "test_real_transforms": 3000}[module]
    if module == "test_basic":
        assert tests["test_basic::TestFFT::test_identity_extensive"]["calls"] == 4 * 511
        # 16 threads at once, and the result that they are compared with.
        assert tests["test_basic::TestFFTThreadSafe::test_fft"]["calls"] == 17


def test_each_precision_is_among_them(tests: Tests) -> None:
    for dtype in ("float32", "float64", "complex64", "complex128"):
        ran = [test for name, test in tests.items() if re.search(rf"\b{dtype}\b", name)]
        assert len(ran) >= 13
        assert all(test["outcome"] == "passed" and test["calls"] for test in ran)


def test_the_page_has_the_counts(tests: Tests) -> None:
    check_counts(tests, REFUSED, "fft")
