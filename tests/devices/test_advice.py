"""Errors of a newcomer: each names the argument and a remedy."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import attrs
import numpy as np
import pytest
from chosen import BACKEND, INLINE, NAME
from isolations import inline, isolated

import trio_accel as ta
from trio_accel import actors, linalg

NOT_AWAITED = "it was not awaited: write `await` before the call that makes it"
NOT_OPEN = (
    "the device is not open yet: device = await system.open_device(...), "
    "or async with system.open_device(...) as device"
)
PENDING = (
    "its reply is pending.value, which can be given to further operations at once; "
    "await pending.wait() waits until the operation is done"
)


@pytest.fixture
async def a(device: ta.Device) -> ta.AccelRef:
    return await device.put(np.eye(2))


@pytest.fixture
async def other(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=INLINE) as other:
        yield other


async def refused(call: Any, *arguments: Any, **more: Any) -> str:
    """The text of the TypeError at the end of a call."""
    with pytest.raises(TypeError) as caught:
        await call(*arguments, **more)
    return str(caught.value)


class Unawaited:
    """Coroutines in place of their results; closed at the end, because they never run."""

    def __init__(self) -> None:
        self._made: list[Coroutine[Any, Any, Any]] = []

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._made.append(coroutine)
        return coroutine

    def close(self) -> None:
        for coroutine in self._made:
            coroutine.close()


@pytest.fixture
def unawaited() -> Any:
    unawaited = Unawaited()
    yield unawaited
    unawaited.close()


@inline
async def test_an_operand_without_await(device: ta.Device, a: ta.AccelRef, unawaited: Unawaited) -> None:
    host = np.eye(2)
    assert await refused(linalg.matmul, unawaited(device.put(host)), a) == (
        f"linalg.matmul: a must be an AccelRef or a NumPy array, got coroutine; {NOT_AWAITED}"
    )
    assert await refused(linalg.matmul, unawaited(device.put(host)), host) == (
        f"linalg.matmul: an operand is a coroutine; {NOT_AWAITED}"
    )
    assert await refused(linalg.axpy, 1.0, a, unawaited(device.put(host))) == (
        f"linalg.axpy: y must be an AccelRef, got coroutine; {NOT_AWAITED}"
    )
    assert await refused(device.put, unawaited(a.to_host())) == (
        f"put: host must be an array, got Call; {NOT_AWAITED}"
    )
    assert await refused(device.put, unawaited(device.put(host))) == (
        f"put: host must be an array, got coroutine; {NOT_AWAITED}"
    )
    assert await refused(device.ask, linalg.Matmul(unawaited(a + 1), a)) == (
        f"linalg.Matmul: a must be an AccelRef or a NumPy array, got Call; {NOT_AWAITED}"
    )
    assert await refused(lambda: operator.matmul(unawaited(device.put(host)), a)) == (
        f"linalg.matmul: a must be an AccelRef or a NumPy array, got coroutine; {NOT_AWAITED}"
    )


@inline
async def test_a_device_without_await(
    system: ta.System, device: ta.Device, a: ta.AccelRef, other: ta.Device
) -> None:
    opening: Any = system.open_device(BACKEND)
    for name in ("put", "zeros", "submit", "info"):
        with pytest.raises(AttributeError) as caught:
            getattr(opening, name)
        assert str(caught.value) == f"'DeviceOpening' object has no attribute '{name}'; {NOT_OPEN}"
    assert await refused(a.copy_to, opening) == (
        f"copy_to: device must be an open Device, got DeviceOpening; {NOT_OPEN}"
    )
    assert await refused(a.copy_to, NAME) == (
        f"copy_to: device must be an open Device, got str; open it: await system.open_device({NAME!r})"
    )
    assert await refused(ta.sparse.csr, opening, None) == (
        f"sparse.csr: device must be an open Device, got DeviceOpening; {NOT_OPEN}"
    )
    with pytest.raises(TypeError) as refusal:
        ta.random.Generator(opening)
    assert str(refusal.value) == f"Generator: device must be an open Device, got DeviceOpening; {NOT_OPEN}"


@inline
async def test_a_pending_in_place_of_its_reply(device: ta.Device, a: ta.AccelRef) -> None:
    pending: Any = device.submit(linalg.Matmul(a, a))

    async def wait() -> object:
        return await pending

    assert await refused(wait) == f"a Pending is not awaited itself; {PENDING}"
    with pytest.raises(AttributeError) as caught:
        _ = pending.to_host
    assert str(caught.value) == f"'Pending' object has no attribute 'to_host'; {PENDING}"
    for call in (lambda: linalg.matmul(pending, a), lambda: linalg.matmul(a, pending)):
        assert (await refused(call)).endswith(f"must be an AccelRef or a NumPy array, got Pending; {PENDING}")
    assert await refused(linalg.nrm2, pending) == f"linalg.nrm2: an operand is a Pending; {PENDING}"
    assert await refused(device.put, pending) == f"put: host must be an array, got Pending; {PENDING}"
    assert await pending.wait() is pending.value


@inline
async def test_operands_of_other_kinds(device: ta.Device, a: ta.AccelRef) -> None:
    wrong: Any = [[1.0]]
    assert await refused(linalg.matmul, a, wrong) == (
        "linalg.matmul: b must be an AccelRef or a NumPy array, got list; make it one: np.asarray(value)"
    )
    assert await refused(linalg.scal, 2.0, np.ones(3)) == (
        "linalg.scal: no operand is on a device; copy one there first (await device.put(array)), or ask the "
        "device itself (await device.ask(message))"
    )
    assert await refused(linalg.matmul, a, a, out=np.eye(2)) == (
        "linalg.matmul: out must be an AccelRef, got ndarray; copy it to the device first: "
        "await device.put(array)"
    )
    assert await refused(device.put, a) == (
        f"put: the array is on {device.path} already; await ref.copy() copies it there, and "
        "await ref.copy_to(device) to another device"
    )


@inline
async def test_an_operand_of_another_device(device: ta.Device, a: ta.AccelRef, other: ta.Device) -> None:
    foreign = await other.put(np.eye(2))
    with pytest.raises(ValueError, match="copy it there") as caught:
        await linalg.matmul(a, foreign)
    assert str(caught.value) == (
        f"linalg.matmul: b is on {other.path}, this runs on {device.path}; copy it there: "
        "await b.copy_to(device)"
    )
    product = await linalg.matmul(a, await foreign.copy_to(device))
    np.testing.assert_array_equal(await product.to_host(), np.eye(2))


def message(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(TypeError) as caught:
        call(*arguments)
    return str(caught.value)


@inline
async def test_numpy_defers_to_arrays_of_devices(a: ta.AccelRef) -> None:
    wrong: Any = a
    for use in (np.sqrt, np.sum):
        with pytest.raises(TypeError, match=rf"write await ta\.arrays\.{use.__name__}\(x"):
            use(wrong)
    on_host = "an AccelRef is not a host array; use await ref.to_host(), or in blocking code b.get(ref)"
    for convert in (np.asarray, np.array):
        assert message(convert, wrong) == on_host
    assert message(np.linalg.norm, wrong).startswith(
        "np.linalg.norm of an AccelRef: write ta.linalg.vector_norm"
    )
    assert message(np.fft.fft, wrong).startswith("np.fft.fft of an AccelRef: write await ta.fft.fft(a)")
    assert message(np.dot, wrong, np.eye(2)).startswith("np.dot of an AccelRef: write ")


@inline
async def test_unsupported_operators(a: ta.AccelRef) -> None:
    wrong: Any = a
    for kind in (float, int, complex):
        assert message(kind, wrong) == (
            f"{kind.__name__}() of an AccelRef: its element is on the device; "
            f"use {kind.__name__}(await ref.item())"
        )
    assert message(lambda: bool(a)) == (
        "an AccelRef cannot be a truth value: its elements are on the device; use await ref.item(), or ask "
        "whether there is one: ref is not None"
    )
    assert message(lambda: list(wrong)) == (
        "an AccelRef is not iterable: its elements are on the device; use await ref.to_host()"
    )
    assert message(lambda: 1.0 in wrong) == (
        "an AccelRef is not searched: its elements are on the device; use await ref.to_host()"
    )
    assert message(lambda: divmod(wrong, 2)) == (
        "divmod() of an AccelRef: write await ta.gather(x1 // x2, x1 % x2)"
    )
    assert len(a) == 2
    assert message(lambda: len(a[0, 0])) == (
        "len() of an AccelRef without axes; await ref.item() gives its element"
    )
    assert message(lambda: operator.setitem(wrong, 0, 1.0)) == (
        "an AccelRef is not assigned to, because an operation on a device is awaited; "
        "await ref[index].assign(value) writes an array or a number into a part, and "
        "ref.at[index].set(value) into a copy"
    )
    await a[0].assign(7.0)
    assert (await a.to_host()).tolist() == [[7.0, 7.0], [0.0, 1.0]]


@attrs.frozen
class Message:
    """A program's own, which compares its fields."""

    ref: ta.AccelRef
    size: int


@inline
async def test_equality_is_by_element_and_identity_is_not(device: ta.Device, a: ta.AccelRef) -> None:
    b, same = await device.put(np.eye(2)), a
    for other in (b, np.eye(2), np.float64(1.0), 1, 1.0):
        expected = np.eye(2) == (np.eye(2) if other is b else other)
        np.testing.assert_array_equal(await (a == other).to_host(), expected)
    # Objects without elements are another case.
    for other in (None, "a", device, object()):
        assert a != other
        assert not a == other  # noqa: SIM201  # both are asked
    # Containers look for the object itself first.
    assert {a, b, same} == {b, a}
    assert len({a, b, same}) == 2
    assert {a: 1, b: 2}[same] == 1
    assert a in {a: 1}
    assert b not in {a, 1}
    assert a in [a, b]
    assert [a, b].index(a) == 0
    assert (a, 1) == (same, 1)
    # A class of attrs compares its fields only by `==`, as with arrays of NumPy.
    for search in (lambda: b in [a, b], lambda: (a,) == (b,), lambda: Message(a, 2) == Message(same, 2)):
        assert message(search).startswith("a Call cannot be a truth value: its elements are on the device")
    assert any(b is each for each in [a, b])


OPTIONS: list[tuple[Callable[..., object], str, str]] = [
    (ta.DeviceOptions, "isolaton", "did you mean 'isolation'?"),
    (ta.DeviceOptions, "in_fligth", "did you mean 'in_flight'?"),
    (ta.DeviceOptions, "spare", "did you mean 'spares'?"),
    (ta.SystemOptions, "stategy", "did you mean 'strategy'?"),
    (ta.SystemOptions, "seed", "there are held_after, intensity, random, strategy"),
    (ta.Policy, "back_off", "did you mean 'backoff'?"),
    (ta.Backoff, "inital", "did you mean 'initial'?"),
    (ta.Intensity, "restart", "did you mean 'restarts'?"),
    (ta.MailboxOptions, "size", "there are capacity, on_restart, overflow, stash"),
]


@pytest.mark.parametrize(("make", "name", "advice"), OPTIONS, ids=[name for _, name, _ in OPTIONS])
def test_a_misspelled_option(make: type, name: str, advice: str) -> None:
    assert message(lambda: make(**{name: 1})) == f"{make.__name__}: there is no option {name!r}; {advice}"


async def test_a_misspelled_option_of_a_call(device: ta.Device) -> None:
    x = await device.put(np.eye(2))
    numbers = ta.random.Generator(device, seed=1)
    calls: list[Callable[..., Any]] = [
        x.item, x.cast, x.fill, x.copy, x.copy_to, x.lease, x.to_host, device.submit, device.put,
        device.zeros, device.empty, device.full, device.statistics, numbers.normal, numbers.uniform,
        ta.sparse.csr, ta.weights.load, ta.weights.save, ta.patterns.retry,
    ]  # fmt: skip
    for call in calls:
        for name, said in (
            ("timeout", "no call takes a timeout: write"),
            ("opt", "there is no option 'opt'; "),
        ):
            with pytest.raises(TypeError, match=rf"^(\w+\.)?{call.__name__}: {said}"):
                await call(**{name: 3})
    with pytest.raises(TypeError, match=r"^put: there is no option 'dtyp'; there are host, pinned$"):
        await device.put(x, dtyp="float32")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^cast: there is no option 'dtyp'; did you mean 'dtype'"):
        await x.cast(dtyp="float32")  # type: ignore[call-arg]


@pytest.mark.parametrize("given", [3, [1], np.eye(2)])
async def test_other_functions_are_not_taken_for_arrays(device: ta.Device, given: Any) -> None:
    asks: list[Any] = [device.ask, device.submit]
    for ask in asks:
        with pytest.raises(TypeError, match=r"^(ask|submit): (?s:.*) is not an operation of a device$"):
            await ask(given)


def test_existing_options_still_work() -> None:
    options = ta.DeviceOptions(in_flight=3, intensity=ta.Intensity(2, within=5.0))
    assert attrs.evolve(options, retry=1).in_flight == 3
    assert message(lambda: attrs.evolve(options, retries=1)).endswith("did you mean 'retry'?")
    assert message(lambda: ta.DeviceOptions(8)).endswith("1 positional argument but 2 were given")  # type: ignore[call-arg]


@pytest.mark.parametrize("open_system", [ta.open_system, actors.open_system])
def test_asyncio_is_recognised(open_system: Callable[[str], Any]) -> None:
    async def main() -> None:
        async with open_system("s"):
            raise AssertionError

    expected = (
        "open_system must be called in a Trio task; start the program with trio.run(main), because "
        "asyncio.run(main()) runs another event loop"
    )
    with pytest.raises(RuntimeError) as caught:
        asyncio.run(main())
    assert str(caught.value) == expected
    # Without any loop, as by hand.
    with pytest.raises(RuntimeError) as caught:
        main().send(None)
    assert str(caught.value) == expected


CHANGED = "make the arrays that it was to change again, then ask again"
LOST: list[tuple[type[Any], Callable[[ta.Device, ta.AccelRef], Any], str]] = [
    (ta.devices.ToHost, lambda d, a: a.to_host(), "read the array again"),
    (ta.devices.Put, lambda d, a: d.put(np.ones(3)), "put the array again"),
    (linalg.Matmul, lambda d, a: linalg.matmul(a, a), "its result was not made; ask again"),
    (linalg.Scal, lambda d, a: linalg.scal(2.0, a), CHANGED),
    (linalg.Matmul, lambda d, a: linalg.matmul(np.eye(2), np.eye(2), out=a), CHANGED),
    (ta.devices.Assign, lambda d, a: a.assign(np.ones((2, 2))), CHANGED),
]
# In a worker the array is there as before.
KEPT = {
    3: "make the arrays that it was to change again, or overwrite what it was to change, then ask again",
    4: "ask again, which overwrites what it has damaged",
    5: "ask again, which overwrites what it has damaged",
}


async def lost(device: ta.Device, case: int, fault: str) -> None:
    operation, call, advice = LOST[case]
    if fault == "kill":
        advice = KEPT.get(case, advice)
    a = await device.put(np.eye(2))
    ta.testing.inject_fault(device, operation, **{fault: True})  # type: ignore[arg-type]
    with pytest.raises(ta.ContextLostError) as caught:
        await call(device, a)
    assert caught.value.message == (
        f"the device's context was lost while this operation was in flight; {advice}"
    )


async def test_advice_after_a_loss_inline(system: ta.System) -> None:
    for case in range(len(LOST)):
        # The launch itself may see a real fault, and reports it.
        async with system.open_device("cpu", options=INLINE) as device:
            await lost(device, case, "poison")


@isolated
async def test_advice_after_a_loss_of_a_worker(device: ta.Device) -> None:
    for case in range(3):
        await lost(device, case, "kill")


@isolated
async def test_advice_after_a_loss_of_a_worker_during_an_update(device: ta.Device) -> None:
    for case in KEPT:
        await lost(device, case, "kill")
