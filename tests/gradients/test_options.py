"""Each option of each function with a gradient: its other values, against central differences."""

from __future__ import annotations

import inspect
import typing
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from gradient_cases import Case, numbers
from test_functions import CASES, NUMBERED

import trio_accel as ta

a: Any = ta.arrays
# They are no options: the array for the result, its dtype, and the numbers that the device draws.
NOT_VARIED = {"out", "dtype", "seed"}
# Their values without a gradient are refused.
REFUSED = {
    ("linalg.qr", "mode"),
    ("linalg.svd", "compute_uv"),
    ("linalg.svd", "full_matrices"),
    ("arrays.cumulative_prod", "include_initial"),
    ("arrays.segmented_reduce", "op"),
    ("tensor.reduce", "op"),
}


def case_of(name: str, number: int) -> Case:
    cases = CASES[name]
    return cases[number] if isinstance(cases, list) else cases


def public(name: str) -> Any:
    room, _, base = name.partition(".")
    return getattr(import_module(f"trio_accel.{room}"), base)


def options_of(name: str) -> dict[str, list[Any]]:
    """The parameters with a few values, from their annotations, and axes."""
    function, found = public(name), dict[str, list[Any]]()
    for parameter in inspect.signature(function).parameters.values():
        note = parameter.annotation
        if isinstance(note, str):
            try:
                note = eval(note, {**vars(typing), **inspect.unwrap(function).__globals__})
            except (NameError, TypeError):
                continue
        if parameter.name in NOT_VARIED:
            continue
        if note is bool:
            found[parameter.name] = [False, True]
        elif get_origin(note) is Literal:
            found[parameter.name] = [*get_args(note)]
        elif parameter.name in ("axis", "axes") and parameter.default in (None, -1, 0):
            found[parameter.name] = [None, 0, 1, -1, (0, 1)]
    return found


# The elements of these factors have free signs or phases.
FREE = ("linalg.hessenberg", "linalg.schur")
VARIED = [
    (name, number, option, value)
    for name, number in NUMBERED
    if not name.startswith("AccelRef.") and name not in FREE
    for option, values in options_of(name).items()
    for value in values
]


def call_in(call: Any, name: str) -> Any:
    """Find a function's call among another one's operands; None without one."""
    if not isinstance(call, ta.Call) or call.function.name == name:
        return call if isinstance(call, ta.Call) else None
    for argument in call.args:
        if (inner := call_in(argument, name)) is not None:
            return inner
    return None


def varied(case: Case, name: str, option: str, value: Any, operands: list[Any]) -> Any:
    """Return the function's call in a case, with another value of an option; None without one."""
    whole = case.f(*operands)
    call = call_in(whole, name)
    if isinstance(whole, ta.Call):
        whole.silence()
    if call is None:
        return None
    args, named = list(call.args), dict(call.named or {})
    # A declared operation has all of its arguments by position.
    place = list(inspect.signature(public(name)).parameters).index(option)
    if place < len(args):
        args[place] = value
    else:
        named[option] = value
    other = ta.Call[Any](call.function, tuple(args), named or None)
    # It may be refused.
    other.silence()
    return other


def real_part(call: Any) -> Any:
    """Return a call's real part, or that of its first result."""
    try:
        dtype = call.dtype
    except ta.NotSupportedError:
        call = call[0]
        dtype = call.dtype
    return a.real(call) if dtype.kind == "complex" else call


@pytest.mark.parametrize(("name", "number", "option", "value"), VARIED)
async def test_gradients_with_each_option(
    device: ta.Device, name: str, number: int, option: str, value: Any
) -> None:
    case = case_of(name, number)
    values = case.values()

    async def result(hosts: list[Any]) -> Any:
        call = varied(case, name, option, value, [await device.put(host) for host in hosts])
        return None if call is None else await (await (real_part(call) * 1.0)).to_host()

    try:
        there = await result(values)
    except (ta.AccelError, TypeError, ValueError) as error:
        # Any other error is a defect of this test.
        assert name in str(error)  # noqa: PT017  # it is raised for some values only
        pytest.skip(f"the function refuses it: {error}")
    if there is None or there.dtype.kind != "f" or not np.isfinite(there).all():
        pytest.skip("a composition, a complex result, or none at these places")
    weights = numbers(there.shape, 99)

    def f(parameters: Any) -> Any:
        return a.sum(real_part(varied(case, name, option, value, parameters)) * weights)

    refs = [await device.put(host) for host in values]
    try:
        found = await ta.grad(f)(refs)
    except ta.NotSupportedError:
        assert (name, option) in REFUSED
        return
    for place, slope in enumerate(found):
        direction = numbers(values[place].shape, 50, -1.0, 1.0)
        sides = []
        for sign in (1, -1):
            moved = [host.copy() for host in values]
            moved[place] += sign * 1e-5 * direction
            sides.append(float((await result(moved) * weights).sum()))
        want = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=2e-6, atol=2e-8)
