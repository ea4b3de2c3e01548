"""`vmap` of each function with a gradient, held against a loop over the examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import Case, numbers
from test_functions import CASES, NUMBERED
from test_kinds_of_operands import REFUSED, case_of

import trio_accel as ta
from trio_accel.devices import ArrayFunction
from trio_accel.gradients._batched import kind_of

a: Any = ta.arrays
SIZE = 3
FIRST_CASES = [(name, 0) for name in CASES]
# Functions with a gradient, but without a batch, and refused cases of other functions.
UNBATCHED = [
    "arrays.segmented_reduce",
    "linalg.lstsq",
    "ndimage.bilateral_filter",
    "nn.dropout",
    "signal.evaluate_spline",
    "signal.stft",
    "signal.welch",
    "sparse.spmm",
    "sparse.spmv",
    "sparse.spsolve_triangular",
]
REFUSED_CASES = {("arrays.interp", 1), ("arrays.interp", 2), ("arrays.polyval", 0)}
# Their bodies ask for operations without a batch.
UNBATCHED_BODIES = {
    "arrays.gradient",
    "arrays.vander",
    "linalg.cross",
    "ndimage.affine_transform",
    "ndimage.map_coordinates",
    "ndimage.shift",
    "ndimage.zoom",
    "nn.cross_entropy_grad",
    "nn.glu_grad",
}
# Their values have a batch, but their gradients add to elements by indices of an expression.
UNBATCHED_GRADIENTS = {
    *("arrays.diag", "arrays.gather_nd", "arrays.median", "arrays.nanmedian", "arrays.nanpercentile"),
    *("arrays.nanquantile", "arrays.percentile", "arrays.quantile", "arrays.take_along_axis"),
    *("arrays.top_k", "arrays.tril", "arrays.triu", "nn.cross_entropy", "nn.glu", "nn.nll_loss"),
    *(f"fft.{back}{kind}{n}" for back in ("", "i") for kind in ("dct", "dst") for n in ("", "n")),
    *("fft.fftshift", "fft.hilbert", "fft.ifftshift", "ndimage.convolve", "ndimage.correlate"),
    *(f"ndimage.{name}_filter" for name in ("maximum", "median", "minimum", "percentile", "rank")),
    *(f"ndimage.{name}_filter{n}" for name in ("gaussian", "uniform") for n in ("", "1d")),
    *("ndimage.maximum_filter1d", "ndimage.minimum_filter1d", "ndimage.gaussian_laplace"),
    *("ndimage.laplace", "ndimage.prewitt", "ndimage.rotate", "ndimage.sobel"),
}
COUNTS = {"rule": 118, "elements": 116, "axes": 63, "composed": 51, "rows": 29, "shapes": 14, "": 10}

pytestmark = pytest.mark.filterwarnings("error:.*was never awaited:RuntimeWarning")


def several(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


async def on_host(result: Any) -> list[Any]:
    """Await a call, or take views, and copy the arrays to the host."""
    made = result if isinstance(result, (ta.AccelRef, tuple, list)) else await result
    return [await array.to_host() for array in several(made)]


def batches_of(case: Case) -> list[Any]:
    """Return the operands of examples, stacked."""
    return [
        np.stack([numbers(shape, seed + 10 * row, case.low, case.high) for row in range(SIZE)])
        for seed, shape in enumerate(case.shapes)
    ]


async def looped(device: ta.Device, f: Any, batches: list[Any], in_axes: Any, rows: Any = range(SIZE)) -> Any:
    """Return the stacked results of a loop; None if the backend lacks the function."""
    results = list[Any]()
    for row in rows:
        operands = [
            await device.put(batch[0 if axis is None else row])
            for batch, axis in zip(batches, in_axes, strict=True)
        ]
        try:
            results.append(await on_host(f(*operands)))
        except REFUSED:
            return None
    return [np.stack(same) for same in zip(*results, strict=True)]


def check(found: Any, wanted: Any, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    assert len(found) == len(wanted)
    for result, want in zip(found, wanted, strict=True):
        assert result.dtype == want.dtype
        assert result.shape == want.shape
        np.testing.assert_allclose(result, want, rtol=rtol, atol=atol)


def skip_refused(name: str, number: int) -> None:
    if name in UNBATCHED or (name, number) in REFUSED_CASES:
        pytest.skip("it is refused, see test_functions_without_a_batch_are_refused_by_name")


@contextmanager
def allowed(name: str) -> Iterator[None]:
    """Let the functions whose bodies have no batch be refused; what is not refused is compared."""
    if name not in UNBATCHED_BODIES:
        yield
        return
    with suppress(ta.NotSupportedError):
        yield


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_a_batch_has_the_results_of_a_loop(device: ta.Device, name: str, number: int) -> None:
    skip_refused(name, number)
    case = case_of(name, number)
    batches, count = batches_of(case), len(case.shapes)
    # All operands, the first one, or all but the first one differ between examples.
    kinds = (
        [(0,) * count]
        if count == 1
        else [(0,) * count, (0, *[None] * (count - 1)), (None, *[0] * (count - 1))]
    )
    for in_axes in kinds:
        wanted = await looped(device, case.f, batches, in_axes)
        if wanted is None:
            pytest.skip(f"{BACKEND} has no {name}")
        moved = [
            await device.put(batch[0] if axis is None else np.ascontiguousarray(np.moveaxis(batch, 0, -1)))
            for batch, axis in zip(batches, in_axes, strict=True)
        ]
        last = tuple([None if axis is None else -1 for axis in in_axes])
        with allowed(name):
            check(
                await on_host(ta.vmap(case.f, in_axes=last, out_axes=-1)(*moved)),
                [np.moveaxis(want, 0, -1) for want in wanted],
            )


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_of_a_batch_are_those_of_a_loop(device: ta.Device, name: str, number: int) -> None:
    """Of the batch by examples and by shared operands, and of each example within the batch."""
    skip_refused(name, number)
    case = case_of(name, number)
    batches = batches_of(case)
    rows = [[await device.put(batch[row]) for batch in batches] for row in range(SIZE)]
    try:
        shape = (await (await (case.f(*rows[0]) * 1.0)).to_host()).shape
    except REFUSED:
        pytest.skip(f"{BACKEND} has no {name}")
    weights = np.stack([numbers(shape, 99 + row) for row in range(SIZE)])
    of_rows = [await device.put(weight) for weight in weights]
    operands, of_batch = [await device.put(batch) for batch in batches], await device.put(weights)

    def value(parameters: Any, weight: Any) -> Any:
        return a.sum(case.f(*parameters) * weight)

    def total(parameters: Any) -> Any:
        return a.sum(ta.vmap(value)(parameters, of_batch))

    def shared(parameters: Any) -> Any:
        return a.sum(ta.vmap(lambda weight: value(parameters, weight))(of_batch))

    slopes = [await on_host(await ta.grad(value)(*pair)) for pair in zip(rows, of_rows, strict=True)]
    wanted = [np.stack(same) for same in zip(*slopes, strict=True)]
    refusal = ""
    try:
        check(await on_host(await ta.grad(total)(operands)), wanted, 1e-7, 1e-8)
        check(await on_host(ta.gather(*ta.vmap(ta.grad(value))(operands, of_batch))), wanted, 1e-7, 1e-8)
    except ta.NotSupportedError as error:
        refusal = str(error)
    assert refusal == "" or (name in UNBATCHED_GRADIENTS | UNBATCHED_BODIES and "vmap: " in refusal)
    if refusal:
        return
    slopes = [await on_host(await ta.grad(value)(rows[0], weight)) for weight in of_rows]
    wanted = [np.sum(same, axis=0) for same in zip(*slopes, strict=True)]
    check(await on_host(await ta.grad(shared)(rows[0])), wanted, 1e-7, 1e-8)


@pytest.mark.parametrize("kind", ["nested", "step", "reversed", "float32", "empty"])
@pytest.mark.parametrize(("name", "number"), FIRST_CASES)
async def test_other_batches(device: ta.Device, name: str, number: int, kind: str) -> None:
    skip_refused(name, number)
    case = case_of(name, number)
    batches = batches_of(case)
    if kind == "float32":
        batches = [batch.astype(np.float32) for batch in batches]
    wanted = await looped(device, case.f, batches, (0,) * len(batches))
    if wanted is None:
        pytest.skip(f"{BACKEND} has no {name}")
    with allowed(name):
        await compare(device, case, batches, wanted, kind)


async def compare(device: ta.Device, case: Case, batches: list[Any], wanted: list[Any], kind: str) -> None:
    f, operands = ta.vmap(case.f), [await device.put(batch) for batch in batches]
    result: Any
    if kind == "nested":
        pairs = [await device.put(np.stack([batch, batch[::-1]], axis=1)) for batch in batches]
        result = ta.vmap(ta.vmap(case.f), in_axes=1, out_axes=1)(*pairs)
        wanted = [np.stack([want, want[::-1]], axis=1) for want in wanted]
    elif kind == "step":
        result = await ta.step(lambda *args: [part * 1 for part in several(f(*args))])(*operands)
    elif kind == "reversed":
        result = f(*[operand[::-1] for operand in operands])
        wanted = [want[::-1] for want in wanted]
    elif kind == "empty":
        result, wanted = f(*[operand[:0] for operand in operands]), [want[:0] for want in wanted]
    else:
        result = f(*operands)
    check(await on_host(result), wanted, *([2e-4, 2e-4] if kind == "float32" else []))


def function_of(name: str) -> ArrayFunction:
    room, _, base = name.partition(".")
    public = getattr(import_module(f"trio_accel.{room}"), base)
    return getattr(public, "asked", None) or ArrayFunction(name, public, "value")


def test_each_function_with_a_gradient_has_a_kind_of_batch_or_is_refused() -> None:
    found = {
        name: kind_of(function_of(name))
        for name, (word, _) in ta.gradients.words().items()
        if word in ("rule", "derived")
    }
    assert sorted(name for name, kind in found.items() if not kind) == UNBATCHED
    kinds = list(found.values())
    assert {kind: kinds.count(kind) for kind in COUNTS} == COUNTS
    assert len(kinds) == sum(COUNTS.values())


STEPS: list[tuple[Any, tuple[tuple[int, ...], ...]]] = [
    (a.argmax, ((3, 4),)),
    (lambda x: a.argmin(x, keepdims=True), ((3, 4),)),
    (lambda x: a.argmax(x, axis=0), ((3, 4),)),
    (a.argmax, ((),)),
    (lambda x: a.argsort(x, axis=0, descending=True), ((3, 4),)),
    (lambda x: a.all(x > 0), ((3, 4),)),
    (lambda x: a.count_nonzero(x > 0, axis=1), ((3, 4),)),
    (a.sign, ((3, 4),)),
    (lambda x, y: a.searchsorted(np.linspace(-2, 2, 5), x + y), ((3, 4), (4,))),
    (lambda x: a.digitize(x, np.linspace(-2, 2, 5)), ((3,),)),
    (lambda x: a.one_hot((x > 0).cast("int64"), 2), ((3,),)),
    (lambda x: a.isin(a.round(x), np.array([0.0, 1.0])), ((3,),)),
    (lambda x: a.full_like(x, 2.0, dtype="float32") + x, ((3, 4),)),
    (ta.linalg.matrix_rank, ((3, 4),)),
    (a.sum, ((),)),
    (a.softmax, ((),)),
    (lambda x: a.std(x, keepdims=True), ((),)),
    (lambda x: a.median(x, keepdims=True), ((),)),
    (lambda x, y: x - y, ((), (2, 3))),
    (lambda x, y: x @ y, ((4,), (2, 4, 3))),
    (lambda x, y: y @ x, ((4,), (2, 3, 4))),
    (lambda x, y: a.where(x > 0, y, 0), ((3, 1), (2, 3, 4))),
    (lambda x: x[..., None, ::-2], ((3, 4),)),
    (lambda x: x.cast("float32"), ((3, 4),)),
    (lambda x: a.concat([x, np.ones((2, 4))], axis=0), ((3, 4),)),
    (lambda x: a.stack([x, np.ones(4)], axis=-1), ((4,),)),
    (lambda x, y: a.take(x, a.argsort(y, axis=-1), axis=1), ((3, 4), (2, 4))),
    (lambda x: a.take(np.arange(4.0), a.argsort(x)), ((4,),)),
    (lambda x, y: a.gather_nd(x, (a.argsort(y), np.array(1))), ((3, 4), (3,))),
    (lambda x: a.sum(x * a.conj(x * (1 + 2j))), ((3,),)),
    (lambda x: ta.nn.embedding((x > 0).cast("int64"), np.ones((2, 3))), ((4,),)),
    (lambda x: ta.jit.elementwise("x * s + 1", name="own")(x, 2.0), ((3,),)),
    (lambda x: ta.jit.elementwise("s = x + 1; d = x - 1", outputs=("s", "d"))(x)[1], ((3,),)),
    (lambda x: ta.nn.conv2d(x, np.ones((2, 3, 2, 2)), np.ones(2)), ((3, 4, 4),)),
]


@pytest.mark.parametrize("number", range(len(STEPS)))
async def test_other_functions_and_kinds_of_operands(device: ta.Device, number: int) -> None:
    f, shapes = STEPS[number]
    batches = batches_of(Case(f, shapes))
    wanted = await looped(device, f, batches, (0,) * len(shapes))
    if wanted is None:
        pytest.skip(f"{BACKEND} does not compute it")
    check(await on_host(ta.vmap(f)(*[await device.put(batch) for batch in batches])), wanted)
    # NumPy arrays are put next to the first array.
    if len(shapes) > 1:
        check(await on_host(ta.vmap(f)(await device.put(batches[0]), *batches[1:])), wanted)


async def test_arguments_and_results_are_nested(device: ta.Device) -> None:
    x, w = numbers((5, 3), 1), numbers((3, 2), 2)
    scale, b = numbers((4, 5), 3), numbers((2,), 4)
    put = device.put

    def f(x: Any, layers: Any, *, scale: Any, power: Any) -> Any:
        y = x @ layers["w"] + layers["b"][0]
        return {"y": y * scale, "parts": (y**power, layers["b"][0])}

    parameters = {"w": await put(w), "b": [await put(b)]}
    scales = await put(np.ascontiguousarray(scale.T))
    made = ta.vmap(f, in_axes=(0, None))(
        await put(x), parameters, scale=scales[:, :1], power=await put(np.full(5, 2.0))
    )
    y = x @ w + b
    found = await ta.gather(made["y"], *made["parts"])
    for result, want in zip(found, (y * scale.T[:, :1], y**2, np.tile(b, (5, 1))), strict=True):
        np.testing.assert_allclose(await result.to_host(), want)

    stacked = {"w": await put(np.stack([w] * 5, axis=1)), "b": [await put(b)]}
    axes: Any = {"y": 1, "parts": (-1, None)}
    made = ta.vmap(
        lambda x, layers: f(x, layers, scale=1.0, power=2.0),
        in_axes=(0, {"w": 1, "b": [None]}),
        out_axes=axes,
    )(await put(x), stacked)
    found = await ta.gather(made["y"], *made["parts"])
    for result, want in zip(found, (y.T, (y**2).T, b), strict=True):
        np.testing.assert_allclose(await result.to_host(), want)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"weight": np.array([0.0, 1.0, 2.0, 0.5])}]
)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
async def test_a_cross_entropy_of_hidden_classes_and_ignored_labels(
    device: ta.Device, reduction: str, options: Any
) -> None:
    logits = numbers((2, 3, 4), 1)
    if "label_smoothing" not in options:
        logits[:, :, 0] = -np.inf
    labels = np.array([[1, -100, 2], [3, 2, -100]])

    def loss(logits: Any, labels: Any) -> Any:
        return ta.nn.cross_entropy(logits, labels, reduction=reduction, **options)

    wanted = await looped(device, loss, [logits, labels], (0, 0), range(2))
    check(await on_host(ta.vmap(loss)(await device.put(logits), labels)), wanted)


async def test_a_function_returns_several_results_of_a_call(device: ta.Device) -> None:
    x = numbers((4, 3, 3), 1)
    q, r = await ta.vmap(ta.linalg.qr)(await device.put(x))
    want_q, want_r = np.linalg.qr(x)
    np.testing.assert_allclose(await q.to_host(), want_q, atol=1e-12)
    np.testing.assert_allclose(await r.to_host(), want_r, atol=1e-12)


async def test_a_batch_is_one_request_and_its_plan_is_kept(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = await device.put(numbers((5, 3))), await device.put(numbers((3,)))
    asked: list[Any] = []
    own: Any = device
    whole = own.ask_chain

    def ask_chain(chain: Any) -> Any:
        asked.append(chain)
        return whole(chain)

    monkeypatch.setattr(own, "ask_chain", ask_chain)
    per_example = ta.vmap(ta.grad(lambda w, x: a.sum(a.sin(x) * w) ** 2), in_axes=(None, 0))
    for _ in range(3):
        await per_example(w, x)
    assert len(asked) == 3
    assert len({chain.key for chain in asked}) == 1


async def test_second_derivatives(device: ta.Device) -> None:
    x, w = numbers((5, 3), 1), numbers((3,), 2)
    operands = await device.put(x), await device.put(w)

    def value(w: Any, x: Any) -> Any:
        return a.sum(a.sin(x * w)) ** 2

    # Of each example, and of the sum.
    found = await ta.vmap(ta.gradients.hessian(value), in_axes=(None, 0))(operands[1], operands[0])
    sines, cosines = np.sin(x * w), np.cos(x * w) * x
    totals = sines.sum(1)[:, None, None]
    wanted = 2 * cosines[:, :, None] * cosines[:, None] - 2 * totals * np.eye(3) * (sines * x * x)[:, None]
    np.testing.assert_allclose(await found.to_host(), wanted, atol=1e-12)
    total = ta.gradients.hessian(lambda w: a.sum(ta.vmap(lambda x: value(w, x))(operands[0])))
    np.testing.assert_allclose(await (await total(operands[1])).to_host(), wanted.sum(0), atol=1e-12)


async def test_gradients_through_a_batch_in_a_step(device: ta.Device) -> None:
    host = numbers((5,), 1)
    derived: Any = ta.value_and_grad(lambda x: a.sum(ta.vmap(lambda row: a.sin(row) * a.sum(x))(x)))
    value, slope = await ta.step(derived)(await device.put(host))
    np.testing.assert_allclose(await value.item(), np.sin(host).sum() * host.sum())
    wanted = np.cos(host) * host.sum() + np.sin(host).sum()
    np.testing.assert_allclose(await slope.to_host(), wanted, rtol=1e-12)


async def test_functions_with_gradients_of_their_own(device: ta.Device) -> None:
    x = await device.put(numbers((5, 3)))
    own: Any = ta.custom_gradient(lambda x: a.floor(x) + x, lambda g, y, x: 3 * g)
    host = await x.to_host()
    np.testing.assert_allclose(await (await ta.vmap(own)(x)).to_host(), np.floor(host) + host)
    found = await ta.vmap(ta.grad(lambda x: a.sum(own(x) * x)))(x)
    np.testing.assert_allclose(await found.to_host(), np.floor(host) + 4 * host)
    with pytest.raises(ta.NotSupportedError, match=r"vmap: custom_gradient .*derive within vmap"):
        await ta.grad(lambda x: a.sum(ta.vmap(own)(x)))(x)
    for make in (ta.grad, lambda f: ta.vmap(ta.grad(f))):
        stopped = await make(lambda x: a.sum(ta.stop_gradient(x) * x))(x)
        np.testing.assert_allclose(await stopped.to_host(), host)
        checked: Any = ta.checkpoint(a.sin)
        found = await make(lambda x, f=checked: a.sum(f(x)))(x)
        np.testing.assert_allclose(await found.to_host(), np.cos(host))
    inside = ta.checkpoint(lambda x: a.sum(ta.vmap(lambda row: a.sum(a.sin(row)))(x)))
    np.testing.assert_allclose(await (await ta.grad(inside)(x)).to_host(), np.cos(host))


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda x: ta.vmap(a.add)(x[0], x), ValueError, "must have the same length, got the lengths 3, 5"),
        (
            ta.vmap(a.sum, in_axes=2),
            ValueError,
            r"in_axes: axis 2 is out of range for shape \(5, 3\)",
        ),
        (
            ta.vmap(a.sum, in_axes=None),
            ValueError,
            "must have the same length, and no argument has one",
        ),
        (
            ta.vmap(a.sum, in_axes=(0, 1)),
            ValueError,
            r"in_axes must be nested like .*got \(0, 1\)",
        ),
        (ta.vmap(a.sum, in_axes={"x": 0}), ValueError, "in_axes must be nested like"),
        (ta.vmap(a.sin, out_axes=(0, 0)), ValueError, "out_axes must be nested like"),
        (ta.vmap(a.sin, out_axes=2), ValueError, "out_axes: axis 2 is out of range for 2 axes"),
        (ta.vmap(a.sin, out_axes=None), ValueError, "out_axes must be an integer for a result"),
        (lambda x: ta.vmap(a.add)(x, 2.0), TypeError, "must be an array, got float.*or pass None in in_axes"),
        (lambda x: ta.vmap(a.sin)(np.ones(3)), TypeError, "no argument is on a device"),
        (ta.vmap(lambda x: 3.0), TypeError, "the function must return calls, got float"),
        (
            ta.vmap(lambda x: a.sum(x).item()),
            TypeError,
            "must return arrays of the device, and item",
        ),
    ],
)
async def test_wrong_arguments(device: ta.Device, make: Any, kind: type[Exception], says: str) -> None:
    x = await device.put(numbers((5, 3)))
    with pytest.raises(kind, match=f"^vmap: .*{says}"):
        await make(x)


@pytest.mark.parametrize("axes", [0.5, True, (0, "1")])
def test_axes_are_integers(axes: Any) -> None:
    for label in ("in_axes", "out_axes"):
        with pytest.raises(TypeError, match=f"^vmap: {label} must be integers or None, got"):
            ta.vmap(a.sin, **{label: axes})


async def test_an_async_function_is_refused(device: ta.Device) -> None:
    async def f(x: Any) -> Any:
        return await a.sin(x)

    with pytest.raises(TypeError, match="vmap: the function must not be async"):
        await ta.vmap(f)(await device.put(numbers((5, 3))))


async def test_functions_without_a_batch_are_refused_by_name(device: ta.Device) -> None:
    x = await device.put(numbers((5, 3)))
    out, generator = await device.zeros((3,)), ta.random.Generator(device, seed=3)
    refused: list[tuple[Any, str]] = [
        (lambda x: ta.linalg.lstsq(a.stack([x, x]), x[:2])[0], "linalg.lstsq"),
        (lambda x: a.segmented_reduce(x, np.array([0, 3])), "arrays.segmented_reduce"),
        (lambda x: a.interp(x, x, x), "arrays.searchsorted"),
        (lambda x: a.sin(x, out=out), "arrays.sin"),
        (lambda x: ta.linalg.matmul(x, np.ones((3, 3)), out=out), "linalg.matmul"),
        (lambda x: ta.ndimage.laplace(x, output=out), "ndimage.laplace .* leave output= away"),
        (lambda x: x.assign(0.0), "assign"),
        (lambda x: a.lexsort([x, x]), "arrays.lexsort"),
        (ta.jit.elementwise("x * i(0)", name="own"), "jit.own"),
        (lambda x: ta.jit.elementwise("x[int64(y)] + y", name="own")(x, x), "jit.own"),
        (lambda x: x + generator.normal((3,)), "random.*would draw the same numbers"),
        (lambda x: ta.nn.dropout(x, generator=generator)[0], "would draw the same numbers"),
    ]
    for f, says in refused:
        with pytest.raises(ta.NotSupportedError, match=f"vmap: .*{says}"):
            await ta.vmap(f)(x)
