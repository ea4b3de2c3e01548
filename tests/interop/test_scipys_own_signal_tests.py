"""SciPy's own tests of those functions that `ta.signal` has, run with a device in SciPy's place.

They come with the installed SciPy, and run in one process of their own (`scipy_signal_suite.py`). The shim
refuses a test that asks for a missing feature of the functions, such as a window of `resample`.
"""

from __future__ import annotations

import re

import pytest
from own_suites import Refused, Tests, check_counts, check_refused, failures, refused, run_suite

DEADLINE = 200
# The first test waits for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE + 30)]
FILTERS = "TestLinearFilter(Float|Complex)(32|64|128)"
MODULES = {
    "scipy.signal.tests.test_signaltools": (
        "TestLinearFilterFloat32",
        "TestLinearFilterFloat64",
        "TestLinearFilterComplex64",
        "TestLinearFilterComplex128",
        "TestSOSFilt",
        "TestResample",
    ),
    "scipy.signal.tests.test_spectral": ("TestWelch", "TestSTFT"),
    "scipy.interpolate.tests.test_polyint": ("TestCubicSpline",),
}
# Tests that pass by functions of a device, at the least.
PASSED = {
    FILTERS: 144,
    "TestSOSFilt": 32,
    "TestResample": 75,
    "TestWelch": 20,
    "TestSTFT": 2,
    "TestCubicSpline": 1,
}

REFUSED = (
    Refused(
        rf"test_signaltools::({FILTERS}::test_invalid_params|TestSOSFilt::test_bad_zi_shape\[\w+\])",
        8,
        "the error is another text",
        "Regex pattern did not match",
    ),
    Refused(
        r"test_signaltools::TestResample::test_"
        r"(basic|input_domain|rfft\[\d+-\d+-hamming\]|resample_win_func\[.*\]|_resample_param_t\[.*\])",
        18,
        "resample has no window, no times, and no spectrum as its argument",
        "resample has no (domain|window|t)",
    ),
    Refused(
        r"test_spectral::TestWelch::test_(\w+_twosided\w*|average|ratio_scale_to)",
        5,
        "welch has one-sided spectra of real signals, and their mean",
        "welch has no (return_onesided|average)",
    ),
    Refused(
        r"test_spectral::TestWelch::test_(detrend_\w+|no_detrending)",
        5,
        "welch subtracts the mean of a segment, or nothing",
        "detrend must be 'constant' or False",
    ),
    Refused(
        r"test_spectral::TestWelch::test_(empty_input\w*|short_data)",
        3,
        "a segment is not made shorter than was asked for, nor a spectrum of nothing",
        "nperseg from 1 to the [08] elements of the signal",
    ),
    Refused(
        r"test_spectral::TestSTFT::test_(average_all_segments|roundtrip_\w+(\[\w+\])?)",
        12,
        "stft has zeros at the ends, and no detrending",
        "stft has no (boundary|padded|detrend)",
    ),
    Refused(
        r"test_spectral::TestSTFT::test_input_validation",
        1,
        "the error is another text",
        "Regex pattern did not match",
    ),
    Refused(
        r"test_polyint::TestCubicSpline::test_"
        r"(general|periodic\w*|second_derivative\w*|three_points|dtypes|incorrect_inputs)",
        8,
        "both ends of a spline have one condition, which is not periodic",
        "cubic_spline has no bc_type",
    ),
)


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Tests:
    names = [f"{module}::{each}" for module, several in MODULES.items() for each in several]
    return run_suite("scipy_signal_suite.py", tmp_path_factory.mktemp("suite"), names, DEADLINE)


def test_all_pass_except_the_listed_tests(tests: Tests) -> None:
    assert failures(tests, REFUSED) == {}


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.tests)
def test_listed_tests_are_refused_for_the_given_reason(tests: Tests, entry: Refused) -> None:
    check_refused(tests, entry)


@pytest.mark.parametrize("name", PASSED)
def test_the_suite_used_the_device(tests: Tests, name: str) -> None:
    used = [
        each
        for each, test in tests.items()
        if re.search(name, each) and test["outcome"] == "passed" and test["calls"]
    ]
    assert len([each for each in used if refused(each, REFUSED) is None]) >= PASSED[name]


def test_the_page_has_the_counts(tests: Tests) -> None:
    check_counts(tests, REFUSED, "signal")
