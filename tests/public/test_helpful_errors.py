"""Mistakes by users of NumPy, PyTorch or asyncio: the message gives a remedy."""

from __future__ import annotations

import operator
import re
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import attrs
import numpy as np
import pytest

import trio_accel as ta
from trio_accel import jit, linalg
from trio_accel.backends.base.contract import foreign_names
from trio_accel.patterns import Batcher, Submit

SCALE = jit.Kernel(
    "scale",
    'extern "C" __global__ void scale(float a, float* x) { x[threadIdx.x] *= a; }',
    parameters={"a": jit.scalar("float32"), "x": jit.updates("float32")},
    grid=1,
    block=1,
)


@attrs.frozen
class Surroundings:
    """The arguments of the mistakes."""

    system: ta.System
    device: ta.Device
    x: ta.AccelRef
    single: ta.AccelRef
    batcher: ta.Ref[Batcher[int, int]]


class Foreign:
    """An array of another library."""

    def __dlpack__(self) -> object:
        raise AssertionError


async def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def blocking(items: list[int]) -> list[int]:
    return items


async def _with(manager: Any) -> None:
    with manager:
        raise AssertionError


async def _async_with(manager: Any) -> None:
    async with manager:
        raise AssertionError


async def _ask_blocking(at: Surroundings) -> None:
    ref = await at.system.spawn(Batcher[int, int], blocking)  # type: ignore[arg-type]
    await ref.ask(Submit(3))


async def _forget_await(at: Surroundings) -> None:
    product = linalg.matmul(at.x, at.x)
    try:
        await at.device.ask(product)  # type: ignore[arg-type]
    finally:
        product.close()


Mistake = Callable[[Any], "Awaitable[object] | object"]

untyped: Any = ta

# The mistakes, and the required messages.
MISTAKES: dict[str, tuple[Mistake, type[Exception], str]] = {
    "a float64 array of NumPy with float32": (
        lambda at: linalg.matmul(at.single, np.ones(3)),
        TypeError,
        "got a float32, b float64; write b.astype('float32')",
    ),
    "the same, the other way round": (
        lambda at: linalg.matmul(np.ones(3), at.single),
        TypeError,
        "got a float64, b float32; write a.astype('float32')",
    ),
    "a float64 array with float32": (
        lambda at: linalg.solve(at.single, at.x),
        TypeError,
        "write await b.cast('float32')",
    ),
    "float64 with float32 in lstsq": (
        lambda at: linalg.lstsq(at.single, np.ones(3)),
        TypeError,
        "write b.astype('float32')",
    ),
    "a float32 matrix of NumPy in lstsq": (
        lambda at: linalg.lstsq(np.eye(3, dtype=np.float32), at.x),
        TypeError,
        "write a.astype('float64')",
    ),
    "complex with real": (
        lambda at: linalg.gemm(1.0, at.x, np.ones((3, 3), complex)),
        TypeError,
        "write await a.cast('complex128')",
    ),
    "scal the wrong way round": (
        lambda at: linalg.scal(at.x, 2.0),  # type: ignore[arg-type]
        TypeError,
        "alpha must be a number, got AccelRef: scal(alpha, x)",
    ),
    "a product with a number": (
        lambda at: linalg.matmul(at.x, 2.0),  # type: ignore[arg-type]
        TypeError,
        "await linalg.scal(alpha, x) multiplies by a number",
    ),
    "an array of another library": (
        lambda at: linalg.matmul(at.x, Foreign()),  # type: ignore[arg-type]
        TypeError,
        "got Foreign; copy it to the device first: await device.put(x)",
    ),
    "out of NumPy": (
        lambda at: jit.elementwise("x + 1.0")(at.x, out=np.ones((3, 3))),  # type: ignore[call-overload]
        TypeError,
        "out must be an AccelRef, got ndarray; copy it",
    ),
    "unequal": (
        lambda at: bool(at.x != at.single),
        TypeError,
        "a Call cannot be a truth value: its elements",
    ),
    "a format": (lambda at: f"{at.x:.2f}", TypeError, "use await ref.item()"),
    "round": (lambda at: round(at.x), TypeError, "use round(await ref.item())"),
    "max in an expression": (
        lambda _: jit.elementwise("max(x, 0)"),
        ValueError,
        "no function 'max' in expressions; write maximum(x, y)",
    ),
    "min in an expression": (lambda _: jit.elementwise("min(x, y)"), ValueError, "write minimum(x, y)"),
    "a power": (lambda at: jit.elementwise("x^2")(at.x), TypeError, "write x**2 for a power"),
    "ln": (lambda _: jit.elementwise("ln(x)"), ValueError, "write log(x)"),
    "an output that is not assigned": (
        lambda _: jit.elementwise("x", outputs=("z",)),
        ValueError,
        "output 'z' is not assigned; the expression assigns nothing",
    ),
    "a function for an expression": (
        lambda _: jit.elementwise(lambda x: x),  # type: ignore[call-overload]
        TypeError,
        "an expression is a text, such as 'x * x', got function",
    ),
    "options of a device one by one": (
        lambda at: at.system.open_device("cpu", isolation="process"),
        TypeError,
        "options=ta.DeviceOptions(isolation='process')",
    ),
    "no such option of a device": (
        lambda at: at.system.open_device("cpu", isolaton="process"),
        TypeError,
        "did you mean 'isolation'?",
    ),
    "a device without a system": (
        lambda _: untyped.open_device("cpu"),
        AttributeError,
        'async with ta.open_system("name") as system, system.open_device("cpu") as device',
    ),
    "a function of a capability": (
        lambda _: untyped.matmul,
        AttributeError,
        "write ta.linalg.matmul",
    ),
    "another name of NumPy": (
        lambda _: untyped.linalg.norm,
        AttributeError,
        "write ta.linalg.vector_norm, or",
    ),
    "another name of NumPy, which SciPy has for sparse matrices": (
        lambda _: untyped.norm,
        AttributeError,
        "write ta.linalg.vector_norm, or",
    ),
    "a name of PyTorch": (lambda _: untyped.arrays.cat, AttributeError, "write ta.arrays.concat"),
    "another package": (lambda _: untyped.arrays.einsum, AttributeError, "write ta.linalg.einsum"),
    "a pattern": (lambda _: untyped.Batcher, AttributeError, "write ta.patterns.Batcher"),
    "an array without a device": (
        lambda _: untyped.zeros((2, 3)),
        AttributeError,
        "write ta.arrays.zeros",
    ),
    "a device in a plain with": (
        lambda at: _with(at.system.open_device("cpu")),
        TypeError,
        "async with system.open_device(...) as device",
    ),
    "a system without async with": (
        lambda _: untyped.open_system("s").open_device("cpu"),
        AttributeError,
        "async with ta.open_system(...) as system",
    ),
    "a system awaited": (
        lambda _: untyped.open_system("s"),
        TypeError,
        "async with ta.open_system(...) as system",
    ),
    "a system in a plain with": (
        lambda _: _with(untyped.open_system("s")),
        TypeError,
        "async with ta.open_system(...) as system",
    ),
    "a dashboard without async with": (
        lambda at: untyped.open_dashboard(at.system).url,
        AttributeError,
        "async with ta.open_dashboard(system) as dashboard",
    ),
    "a dashboard of a device": (
        lambda at: _async_with(untyped.open_dashboard(at.device)),
        TypeError,
        "open_dashboard: system must be an open system",
    ),
    "a dashboard of a device, its system": (
        lambda at: _async_with(untyped.open_dashboard(at.device)),
        TypeError,
        "device.system",
    ),
    "a dashboard of a system that is not open": (
        lambda _: _async_with(untyped.open_dashboard(untyped.open_system("s"))),
        TypeError,
        "async with ta.open_system(...) as system",
    ),
    "sum": (lambda at: at.x.sum(), AttributeError, "await ta.arrays.sum(x, axis=...)"),
    "astype": (lambda at: at.x.astype("float32"), AttributeError, "await x.cast(dtype)"),
    "numpy": (lambda at: at.x.numpy(), AttributeError, "await x.to_host()"),
    "mean": (
        lambda at: at.x.mean(),
        AttributeError,
        "write await ta.arrays.mean(x, axis=...)",
    ),
    "exp": (lambda at: at.x.exp(), AttributeError, 'write await ta.jit.elementwise("exp(x)")(x)'),
    "a forgotten await in ask": (
        _forget_await,
        TypeError,
        "write `await` before the call that makes it",
    ),
    "a class in ask": (
        lambda at: at.device.ask(linalg.Matmul),
        TypeError,
        "make a message of it: Matmul(...)",
    ),
    "a function in ask": (lambda at: at.device.ask(linalg.matmul), TypeError, "await matmul(...)"),
    "a timeout of a device": (
        lambda at: at.device.ask(linalg.Matmul(at.x, at.x), timeout=1.0),
        TypeError,
        "with trio.fail_after(seconds):",
    ),
    "a timeout of a function": (
        lambda at: untyped.linalg.matmul(at.x, at.x, timeout=1.0),
        TypeError,
        "linalg.matmul: no call takes a timeout: write `with trio.fail_after(seconds):`",
    ),
    "a timeout of put": (
        lambda at: at.device.put(np.eye(3), timeout=1.0),
        TypeError,
        "with trio.fail_after(seconds):",
    ),
    "a timeout of to_host": (lambda at: at.x.to_host(timeout=1), TypeError, "with trio.fail_after(seconds):"),
    "a timeout of an actor": (
        lambda at: at.batcher.ask(Submit(3), timeout=1.0),
        TypeError,
        "with trio.fail_after(seconds):",
    ),
    "no such option of a function": (
        lambda at: untyped.linalg.matmul(at.x, at.x, output=at.x),
        TypeError,
        "did you mean 'out'?",
    ),
    "a module in an expression": (
        lambda _: jit.elementwise("np.exp(x)"),
        ValueError,
        "by their names: write exp(...)",
    ),
    "a function of PyTorch": (
        lambda _: jit.elementwise("torch.relu(x)"),
        ValueError,
        "write await ta.nn.relu(x)",
    ),
    "softmax": (
        lambda _: jit.elementwise("softmax(x)"),
        ValueError,
        "write await ta.arrays.softmax(x, axis=...)",
    ),
    "a mean in an expression": (
        lambda _: jit.elementwise("x - mean(x)"),
        ValueError,
        "write await ta.arrays.mean(x, axis=...)",
    ),
    "a deviation as a reduction": (
        lambda _: jit.reduction("x", "std"),
        ValueError,
        "write await ta.arrays.std(x, axis=...)",
    ),
    "keep_dims": (
        lambda at: jit.reduction("x")(at.x, axis=0, keep_dims=True),
        TypeError,
        "there is no option 'keep_dims'; did you mean 'keepdims'?",
    ),
    "keep_dims of sum": (
        lambda at: untyped.arrays.sum(at.x, keep_dims=True),
        TypeError,
        "did you mean 'keepdims'?",
    ),
    "dim": (lambda at: untyped.arrays.sum(at.x, dim=0), TypeError, "there are axis, dtype, keepdims, out, x"),
    "a text in place of a scalar": (
        lambda at: untyped.jit.elementwise("a * x")("2", at.x),
        TypeError,
        "a must be a number or an array, got str",
    ),
    "an array in place of a scalar": (
        lambda at: SCALE(at.x, at.x),
        TypeError,
        "a must be a number, got <AccelRef",
    ),
    "an item in place of Submit": (lambda at: at.batcher.ask(3), TypeError, "ask(Submit(...))"),
    "a model that is not async": (_ask_blocking, TypeError, "write `async def blocking(...)`"),
    "an actor that is not spawned": (
        lambda _: untyped.patterns.Batcher(double).ask(Submit(3)),
        AttributeError,
        "ref = await system.spawn(Batcher, ...), then await ref.ask(...)",
    ),
    "an instance in spawn": (
        lambda at: at.system.spawn(Batcher(double)),
        TypeError,
        "write spawn(Batcher, ...)",
    ),
    "a misspelled option of spawn": (
        lambda at: at.system.spawn(Batcher, double, max_sise=3),
        TypeError,
        "spawn: Batcher: there is no option 'max_sise'; did you mean 'max_size'?",
    ),
    "a model that is left out": (
        lambda at: at.system.spawn(Batcher, max_size=3),
        TypeError,
        "spawn: Batcher: missing a required argument: 'model'; it takes (model, *, max_size=32,",
    ),
}


async def _make(mistake: Mistake, at: Surroundings) -> None:
    made = mistake(at)
    if isawaitable(made):
        await made


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_the_message_gives_a_remedy(mistake: str, system: ta.System, device: ta.Device) -> None:
    batcher = await system.spawn(Batcher[int, int], double)
    single = await device.put(np.eye(3, dtype=np.float32))
    at = Surroundings(system, device, await device.put(np.eye(3)), single, batcher)
    call, kind, text = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        await _make(call, at)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400


# Attributes missing from an array, and by NumPy the replacement in the message.
ADVISED: dict[str, Callable[[np.ndarray], np.ndarray | float]] = {
    "all": lambda x: x.all(0),
    "any": lambda x: x.any(0),
    "astype": lambda x: x.astype("float32"),
    "cpu": lambda x: x,
    "dot": lambda x: x @ x,
    "exp": np.exp,
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(0),
    "min": lambda x: x.min(0),
    "norm": lambda x: float(np.linalg.norm(x)),
    "prod": lambda x: x.prod(0),
    "ravel": np.ravel,
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(0),
    "std": lambda x: x.std(0),
    "sum": lambda x: x.sum(0),
    "tolist": lambda x: x,
}


@pytest.mark.parametrize("name", ADVISED)
async def test_the_remedy_of_a_message_can_be_written(name: str, device: ta.Device) -> None:
    host = np.random.default_rng(2).standard_normal((3, 3))
    x = await device.put(host)
    with pytest.raises(AttributeError) as caught:
        getattr(x, name)
    text = (
        str(caught.value)
        .partition("; write ")[2]
        .replace("axis=...", "axis=0")
        .replace("(dtype", "('float32'")
    )
    names: dict[str, Any] = {"ta": ta, "x": x, "y": x}
    exec(f"async def written(): return {text}", names)
    result = await names["written"]()
    found = await result.to_host() if isinstance(result, ta.AccelRef) else result
    np.testing.assert_allclose(found, ADVISED[name](host), rtol=1e-12)


async def test_a_norm_as_the_message_advises(device: ta.Device) -> None:
    host = np.random.default_rng(1).standard_normal((4, 5))
    x = await device.put(host)
    norm = await jit.reduction("abs(x) ** 2", "sum", post="sqrt(a)")(x)
    np.testing.assert_allclose(await norm.item(), np.linalg.norm(host), rtol=1e-12)


async def test_a_reference_is_shown_and_compared_with_objects_without_elements(device: ta.Device) -> None:
    x = await device.put(np.eye(3))
    assert f"{x}" == str(x)
    assert x != "x"


def test_an_error_of_a_property_is_not_taken_for_another() -> None:
    class Broken(ta.Actor):
        @property
        def other(self) -> int:
            return self.missing  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'missing'"):
        _ = Broken().other


@pytest.mark.parametrize(
    ("package", "name", "meant"),
    [
        ("linalg", "mat_mul", "matmul"),
        ("arrays", "cumulativ_sum", "cumulative_sum"),
        ("nn", "soft_plus", "softplus"),
    ],
)
def test_a_misspelt_name_gets_the_nearest_name(package: str, name: str, meant: str) -> None:
    with pytest.raises(
        AttributeError, match=f"'trio_accel.{package}' has no .*'{name}'; did you mean '{meant}'"
    ):
        getattr(getattr(ta, package), name)
    with pytest.raises(AttributeError, match=r"has no attribute 'quux'$"):
        _ = ta.linalg.quux


def test_every_mentioned_name_exists() -> None:
    for name in foreign_names.OTHER_NAMES:
        told = foreign_names.elsewhere(name).partition("write ta.")[2]
        for path in (part.partition("ta.")[2] or part for part in told.split(", or ")):
            package, _, function = path.partition(" ")[0].partition(".")
            assert callable(getattr(getattr(ta, package), function)), name
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; write "):
            getattr(ta.linalg, name)


async def test_the_error_for_a_function_of_numpy_names_the_one_of_the_device(device: ta.Device) -> None:
    """Each ufunc and each function that NumPy hands over names its counterpart, or how to copy."""
    x = await device.put(np.arange(1.0, 5.0))
    functions = {name: getattr(np, name) for name in dir(np) if not name.startswith("_")}
    functions |= {f"linalg.{name}": getattr(np.linalg, name) for name in np.linalg.__all__}
    functions |= {f"fft.{name}": getattr(np.fft, name) for name in np.fft.__all__}
    named = 0
    for name, function in functions.items():
        if not isinstance(function, np.ufunc) and not hasattr(function, "_implementation"):
            continue
        if name in ("shape", "ndim", "size"):
            assert function(x) == getattr(x, name)
            continue
        given = [x] * (function.nin if isinstance(function, np.ufunc) else 1)
        try:
            function(*given)
        except TypeError as error:
            text = str(error)
        else:
            raise AssertionError(f"np.{name} took an array of the device")
        if any(word in text for word in ("missing", "iterable", "PathLike")):
            # It looks at the number or the kind of its arguments before the array.
            continue
        assert "write " in text or "to_host()" in text, (name, text)
        own = function.__name__
        if own in ta.arrays.__all__:
            assert f".{own}(" in text, (name, text)
            named += 1
    assert named > 90
    for call, told in {
        "await ta.arrays.sum(x)": lambda: np.add.reduce(x),
        "await ta.arrays.pow(x1, x2)": lambda: np.power(x, 2),
        "ta.linalg.vector_norm": lambda: np.linalg.norm(x),
        "await ta.arrays.stack(arrays)": lambda: np.stack([x, x]),
        "np.save(await ref.to_host())": lambda: np.save("nowhere", x),
        "await ta.arrays.add(x1, x2)": lambda: np.add(x, 1, out=np.zeros(4)),
    }.items():
        with pytest.raises(TypeError, match=re.escape(call)):
            told()


async def test_operators_of_numpys_arrays_compute_on_the_device(device: ta.Device) -> None:
    host = np.arange(1, 5)
    x = await device.put(host)
    names = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge eq ne"
    for operator_name in names.split():
        of_two = getattr(operator, operator_name)
        for given in (host[::-1].copy(), *([] if operator_name == "matmul" else [host.dtype.type(2)])):
            np.testing.assert_array_equal(await (await of_two(given, x)).to_host(), of_two(given, host))
    with pytest.raises(TypeError, match=re.escape("await ta.arrays.add(x1, x2)")):
        host += x
