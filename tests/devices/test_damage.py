"""An operation that fails damages the elements it should write, and overwriting them repairs the array."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import arrays, graphs, jit, linalg
from trio_accel.backends.base.contract.ops import ArraySpec
from trio_accel.devices import Assign
from trio_accel.devices.operations._blocks import Block
from trio_accel.testing import inject_fault

RECOVERS = ta.DeviceOptions(
    isolation="process", intensity=ta.Intensity(1000, 60.0), backoff=ta.Backoff(base=0.0)
)
HOST = np.arange(24.0).reshape(4, 6)


@pytest.fixture
def options() -> ta.DeviceOptions:
    return RECOVERS


@pytest.fixture
async def device(system: ta.System, options: ta.DeviceOptions) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=options) as device:
        yield device


async def damage(x: ta.AccelRef) -> None:
    """Have an update in place end with its worker."""
    inject_fault(x.device, linalg.Scal, kill=True)
    with pytest.raises(ta.ContextLostError, match="or overwrite what it was to change"):
        await linalg.scal(2.0, x)


HEALS: dict[str, Callable[[ta.AccelRef, ta.AccelRef], Awaitable[object]]] = {
    "fill": lambda x, y: x.fill(3.0),
    "assign of a number": lambda x, y: x.assign(3.0),
    "assign of the host's": lambda x, y: x.assign(HOST),
    "assign of an array": lambda x, y: x.assign(y),
    "out of a function": lambda x, y: arrays.exp(y, out=x),
    "out of an expression": lambda x, y: jit.elementwise("2 * a")(y, out=x),
    "out of a product": lambda x, y: linalg.matmul(y, np.eye(6), out=x),
    "out of a view": lambda x, y: arrays.exp(y.T, out=x.T),
}


@pytest.mark.parametrize("name", HEALS)
async def test_to_overwrite_all_makes_an_array_right_again(device: ta.Device, name: str) -> None:
    y, x, expected = await device.put(HOST), await device.put(HOST), await device.put(HOST)
    await HEALS[name](expected, y)
    row = x[1]
    await damage(x)
    for array in (x, row):
        with pytest.raises(ta.StaleRefError, match="overwrite what is spoiled, by fill, assign or out="):
            await array.to_host()
    with pytest.raises(ta.StaleRefError, match=r"linalg\.scal: x: its contents were spoiled"):
        await linalg.scal(2.0, x)  # the updated array is also read
    await HEALS[name](x, y)
    wanted = await expected.to_host()
    np.testing.assert_array_equal(await x.to_host(), wanted)
    np.testing.assert_array_equal(await row.to_host(), wanted[1])
    np.testing.assert_array_equal(await (await linalg.scal(2.0, x)).to_host(), 2 * wanted)


async def test_a_write_to_a_view_damages_only_the_view(device: ta.Device) -> None:
    x = await device.put(HOST)
    await damage(x[1])
    np.testing.assert_array_equal(await x[2:].to_host(), HOST[2:])
    np.testing.assert_array_equal(await x[0].to_host(), HOST[0])
    for array in (x, x[:, 2], x[1, 5]):
        with pytest.raises(ta.StaleRefError):
            await array.to_host()
    # An overwritten part is right; the rest is damaged.
    await x[1, :4].assign(7.0)
    np.testing.assert_array_equal(await x[:, 2].to_host(), [2.0, 7.0, 14.0, 20.0])
    with pytest.raises(ta.StaleRefError):
        await x[1].to_host()
    await linalg.scal(2.0, x[0])
    await x[:, 4:].fill(0.0)
    expected = HOST.copy()
    expected[0] *= 2
    expected[1] = 7.0
    expected[:, 4:] = 0.0
    np.testing.assert_array_equal(await x.to_host(), expected)


async def test_graphs_work_again_with_their_arrays(device: ta.Device) -> None:
    x = await device.put(np.arange(4.0))

    async def step(factor: ta.AccelRef) -> ta.AccelRef:
        return await jit.elementwise("a * b")(x, factor)

    two = await device.put(np.full(4, 2.0))
    graph = await graphs.capture(device, step, two)
    np.testing.assert_array_equal(await (await graph.replay()).to_host(), [0, 2, 4, 6])
    await damage(x)
    with pytest.raises(ta.StaleRefError):
        await graph.replay()
    await x.assign(np.ones(4))
    np.testing.assert_array_equal(await (await graph.replay()).to_host(), [2, 2, 2, 2])


async def test_a_lost_overwrite_damages_its_target(device: ta.Device) -> None:
    x = await device.put(HOST)
    inject_fault(device, Assign, kill=True)
    with pytest.raises(ta.ContextLostError, match="ask again, which overwrites"):
        await x[1].assign(np.ones(6))
    np.testing.assert_array_equal(await x[0].to_host(), HOST[0])
    with pytest.raises(ta.StaleRefError, match=r"spoiled by assign"):
        await x[1].to_host()


@pytest.mark.parametrize("options", [attrs.evolve(RECOVERS, retry=1)])
@pytest.mark.parametrize("name", HEALS)
async def test_overwrites_run_again_after_a_loss(device: ta.Device, name: str) -> None:
    y, x, expected = await device.put(HOST), await device.put(HOST), await device.put(HOST)
    await HEALS[name](expected, y)
    operation = (
        "jit.elementwise"
        if "expression" in name
        else {"f": "devices.Fill", "a": "devices.Assign"}.get(name[0])
    )
    inject_fault(device, operation or ("linalg.Matmul" if "product" in name else "arrays.exp"), kill=True)
    await HEALS[name](x, y)
    np.testing.assert_array_equal(await x.to_host(), await expected.to_host())
    assert device.generation == 2


@pytest.mark.parametrize("options", [attrs.evolve(RECOVERS, retry=1)])
async def test_an_update_does_not_run_again(device: ta.Device) -> None:
    x = await device.put(HOST)
    await damage(x[1])
    np.testing.assert_array_equal(await x[0].to_host(), HOST[0])


AT_LAST = 1 << 60  # a moment after all damage
SHAPE = (6, 5, 4)
INDEXES = st.tuples(*[st.one_of(st.integers(0, size - 1), st.slices(size)) for size in SHAPE])
STEPS = st.lists(
    st.tuples(st.sampled_from(["spoil", "heal"]), INDEXES, st.permutations(range(3))), max_size=12
)


def part(index: Any, order: Any) -> tuple[Any, ArraySpec]:
    """A view of the elements' numbers, and the same view of a block that begins 8 bytes earlier."""
    numbers = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)
    view = numbers.transpose(order)[(*(index[axis] for axis in order), ...)]
    start = 8 + (
        view.__array_interface__["data"][0] - numbers.__array_interface__["data"][0] if view.size else 0
    )
    return view, ArraySpec(1, start, ta.DType.int32, view.shape, view.strides)


def block_of(nbytes: int) -> Block:
    """A block of a device that returns nothing."""
    table: Any = SimpleNamespace(valid_since=0, dropped=[], is_notified=True)
    return Block(table, nbytes, 1, 1)


@given(STEPS, INDEXES)
@settings(max_examples=300, deadline=None)
def test_parts_of_a_block_are_damaged_like_a_mask(steps: Any, read: Any) -> None:
    """Spoiled, overwritten and read parts of one block, against a mark for each element."""
    block, mask = block_of(8 + 4 * int(np.prod(SHAPE))), np.zeros(np.prod(SHAPE), bool)
    for what, index, order in steps:
        view, spec = part(index, order)
        mask[view] = what == "spoil"
        if what == "heal":
            block.heal((spec,), AT_LAST)
        elif view.size:
            block.mark_damaged("test", None, (spec,))
    view, spec = part(read, range(3))
    assert (block.damage_of(spec) is not None) == mask[view].any()
    assert (block.damaged_by is not None) == mask.any()
    assert sum(end - start for one in block.damages for start, end in one.ranges) == 4 * mask.sum()


def test_a_view_of_too_many_pieces_is_all_or_nothing() -> None:
    even = ArraySpec(1, 0, ta.DType.float32, (100_000,), (8,))
    one = ArraySpec(1, 4, ta.DType.float32, (1,), (4,))
    block = block_of(800_000)
    block.mark_damaged("test", None, (even,))
    assert block.damage_of(one) is not None
    block.heal((even,), AT_LAST)
    assert block.damage_of(even) is not None
