"""A device for code that blocks, in a notebook: cells that run twice, short tracebacks, NumPy's functions."""

from __future__ import annotations

import gc
import operator
import traceback
import warnings
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.interop import Array, BlockingDevice

pytestmark = pytest.mark.machine
HOST = np.array([[1.0, 4.0], [9.0, 16.0]])


@pytest.fixture
def a(b: BlockingDevice) -> Array:
    return b.xp.asarray(HOST)


@pytest.fixture
def y(b: BlockingDevice) -> ta.Call[ta.AccelRef]:
    return b.wait(b.device.put(HOST)) + 1.0


@pytest.fixture(autouse=True)
def nothing_is_warned_of() -> Generator[None, None, None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
        gc.collect()


def test_a_cell_with_a_call_can_run_again(b: BlockingDevice, y: ta.Call[ta.AccelRef]) -> None:
    first = b.get(y)
    first[:] = 0.0  # the result is the program's
    for _ in range(2):
        np.testing.assert_array_equal(b.get(y), HOST + 1)
    ref = b.wait(y)
    assert b.wait(y) is ref
    np.testing.assert_array_equal(b.get([y, ref + 1.0])[1], HOST + 2)
    factors = ta.linalg.qr(ref)
    first, second = b.get(factors), b.get(factors)
    np.testing.assert_allclose(first[0] @ first[1], HOST + 1)
    np.testing.assert_array_equal(first[1], second[1])


def test_a_cell_with_a_list_of_calls_can_run_again(b: BlockingDevice, y: ta.Call[ta.AccelRef]) -> None:
    z = b.wait(b.device.put(HOST)) * 2.0
    for _ in range(2):
        np.testing.assert_array_equal(b.get([y, z])[1], HOST * 2)
    np.testing.assert_array_equal(b.get(z), HOST * 2)


def test_a_call_with_a_retained_result_is_an_operand_of_further_calls(b: BlockingDevice, a: Array) -> None:
    @ta.step
    def doubled(z: Any) -> Any:
        return z * 2.0

    x = a.ref
    y = x @ x
    expected = b.get(y)
    assert y.shape == (2, 2)
    for _ in range(2):
        assert b.get(y + y * 2.0).tolist() == (expected * 3.0).tolist()
        assert b.get(ta.linalg.matmul(y, x)).tolist() == (expected @ b.get(x)).tolist()
        assert b.get(doubled(y)).tolist() == (expected * 2.0).tolist()
        assert b.get(ta.arrays.concat([y, x], axis=0)).shape == (4, 2)
        assert np.asarray(a + y).tolist() == (np.asarray(a) + expected).tolist()
        assert np.asarray(y - a).tolist() == (expected - np.asarray(a)).tolist()
        assert np.asarray(b.xp.asarray(y)).tolist() == expected.tolist()
        gradient = b.get(ta.grad(lambda z: ta.arrays.sum(z * z))(y))
        assert gradient.tolist() == (expected * 2.0).tolist()
    several = ta.linalg.qr(x)
    q, r = b.get(several)
    assert b.get(several[0] @ several[1]) == pytest.approx(q @ r)


def test_a_call_without_a_result_names_the_wait(b: BlockingDevice, a: Array) -> None:
    y: Any = a.ref @ a.ref
    b.get(y + 1.0)  # only a part of another call
    says = r"^<Call linalg\.matmul> was awaited before, or in another call; keep .* code y = b\.wait\(y\); or"
    uses: list[Callable[[], object]] = [
        lambda: b.get(y),
        lambda: b.get(y * 2.0),
        lambda: b.xp.asarray(y),
        lambda: a + y,
        lambda: y - a,
        lambda: y.shape,
        lambda: b.get(ta.grad(lambda z: ta.arrays.sum(z * z))(y)),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=says):
            use()
    with pytest.raises(TypeError, match="'Call' and 'NoneType'"):
        y + None


def test_iterators_and_dicts(b: BlockingDevice, x: ta.AccelRef) -> None:
    host = b.get(x)
    made = b.get(array for array in (x + 1.0, x))
    assert isinstance(made, list)
    np.testing.assert_array_equal(made, [host + 1, host])
    np.testing.assert_array_equal(b.get(map(abs, [x]))[0], abs(host))
    named = b.get({"one": x + 1.0, "two": [x]})
    np.testing.assert_array_equal(named["one"], host + 1)
    np.testing.assert_array_equal(named["two"][0], host)
    with pytest.raises(TypeError, match="a list, tuple or dict of these, got"):
        b.get({x + 1.0})
    with pytest.raises(TypeError, match=r"to_host|got 3"):
        b.get(3)


def _lines(function: Callable[[], object]) -> list[str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any
        function()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    return "".join(traceback.format_exception(caught.value)).splitlines()


def test_the_traceback_of_a_mistake_is_short(b: BlockingDevice, x: ta.AccelRef, a: Array) -> None:
    wrong = b.wait(b.device.put(np.ones((7, 2))))

    async def product() -> ta.AccelRef:
        return await (x @ wrong)

    mistakes: dict[str, Callable[[], object]] = {
        "get": lambda: b.get(x @ wrong),
        "wait": lambda: b.wait(x @ wrong),
        "list": lambda: b.get([x @ wrong, x]),
        "coroutine": lambda: b.get(product()),
        "function": lambda: b.wait(product),
        "namespace": lambda: b.xp.matmul(a, b.xp.ones(7)),
        "operator": lambda: a @ b.xp.ones(7),
        "index": lambda: a[9],
        "reshape": lambda: b.xp.reshape(a, (7,)),
        "opening": lambda: ta.blocking("nowhere"),
        "asarray": lambda: b.xp.asarray(["text"]),
    }
    for name, mistake in mistakes.items():
        lines = _lines(mistake)
        assert len(lines) <= 14, (name, lines)
        assert lines[-1].partition(":")[0].endswith(("ValueError", "TypeError", "IndexError")), name
        assert sum("trio_accel/" in line for line in lines) <= 2, (name, lines)


def test_the_frames_of_the_program_and_the_cause_remain(b: BlockingDevice) -> None:
    async def deeper() -> None:
        try:
            {}[await b.device.put(HOST)]
        except KeyError as error:
            raise OSError("second") from error

    async def outer() -> None:
        await deeper()

    with pytest.raises(OSError, match="second") as caught:
        b.wait(outer)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_the_frames_of_the_program_and_the_cause_remain", "outer", "deeper"]
    assert isinstance(caught.value.__cause__, KeyError)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)] == ["deeper"]


UFUNCS = (
    np.exp,
    np.sin,
    np.sqrt,
    np.negative,
    np.absolute,
    np.arctan,
    np.isfinite,
    np.square,
    np.log1p,
    np.cbrt,
    np.floor,
    np.sign,
    np.rint,
    np.fabs,
)


@pytest.mark.parametrize("ufunc", UFUNCS)
def test_ufuncs_of_one_argument(a: Array, ufunc: np.ufunc) -> None:
    made = ufunc(a)
    assert isinstance(made, Array)
    np.testing.assert_allclose(np.asarray(made), ufunc(HOST), rtol=1e-14)


def test_operators_with_numpys_arrays_and_numbers(a: Array) -> None:
    other = HOST[::-1].copy()
    names = "add sub mul truediv floordiv mod pow matmul lt le gt ge eq ne"
    for name in names.split():
        function = getattr(operator, name)
        for left, right in ((other, a), (a, other), (np.float64(2), a), (a, np.float64(2))):
            if name == "matmul" and np.float64 in (type(left), type(right)):
                continue
            made = function(left, right)
            assert isinstance(made, Array), name
            expected = function(*(HOST if side is a else side for side in (left, right)))
            np.testing.assert_allclose(np.asarray(made), expected)


def test_numpys_functions(b: BlockingDevice, a: Array) -> None:
    functions: dict[str, Callable[[Any], Any]] = {
        "sum": lambda v: np.sum(v, axis=0, keepdims=True),
        "mean": np.mean,
        "max": lambda v: np.max(v, axis=1),
        "where": lambda v: np.where(HOST > 2, v, 0.0),
        "concatenate": lambda v: np.concatenate([v, HOST]),
        "reshape": lambda v: np.reshape(v, (4,)),
        "clip": lambda v: np.clip(v, 2.0, 5.0),
        "solve": lambda v: np.linalg.solve(v, HOST),
        "inv": np.linalg.inv,
        # These are computed on the host.
        "std": lambda v: np.std(v, ddof=1),
        "norm": np.linalg.norm,
        "cumsum": lambda v: np.cumsum(v, axis=0),
        "unique": np.unique,
        "reduce": np.add.reduce,
        "divmod": lambda v: np.divmod(v, 2.0)[1],
        "shape": np.shape,
        "transpose": np.transpose,
        "dot": lambda v: np.dot(v, HOST),
    }
    for name, function in functions.items():
        np.testing.assert_allclose(np.asarray(function(a)), function(HOST), rtol=1e-12, err_msg=name)
    assert isinstance(functions["sum"](a), Array)
    assert isinstance(functions["solve"](a), Array)
    assert np.array_equal(a, HOST)
    assert np.allclose(a, b.xp.asarray(HOST))


def test_in_place_operators(b: BlockingDevice, a: Array, x: ta.AccelRef) -> None:
    host = HOST.copy()
    host += a
    np.testing.assert_array_equal(host, 2 * HOST)
    target = b.xp.asarray(HOST, copy=True)
    assert np.add(a, HOST, out=target) is target
    np.testing.assert_array_equal(np.asarray(target), 2 * HOST)
    numbers: Any = np.ones((3, 3))
    with pytest.raises(TypeError, match=r"await ta\.arrays\.add\(x1, x2\); in blocking code use b\.get"):
        numbers += x


def test_indices_of_numpy(b: BlockingDevice, a: Array) -> None:
    for key in (np.array([1, 0]), [1, 0], (slice(None), np.array([1])), HOST > 2, ([0, 1], [1, 1])):
        np.testing.assert_array_equal(np.asarray(a[key]), HOST[key])  # type: ignore[index]
    changed, expected = b.xp.asarray(HOST, copy=True), HOST.copy()
    changed[np.array([1])] = 5.0
    changed[HOST < 2] = 7.0
    expected[np.array([1])] = 5.0
    expected[HOST < 2] = 7.0
    np.testing.assert_array_equal(np.asarray(changed), expected)


def test_gradients_of_arrays_of_the_namespace(b: BlockingDevice, a: Array) -> None:
    gradient = ta.grad(lambda w: ta.arrays.sum(w * w))
    np.testing.assert_array_equal(b.get(gradient(a)), 2 * HOST)
    value, gradients = b.get(ta.value_and_grad(lambda p: ta.arrays.sum(p["w"][0] * 3.0))({"w": [a]}))
    assert value == 3 * HOST.sum()
    np.testing.assert_array_equal(gradients["w"][0], np.full((2, 2), 3.0))


def test_a_reference_is_not_an_array_of_the_standard(b: BlockingDevice, x: ta.AccelRef) -> None:
    for array in (x, x + 1.0):
        with pytest.raises(TypeError, match=r"pass b\.xp\.asarray\("):
            array.__array_namespace__()
    assert b.xp.asarray(x).__array_namespace__() is b.xp
    xr = pytest.importorskip("array_api_compat")
    with pytest.raises(TypeError, match=r"b\.xp\.asarray"):
        xr.array_namespace(x)


def test_mistakes_name_the_way_in_blocking_code(b: BlockingDevice, own: BlockingDevice, a: Array) -> None:
    x, other = b.wait(b.device.put(HOST)), own.wait(own.device.put(HOST))
    with pytest.raises(ValueError, match=r"b\.wait\(b\.device\.put\(b2\.get\(x2\)\)\)"):
        b.get(x + other)
    with pytest.raises(TypeError, match=r"put: host is an array of a blocking namespace.*array\.ref"):
        b.wait(b.device.put(a))
    with pytest.raises(TypeError, match=r"in blocking code use b\.get"):
        np.sin(x)  # type: ignore[call-overload]
    for mistake in (
        lambda: float(x),
        lambda: x[np.array([0])],
        lambda: x.mean,
        lambda: x.cpu,
        lambda: list(x),
    ):
        with pytest.raises((TypeError, AttributeError), match=r"in blocking code .*b\.get"):
            mistake()
    with pytest.raises(ValueError, match="asarray: copy=False, and the call makes a new array"):
        b.xp.asarray(x @ x, copy=False)
    for name, told in {
        "item": "float(array)",
        "backward": "ta.grad",
        "detach": "leave it out",
        "numpy": "np.asarray(array)",
        "cuda": "to_device",
        "clone": "copy=True",
        "mean": "xp.mean(array)",
    }.items():
        with pytest.raises(AttributeError) as caught:
            getattr(a, name)
        assert told in str(caught.value)


def test_a_block_refuses_a_closed_device() -> None:
    opened = ta.blocking(NAME, options=INLINE)
    opened.wait(opened.device.close())
    with pytest.raises(RuntimeError, match="with: the device of this blocking device is closed"), opened:
        pass
    opened.close()
