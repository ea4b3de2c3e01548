"""Integers that no device can work with, in each argument of each function that takes integers."""

from __future__ import annotations

import inspect
import math
import re
import sys
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND

import trio_accel as ta
from trio_accel import NotSupportedError, arrays, fft, linalg, ndimage, nn, sparse, tensor

# The first fits into no signed word, and the next is 0 in one of 64 bits.
TOO_LARGE = (2**63, 2**64, 2**70, 10**30, -(2**63) - 1)
# Numbers that fit, although their sums and products do not.
LARGE = (2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
# An offset of any size has a meaning: no element is there, or the shift is taken by the length.
OFFSETS = {
    *(f"arrays.{name}.k" for name in ("eye", "rot90", "tri", "tril", "triu")),
    *("arrays.diagonal.offset", "arrays.roll.shift", "linalg.diagonal.offset", "linalg.trace.offset"),
}
REFUSALS = (ValueError, TypeError, IndexError, ta.OutOfMemoryError, ta.NotSupportedError)
_WHOLE = re.compile(r"\bint\b|_Sizes|Padding|_?Axis\b|_Axes|\bShape\b|\bNumbers\b")
_REAL = re.compile(r"\bfloat\b(?!\[)|\bcomplex\b(?!')|ExpressionArgument|\bFloats\b")
# No float is as large as the first two, and sums with the third are infinite.
REAL = (10**400, -(10**400), sys.float_info.max, math.inf, math.nan)

# By the name of an argument, its value: an array for capitals, other values unchanged.
SAMPLES: dict[str, Any] = {
    **dict.fromkeys(("x", "a", "x1", "x2", "in1", "in2", "grad", "param", "exp_avg", "exp_avg_sq"), "PLANE"),
    **dict.fromkeys(("exp_inf", "state_sum", "logits", "log_probs"), "PLANE"),
    **dict.fromkeys(("query", "key", "value", "grad_output", "input", "weight", "output"), "IMAGES"),
    **dict.fromkeys(("key_cache", "value_cache"), "IMAGES"),
    **dict.fromkeys(("indices", "labels"), "NUMBERS"),
    **dict.fromkeys(("A", "matrix"), "SPARSE"),
    "y": "PLANE", "b": "VECTOR", "device": "DEVICE", "logsumexp": "SCORES", "key_lengths": "LENGTHS",
    "block_table": "TABLE", "arrays": ["PLANE", "PLANE"], "keys": ["VECTOR", "VECTOR"], "ab": "BANDS",
    "axis": 0, "axes": (0, 1), "axis1": 0, "axis2": 1, "bins": 5, "blocksize": (2, 2), "check_every": 1,
    "correction": 1, "destination": 0, "dilation": 1, "divisor_override": 2, "fill_value": 0.0, "fn": 0.5,
    "groups": 1, "ignore_index": -100, "input_size": (1, 2, 3, 3), "k": 1, "kernel_size": 2,
    "l_and_u": (1, 1), "length": 5, "limit": 5, "m": 5, "maxiter": 3, "memory_limit": 10**6, "minlength": 3,
    "n": 3, "N": 3, "n_cols": 3, "n_rows": 3, "ncv": 4, "norm_type": 2.0, "num": 4, "num_embeddings": 7,
    "num_groups": 2, "offset": 0, "output_padding": 0, "pad_width": 1, "padding": 0, "padding_idx": 1,
    "q": 0.5, "repeats": 2, "repetitions": (1, 2), "restart": 3, "shape": (2, 3), "shift": 1,
    "source": 0, "spacing": 1.0, "start": 1, "step": 1, "stop": 2, "stride": 1,
    "values": 1.0, "indices_or_sections": 2, "weight_size": (1, 2, 2, 2), "window_shape": 2,
    "window_size": (1, 1), "subscripts": "ij,ij->i", "operands": ["PLANE", "PLANE"], "high": 9, "low": 1,
    "index": 1, "sizes": [], "more": [], "d": 2, "bits": 30, "n_children": 2,
    "alpha": 1.0, "beta": 0.5, "betas": (0.9, 0.99), "momentum": 0.5, "threshold": 0.5,
    "s": (3, 4), "condition": "TRUTHS", "conditions": ["PLANE", "PLANE"], "choices": ["PLANE", "PLANE"],
    "generator": "GENERATOR", "grads": ["PLANE", "PLANE"], "max_norm": 0.5,
    **dict.fromkeys(("xp", "fp", "p", "running_mean", "running_var"), "VECTOR"), "activation": "relu",
    **dict.fromkeys(("aux", "of", "c", "square_avg", "acc_delta", "mask", "var", "target"), "PLANE"),
    **dict.fromkeys(("anchor", "positive", "negative"), "PLANE"),
}  # fmt: skip
# Functions with other requirements.
_RULE = {f"exp_{name}": f"MOMENT{number}" for number, name in enumerate(("avg", "avg_sq", "inf"))}
OWN: dict[str, dict[str, Any]] = {
    "arrays.bincount": {"x": "NUMBERS"},
    "arrays.broadcast_to": {"shape": (2, 4, 4)},
    "arrays.one_hot": {"x": "NUMBERS"},
    "arrays.pad": {"pad_width": ((1, 1), (1, 1))},
    "arrays.put": {"x": "VECTOR"},
    "arrays.put_along_axis": {"x": "VECTOR"},
    "arrays.reshape": {"shape": (4, 4)},
    "arrays.sliding_window_view": {"axis": 0},
    "arrays.squeeze": {"x": "IMAGES"},
    "arrays.take_along_axis": {"x": "VECTOR"},
    "arrays.unravel_index": {"x": "NUMBERS"},
    "arrays.vander": {"x": "VECTOR"},
    "arrays.linear_recurrence": {"a": 0.5, "initial": 0.5},
    "arrays.scan": {"text": "a + b"},
    "fft.next_fast_len": {"target": 7},
    "linalg.cross": {"x1": "VOLUME", "x2": "VOLUME", "axis": 0},
    "linalg.tensordot": {"axes": 1},
    "nn.adagrad": {"state_sum": "MOMENT0"},
    **dict.fromkeys(("nn.adam", "nn.adamax", "nn.adamw", "nn.radam"), _RULE),
    "nn.avg_pool_grad": {"kernel_size": 1},
    "nn.conv_input_grad": {"padding": 1, "weight": "CORNERS", "grad_output": "WINDOWS"},
    "nn.conv_weight_grad": {"padding": 1, "weight_size": (2, 2, 2, 2), "grad_output": "WINDOWS"},
    "nn.cross_entropy_grad": {"grad": 1.0},
    "nn.embedding": {"weight": "PLANE"},
    "nn.glu_grad": {"grad": "HALF"},
    "nn.max_pool_grad": {"indices": "PLACES"},
    **{f"sparse.{name}": {"maxiter": 50} for name in ("bicgstab", "cg", "gmres", "minres")},
    **{f"nn.{name}": {"value": 0.0} for name in ("threshold", "threshold_grad")},
    "sparse.bsr": {"matrix": scipy.sparse.csr_array(np.eye(4))},
    "sparse.eigsh": {"k": 1},
    "AccelRef.reshape": {"shape": (4, 4)},
    "Generator.beta": {"a": 2.0, "b": 2.0},
    "Generator.chisquare": {"df": 2.0},
    "Device.full": {"value": 0.0},
    "Generator.gamma": {"a": 2.0},
    "Generator.pareto": {"a": 2.0},
    "Generator.standard_t": {"df": 2.0},
    "Generator.weibull": {"a": 2.0},
    "Generator.binomial": {"n": 3, "p": 0.5},
    "Generator.choice": {"a": 5},
    "Generator.dirichlet": {"alpha": [1.0, 1.0]},
    "Generator.multivariate_normal": {"mean": [0.0], "cov": [[1.0]]},
    "Generator.permutation": {"x": 5},
    "Generator.triangular": {"left": 0.0, "mode": 0.5, "right": 1.0},
}
# Images have two axes.
_IMAGE: dict[str, Any] = {
    "input": "PLANE", "image": "PLANE", "weights": [[1.0, 2.0]], "sigma": 1.0, "order": 1, "radius": 2,
    "size": 3, "origin": 0, "axes": (0, 1), "rank": 1, "percentile": 50.0, "iterations": 1, "border_value": 0,
    "angle": 30.0, "zoom": 2.0, "matrix": [1.0, 2.0], "output_shape": (4, 4), "coordinates": [[0.5], [0.5]],
    "sampling": 1.0, "win_size": 5, "channel_axis": None,
}  # fmt: skip
for _name in ndimage.__all__:
    _taken = inspect.signature(getattr(ndimage, _name)).parameters if _name.islower() else ()
    OWN[f"ndimage.{_name}"] = {key: _IMAGE[key] for key in _taken if key in _IMAGE}
for _name in ("correlate1d", "convolve1d"):
    OWN[f"ndimage.{_name}"]["weights"] = [1.0, 2.0]
for _name in ("gaussian_filter", "gaussian_laplace", "laplace", "uniform_filter", "median_filter"):
    OWN[f"ndimage.{_name}"]["axes"] = (0, 1)
OWN["ndimage.spline_filter"]["order"] = 3
# Those of windows: by the number of their axes.
for _axes in (1, 2, 3):
    _pooled = {"input": f"IMAGES{_axes}", "weight": f"IMAGES{_axes}"}
    for _name in ("conv", "conv_transpose", "avg_pool", "max_pool", "lp_pool"):
        OWN[f"nn.{_name}{_axes}d"] = _pooled
# Places in a sequence of random numbers, which has 128 bits or more; and numbers of any dtype.
FREE = {"Generator.advance", "Generator.jumped", "Generator.integers"}
# Positions of arguments, and the iterations between kept states.
FREE |= {"gradients.hessian", "gradients.jacobian", "gradients.scan"}
METHODS = {"Device": "DEVICE", "AccelRef": "PLANE", "Generator": "GENERATOR", "Sobol": "SOBOL"}


def _numbers_of(function: Any, kind: re.Pattern[str]) -> list[str]:
    """Return the parameters for numbers, or for several."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if kind.search(str(one.annotation))]


def _functions(kind: re.Pattern[str]) -> dict[str, Any]:
    """Return the functions of all capabilities, and the methods, that take such numbers."""
    found: dict[str, Any] = {}
    for capability in (arrays, fft, linalg, ndimage, nn, sparse, tensor):
        package = capability.__name__.rpartition(".")[2]
        found |= {f"{package}.{name}": getattr(capability, name) for name in capability.__all__}
    for cls in (ta.Device, ta.AccelRef, ta.random.Generator, ta.random.Sobol):
        names = [name for name in dir(cls) if not name.startswith("_")]
        found |= {f"{cls.__name__}.{name}": getattr(cls, name) for name in names}
    found = {name: one for name, one in found.items() if inspect.isfunction(one)}
    return {name: one for name, one in found.items() if _numbers_of(one, kind) and name not in FREE}


FUNCTIONS = _functions(_WHOLE)
OF_REAL = _functions(_REAL)


async def _arrays(device: ta.Device) -> dict[str, Any]:
    """Make what the samples name."""
    rng = np.random.default_rng(0)
    shapes = {
        "PLANE": (4, 4),
        "VECTOR": (4,),
        "BANDS": (3, 4),
        "VOLUME": (3, 4),
        "HALF": (2, 4),
        "MOMENT0": (4, 4),
        "MOMENT1": (4, 4),
        "MOMENT2": (4, 4),
        "IMAGES": (1, 2, 3, 3),
        "IMAGES1": (2, 2, 4),
        "IMAGES2": (2, 2, 3, 3),
        "IMAGES3": (2, 2, 2, 3, 3),
        "SCORES": (1, 2, 3),
        "CORNERS": (2, 2, 2, 2),
        "WINDOWS": (1, 2, 4, 4),
    }
    hosts: dict[str, Any] = {name: rng.random(shape) for name, shape in shapes.items()}
    hosts |= {
        "TRUTHS": np.eye(4, dtype=bool),
        "NUMBERS": np.arange(4),
        "LENGTHS": np.array([2]),
        "TABLE": np.array([[0]]),
    }
    hosts["PLACES"] = np.arange(9).repeat(2).reshape(1, 2, 3, 3) % 9
    matrix = scipy.sparse.csr_array(np.eye(4) * 3 + np.eye(4, k=1) + np.eye(4, k=-1))
    return {
        **{name: await device.put(host) for name, host in hosts.items()},
        "DEVICE": device,
        "SPARSE": await sparse.csr(device, matrix),
        "GENERATOR": ta.random.Generator(device, seed=1),
        "SOBOL": ta.random.Sobol(device, 2, seed=1),
    }


def _replaced(sample: Any, number: int) -> Iterator[Any]:
    """Put a number in place of a sample: of all its numbers, and of only the last one."""
    if not isinstance(sample, tuple):
        yield number
        return
    yield tuple([next(_replaced(one, number)) for one in sample])
    yield (*sample[:-1], list(_replaced(sample[-1], number))[-1])


async def _call(name: str, there: dict[str, Any], changed: str, number: Any) -> None:
    """Call a function with samples of all that it needs, and one argument changed."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    function, own = (FUNCTIONS | OF_REAL)[name], OWN.get(name, {})
    samples = SAMPLES | own | {changed: number}
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            of, method = name.split(".")
            function = getattr(there[METHODS[of]], method)
            continue
        if one.name not in {*own, changed} and one.default is not one.empty:
            continue
        value = samples[one.name]
        if one.kind is one.VAR_POSITIONAL:
            given += [there[each] for each in value]
            continue
        if isinstance(value, list) and value and value[0] in ("PLANE", "VECTOR"):
            value = [there[each] for each in value]
        value = there[value] if isinstance(value, str) and value in there else value
        if one.kind is one.POSITIONAL_ONLY:
            given.append(value)
        else:
            named[one.name] = value
    called = function(*given, **named)
    if inspect.isawaitable(called):
        await called


@pytest.fixture
async def limited(system: ta.System, isolation: ta.Isolation) -> AsyncGenerator[ta.Device, None]:
    """A device without memory for large arrays."""
    options = ta.DeviceOptions(isolation=isolation, memory_limit=1 << 28)
    async with system.open_device(BACKEND, options=options) as device:
        yield device


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
async def test_numbers_that_no_device_has_are_refused(limited: ta.Device, name: str) -> None:
    there = await _arrays(limited)
    samples = SAMPLES | OWN.get(name, {})
    for parameter in _numbers_of(FUNCTIONS[name], _WHOLE):
        try:
            await _call(name, there, parameter, samples[parameter])
        except NotSupportedError:
            assert BACKEND != "cpu"
        for number in TOO_LARGE if name == "Device.host_empty" else TOO_LARGE + LARGE:
            for value in _replaced(samples[parameter], number):
                must = number in TOO_LARGE and f"{name}.{parameter}" not in OFFSETS
                must = must or parameter.startswith("ax")
                with pytest.raises(REFUSALS) if must else suppress(*REFUSALS):
                    await _call(name, there, parameter, value)
                    assert not must, (parameter, value)
    # An argument that passes all checks crashes an actor, or the context.
    assert limited.generation == 1


# A tolerance near the end of float64 is infinite times a value, as in NumPy.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(OF_REAL))
async def test_numbers_that_no_float_holds_are_refused(limited: ta.Device, name: str) -> None:
    there = await _arrays(limited)
    for parameter in _numbers_of(OF_REAL[name], _REAL):
        for number in REAL:
            for value in _replaced((SAMPLES | OWN.get(name, {})).get(parameter), number):
                with suppress(*REFUSALS):
                    await _call(name, there, parameter, value)
    assert limited.generation == 1


MANY = 1 << 20
# Functions whose results, or intermediate results, grow with a number and not with an array.
GROWING: dict[str, Callable[[ta.Device, ta.AccelRef, int], Awaitable[Any]]] = {
    "bincount": lambda d, x, n: arrays.bincount(x, minlength=n),
    "choice": lambda d, x, n: ta.random.Generator(d).choice(n, (3,), replace=False),
    "czt": lambda d, x, n: fft.czt(x[:4], n),
    "czt along a spiral": lambda d, x, n: fft.czt(x[:4], n, 0.99 + 0.01j),
    "dirichlet": lambda d, x, n: ta.random.Generator(d).dirichlet((n // 2,), [1.0, 2.0]),
    "dst": lambda d, x, n: fft.dst(x, n=n),
    "fftfreq": lambda d, x, n: fft.fftfreq(d, n),
    "gamma of a row": lambda d, x, n: ta.random.Generator(d).gamma((n // 4, 4), a=np.arange(1.0, 5.0)),
    "hilbert": lambda d, x, n: fft.hilbert(x, n),
    "histogram": lambda d, x, n: arrays.histogram(x, n),
    "linspace": lambda d, x, n: arrays.linspace(d, 0, 1, n),
    "one_hot": lambda d, x, n: arrays.one_hot(x, n // 4),
    "permutation": lambda d, x, n: ta.random.Generator(d).permutation(n),
    "repeat": lambda d, x, n: arrays.repeat(x, n // 4),
    "tri": lambda d, x, n: arrays.tri(d, n // 1024, 1024),
    "vander": lambda d, x, n: arrays.vander(x, n // 4),
    "zoom_fft": lambda d, x, n: fft.zoom_fft(x[:4], 0.5, n),
}


# Memory of the program is requested from `Device.host_empty`.
@pytest.mark.parametrize("isolation", ["process"])
@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"Device.host_empty"}))
async def test_no_number_grows_in_the_memory_of_the_program(
    limited: ta.Device, name: str, isolation: ta.Isolation
) -> None:
    there = await _arrays(limited)
    samples = SAMPLES | OWN.get(name, {})
    for parameter in _numbers_of(FUNCTIONS[name], _WHOLE):
        with suppress(NotSupportedError):
            # Objects made once, such as code, are not part of it.
            await _call(name, there, parameter, samples[parameter])
        for value in _replaced(samples[parameter], MANY):
            tracemalloc.start()
            try:
                with suppress(*REFUSALS):
                    await _call(name, there, parameter, value)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < MANY, (parameter, value)


async def test_an_array_without_elements_has_no_endless_parts(limited: ta.Device) -> None:
    nothing = await limited.zeros((0, 2))
    assert len(arrays.split(nothing, 3)) == 3
    with pytest.raises(ValueError, match=r"arrays.split: there must be at most 65536 parts"):
        arrays.split(nothing, 2**62)
    with pytest.raises(ValueError, match=r"arrays.unstack: there must be at most 65536 parts"):
        arrays.unstack(await limited.zeros((2**40, 0)))


async def _operand(device: ta.Device, name: str) -> ta.AccelRef:
    is_whole = name in ("bincount", "one_hot")
    return await device.put(np.arange(1, 5, dtype=np.int64 if is_whole else np.float64))


@pytest.mark.parametrize("isolation", ["process"])
@pytest.mark.parametrize("name", GROWING)
async def test_memory_that_grows_with_a_number_is_made_on_the_device(
    limited: ta.Device, name: str, isolation: ta.Isolation
) -> None:
    x = await _operand(limited, name)
    await GROWING[name](limited, x, 1024)
    tracemalloc.start()
    try:
        await GROWING[name](limited, x, MANY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An element of the result has at least four bytes.
    assert peak < MANY


@pytest.mark.parametrize("name", GROWING)
async def test_the_limit_of_the_device_matches_its_growing_memory(limited: ta.Device, name: str) -> None:
    x = await _operand(limited, name)
    with pytest.raises(ta.OutOfMemoryError):
        await GROWING[name](limited, x, 10**12)
    assert limited.generation == 1
