"""Methods write to the arrays that they declare, and to no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from undeclared_programs import Aliases, Counters, adds

import trio_accel as ta
from trio_accel.programs import Program

AT_ONCE = ta.Backoff(base=0.0)
MANY = ta.Intensity(100, 60.0)
PLACES = ["itself", "view", "in a list", "in a tuple"]


async def opening(device: ta.Device) -> tuple[Program[Counters], ta.AccelRef]:
    state = await device.zeros((2, 3))
    program = await ta.open_program(
        device, Counters, state, np.zeros(2), np.zeros(2), intensity=MANY, backoff=AT_ONCE
    )
    return program, state


async def told(ask: Any) -> str:
    """The error of a method, with its notes."""
    with pytest.raises(ta.ActorFailedError) as caught:
        await ask
    cause = caught.value.__cause__
    assert cause is not None
    return "\n".join([str(cause), *getattr(cause, "__notes__", ())])


@pytest.mark.parametrize("where", PLACES)
async def test_state_is_read_only_for_methods_that_do_not_declare_it(device: ta.Device, where: str) -> None:
    program, state = await opening(device)
    text = await told(program.ask(Counters.add_undeclared, where))
    assert "read-only" in text
    assert "undeclared_programs.Counters.add_undeclared" in text
    assert '@programs.method(updates=["self.state", "self.other", "self.limits", "where"])' in text
    # Nothing was written, and a declared writer still writes; so it was no update that counts twice.
    np.testing.assert_array_equal(await state.to_host(), np.zeros((2, 3)))
    for _ in range(3):
        await program.ask(Counters.add, where)
    assert (await state.to_host()).sum() == 3 * (6 if where == "itself" else 3)
    assert (await program.ask(Counters.looks))[1] == (await state.to_host()).sum()
    text = await told(program.ask(Counters.add_while_another_is_declared, where))
    assert '(updates=["self.state", "self.other", "self.limits", "where"])' in text


@pytest.mark.parametrize("keeps", [Counters.looks, Counters.keeps], ids=lambda one: one.__name__)
async def test_views_kept_by_methods_are_like_the_constructors_views(device: ta.Device, keeps: Any) -> None:
    program, state = await opening(device)
    await program.ask(keeps)
    await program.ask(Counters.add, "kept")
    await told(program.ask(Counters.add_undeclared, "kept"))
    np.testing.assert_array_equal(await state.to_host(), [[1.0] * 3, [0.0] * 3])


async def test_each_argument_of_the_constructor_is_declared_for_itself(device: ta.Device) -> None:
    both = await device.zeros((2, 3))
    program = await ta.open_program(device, Aliases, both[0], both[1], intensity=MANY, backoff=AT_ONCE)
    await program.ask(Aliases.both)
    text = await told(program.ask(Aliases.only_first_declared))
    assert '(updates=["self.first", "self.second"])' in text
    fresh = await device.put(np.array([[1.0] * 3, [2.0] * 3]))
    await program.reset(fresh[0], fresh[1])
    await program.ask(Aliases.both)
    np.testing.assert_array_equal(await fresh.to_host(), [[2.0] * 3, [4.0] * 3])


async def test_an_error_names_the_missing_declaration_of_an_argument(device: ta.Device) -> None:
    program, _ = await opening(device)
    x = await device.zeros(3)
    assert '(updates=["self.state", "self.other", "self.limits", "x"])' in await told(
        program.ask(Counters.takes, x)
    )
    # No method declares these, so they are frozen.
    assert "read-only" in await told(program.ask(Counters.to_frozen))
    with pytest.raises(ValueError, match="read-only") as caught:
        await ta.run(adds, x)
    assert '(updates=["x"])' in "\n".join(caught.value.__notes__)
    np.testing.assert_array_equal(await x.to_host(), np.zeros(3))
