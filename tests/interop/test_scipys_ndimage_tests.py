"""SciPy's own tests of `scipy.ndimage`, with the functions of a device in place of SciPy's.

They come with the installed SciPy, and run in one process of their own (`scipy_ndimage_suite.py`). All that
fail want a warning, a text, or an error that the functions do not have; no number is another.
"""

from __future__ import annotations

import pytest
from own_suites import Refused, Tests, check_counts, check_refused, failures, run_suite

MODULES = ("filters", "interpolation", "measurements", "morphology", "datatypes", "splines")
DEADLINE = 900
# The first test waits for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE + 30)]
FILTERS = "test_filters::TestNdimageFilters::test_"

REFUSED = (
    Refused(
        rf"{FILTERS}correlate(1d)?_complex_(input|kernel|input_and_kernel)(_cval)?\[.*\]",
        336,
        "a real output of complex sums is refused, and not another than was asked for",
        "DID NOT WARN",
    ),
    Refused(
        rf"{FILTERS}(filter_(tuple_length_mismatch|invalid_axes|invalid_footprint_ndim)\[.*\]"
        # A repeated axis.
        r"|filter_axes\[axes(8|13|17)-.*\]|filter_axes_kwargs\[axes(2|7|11)-.*\]"
        r"|derivative_filter_axes\[(laplace|gaussian_laplace)-.*\])",
        152,
        "the error is another text",
        "Regex pattern did not match",
    ),
    Refused(
        r"test_interpolation::TestZoom::test_zoom_grid_mode_warnings\[.*\]",
        2,
        "a mode that does not suit grid_mode warns nobody",
        "DID NOT WARN",
    ),
    Refused(
        rf"{FILTERS}uniform02", 1, "an image without axes has no window", "size or footprint must say which"
    ),
    Refused(
        rf"{FILTERS}(minimum_filter07|maximum_filter07|rank08)|test_filters::test_gaussian_filter_float16",
        4,
        "the functions compute it: ranks with any mode, and float16",
        "DID NOT RAISE",
    ),
)


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Tests:
    names = [f"scipy.ndimage.tests.test_{name}" for name in MODULES]
    return run_suite("scipy_ndimage_suite.py", tmp_path_factory.mktemp("suite"), names, DEADLINE)


def test_all_pass_except_the_listed_tests(tests: Tests) -> None:
    assert failures(tests, REFUSED, ("passed", "skipped")) == {}


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.tests)
def test_listed_tests_are_refused_for_the_given_reason(tests: Tests, entry: Refused) -> None:
    check_refused(tests, entry)


def test_the_suite_used_the_device(tests: Tests) -> None:
    assert sum(test["outcome"] == "passed" and test["calls"] > 0 for test in tests.values()) > 3300


def test_the_page_has_the_counts(tests: Tests) -> None:
    check_counts(tests, REFUSED, "ndimage")
