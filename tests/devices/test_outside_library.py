"""A library from outside, found by its import path: optional and many arrays, replies from status words."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE, NAME
from isolations import isolated
from outside_library import Broken, Careless, Negate, Stack, either

import trio_accel as ta


async def vectors(device: ta.Device, count: int, length: int = 6) -> list[ta.AccelRef]:
    return [await device.put(np.arange(1.0, length + 1) + 10 * number) for number in range(count)]


def vector(number: int, length: int = 6) -> Any:
    return np.arange(1.0, length + 1) + 10 * number


async def test_optional_and_many_arrays(device: ta.Device) -> None:
    bias = await device.put(np.full(6, -1.0))
    many = await vectors(device, 7)
    # In turns, so that the cached facts of one are not taken for the other.
    for count, given in itertools.product((1, 7, 2, 2), (None, bias, bias, None, None, bias)):
        array, rows = await device.ask(Stack(tuple(many[:count]), given, factor=2.0))
        expected = [2.0 * vector(number) for number in range(count)]
        expected += [np.full(6, -1.0)] * (given is not None)
        np.testing.assert_array_equal(await array.to_host(), expected)
        assert rows == len(expected)


async def test_a_declared_operation_lacks_an_operand(device: ta.Device) -> None:
    """Its kernel gets None."""
    a, other = await vectors(device, 2)
    for given, expected in ((None, 0), (other, 1), (vector(1), 1), (None, 0)):
        result = await either(a, given)
        np.testing.assert_array_equal(await result.to_host(), vector(expected))
    with pytest.raises(ValueError, match="other must have shape"):
        await either(a, np.zeros(5))


async def test_other_operands_each_time(device: ta.Device) -> None:
    """Host arrays, views, one array twice, other numbers of them, other scalars."""
    refs = await vectors(device, 3)
    for step, (terms, bias) in enumerate(
        [
            ((refs[0], refs[1]), None),
            ((refs[1], refs[0]), None),
            ((refs[0], refs[0]), refs[0]),
            ((refs[2][::-1], vector(5)), refs[1]),
            ((vector(1), refs[0], vector(2)), vector(3)),
            ((refs[0],), refs[1]),
            ((), refs[1]),
        ]
    ):
        factor = 1.0 + step
        array, rows = await device.ask(Stack(terms, bias, factor=factor))
        hosts = [term if isinstance(term, np.ndarray) else await term.to_host() for term in terms]
        expected = [factor * host for host in hosts]
        if bias is not None:
            expected.append(bias if isinstance(bias, np.ndarray) else await bias.to_host())
        np.testing.assert_array_equal(await array.to_host(), expected)
        assert rows == len(expected)


async def test_submitted_replies_are_read_from_the_status(device: ta.Device) -> None:
    terms = tuple(await vectors(device, 2))
    pending = device.submit(Stack(terms))
    with pytest.raises(RuntimeError, match="wait"):
        _ = pending.value
    array, rows = await pending.wait()
    assert (rows, pending.is_done, pending.error) == (2, True, None)
    np.testing.assert_array_equal(await array.to_host(), [vector(0), vector(1)])
    many = [device.submit(Stack(terms[:1], terms[1] if number % 2 else None)) for number in range(20)]
    assert [(await each.wait()).rows for each in many] == [1, 2] * 10


async def test_a_bad_status_is_the_operations_error(system: ta.System, device: ta.Device) -> None:
    terms = tuple(await vectors(device, 2))
    for _ in range(3):
        with pytest.raises(ta.LibraryError, match="row 3 is bad") as caught:
            await device.ask(Stack(terms, bad_row=3))
        assert (caught.value.code, caught.value.device, caught.value.operation) == (
            "bad_row",
            NAME,
            "outside_library.Stack",
        )
        pending = device.submit(Stack(terms, bad_row=4))
        with pytest.raises(ta.LibraryError, match="row 4 is bad"):
            await pending.wait()
        assert (await device.ask(Stack(terms))).rows == 2
    assert device.generation == 1
    assert {node.restarts for node in system.tree().walk()} == {0}
    # The error is held by nothing that lives as long as the device, and with it the frames it was raised in.
    del caught, pending
    gc.collect()
    assert (await device.statistics()).memory.blocks == 2


async def test_a_reply_that_cannot_be_made(system: ta.System, device: ta.Device) -> None:
    """It is raised where the reply is waited for, and nobody else minds."""
    terms = tuple(await vectors(device, 2))
    with pytest.raises(ValueError, match="no reply"):
        await device.ask(Stack(terms, refuse="no reply"))
    pending = device.submit(Stack(terms, refuse="nor here"))
    with pytest.raises(ValueError, match="nor here"):
        await pending.wait()
    assert (await device.ask(Stack(terms))).rows == 2
    assert {node.restarts for node in system.tree().walk()} == {0}
    del pending
    gc.collect()
    assert (await device.statistics()).memory.blocks == 2


async def test_it_waits_for_writers_of_its_arrays(device: ta.Device) -> None:
    """Also of fields with many arrays and with an optional one; and later writers wait for it."""
    first, second = await vectors(device, 2)
    await device.ask(Stack((first,), second))
    await ta.linalg.scal(1.0, first)
    for step, role in enumerate(("terms", "bias", "terms")):
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.05)
        ta.testing.inject_fault(device, Stack, delay=0.05)
        device.submit(ta.linalg.Scal(-1.0, second))
        pending = device.submit(Stack((first, second)) if role == "terms" else Stack((first,), second))
        device.submit(ta.linalg.Scal(-2.0, second))
        array, _ = await pending.wait()
        np.testing.assert_array_equal(await array.to_host(), [vector(0), -vector(1) * 2.0**step])
        np.testing.assert_array_equal(await second.to_host(), vector(1) * 2.0 ** (step + 1))


async def test_others_wait_for_its_writes(device: ta.Device) -> None:
    for role in ("arrays", "more"):
        refs = await vectors(device, 3)
        await ta.linalg.scal(1.0, refs[0])
        changed = Negate(tuple(refs)) if role == "arrays" else Negate((refs[0],), refs[2])
        ta.testing.inject_fault(device, Negate, delay=0.05)
        device.submit(changed)
        pending = device.submit(ta.linalg.Scal(3.0, refs[2]))
        assert not pending.is_done
        factors = [-1.0, -1.0 if role == "arrays" else 1.0, -3.0]
        for number, (ref, factor) in enumerate(zip(refs, factors, strict=True)):
            np.testing.assert_array_equal(await ref.to_host(), factor * vector(number))


async def test_a_launch_that_fails_changes_nothing(system: ta.System, device: ta.Device) -> None:
    refs = await vectors(device, 3)
    refusal = ta.LibraryError("injected", library="outside", code="injected")
    ta.testing.inject_fault(device, Negate, fail=refusal)
    ta.testing.inject_fault(device, Stack, fail=refusal)
    for message in (Negate(tuple(refs[:2]), refs[2]), Stack(tuple(refs[:2]), refs[2])):
        with pytest.raises(ta.LibraryError, match="injected"):
            await device.ask(message)
        await device.ask(message)
    for number, ref in enumerate(refs):
        np.testing.assert_array_equal(await ref.to_host(), -vector(number))
    assert device.generation == 1
    assert {node.restarts for node in system.tree().walk()} == {0}


@isolated
async def test_a_loss_takes_written_arrays_and_leaves_the_others(device: ta.Device) -> None:
    terms, changed = await vectors(device, 2), await vectors(device, 3)
    untouched = await device.put(np.ones(3))
    await device.ask(Stack(tuple(terms), terms[0]))
    ta.testing.inject_fault(device, Negate, poison=True)
    with pytest.raises(ta.ContextLostError):
        await device.ask(Negate((changed[0], changed[1]), changed[2]))
    for ref in changed:
        with pytest.raises(ta.StaleRefError):
            await ref.to_host()
    np.testing.assert_array_equal(await untouched.to_host(), np.ones(3))
    assert device.generation == 2
    ta.testing.inject_fault(device, Stack, poison=True)
    with pytest.raises(ta.ContextLostError):
        await device.ask(Stack(tuple(terms), terms[1]))
    for number, ref in enumerate(terms):
        np.testing.assert_array_equal(await ref.to_host(), vector(number))
    array, rows = await device.ask(Stack(tuple(terms), terms[1]))
    np.testing.assert_array_equal(await array.to_host(), [vector(0), vector(1), vector(1)])
    assert (rows, device.generation) == (3, 3)


async def test_kernels_that_fail(system: ta.System, device: ta.Device) -> None:
    (x,) = await vectors(device, 1)
    for _ in range(2):
        with pytest.raises(ta.LibraryError, match="refused"):
            await device.ask(Broken("refuses"))
    assert {node.restarts for node in system.tree().walk()} == {0}
    with pytest.raises(ta.ActorFailedError) as caught:
        await device.ask(Broken("raises"))
    assert "broken on purpose" in str(caught.value.__cause__ or caught.value)
    with pytest.raises(ta.ActorFailedError):
        await device.ask(Broken("returns something"))
    await device.ask(Broken("does nothing"))
    assert (await device.ask(Stack((x,)))).rows == 1
    assert device.generation == 1


async def test_arrays_must_be_specifications(system: ta.System, device: ta.Device) -> None:
    x, y = await vectors(device, 2)
    wrong: list[tuple[Any, Any]] = [
        ([x.spec], None),
        ((x,), None),
        ((x.spec, y), None),
        ((x.spec, None), None),
        (None, None),
        (x.spec, None),
        ((x.spec,), y),
        ((x.spec,), (y.spec,)),
        ((x.spec,), np.ones(6)),
    ]
    for arrays, more in wrong:
        with pytest.raises(TypeError, match=r"Careless: NegateSpec\.(arrays|more)"):
            await device.ask(Careless(arrays, more))
        with pytest.raises(TypeError, match=r"Careless: NegateSpec\.(arrays|more)"):
            device.submit(Careless(arrays, more))
    np.testing.assert_array_equal(await x.to_host(), vector(0))
    assert {node.restarts for node in system.tree().walk()} == {0}


async def test_operands_that_do_not_fit(system: ta.System, device: ta.Device) -> None:
    x, y = await vectors(device, 2)
    released = await device.put(np.ones(6))
    released.release()
    wrong: list[tuple[Stack, type[Exception], str]] = [
        (Stack(()), ValueError, "at least one"),
        (Stack((x, await device.zeros(5, "float64"))), ValueError, "one shape"),
        (Stack((x,), await device.zeros((2, 6), "float64")), ValueError, "one shape"),
        (Stack((x, y), await device.zeros(6, "float32")), ValueError, "one shape"),
        (Stack((x, released)), ta.StaleRefError, r"terms\[1\]"),
        (Stack((x,), released), ta.StaleRefError, "bias"),
        (Stack((x, "y")), TypeError, r"terms\[1\]"),  # type: ignore[arg-type]  # wrong on purpose
    ]
    for message, error, text in wrong:
        with pytest.raises(error, match=text):
            await device.ask(message)
    async with system.open_device(BACKEND, options=INLINE) as other:
        far = await other.put(np.ones(6))
        for message, argument in ((Stack((x, far)), r"terms\[1\]"), (Stack((x,), far), "bias")):
            with pytest.raises(ValueError, match=rf"{argument} is on .*copy it there"):
                await device.ask(message)
    assert (await device.ask(Stack((x, y)))).rows == 2
