"""Arguments for every public function, found by names and annotations of its parameters or from a table."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

import trio_accel as ta

Array: TypeAlias = npt.NDArray[Any]
Layout: TypeAlias = Literal["plain", "transposed", "reversed", "every other"]
LAYOUTS: tuple[Layout, ...] = ("plain", "transposed", "reversed", "every other")

_SHAPES = ((6, 8), (6, 6), (8,), (2, 4, 8), (2, 4, 8, 8), (2, 4, 6, 6, 6), (3, 3), (4,))
# The numbers that a parameter may take, by its annotation.
_NUMBERS: Mapping[str, tuple[Any, ...]] = {
    "int": (1, 2, -1, 0, 4),
    "float": (0.5, 2.0),
    "complex": (0.5,),
    "bool": (True,),
    "str": (),
    "int | Sequence[int]": (2, (2, 2), (1,), (0, 1)),
    "Sequence[int]": ((1, 0), (0,), (2, 3), (2,)),
    "Shape": ((3, 4),),
    "int | tuple[int, ...]": ((2, 3), 2),
    "slice": (),
}
_ARRAYS = ("Operand", "AccelRef", "ExpressionArgument", "Array")
_INTEGERS = ("indices", "index", "labels", "target", "sorter", "repeats", "order", "x_indices", "starts")
_MASKS = ("mask", "condition", "where", "x_mask")
_MAX_WAYS = 12
_SPECIAL = (0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e-3)


@attrs.frozen
class Drawn:
    """An array of random values.

    Attributes:
        shape: Its shape.
        kind: ``"values"`` of the dtype and the layout under test, ``"integers"``, which are 0 and 1 in int64,
            or a ``"mask"``.
        is_regular: Whether it holds no special values, such as NaN.
        is_on_host: Whether the function takes a NumPy array.
    """

    shape: tuple[int, ...]
    kind: Literal["values", "integers", "mask"] = "values"
    is_regular: bool = False
    is_on_host: bool = False

    def make(self, dtype: str, seed: int) -> Array:
        """Draw the values, the same for each seed."""
        rng = np.random.default_rng(seed)
        if self.kind == "integers":
            return rng.integers(0, 2, self.shape).astype("int64")
        if self.kind == "mask" or dtype == "bool":
            return rng.random(self.shape) < 0.5
        kind = ta.DType(dtype)
        if kind.kind in ("int", "uint"):
            return rng.integers(0, 9, self.shape).astype(kind.dtype)
        made = rng.standard_normal(self.shape) + 0.1
        if len(self.shape) > 1 and self.shape[-1] == self.shape[-2]:
            made = made @ np.swapaxes(made, -1, -2) + 2 * np.eye(self.shape[-1])
        elif seed % 2 and not self.is_regular:
            flat = made.reshape(-1)
            flat[: len(_SPECIAL)] = _SPECIAL[: flat.size]
        imaginary = 0.5j * rng.standard_normal(self.shape) if kind.kind == "complex" else 0
        return (made + imaginary).astype(kind.dtype)

    async def put(self, device: ta.Device, dtype: str, layout: Layout, seed: int) -> ta.AccelRef | Array:
        """Put it on a device, as a view with the layout."""
        array = self.make(dtype, seed)
        if self.is_on_host:
            return array
        if layout == "transposed" and array.ndim > 1:
            return (await device.put(np.ascontiguousarray(np.swapaxes(array, -1, -2)))).mT
        if layout == "reversed" and array.ndim:
            return (await device.put(np.ascontiguousarray(array[..., ::-1])))[..., ::-1]
        if layout == "every other" and array.ndim:
            wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
            wide[..., ::2] = array
            return (await device.put(wide))[..., ::2]
        return await device.put(array)


@attrs.frozen
class Computed:
    """An argument that depends on the device or the dtype under test.

    Attributes:
        make: A function of both, which may be async.
    """

    make: Callable[[ta.Device, str], Any]


@attrs.frozen
class Arguments:
    """The arguments of a call: `Drawn` and `Computed` ones, lists and tuples of these, and other values.

    Attributes:
        positional: The positional ones.
        named: The others, by name.
        following: Arguments that the result is called with, if the function makes a function.
    """

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    following: Arguments | None = None

    async def call(
        self, function: Callable[..., Any], device: ta.Device, dtype: str, layout: Layout
    ) -> tuple[list[Any], Any]:
        """Put the arrays on a device, and call a function.

        Returns:
            The arguments, and the result.
        """
        seeds = itertools.count()

        async def made(value: Any) -> Any:
            if isinstance(value, Drawn):
                return await value.put(device, dtype, layout, next(seeds))
            if isinstance(value, Computed):
                return await _awaited(value.make(device, dtype))
            # Type checkers do not know the items of a list that they narrow `Any` to.
            if type(value) in (list, tuple):
                return type(value)([await made(each) for each in value])
            return value

        positional = [await made(value) for value in self.positional]
        named = {name: await made(value) for name, value in self.named.items()}
        result = await _awaited(function(*positional, **named))
        if self.following is not None:
            _, result = await self.following.call(result, device, dtype, layout)
        return [*positional, *named.values()], result


async def _awaited(made: Any) -> Any:
    return await made if inspect.isawaitable(made) else made


def x(*shape: int) -> Drawn:
    """Draw values of the dtype under test."""
    return Drawn(shape)


def whole(*shape: int) -> Drawn:
    """Draw integers, 0 and 1."""
    return Drawn(shape, "integers")


def host(*shape: int) -> Drawn:
    """Draw values that stay on the host."""
    return Drawn(shape, is_on_host=True, is_regular=True)


def call(*positional: Any, **named: Any) -> Arguments:
    """Name the arguments of a call."""
    return Arguments(positional, named)


def _pooled(device: ta.Device, dtype: str) -> Any:
    return device.put(np.array([[[0, 3, 5, 6]]]))


async def _attended(device: ta.Device, dtype: str) -> Any:
    return await device.put(
        np.array([[[1.0, 1.5], [1.25, 2.0]]], "float64" if dtype == "float64" else "float32")
    )


def _pivots(device: ta.Device, dtype: str) -> Any:
    return device.put(np.array([1, 1, 2, 5, 4, 5], "int32"))


def _offsets(device: ta.Device, dtype: str) -> Any:
    return device.put(np.array([0, 2, 2, 6]))


def _generator(device: ta.Device, dtype: str) -> Any:
    return ta.random.Generator(device, seed=1)


def _signs(device: ta.Device, dtype: str) -> Any:
    return device.put(np.arange(96, dtype="uint8").reshape(6, 16))


def _banded(device: ta.Device, dtype: str) -> Any:
    return device.put(np.array([[0.0] + [0.5] * 7, [4.0] * 8], ta.DType(dtype).dtype))


def _table(device: ta.Device, dtype: str) -> Any:
    return device.put(np.array([[1, 0], [2, 3]], "int32"))


def _lengths(device: ta.Device, dtype: str) -> Any:
    return device.put(np.array([6, 8], "int32"))


async def _spline(device: ta.Device, dtype: str) -> Any:
    values = Drawn((6, 8), is_regular=True).make(dtype, 2)
    return await ta.signal.cubic_spline(np.arange(6.0), await device.put(values))


_DEVICE = Computed(lambda device, dtype: device)
_DTYPE = Computed(lambda device, dtype: dtype)

_PAIR = call(1.0, x(6, 8), x(6, 8))
OWN: Mapping[str, Arguments] = {
    **dict.fromkeys([
        "nn.l1_loss_grad", "nn.mse_loss_grad", "nn.huber_loss_grad", "nn.smooth_l1_loss_grad",
        "nn.kl_div_grad", "nn.binary_cross_entropy_grad", "nn.soft_margin_loss_grad",
        "nn.poisson_nll_loss_grad", "nn.hinge_embedding_loss_grad",
        "nn.binary_cross_entropy_with_logits_grad",
    ], _PAIR),
    "nn.gaussian_nll_loss_grad": call(1.0, x(6, 8), x(6, 8), x(6, 8)),
    "nn.margin_ranking_loss_grad": call(1.0, x(6, 8), x(6, 8), x(6, 8)),
    "nn.cross_entropy": call(x(6, 8), whole(6)),
    "nn.cross_entropy_grad": call(1.0, x(6, 8), whole(6)),
    "nn.nll_loss": call(x(6, 8), whole(6)),
    "nn.glu_grad": call(x(6, 4), x(6, 8)),
    "nn.embedding_grad": call(x(5, 8), whole(5), 4),
    "nn.batch_norm": call(x(2, 4, 8), x(4), x(4), x(4), x(4)),
    "nn.conv_transpose1d": call(x(2, 4, 8), x(4, 3, 3)),
    "nn.conv_transpose2d": call(x(2, 4, 6, 6), x(4, 3, 3, 3)),
    "nn.conv_input_grad": call((2, 4, 8), x(3, 4, 3), x(2, 3, 6)),
    "nn.conv_weight_grad": call(x(2, 4, 8), (3, 4, 3), x(2, 3, 6)),
    "nn.avg_pool_grad": call(x(2, 4, 4), (2, 4, 8), 2),
    "nn.adaptive_avg_pool_grad": call(x(2, 4, 2), (2, 4, 8)),
    "nn.cosine_embedding_loss": call(x(6, 8), x(6, 8), x(6)),
    "ndimage.convolve": call(x(6, 8), x(3, 3)),
    "ndimage.correlate": call(x(6, 8), x(3, 3)),
    "ndimage.convolve1d": call(x(6, 8), x(3)),
    "ndimage.correlate1d": call(x(6, 8), x(3)),
    "ndimage.maximum_filter": call(x(6, 8), size=3),
    "ndimage.median_filter": call(x(6, 8), size=3),
    "ndimage.minimum_filter": call(x(6, 8), size=3),
    "ndimage.percentile_filter": call(x(6, 8), 40, size=3),
    "ndimage.rank_filter": call(x(6, 8), 2, size=3),
    "ndimage.map_coordinates": call(x(6, 8), x(2, 5)),
    "ndimage.affine_transform": call(x(6, 8), np.array([[1.0, 0.25], [-0.5, 1.0]])),
    **dict.fromkeys([
        "arrays.quantile", "arrays.percentile", "arrays.nanquantile", "arrays.nanpercentile",
    ], call(x(6, 8), 0.5)),
    "arrays.squeeze": call(x(6, 1, 8), axis=1),
    "arrays.repeat": call(x(6, 8), 2, axis=1),
    "arrays.broadcast_to": call(x(6, 8), (2, 6, 8)),
    "linalg.gemv": call(2.0, x(6, 8), x(8)),
    "linalg.ger": call(2.0, x(6), x(8), x(6, 8)),
    "linalg.symv": call(2.0, x(6, 6), x(6)),
    "linalg.syr": call(2.0, x(6), x(6, 6)),
    "linalg.syr2": call(2.0, x(6), x(6), x(6, 6)),
    "linalg.trmv": call(x(6, 6), x(6)),
    "linalg.trsv": call(x(6, 6), x(6)),
    "linalg.cho_solve": call((x(6, 6), True), x(6, 3)),
    "linalg.lu_solve": call((x(6, 6), Computed(_pivots)), x(6, 3)),
    "linalg.solve_banded": call((1, 1), x(3, 8), x(8)),
    "linalg.solveh_banded": call(Computed(_banded), x(8)),
    "linalg.fused_matmul_grad": call(x(6, 8), x(8, 4), Computed(_signs), "relu"),
    "linalg.fused_matmul_sums": call(x(6, 8), x(8, 4), "a"),
    "linalg.einsum": call("ij,kj->ik", x(6, 8), x(5, 8)),
    "signal.lfilter": call(np.array([0.5, 0.25, 0.125]), np.array([1.0, -0.5, 0.25]), x(6, 8)),
    "signal.sosfilt": call(np.array([[0.5, 0.25, 0.125, 1.0, -0.5, 0.25]] * 2), x(6, 8)),
    "signal.cubic_spline": call(np.arange(6.0), x(6, 8)),
    "signal.evaluate_spline": call(Computed(_spline), x(5)),
    "arrays.arange": call(_DEVICE, 1, 9, 2, dtype=_DTYPE),
    "arrays.asarray": call(_DEVICE, host(6, 8), dtype=_DTYPE),
    "arrays.empty": call(_DEVICE, (0, 3), dtype=_DTYPE),
    "arrays.eye": call(_DEVICE, 3, 5, k=1, dtype=_DTYPE),
    "arrays.full": call(_DEVICE, (3, 4), 1, dtype=_DTYPE),
    "arrays.geomspace": call(_DEVICE, 1.0, 64.0, 7, dtype=_DTYPE),
    "arrays.linspace": call(_DEVICE, 0.0, 3.0, 7, dtype=_DTYPE),
    "arrays.logspace": call(_DEVICE, 0.0, 2.0, 7, dtype=_DTYPE),
    "arrays.ones": call(_DEVICE, (3, 4), dtype=_DTYPE),
    "arrays.tri": call(_DEVICE, 3, 5, dtype=_DTYPE),
    "arrays.zeros": call(_DEVICE, (3, 4), dtype=_DTYPE),
    "arrays.scan": call("a + b", x(6, 8), axis=1),
    "arrays.segmented_reduce": call(x(6), Computed(_offsets)),
    "arrays.select": call([Drawn((6, 8), "mask"), Drawn((6, 8), "mask")], [x(6, 8), x(6, 8)]),
    "fft.fftfreq": call(_DEVICE, 9, dtype=_DTYPE),
    "fft.rfftfreq": call(_DEVICE, 9, dtype=_DTYPE),
    "fft.fused": Arguments((ta.fft.fft, "x * 2", "y + 1"), following=call(x(4, 8))),
    "nn.conv_transpose3d": call(x(2, 4, 3, 3, 3), x(4, 3, 2, 2, 2)),
    "nn.dropout": call(x(6, 8), generator=Computed(_generator)),
    "nn.max_pool_grad": call(x(1, 1, 4), Computed(_pooled), (1, 1, 8)),
    "nn.paged_attention": call(
        x(2, 4, 3, 8), x(4, 2, 4, 8), x(4, 2, 4, 8), Computed(_table), Computed(_lengths)),
    "nn.scaled_dot_product_attention_grad": call(
        x(1, 2, 2, 8), x(1, 2, 2, 8), x(1, 2, 2, 8), x(1, 2, 2, 8), x(1, 2, 2, 8), Computed(_attended)),
}  # fmt: skip
"""Arguments that the search does not find, by the names of functions."""


def candidates(name: str, function: Callable[..., Any]) -> Iterator[Arguments]:
    """Return ways to call a function, its own ones and the likeliest ones first.

    Args:
        name: Its name with that of its module, such as ``"nn.softmax"``.
        function: The function.

    Raises:
        TypeError, ValueError: It has no signature.
    """
    if name in OWN:
        yield OWN[name]
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    for is_regular in (False, True):
        for shape in _SHAPES:
            slots = [_values(parameter, shape, is_regular=is_regular) for parameter in needed]
            for values in itertools.islice(itertools.product(*slots), _MAX_WAYS):
                yield _call(needed, values)


def _values(parameter: inspect.Parameter, shape: tuple[int, ...], *, is_regular: bool) -> Sequence[Any]:
    told = str(parameter.annotation)
    if not any(name in told for name in _ARRAYS):
        return _NUMBERS.get(told, (1, 2)) or (None,)
    kind: Literal["values", "integers", "mask"] = "values"
    if parameter.name in _INTEGERS and not is_regular:
        kind = "integers"
    elif parameter.name in _MASKS:
        kind = "mask"
    array = Drawn(shape, kind, is_regular)
    return [[array, array]] if "Sequence" in told else [array]


def _call(parameters: Sequence[inspect.Parameter], values: Sequence[Any]) -> Arguments:
    positional, named = list[Any](), dict[str, Any]()
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        elif parameter.kind is parameter.VAR_POSITIONAL and isinstance(value, list):
            positional += value
        else:
            positional.append(value)
    return Arguments(tuple(positional), named)
