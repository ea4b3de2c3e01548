"""Wrong arguments, each in turn, of every function that computes: errors are plain, and name the function."""

from __future__ import annotations

import inspect
import pickle
import re
import zlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND
from test_large_numbers import OWN as OF_NUMBERS
from test_large_numbers import SAMPLES as NUMBERS

import trio_accel as ta
from trio_accel import arrays, fft, linalg, ndimage, nn, signal, sparse, spatial, tensor

PACKAGES = {"arrays": arrays, "fft": fft, "linalg": linalg, "nn": nn, "sparse": sparse, "tensor": tensor}
# Their refusals are looked at by tests of their own.
OTHER_PACKAGES = {"ndimage": ndimage, "signal": signal, "spatial": spatial}
METHODS: dict[str, Any] = {"random": ta.random.Generator, "random.Sobol": ta.random.Sobol}
# By the name of an argument, its value: an array for capitals, other values unchanged.
SAMPLES: dict[str, Any] = NUMBERS | {
    **dict.fromkeys(("xp", "fp", "running_mean", "running_var", "c_or_cr", "d"), "VECTOR"),
    **dict.fromkeys(("anchor", "positive", "negative", "var"), "PLANE"), "square_avg": "MOMENT1",
    **dict.fromkeys(("condition", "mask"), "TRUTHS"), "acc_delta": "MOMENT2", "offsets": "OFFSETS",
    "p": 0.5, "obj": [[1.0]], "conditions": ["TRUTHS"], "choices": ["PLANE"], "s": 0.5, "threshold": 0.5,
    "transform": fft.rfft, "alpha": 1.0, "beta": 0.0, "aux": "AUX", "activation": "gelu", "of": "b",
    "c": "SQUARE", "c_and_lower": ("DEFINITE", True), "lu_and_piv": ("PLANE", "PIVOTS"), "output_size": 2,
    "generator": "GENERATOR", "dl": "VECTOR", "du": "VECTOR", "jumps": 1, "n_children": 1, "words": 1,
}  # fmt: skip
# Functions with other requirements, named by the ends of the text before.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("arrays.polyval", {"p": "VECTOR"}),
    ("arrays.interp arrays.segmented_reduce arrays.run_lengths arrays.unwrap", {"x": "VECTOR"}),
    ("arrays.scatter arrays.take", {"axis": 0, "indices": "NUMBERS"}),
    ("arrays.gather_nd arrays.scatter_nd", {"indices": ["NUMBERS"], "x": "VECTOR"}),
    ("arrays.searchsorted arrays.digitize", {"x1": "VECTOR", "bins": "VECTOR"}),
    ("arrays.lerp", {"weight": 0.5}),
    ("arrays.cumulative_logsumexp arrays.cumulative_max arrays.cumulative_min", {"axis": 0}),
    ("arrays.cumulative_prod arrays.cumulative_sum", {"axis": 0}),
    ("arrays.linear_recurrence arrays.scan", {"axis": 0, "a": 0.5, "text": "a + b"}),
    ("arrays.bitwise_and arrays.bitwise_or arrays.bitwise_xor", {"x1": "NUMBERS", "x2": "NUMBERS"}),
    ("arrays.bitwise_left_shift arrays.bitwise_right_shift", {"x1": "NUMBERS", "x2": "NUMBERS"}),
    ("arrays.gcd arrays.lcm", {"x1": "NUMBERS", "x2": "NUMBERS"}),
    ("arrays.bitwise_invert", {"x": "NUMBERS"}),
    (
        "arrays.logical_and arrays.logical_or arrays.logical_xor arrays.logical_not",
        {"x": "TRUTHS", "x1": "TRUTHS", "x2": "TRUTHS"},
    ),
    (
        "arrays.intersect1d arrays.setdiff1d arrays.setxor1d arrays.union1d",
        {"x1": "VECTOR", "x2": "VECTOR"},
    ),
    ("arrays.meshgrid", {"arrays": ["VECTOR", "OTHER"]}),
    ("fft.fftfreq fft.rfftfreq", {"d": 1.0}),
    ("linalg.gemv linalg.symv linalg.trmv linalg.trsv linalg.asum linalg.nrm2 linalg.iamax", {"x": "VECTOR"}),
    ("linalg.gemv linalg.symv", {"y": "OTHER"}),
    ("linalg.swap linalg.axpy linalg.dot linalg.ger linalg.syr2 linalg.rot", {"x": "VECTOR", "y": "OTHER"}),
    ("linalg.syr", {"x": "VECTOR"}),
    ("linalg.rot", {"c": 0.6, "s": 0.8}),
    ("linalg.gemm linalg.matmul linalg.symm linalg.trmm linalg.trsm linalg.syr2k", {"b": "SQUARE"}),
    ("linalg.fused_matmul linalg.fused_matmul_grad linalg.fused_matmul_sums linalg.kron", {"b": "SQUARE"}),
    ("linalg.syrk linalg.syr2k linalg.gemm linalg.symm", {"c": "MOMENT0"}),
    ("linalg.eigh linalg.eigvalsh", {"b": "DEFINITE"}),
    ("linalg.cholesky linalg.ldl", {"a": "DEFINITE"}),
    ("linalg.orth linalg.null_space", {"A": "PLANE"}),
    ("linalg.outer", {"x1": "VECTOR", "x2": "OTHER"}),
    ("linalg.solveh_banded", {"ab": "UPPER"}),
    ("linalg.solve_tridiagonal", {"b": "VECTOR"}),
    ("linalg.einsum tensor.einsum tensor.contract_path", {"operands": ["PLANE", "SQUARE"]}),
    ("tensor.permute", {"subscripts": "ij->ji"}),
    ("tensor.reduce", {"subscripts": "ij->i"}),
    ("tensor.contract", {"subscripts": "ij,jk->ik", "b": "SQUARE"}),
    ("tensor.elementwise", {"subscripts": "ij,ij->ij", "operands": ["PLANE", "SQUARE"]}),
    ("nn.linear nn.linear_input_grad", {"weight": "SQUARE"}),
    ("nn.prelu nn.prelu_grad", {"weight": 0.5}),
    ("nn.threshold nn.threshold_grad", {"value": 0.5}),
    ("nn.cosine_embedding_loss", {"target": "VECTOR"}),
    ("nn.group_norm_grad nn.instance_norm_grad", {"x": "IMAGES", "grad": "IMAGES"}),
    ("nn.group_norm nn.instance_norm", {"x": "IMAGES"}),
    ("nn.dropout_grad", {"mask": "TRUTHS"}),
    ("nn.glu_grad", {"grad": "COLUMNS"}),
    ("nn.adaptive_avg_pool1d nn.adaptive_max_pool1d", {"input": "IMAGES1"}),
    ("nn.adaptive_avg_pool2d nn.adaptive_max_pool2d", {"input": "IMAGES2"}),
    ("nn.adaptive_avg_pool3d nn.adaptive_max_pool3d", {"input": "IMAGES3"}),
    ("nn.avg_pool_grad", {"padding": 0}),
    ("nn.lion", {"exp_avg": "MOMENT1"}),
    ("sparse.add sparse.spgemm", {"a": "SPARSE", "b": "SPARSE"}),
    ("sparse.sddmm sparse.spmm", {"b": "SQUARE"}),
    ("sparse.spmv sparse.multiply", {"x": "VECTOR"}),
    ("sparse.spsolve_triangular", {"matrix": "LOWER"}),
    ("sparse.ic0 sparse.ilu0", {"matrix": "SYMMETRIC"}),
    ("sparse.eigsh", {"A": "SYMMETRIC"}),
    ("sparse.bsr sparse.coo sparse.csc sparse.csr", {"matrix": scipy.sparse.csr_array(np.eye(4))}),
    ("random.integers", {"low": 0, "high": 9}),
    ("signal.cubic_spline", {"x": [0.0, 1.0, 2.0, 3.0], "y": "PLANE"}),
    ("signal.lfilter", {"b": [1.0, 0.5], "a": [1.0, 0.2], "x": "PLANE"}),
    ("signal.sosfilt", {"sos": [[1.0, 0.5, 0.1, 1.0, 0.2, 0.1]], "x": "PLANE"}),
    ("signal.resample", {"num": 6}),
    ("signal.stft signal.welch", {"nperseg": 4}),
    ("spatial.cell_list spatial.neighbours", {"points": "COLUMNS", "size": 0.5, "radius": 0.5}),
]
LOSSES = re.compile(r"nn\.(?!cosine|cross|nll|triplet)\w+_(loss|div|entropy|logits)(_grad)?")


def _functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for package, module in (PACKAGES | OTHER_PACKAGES).items():
        found |= {f"{package}.{name}": getattr(module, name) for name in module.__all__}
    for prefix, cls in METHODS.items():
        found |= {f"{prefix}.{name}": getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
    return {name: one for name, one in found.items() if inspect.isfunction(one)}


FUNCTIONS = _functions()
PARAMETERS = {one for function in FUNCTIONS.values() for one in inspect.signature(function).parameters}


def own_samples(name: str) -> dict[str, Any]:
    """Return the requirements of a function that its arguments' names do not show."""
    package, _, method = name.rpartition(".")
    own = dict(OF_NUMBERS.get(f"Generator.{method}" if package == "random" else name, {}))
    if LOSSES.fullmatch(name):
        own["target"] = "SQUARE"
    if name.startswith("nn.") and name.endswith("_grad") and LOSSES.fullmatch(name):
        own["grad"] = 1.0
    for names, more in OTHERS:
        own |= more if name in names.split() else {}
    there = inspect.signature(FUNCTIONS[name]).parameters
    return {key: value for key, value in own.items() if key in there}


# In words: objects put on the device, and objects that a function calls or iterates as the user's own code.
ON_DEVICE = " on the device"
OWN_CODE = {(parameter, "class") for parameter in ("A", "M", "callback", "transform")}


class Surroundings:
    """Makes the arrays that samples name, each when it is needed."""

    def __init__(self, device: ta.Device) -> None:
        self._device = device
        self._made: dict[str, Any] = {"DEVICE": device}

    async def __call__(self, sample: Any) -> Any:
        """Return a sample with arrays in the place of their names."""
        if isinstance(sample, (list, tuple)):
            several = [await self(one) for one in cast("list[Any]", sample)]
            return several if isinstance(sample, list) else tuple(several)
        if not isinstance(sample, str) or not sample.isupper():
            return sample
        if sample not in self._made:
            self._made[sample] = await self._make(sample)
        return self._made[sample]

    async def _make(self, name: str) -> Any:
        device, square = self._device, np.random.default_rng(0).random((4, 4))
        definite = square @ square.T + 4 * np.eye(4)
        sparse_hosts = {
            "SPARSE": np.eye(4) * 3 + np.eye(4, k=1) + np.eye(4, k=-1),
            "LOWER": np.tril(definite),
            "SYMMETRIC": definite,
        }
        if name in sparse_hosts:
            return await sparse.csr(device, scipy.sparse.csr_array(sparse_hosts[name]))
        if name in ("GENERATOR", "SOBOL"):
            return (
                ta.random.Sobol(device, 2, seed=1) if name == "SOBOL" else ta.random.Generator(device, seed=1)
            )
        shapes = {
            "VECTOR": (4,),
            "OTHER": (4,),
            "BANDS": (3, 4),
            "VOLUME": (3, 4),
            "HALF": (2, 4),
            "COLUMNS": (4, 2),
            "AUX": (4, 8),
            "IMAGES": (1, 2, 3, 3),
            "IMAGES1": (2, 2, 4),
            "IMAGES2": (2, 2, 3, 3),
            "IMAGES3": (2, 2, 2, 3, 3),
            "SCORES": (1, 2, 3),
            "CORNERS": (2, 2, 2, 2),
            "WINDOWS": (1, 2, 4, 4),
        }
        hosts: dict[str, Any] = {
            "NUMBERS": np.arange(4),
            "LENGTHS": np.array([2]),
            "TABLE": np.array([[0]]),
            "TRUTHS": square > 0.5,
            "OFFSETS": np.array([0, 2, 4]),
            "PIVOTS": np.arange(4, dtype=np.int32),
            "PLACES": np.arange(9).repeat(2).reshape(1, 2, 3, 3) % 9,
            "DEFINITE": definite,
            "UPPER": np.array([[0, 0.1, 0.1, 0.1], [3, 3, 3, 3]]),
        }
        host = hosts.get(name)
        return await device.put(
            np.random.default_rng(1).random(shapes.get(name, (4, 4))) if host is None else host
        )


class Strange:
    """Something that no function takes."""

    def __repr__(self) -> str:
        return "something strange"


def _wrong(name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the wrong arguments: the parameter, the object in words, and the value."""
    values: dict[str, Any] = {
        "None": None, "text": "abc", "list": [1, 2], "object": Strange(), "fraction": 0.5, "negative": -1,
        "zero": 0, "large": 99, "complex": 1j, "NaN": float("nan"), "truth": True, "nothing": (), "dict": {},
        "list of None": [None], "list of text": ["a"], "tuple": (0.5,), "class": int, "huge": 10**400,
        "texts": np.array(["a", "b"]), "objects": np.array([None, 1], object),
        "dates": np.array(["2020-01-01"], "datetime64[D]"),
    }  # fmt: skip
    hosts = {
        "whole": np.ones((4, 4), np.int64),
        "truths": np.ones((4, 4), bool),
        "axes": np.ones((2, 3, 4)),
        "complexes": np.ones((4, 4), complex),
        "single": np.ones((4, 4), np.float32),
        "half": np.ones((4, 4), np.float16),
        "unfitting": np.ones((3, 5)),
        "scalar": np.ones(()),
        "empty": np.ones(0),
        "vector": np.ones(7),
    }
    values |= hosts | {f"{word}{ON_DEVICE}": host for word, host in hosts.items()}
    for one in inspect.signature(FUNCTIONS[name]).parameters.values():
        if one.name != "self" and one.kind is not one.VAR_KEYWORD:
            yield from ((one.name, word, value) for word, value in values.items())


async def call(
    name: str, there: Surroundings, changed: str = "", value: object = None, **more: object
) -> Any:
    """Call a function with samples of all that it needs, and arguments changed; return its result."""
    function, own = FUNCTIONS[name], own_samples(name)
    changes = {changed: value, **more}
    given: list[Any] = []
    named: dict[str, Any] = {}
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            function = getattr(await there("SOBOL" if "Sobol" in name else "GENERATOR"), function.__name__)
        elif one.name in changes or one.name in own or one.default is one.empty:
            is_changed = one.name in changes
            argument = changes[one.name] if is_changed else await there((SAMPLES | own)[one.name])
            if one.kind is one.VAR_POSITIONAL:
                given += argument if isinstance(argument, list) else [argument]
            elif one.kind is one.POSITIONAL_ONLY:
                given.append(argument)
            else:
                named[one.name] = argument
    called = function(*given, **named)
    return await called if inspect.isawaitable(called) else called


# Python's and NumPy's own messages, and their texts of objects.
OF_PYTHON = re.compile(
    r"unsupported operand|argument of type|not subscriptable|expected str|unexpected keyword|unhashable|"
    r"positional argument|to unpack|not iterable|not convert|invalid literal|not callable|len\(\)|ufunc|"
    r"n't convert|truth value of|cannot be interpreted|has no attribute|must be real number, not|"
    r"'\w+' object |0-d array|dtype\('"
)
INNER = re.compile(
    r"\b(?:arrays|devices|fft|linalg|nn|random|sparse|tensor)\.(?!Generator)[A-Z]\w+|(?<![\w.])_[a-z]\w+"
)
ARGUMENT = re.compile(r"(?:the )?(\w+)(?:\[\d+\])? (?:must|has|have|is|holds) ")
# Words that are also names of arguments elsewhere, with the same meaning.
PLAIN = {
    "shape",
    "axis",
    "axes",
    "index",
    "indices",
    "values",
    "arrays",
    "step",
    "matrix",
    "result",
    "operands",
}


def complaint(name: str, error: Exception) -> str | None:
    """Return the faults of an error; None if there are none."""
    text = str(error).partition(" (device ")[0]
    head, _, rest = text.partition(": ")
    if not isinstance(error, (TypeError, ValueError, IndexError, ta.AccelError)):
        return "of no type that functions refuse with"
    if head != name:
        return "does not begin with the function"
    if found := OF_PYTHON.search(rest) or INNER.search(rest):
        return f"has {found[0]!r}"
    argument = ARGUMENT.match(rest)
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    # A pair, such as `c_and_lower`, has the names of its two, and `c_or_cr` the names of both forms.
    own = {word for one in parameters for word in (one, *re.split("_(?:and|or)_", one))}
    if argument and argument[1] in PARAMETERS - own - PLAIN:
        return f"tells of {argument[1]!r}"
    return None


async def check(device: ta.Device, name: str, share: int) -> list[str]:
    """Call a function with each of these wrong arguments; return the faults of its refusals."""
    await call(name, Surroundings(device))
    wrong: list[str] = []
    for parameter, word, value in _wrong(name):
        if zlib.crc32(f"{name} {parameter} {word}".encode()) % share:
            continue
        if (parameter, word) in OWN_CODE:
            continue
        try:
            given = await device.put(value) if word.endswith(ON_DEVICE) else value
            await call(name, Surroundings(device), parameter, given)
        except Exception as error:  # noqa: BLE001  # any type is told
            told = complaint(name, error)
            wrong += [f"{name}({parameter}: {word}) {told}: {type(error).__name__}: {error}"] * bool(told)
    return wrong


@pytest.mark.skipif(BACKEND != "cpu", reason="what a backend has not, it refuses first")
@pytest.mark.parametrize(
    "share", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(12, id="some")]
)
@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("package", [*PACKAGES, "random"])
async def test_wrong_arguments_are_refused_plainly_and_by_the_name_of_the_function(
    device: ta.Device, package: str, share: int, isolation: ta.Isolation
) -> None:
    names = [name for name in sorted(FUNCTIONS) if name.startswith(f"{package}.")]
    wrong = [one for name in names for one in await check(device, name, share)]
    assert not wrong, "\n".join([f"{len(wrong)} refusals:", *wrong])
    # An argument that passes all checks crashes an actor, or the context.
    assert device.generation == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_function_is_pickled_by_its_name(package: str) -> None:
    listed = PACKAGES[package].__all__
    functions = [one for one in map(vars(PACKAGES[package]).get, listed) if inspect.isfunction(one)]
    assert len(functions) > 5
    assert [one.__name__ for one in functions if pickle.loads(pickle.dumps(one)) is not one] == []


async def test_a_boolean_is_not_a_real_number(device: ta.Device) -> None:
    x, b = await device.put(np.eye(3)), await device.put(np.ones(3))
    matrix = await sparse.csr(device, scipy.sparse.eye_array(3, format="csr"))
    generator = ta.random.Generator(device)
    for argument, call in {
        "p": lambda: nn.dropout(x, p=True, generator=generator),
        "label_smoothing": lambda: nn.cross_entropy(x, x, label_smoothing=True),
        "delta": lambda: nn.huber_loss(x, x, delta=True),
        "rtol": lambda: sparse.cg(matrix, b, rtol=True),
        "atol": lambda: sparse.gmres(matrix, b, atol=True),
    }.items():
        with pytest.raises(TypeError, match=f"{argument} must be a real number, got True"):
            await call()
