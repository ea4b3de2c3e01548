"""`grad`, `value_and_grad`, `vjp`, `custom_gradient`, `stop_gradient` and `slopes=`, and their refusals."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trio_accel as ta

a: Any = ta.arrays
HOST = np.linspace(0.2, 1.4, 6)


async def test_argnums(device: ta.Device) -> None:
    x, y = await device.put(HOST), await device.put(HOST[::-1].copy())

    def f(x: Any, y: Any, k: float = 1.0) -> Any:
        return a.sum(x * x * y) * k

    np.testing.assert_allclose(await (await ta.grad(f)(x, y)).to_host(), 2 * HOST * HOST[::-1])
    np.testing.assert_allclose(await (await ta.grad(f, argnums=1)(x, y, k=2.0)).to_host(), 2 * HOST**2)
    np.testing.assert_allclose(await (await ta.grad(f, argnums=-1)(x, y)).to_host(), HOST**2)
    value, (by_y, by_x) = await ta.value_and_grad(f, argnums=(1, 0))(x, y)
    np.testing.assert_allclose(await value.item(), (HOST**2 * HOST[::-1]).sum())
    np.testing.assert_allclose(await by_x.to_host(), 2 * HOST * HOST[::-1])
    np.testing.assert_allclose(await by_y.to_host(), HOST**2)


async def test_train_has_the_same_functions() -> None:
    assert ta.train.grad is ta.grad
    assert ta.train.value_and_grad is ta.value_and_grad


async def test_vjp_of_a_result_with_axes_and_pulled_twice(device: ta.Device) -> None:
    x, y = await device.put(HOST), await device.put(HOST + 1)
    value, pull = await ta.vjp(lambda x, y: x * y, x, y)
    np.testing.assert_allclose(await value.to_host(), HOST * (HOST + 1))
    for g in (np.ones(6), np.arange(6.0)):
        by_x, by_y = await pull(await device.put(g))
        np.testing.assert_allclose(await by_x.to_host(), g * (HOST + 1))
        np.testing.assert_allclose(await by_y.to_host(), g * HOST)
    with pytest.raises(ValueError, match=r"vjp: the gradient must have shape \(6,\), got \(2,\)"):
        await pull(await device.put(np.ones(2)))


async def test_the_value_and_its_gradients_are_one_request(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = await device.put(HOST)
    asked: list[Any] = []
    own: Any = x.device
    whole = own.ask_chain

    def ask_chain(chain: Any) -> Any:
        asked.append(chain)
        return whole(chain)

    monkeypatch.setattr(own, "ask_chain", ask_chain)
    await ta.value_and_grad(lambda x: a.sum(a.sin(x) * ta.stop_gradient(x)))(x)
    assert len(asked) == 1


async def test_a_value_that_does_not_depend_on_an_array_has_zeros(device: ta.Device) -> None:
    x, y = await device.put(HOST), await device.put(HOST)
    for f in (
        lambda x: a.sum(y * 2),
        lambda x: a.sum(a.sign(x)),
        lambda x: a.sum(ta.stop_gradient(x)),
        lambda x: a.sum(a.zeros_like(x)),
    ):
        np.testing.assert_array_equal(await (await ta.grad(f)(x)).to_host(), np.zeros(6))


async def test_stop_gradient(device: ta.Device) -> None:
    x = await device.put(HOST)
    found = await ta.grad(lambda x: a.sum(x * ta.stop_gradient(x)))(x)
    np.testing.assert_allclose(await found.to_host(), HOST)
    kernel = ta.jit.elementwise("x * stop_gradient(x * x)")
    np.testing.assert_allclose(await (await kernel(x)).to_host(), HOST**3)
    np.testing.assert_allclose(await (await ta.grad(lambda x: a.sum(kernel(x)))(x)).to_host(), HOST**2)


async def test_slopes_by_hand(device: ta.Device) -> None:
    """An input with a text has that gradient, and the other ones have the derived gradients."""
    kernel = ta.jit.elementwise("y = exp(x) * w", slopes={"x": "10 * g * y"}, name="own")
    x, w = await device.put(HOST), await device.put(HOST + 1)
    by_x, by_w = await ta.grad(lambda x, w: a.sum(kernel(x, w)), argnums=(0, 1))(x, w)
    np.testing.assert_allclose(await by_x.to_host(), 10 * np.exp(HOST) * (HOST + 1))
    np.testing.assert_allclose(await by_w.to_host(), np.exp(HOST))


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (
            {"slopes": {"z": "g"}},
            ValueError,
            "slopes: 'z' is not an input that is read element by element: x",
        ),
        ({"slopes": {"x": "g * q"}}, ValueError, r"slopes\['x'\] reads q; it may read g, x, y"),
        ({"slopes": {"x": "g *"}}, ValueError, r"slopes\['x'\]"),
        ({"slopes": {"x": "s = g; t = g"}}, ValueError, r"slopes\['x'\] has several results"),
        ({"slopes": "g"}, TypeError, "slopes must be a dict of texts"),
        (
            {"slopes": {"x": "g"}, "outputs": ("y", "z")},
            ValueError,
            "slopes need an expression with one result",
        ),
    ],
)
def test_refused_slopes(options: dict[str, Any], kind: type[Exception], says: str) -> None:
    text = "y = x * x; z = x" if "outputs" in options else "y = x * x"
    with pytest.raises(kind, match=says):
        ta.jit.elementwise(text, **options)
    with pytest.raises(ValueError, match="rename the input g"):
        ta.jit.elementwise("g * x", slopes={"x": "g"})


async def test_custom_gradient(device: ta.Device) -> None:
    asked: list[int] = []

    def rule(g: Any, y: Any, x: Any, w: Any) -> Any:
        asked.append(1)
        return 3 * g * y, None

    f = ta.custom_gradient(lambda x, w: a.exp(a.sign(x) * w), rule)
    x, w = await device.put(HOST), await device.put(HOST * 0 + 0.5)
    slope = ta.grad(lambda x: a.sum(f(x, w) * 2))
    for _ in range(2):
        np.testing.assert_allclose(await (await slope(x)).to_host(), 6 * np.exp(0.5) * np.ones(6))
    assert len(asked) == 2
    np.testing.assert_allclose(await (await f(x, w)).to_host(), np.exp(0.5) * np.ones(6))
    # None is a gradient of 0.
    np.testing.assert_array_equal(await (await ta.grad(lambda w: a.sum(f(x, w)))(w)).to_host(), np.zeros(6))


@pytest.mark.parametrize(
    ("rule", "kind", "says"),
    [
        (lambda g, y, x: g[:2], ValueError, r"gradient of argument 0 must have shape \(6,\), got \(2,\)"),
        (
            lambda g, y, x: g.cast("float32"),
            TypeError,
            "gradient of argument 0 must be of float64, got float32",
        ),
        (
            lambda g, y, x: 3.0,
            TypeError,
            "gradient of argument 0 must be a call, an array or None, got float",
        ),
        (lambda g, y, x: (g, g), ValueError, "a gradient or None for each of 1 arguments, got 2"),
    ],
)
async def test_wrong_rules(device: ta.Device, rule: Any, kind: type[Exception], says: str) -> None:
    f = ta.custom_gradient(a.floor, rule)
    x = await device.put(HOST)
    with pytest.raises(kind, match=says):
        await ta.grad(lambda x: a.sum(f(x)))(x)
    with pytest.raises(TypeError, match="custom_gradient: rule must be a function, got int"):
        ta.custom_gradient(a.floor, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("f", "kind", "says"),
    [
        (
            lambda x: a.sum(a.cumulative_prod(x, include_initial=True)),
            ta.NotSupportedError,
            "arrays.cumulative_prod has no gradient, because include_initial adds",
        ),
        (
            lambda x: a.sum(
                ta.nn.scaled_dot_product_attention(*[x.reshape(1, 2, 3)] * 3, attn_mask=x[:4].reshape(2, 2))
            ),
            ta.NotSupportedError,
            "nn.scaled_dot_product_attention has no gradient by attn_mask",
        ),
        (lambda x: x * 2, ValueError, r"value_and_grad: the value must be a scalar, got shape \(6,\); add"),
        (lambda x: 3.0, TypeError, "value_and_grad: the function must return a call, got float"),
    ],
)
@pytest.mark.filterwarnings("error:.*was never awaited:RuntimeWarning")
async def test_invalid_arguments_are_refused(
    device: ta.Device, f: Any, kind: type[Exception], says: str
) -> None:
    x = await device.put(HOST)
    with pytest.raises(kind, match=says):
        await ta.value_and_grad(f)(x)
    gc.collect()


@pytest.mark.filterwarnings("error:.*was never awaited:RuntimeWarning")
async def test_a_loss_on_the_host_is_refused_without_advice_to_await(device: ta.Device) -> None:
    x = await device.put(HOST)
    nothing = "; leave it out, because a function that gets gradients awaits nothing$"
    cases: list[tuple[Any, str]] = [
        (lambda x: a.sum(x).item(), r"and item gives a number of the host; leave \.item\(\) out$"),
        (lambda x: a.sum(x).to_host(), r"and to_host gives an array of the host; leave \.to_host\(\) out$"),
        (lambda x: a.sum(x).item() * 2.0, f"^item gives a number of the host{nothing}"),
        (lambda x: float(a.sum(x)), f"^float\\(\\) of a Call: its element is on the device{nothing}"),
        (lambda x: int(a.sum(x)), f"^int\\(\\) of a Call: its element is on the device{nothing}"),
        (np.asarray, f"^a Call is not a host array{nothing}"),
        (np.sum, r"^np\.sum of a Call: write ta\.arrays\.sum\(x\)$"),
    ]
    for f, says in cases:
        for make in (ta.grad, ta.value_and_grad):
            with pytest.raises(TypeError, match=says):
                await make(f)(x)
        with pytest.raises(TypeError, match=says):
            await ta.vjp(f, x)
    with pytest.raises(ValueError, match=r"^item: the number is not known before .*; leave item\(\) out"):
        await ta.grad(lambda x: a.sum(x * a.sum(x).item()))(x)
    # Outside of the function, the advice is to await.
    with pytest.raises(TypeError, match=r"use float\(await call\.item\(\)\)$"):
        float(a.sum(x))  # type: ignore[arg-type]
    gc.collect()


def test_a_blocking_namespace_in_a_loss_names_the_function_to_compose() -> None:
    with ta.blocking("cpu", options=ta.DeviceOptions(isolation="inline")) as b:
        x = b.xp.asarray(HOST)
        with pytest.raises(RuntimeError, match=r"waits for none; write ta\.arrays\.sum\(\.\.\.\)$"):
            b.get(ta.grad(b.xp.sum)(x))
        with pytest.raises(RuntimeError, match=r"^get: a function that gets gradients .*; leave it out$"):
            b.get(ta.grad(lambda x: b.get(a.sum(x)))(x))


@pytest.mark.filterwarnings("error:.*was never awaited:RuntimeWarning")
async def test_gradients_without_await_name_the_await(device: ta.Device) -> None:
    x = await device.put(HOST)

    def f(x: Any) -> Any:
        return a.sum(x * x)

    makes: dict[str, Callable[[], Any]] = {
        "ta.grad(f)(...)": lambda: ta.grad(f)(x),
        "ta.value_and_grad(f)(...)": lambda: ta.value_and_grad(f)(x),
        "ta.vjp(f, ...)": lambda: ta.vjp(f, x),
    }
    _, pull = await ta.vjp(f, x)
    makes["pull(g)"] = lambda: pull(1.0)
    for text, make in makes.items():
        says = re.escape(f"await it first: (await {text})")
        uses: list[Callable[[Any], object]] = [
            lambda slope: 0.1 * slope,
            lambda slope: slope * 2.0,
            lambda slope: slope[0],
            lambda slope: [*slope],
        ]
        for use in uses:
            with pytest.raises(TypeError, match=says):
                use(make())
        with pytest.raises(TypeError, match="it was not awaited"):
            await (x - make())
        unawaited = make()
        with pytest.raises(AttributeError, match=rf"{says}\.to_host, or"):
            unawaited.to_host()
        unawaited.close()
    gc.collect()


async def test_arguments_without_a_gradient(device: ta.Device) -> None:
    for host, says in (
        (np.arange(3), "arguments with gradients must be floating or complex, got int64"),
        (np.array([True]), "must be floating or complex, got bool"),
    ):
        x = await device.put(host)
        with pytest.raises(TypeError, match=says):
            await ta.grad(a.sum)(x)
    with pytest.raises(
        TypeError, match=r"must be arrays on a device, in dicts and lists, got ndarray; copy it to"
    ):
        await ta.grad(a.sum)(HOST)
    x = await device.put(HOST)
    with pytest.raises(ValueError, match="argnums: 1 is out of range for 1 arguments"):
        await ta.grad(a.sum, argnums=1)(x)
    with pytest.raises(TypeError, match="argnums must be an integer or a list of integers"):
        ta.grad(a.sum, argnums="x")  # type: ignore[arg-type]


async def test_complex_numbers_between_real_numbers(device: ta.Device) -> None:
    """The gradient of a real value by real arrays passes complex arrays."""
    x = await device.put(HOST)

    def f(x: Any) -> Any:
        z = ta.fft.fft(x) * (0.5 - 1.5j)
        z = z * z / (2 + a.conj(z)) + a.exp(z * 0.1) - z**2 * x
        return a.sum(a.abs(z)) + a.sum(a.real(ta.fft.ifft(z)) * x) + a.sum(a.real(z @ z))

    found = await (await ta.grad(f)(x)).to_host()
    direction = np.random.default_rng(1).uniform(-1, 1, 6)
    sides = [await (await f(await device.put(HOST + h * direction))).item() for h in (1e-6, -1e-6)]
    np.testing.assert_allclose((found * direction).sum(), (sides[0] - sides[1]) / 2e-6, rtol=1e-7)


def test_each_public_function_has_one_word() -> None:
    found = ta.gradients.words()
    assert [name for name, (word, _) in found.items() if not word] == []
    assert {word for word, _ in found.values()} == {"derived", "rule", "step", "refused"}
    assert [name for name, (word, reason) in found.items() if (word == "refused") != bool(reason)] == []
