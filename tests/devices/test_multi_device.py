"""Operations that span devices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import attrs
import collective_library as collective
import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from collective_library import AllReduce, Double, OtherAllReduce, PeerCopy, Round
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

pytestmark = [
    pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning"),
    pytest.mark.skipif(IS_STAND_IN, reason="the stand-in keeps what a program has compiled"),
]

Devices = Sequence[ta.Device]


@pytest.fixture(params=[2, 3])
async def devices(system: ta.System, request: pytest.FixtureRequest) -> AsyncGenerator[Devices, None]:
    """Devices, each with memory of its own."""
    async with AsyncExitStack() as stack:
        count: int = request.param
        options = ta.DeviceOptions(isolation="inline", cancel_grace=1.0)
        yield [
            await stack.enter_async_context(system.open_device(BACKEND, options=options))
            for _ in range(count)
        ]


two = pytest.mark.parametrize("devices", [2], indirect=True)


async def put_all(devices: Devices, values: Sequence[float], size: int = 5) -> list[ta.AccelRef]:
    return [await device.put(np.full(size, value)) for device, value in zip(devices, values, strict=False)]


async def values_of(arrays: Sequence[ta.AccelRef]) -> list[float]:
    hosts = [await array.to_host() for array in arrays]
    assert all((host == host[0]).all() for host in hosts)
    return [float(host[0]) for host in hosts]


async def blocks_of(devices: Devices) -> list[int]:
    for device in devices:
        await device.synchronize()
    return [(await device.statistics()).memory.blocks for device in devices]


async def test_a_sum_over_devices(devices: Devices) -> None:
    rng = np.random.default_rng(1)
    hosts = [rng.standard_normal((7, 11)) for _ in devices]
    arrays = [await device.put(host) for device, host in zip(devices, hosts, strict=True)]
    sums = await ta.ask_across(AllReduce(arrays))
    assert [total.device for total in sums] == list(devices)
    results = [await total.to_host() for total in sums]
    np.testing.assert_allclose(results[0], np.sum(hosts, axis=0), rtol=1e-12)
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()


async def test_host_operands_are_copied_to_their_devices(devices: Devices) -> None:
    hosts = [np.full(3, float(number)) for number, _ in enumerate(devices)]
    sums = await ta.ask_across(AllReduce(hosts, on=devices))
    assert await values_of(sums) == [sum(range(len(devices)))] * len(devices)


async def test_one_device_simply_works(devices: Devices) -> None:
    (array,) = await put_all(devices[:1], [3.0])
    (total,) = await ta.ask_across(AllReduce([array]))
    assert await values_of([total]) == [3.0]


@two
async def test_the_reply_is_made_of_the_status_words_of_all(devices: Devices) -> None:
    arrays = await put_all(devices, [1.0, 2.0])
    assert await ta.ask_across(Round(arrays, ["", ""])) == [2, 2]
    assert await values_of(arrays) == [2.0, 3.0]


@two
async def test_what_finish_raises_is_raised(devices: Devices) -> None:
    def refuse() -> None:
        raise ValueError("no")

    arrays = await put_all(devices, [1.0, 2.0])
    with pytest.raises(ValueError, match="no"):
        await ta.ask_across(Round(arrays, ["", ""], finish=refuse))


@two
@pytest.mark.skipif(BACKEND != "cpu", reason="its kernels are functions of Python")
async def test_kernels_meet(devices: Devices) -> None:
    # Both run at the same time: each waits for the other.
    collective.MEETINGS["meets"] = collective.threading.Barrier(2)
    arrays = await put_all(devices, [1.0, 2.0])
    await ta.ask_across(Round(arrays, ["meets", "meets"]))
    assert await values_of(arrays) == [2.0, 3.0]


@two
async def test_order_with_operations_of_one_device(devices: Devices) -> None:
    # All are handed over before the first is done.
    a, b = await put_all(devices, [1.0, 10.0])
    out = await put_all(devices, [0.0, 0.0])
    for round_ in range(20):
        async with trio.open_nursery() as nursery:
            a.device.submit(Double(a))
            b.device.submit(Double(b))
            nursery.start_soon(ta.ask_across, AllReduce([a, b], out=out))
        expected = 11.0 * 2 ** (round_ + 1)
        assert await values_of(out) == [expected, expected]


@two
async def test_opposite_orders_at_the_same_time(devices: Devices) -> None:
    arrays = await put_all(devices, [1.0, 2.0])
    results: list[float] = []

    async def ask(operation: AllReduce) -> None:
        sums = await ta.ask_across(operation)
        results.extend(await values_of(sums))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for number in range(200):
                kind = OtherAllReduce if number % 3 else AllReduce
                nursery.start_soon(ask, kind(arrays[:: 1 if number % 2 else -1]))
    assert results == [3.0] * 400


@two
async def test_nothing_is_left(devices: Devices) -> None:
    before = await blocks_of(devices)
    arrays = await put_all(devices, [1.0, 2.0])
    for _ in range(5):
        sums = await ta.ask_across(AllReduce(arrays))
    del arrays, sums
    assert await blocks_of(devices) == before
    assert [(await device.statistics()).in_flight for device in devices] == [0, 0]


@attrs.frozen
class Step:
    """One operation of a random program on two arrays of each of two devices."""

    kind: str
    device: int
    i: int
    j: int
    value: float

    def serial(self, arrays: list[list[float]]) -> None:
        """Do it on numbers."""
        here, there = arrays[self.device], arrays[1 - self.device]
        match self.kind:
            case "fill":
                here[self.i] = self.value
            case "double":
                here[self.i] *= 2
            case "sum":
                here[1 - self.i] = there[1 - self.j] = here[self.i] + there[self.j]
            case "copy":
                there[self.j] = here[self.i]
            case "round":
                here[self.i] += 1
                there[self.j] += 1
            case _:
                raise AssertionError(self.kind)

    def ask(self, arrays: list[list[ta.AccelRef]]) -> Callable[[], Awaitable[object]]:
        """How to ask for it."""
        here, there = arrays[self.device], arrays[1 - self.device]
        x, y = here[self.i], there[self.j]
        kind = AllReduce if self.value < 0 else OtherAllReduce
        return {
            "fill": lambda: x.fill(self.value),
            "double": lambda: x.device.ask(Double(x)),
            "sum": lambda: ta.ask_across(kind([x, y], out=[here[1 - self.i], there[1 - self.j]])),
            "copy": lambda: ta.ask_across(PeerCopy(x, y.device, out=y)),
            "round": lambda: ta.ask_across(Round([x, y], ["", ""])),
        }[self.kind]


ints = st.integers(0, 1)
programs = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(["fill", "double", "sum", "copy", "round"]),
        device=ints,
        i=ints,
        j=ints,
        value=st.sampled_from([-1.0, 0.5, 3.0]),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(programs)
def test_random_programs_equal_the_serial_result(program: list[Step]) -> None:
    start = [[1.0, 2.0], [3.0, 4.0]]
    expected = [list(values) for values in start]
    for step in program:
        step.serial(expected)

    async def run() -> list[list[float]]:
        async with ta.open_system("random") as system, AsyncExitStack() as stack:
            # An asker that has to open a library waits for that first, while others are handed over.
            memory = "trio_accel.devices:MemoryActor"
            libraries = [AllReduce.library, OtherAllReduce.library, memory]
            options = ta.DeviceOptions(isolation="inline", libraries=tuple(libraries))
            devices = [
                await stack.enter_async_context(system.open_device(BACKEND, options=options)) for _ in start
            ]
            arrays = [
                await put_all([device] * 2, values) for device, values in zip(devices, start, strict=True)
            ]

            async def ask(step: Step) -> None:
                await step.ask(arrays)()

            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    for step in program:
                        # In this order, and each before the one before it is done.
                        nursery.start_soon(ask, step)
                        await trio.lowlevel.checkpoint()
                return [await values_of(some) for some in arrays]

    assert trio.run(run) == expected


def test_opposite_orders_on_shared_streams() -> None:
    # Each device has one stream for all its libraries.
    async def run() -> list[float]:
        async with ta.open_system("shared") as system, AsyncExitStack() as stack:
            options = ta.DeviceOptions(isolation="inline", streams=ta.SingleStream())
            devices = [
                await stack.enter_async_context(system.open_device(BACKEND, options=options)) for _ in "ab"
            ]
            arrays = await put_all(devices, [1.0, 2.0])
            totals: list[float] = []

            async def ask(operation: AllReduce) -> None:
                totals.extend(await values_of(await ta.ask_across(operation)))

            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    for number in range(100):
                        kind = OtherAllReduce if number % 3 else AllReduce
                        nursery.start_soon(ask, kind(arrays[:: 1 if number % 2 else -1]))
            return totals

    assert trio.run(run) == [3.0] * 200
