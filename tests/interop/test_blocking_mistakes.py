"""A device for blocking code: results of mixed kinds, and mistakes with errors that give a remedy."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import trio.lowlevel
from blocking_tasks import refused
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.interop import BlockingDevice

pytestmark = pytest.mark.machine


async def step(x: ta.AccelRef) -> ta.AccelRef:
    return await (x + 1.0)


async def step_on_host(x: ta.AccelRef) -> dict[str, Any]:
    return {"shape": x.shape, "host": await x.to_host()}


def test_get_waits_for_coroutines_and_lists(b: BlockingDevice, x: ta.AccelRef) -> None:
    host = b.get(x)
    np.testing.assert_array_equal(b.get(step(x)), host + 1)
    first, second, third = b.get([x + 1.0, x, b.xp.asarray(x)])
    np.testing.assert_array_equal(first, host + 1)
    np.testing.assert_array_equal(second, host)
    np.testing.assert_array_equal(third, host)
    pair = b.get((x, [step(x)]))
    assert isinstance(pair, tuple)
    np.testing.assert_array_equal(pair[1][0], host + 1)
    # Results of your own functions are not lost.
    assert b.get(step_on_host(x))["shape"] == (3, 3)


def test_an_array_needs_no_wait(b: BlockingDevice, x: ta.AccelRef) -> None:
    for array in (x, b.xp.ones(3)):
        for ask in (b.wait, b.submit):
            with pytest.raises(TypeError, match=r"got .*; an array needs no wait: .*b\.get\(array\)$"):
                ask(array)  # type: ignore[arg-type]


def test_arrays_and_calls_become_arrays_of_the_namespace(b: BlockingDevice, x: ta.AccelRef) -> None:
    assert b.xp.asarray(x).ref is x
    np.testing.assert_array_equal(np.asarray(b.xp.asarray(x + 1.0)), b.get(x) + 1)
    assert b.xp.asarray(x, dtype="float32").dtype == "float32"
    assert b.xp.asarray(x, copy=True).ref is not x


def test_numpy_arrays_are_operands(b: BlockingDevice) -> None:
    x, host = b.xp.asarray([1.0, 2.0, 3.0]), np.array([4.0, 2.0, 0.0])
    for function in (operator.add, operator.sub, operator.mul, operator.matmul, operator.lt, operator.eq):
        for operands in ((x, host), (host, x)):
            made = np.asarray(function(*operands))
            assert made.tolist() == function(*map(np.asarray, operands)).tolist()
    x += host
    assert np.asarray(x).tolist() == [5.0, 4.0, 3.0]


def test_numpys_methods(b: BlockingDevice) -> None:
    x = b.xp.ones(3)
    for name, advice in (
        ("mean", "write xp.mean(array), where xp is its namespace, such as b.xp"),
        ("tolist", "np.asarray(array) copies it to NumPy"),
    ):
        with pytest.raises(AttributeError) as error:
            getattr(x, name)
        assert str(error.value) == f"'Array' object does not have {name!r}; {advice}"
    assert not hasattr(x, "__cuda_array_interface__")


def test_arrays_of_the_namespace_in_async_functions(b: BlockingDevice) -> None:
    x: Any = b.xp.asarray([1.0, 2.0])
    advice = "call the function of its namespace, such as b.xp.sum(array), or pass its AccelRef: array.ref"
    for make in (ta.arrays.sum, ta.nn.relu, b.wait(b.device.put(np.ones(2))).assign):
        with pytest.raises(TypeError, match="got Array; ") as error:
            b.wait(make, x)
        assert str(error.value).endswith(advice)
    assert b.get(ta.arrays.sum(x.ref)) == 3.0


def test_an_array_of_another_run_is_copied(b: BlockingDevice, own: BlockingDevice, x: ta.AccelRef) -> None:
    theirs = own.xp.asarray([1.0, 2.0])
    for made in (
        b.xp.asarray(theirs),
        b.xp.asarray(theirs, device=b.device),
        b.xp.from_dlpack(theirs),
        b.xp.asarray(theirs, dtype="float64", copy=True),
    ):
        assert made.device is b.device
        assert np.asarray(made + 1).tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="copy=False"):
        b.xp.asarray(theirs, copy=False)
    text = refused(own.xp.asarray, x + 1.0)
    assert f"device {b.device.path} belongs to another thread or Trio run; use get" in text
    assert np.asarray(own.xp.asarray(b.get(x))).shape == (3, 3)


def test_devices_have_different_names() -> None:
    with ta.blocking(NAME, options=INLINE) as first, ta.blocking(NAME, options=INLINE) as second:
        assert first.device.path != second.device.path
        assert repr(first) != repr(second)
        with pytest.raises(ValueError, match=f"on {second.device.path}, this runs on {first.device.path}"):
            operator.add(first.xp.ones(2), second.xp.ones(2))


def test_options_without_their_class() -> None:
    with pytest.raises(TypeError, match=r"options=ta\.DeviceOptions\(isolation='process', retry=1\)$"):
        ta.blocking(NAME, isolation="process", retry=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'isolated'"):
        ta.blocking(NAME, isolated=True)  # type: ignore[arg-type]


def test_the_error_of_a_lost_device_gives_a_remedy_for_blocking_code() -> None:
    with ta.blocking(NAME, options=INLINE) as b:
        x, a = b.wait(b.device.put(np.ones(2))), b.xp.ones(2)

        async def fail(retry_after: float | None = None) -> None:
            await trio.lowlevel.checkpoint()
            text = "intact: system.open_device(adopt=device) has them"
            raise ta.DeviceLostError(text, retry_after=retry_after)

        with pytest.raises(ta.DeviceLostError) as lost:
            b.wait(fail)
        adopting = "intact: b.wait(b.system.open_device(adopt=b.device)) has them"
        assert lost.value.message == f"{adopting}; open another: ta.blocking(...)"
        with pytest.raises(ta.DeviceLostError) as lost:
            b.wait(fail, 1.0)
        assert lost.value.message == "intact: system.open_device(adopt=device) has them"
        b.wait(b.device.close())
        with pytest.raises(ta.DeviceLostError, match=r"^the device is closed; open another: ta\.blocking\("):
            b.get(x + 1.0)
        assert "make one of an open device, or use xp of ta.blocking(...)" in refused(lambda: a + 1)


def test_arrays_of_both_kinds_in_operators(b: BlockingDevice, x: ta.AccelRef) -> None:
    host = b.get(x)
    for made in (b.xp.asarray(host) + x, x + b.xp.asarray(host), (x + x) - b.xp.asarray(host) * 0.0):
        assert type(made) is type(b.xp.ones(1))
        np.testing.assert_array_equal(np.asarray(made), host * 2)
    assert np.all(np.asarray(b.xp.asarray(host) == x))
    assert np.all(np.asarray(x == b.xp.asarray(host)))
    a = b.xp.asarray(host)
    a += x
    np.testing.assert_array_equal(np.asarray(a), host * 2)


def test_calls_of_a_list_share_operands(b: BlockingDevice, x: ta.AccelRef) -> None:
    host = b.get(x)
    values, vectors = ta.linalg.eigh(x + x.T)
    w, v = b.get([values, vectors])
    np.testing.assert_allclose(v * w @ v.T, host + host.T, atol=1e-10)
    y = x @ x
    np.testing.assert_allclose(b.get((y, y + 1.0, y)), [host @ host, host @ host + 1, host @ host])


def test_layouts_on_each_device_of_the_run(own: BlockingDevice) -> None:
    second = own.wait(own.system.open_device(NAME))
    y = own.wait(second.put(np.eye(2)))
    w, v = ta.linalg.eigh(y @ y)
    assert (w.shape, v.shape) == ((2,), (2, 2))
    own.get([w, v])
    own.wait(second.close())


def test_an_array_of_a_closed_device(b: BlockingDevice) -> None:
    earlier = ta.blocking(NAME)
    x = earlier.wait(earlier.device.put(np.ones(2)))
    earlier.close()
    assert "and it is closed: make its arrays again on an open device" in refused(b.get, x)
