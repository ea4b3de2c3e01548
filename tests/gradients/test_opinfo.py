"""Values, gradients and Hessian-vector products against PyTorch, for the samples of its OpInfos.

PyTorch describes each of its operators by an `OpInfo`, and tests its own gradients with the samples there.
`opinfo_functions` has our counterparts. Each stage of a sample (value, first and second derivative) is equal,
or `NotSupportedError` refuses it with the name of a function, or a table below gives the reason of its
difference. Everything else fails.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs
import numpy as np
import pytest
import trio
from opinfo_base import DEVICE, NoCounterpartError
from opinfo_functions import FUNCTIONS

import trio_accel as ta

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("expecttest", reason="PyTorch's OpInfos import expecttest")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_backend,
    pytest.mark.filterwarnings("ignore:.*was never awaited"),
]

a: Any = ta.arrays
_MAX_SAMPLES = 12
_MAX_COMPLEX_SAMPLES = 4
_MAX_ELEMENTS = 700
"""Elements of all operands of a sample, unless all samples of an operator have more."""
_MAX_TRIED = 400
"""Samples of which the most different ones are chosen."""
TOLERANCES = {"value": 1e-9, "first": 1e-7, "second": 1e-6}

OF_ABSOLUTES: dict[str, Callable[..., Any]] = {
    "linalg.eigh": lambda w, v: (w, v.abs()),
    "linalg.eig": lambda w, v: (w, v.abs()),
    "linalg.svd": lambda u, s, vh: (u[..., : s.shape[-1]].abs(), s, vh[..., : s.shape[-1], :].abs()),
    "svd": lambda u, s, v: (u[..., : s.shape[-1]].abs(), s, v[..., : s.shape[-1]].abs()),
    "linalg.qr": lambda q, r: (q.abs(), r.abs()),
}
"""Results that are unique up to signs or phases, as the functions of ours return them."""

TRIANGLES: dict[str, Callable[..., Any]] = {
    "linalg.pinv.hermitian": lambda x, hermitian: torch.linalg.pinv(x + x.mH, hermitian=hermitian),
    "cholesky_solve": lambda b, x, upper=False: torch.cholesky_solve(b, triangle(x, upper), upper=upper),
    "cholesky_inverse": lambda x, upper=False: torch.cholesky_inverse(triangle(x, upper), upper=upper),
}
"""Functions that read one triangle, with arguments for which this does not matter, as PyTorch tests them."""


def triangle(x: Any, upper: bool) -> Any:
    return x.triu() if upper else x.tril()


_LAST_OF_SEVERAL = "samples have an index twice: `set` takes the last value, and PyTorch derives all of them"
_NAN_IN_PYTORCH = "PyTorch's second derivative is NaN at zeros and beside masked elements"
DIFFERENCES: dict[str, dict[str, str]] = {
    "linalg.norm.subgradients_at_zero": {"second": _NAN_IN_PYTORCH},
    "masked.logaddexp": {"second": _NAN_IN_PYTORCH},
    "nn.functional.hinge_embedding_loss": {"value": "a sample has a target that is neither 1 nor -1"},
    "nn.functional.linear_cross_entropy.chunked": {
        "second": "PyTorch takes the gradient that the value has computed for a constant"
    },
    **{
        f"nn.functional.max_unpool{k}d": dict.fromkeys(("first", "second"), _LAST_OF_SEVERAL)
        for k in (1, 2, 3)
    },
    "nn.functional.rms_norm": {"value": "complex: ours has the mean of abs(x)**2, and PyTorch of x**2"},
    "torch.ops.aten._safe_softmax.default": {
        "value": "PyTorch's function for masks has 0 in rows of -inf only"
    },
}
"""Stages that differ for some samples, with the reason. An entry without a difference fails."""

REFUSED: dict[str, str] = {
    "linalg.cholesky": "linalg.cholesky",
    "linalg.cholesky_ex": "linalg.cholesky",
    "linalg.eigvalsh": "linalg.eigvalsh",
    "masked_select": "arrays.compress",
    "repeat_interleave": "arrays.repeat",
}
"""The name of the function in the messages of `NotSupportedError`."""


@attrs.frozen
class Outcome:
    """The outcome of a sample's stage."""

    stage: str
    kind: Literal["equal", "refused", "differs", "fails", "real only", "no counterpart", "not in PyTorch"]
    detail: str = ""


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


@pytest.fixture(scope="session")
def infos() -> dict[str, Any]:
    return load_infos()


def load_infos() -> dict[str, Any]:
    """Import PyTorch's OpInfos, which takes some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return {name_of(info): info for info in op_db}


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Replace the tensors of nested arguments."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(item, change) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(mapped(item, change) for item in tree)
    return tuple(tree) if isinstance(tree, torch.Size) else tree


def tensors_of(tree: Any) -> list[Any]:
    found: list[Any] = []
    mapped(tree, found.append)
    return found


def results_of(made: Any) -> list[Any]:
    """Flatten results: arrays, calls and tensors, and None for a result that ours does not have."""
    if isinstance(made, (list, tuple)):
        return [item for one in made for item in results_of(one)]
    return [made]


@attrs.frozen
class Sample:
    """A sample of an OpInfo, with its operands apart."""

    name: str
    info: Any
    tree: tuple[Any, ...]
    named: dict[str, Any]
    operands: list[Any]

    @classmethod
    def of(cls, name: str, info: Any, sample: Any) -> Sample:
        tree, named = (sample.input, *sample.args), sample.kwargs
        found = {id(one): one for one in tensors_of([tree, named]) if one.requires_grad}
        return cls(name, info, tree, named, list(found.values()))

    @property
    def size(self) -> int:
        return sum(one.numel() for one in tensors_of([self.tree, self.named]))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return the options, so that samples with other ones are preferred."""
        options = [*enumerate(self.tree), *sorted(self.named.items())]
        flags = tuple(value if isinstance(value, (bool, str)) else None for _, value in options)
        return tuple(str(key) for key, _ in options), flags, tuple(one.ndim for one in self.operands[:1])

    def arguments(self, change: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
        made: tuple[Any, dict[str, Any]] = mapped((self.tree, self.named), change)
        return made

    def torchs(self, operands: list[Any]) -> list[Any]:
        """Call PyTorch's function."""
        by_id = {id(one): new for one, new in zip(self.operands, operands, strict=True)}
        tree, named = self.arguments(lambda one: by_id.get(id(one), one.detach().clone()))
        made = (TRIANGLES.get(self.name) or self.info.op)(*tree, **named)
        if self.name in OF_ABSOLUTES:
            made = OF_ABSOLUTES[self.name](*made)
        return results_of(made)

    def ours(self, operands: list[Any], constant: Callable[[Any], Any]) -> list[Any]:
        """Call our function."""
        by_id = {id(one): new for one, new in zip(self.operands, operands, strict=True)}
        tree, named = self.arguments(lambda one: by_id[id(one)] if id(one) in by_id else constant(one))
        return results_of(FUNCTIONS[self.name](*tree, **named))

    def __str__(self) -> str:
        def text(tensor: Any) -> str:
            return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"

        tree, named = self.arguments(text)
        return f"{self.name}{tree}{named or ''}"[:300]


def samples_of(name: str, info: Any, dtype: Any) -> list[Sample]:
    """Choose samples with different options, and with few elements if possible."""
    torch.manual_seed(0)
    can_derive = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    tried = itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=can_derive), _MAX_TRIED)
    found = [Sample.of(name, info, one) for one in tried]
    small = [one for one in found if one.size <= _MAX_ELEMENTS] or sorted(found, key=lambda one: one.size)[:2]
    kinds: dict[Any, list[Sample]] = {}
    for one in small:
        kinds.setdefault(one.kind, []).append(one)
    in_turn = [one for row in itertools.zip_longest(*kinds.values()) for one in row if one is not None]
    return in_turn[: _MAX_COMPLEX_SAMPLES if dtype.is_complex else _MAX_SAMPLES]


def dtypes_of(info: Any) -> list[Any]:
    has = info.supported_dtypes("cpu")
    real = next((one for one in (torch.float64, torch.int64) if one in has), None)
    kinds = [real] if real is not None else []
    return [*kinds, torch.complex128] if torch.complex128 in has else kinds


def numpy_of(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    return tensor.detach().numpy(force=True)


def weights_for(host: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)
    made = random.uniform(0.5, 1.5, host.shape)
    return np.asarray(made + 1j * random.uniform(-1.0, 1.0, host.shape) if np.iscomplexobj(host) else made)


def difference(ours: Any, theirs: Any, stage: str) -> str:
    """Return how results differ, or an empty text."""
    if ours.shape != theirs.shape:
        return f"shape {ours.shape}, PyTorch {theirs.shape}"
    kinds = ["i" if one.dtype.kind == "u" else one.dtype.kind for one in (ours, theirs)]
    if kinds[0] != kinds[1]:
        return f"dtype {ours.dtype}, PyTorch {theirs.dtype}"
    if not theirs.size:
        return ""
    ours, theirs = (one.astype("complex128" if np.iscomplexobj(one) else "float64") for one in (ours, theirs))
    finite = theirs[np.isfinite(theirs)]
    scale = max(np.abs(finite).max(initial=0.0), 1e-3)
    rtol = TOLERANCES[stage]
    if np.allclose(ours, theirs, rtol=rtol, atol=0.01 * rtol * scale, equal_nan=True):
        return ""
    wrong = ~np.isclose(ours, theirs, rtol=rtol, atol=0.01 * rtol * scale, equal_nan=True)
    k = tuple(int(i[0]) for i in np.nonzero(wrong)) if ours.ndim else ()
    return f"{wrong.sum()} of {wrong.size} differ, at {k}: {ours[k]}, PyTorch {theirs[k]}"


def squared(result: Any, power: int) -> Any:
    """Give linear functions a second derivative."""
    return result if power == 1 else result + 0.1 * result * result


def loss_of_torch(results: list[Any], weights: list[Any], power: int) -> Any:
    total: Any = torch.zeros((), dtype=torch.float64)
    for one, weight in zip(results, weights, strict=True):
        if weight is not None:
            part = (squared(one, power) * torch.from_numpy(np.asarray(weight))).sum()
            total = total + (part.real if part.is_complex() else part)
    return total


def loss_of_ours(results: list[Any], weights: list[Any], power: int) -> Any:
    total: Any = 0.0
    for one, weight in zip(results, weights, strict=True):
        if weight is not None:
            part = a.sum(squared(one, power) * weight)
            total = total + (a.real(part) if np.iscomplexobj(weight) else part)
    return total


def derivatives_of_torch(sample: Sample, weights: list[Any], along: list[Any]) -> Iterator[list[Any] | str]:
    """Yield gradients, and then products with the Hessian; or the reason if PyTorch lacks them."""
    for power in (1, 2):
        operands = [one.detach().clone().requires_grad_() for one in sample.operands]
        try:
            value = loss_of_torch(sample.torchs(operands), weights, power)
            if not value.requires_grad:
                yield [np.zeros(one.shape, numpy_of(one).dtype) for one in operands]
                continue
            first = torch.autograd.grad(value, operands, create_graph=power == 2, materialize_grads=True)
            if power == 2:
                pairs = zip(first, along, strict=True)
                slope = sum((one.conj() * torch.from_numpy(v)).real.sum() for one, v in pairs)
                if slope.requires_grad:
                    first = torch.autograd.grad(slope, operands, materialize_grads=True)
                else:
                    first = [torch.zeros_like(one) for one in operands]
        except (RuntimeError, NotImplementedError) as error:
            yield str(error).partition("\n")[0]
        else:
            yield [numpy_of(one) for one in first]


NAMES = {name for full in ta.gradients.words() for name in (full, full.partition(".")[2])}


async def stage_of(stage: str, sample: Sample, run: Callable[[], Any], theirs: list[Any] | str) -> Outcome:
    """Compare what our function makes with PyTorch's."""
    if isinstance(theirs, str):
        return Outcome(stage, "not in PyTorch", theirs)
    try:
        ours = await run()
    except Exception as error:  # noqa: BLE001  each of them is a finding
        return outcome_of(stage, sample, error)
    if len(ours) != len(theirs):
        return Outcome(stage, "differs", f"{sample}: {len(ours)} results, PyTorch {len(theirs)}")
    pairs = zip(ours, theirs, strict=True)
    found = [difference(np.asarray(x), y, stage) for x, y in pairs if x is not None]
    detail = next(filter(None, found), "")
    return Outcome(stage, "differs" if detail else "equal", f"{sample}: {detail}" if detail else "")


def outcome_of(stage: str, sample: Sample, error: Exception) -> Outcome:
    """Return the outcome of an error. A refusal has to name a function."""
    text = str(error).partition("\n")[0]
    if isinstance(error, ta.NotSupportedError):
        has_name = any(word.strip(".,:()") in NAMES for word in text.split())
        return Outcome(stage, "refused" if has_name else "fails", text)
    if isinstance(error, NoCounterpartError):
        return Outcome(stage, "no counterpart", text)
    if isinstance(error, TypeError) and "complex" in text and "complex" in str(sample):
        return Outcome(stage, "real only", text)
    return Outcome(stage, "fails", f"{sample}: {type(error).__name__}: {text}")


async def outcomes_of(device: ta.Device, sample: Sample) -> list[Outcome]:
    """Compare one sample: its values, and derivatives if it has operands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = [numpy_of(one) for one in sample.torchs([one.detach().clone() for one in sample.operands])]
    hosts = [numpy_of(one).copy() for one in sample.operands]
    arrays = [await device.put(one) for one in hosts]
    on_device = {
        id(one): await device.put(numpy_of(one))
        for one in tensors_of([sample.tree, sample.named])
        if not sample.operands
    }
    kept: list[bool] = []

    def call(operands: list[Any]) -> list[Any]:
        return sample.ours(operands, lambda one: on_device.get(id(one), numpy_of(one)))

    async def values() -> list[Any]:
        results = call(arrays)
        is_call = [isinstance(one, ta.Call) for one in results]
        calls = list(itertools.compress(results, is_call))
        made = iter(await ta.gather(*calls) if len(calls) > 1 else [await one for one in calls])
        results = [next(made) if has_run else one for one, has_run in zip(results, is_call, strict=True)]
        # The elements decide the number of some results.
        results = results_of(results)
        kept.extend(one is not None for one in results)
        return [await one.to_host() if hasattr(one, "to_host") else one for one in results]

    outcomes = [await stage_of("value", sample, values, theirs)]
    is_floating = [one.dtype.kind in "fc" for one in theirs]
    if outcomes[0].kind != "equal" or not sample.operands or not any(np.logical_and(kept, is_floating)):
        return outcomes
    weights = [
        weights_for(one, k) if keep and one.dtype.kind in "fc" else None
        for k, (one, keep) in enumerate(zip(theirs, kept, strict=True))
    ]
    along = [weights_for(one, 50 + k) for k, one in enumerate(hosts)]

    async def first() -> list[Any]:
        found = await ta.grad(lambda p: loss_of_ours(call(p), weights, 1))(arrays)
        return [np.conj(await one.to_host()) for one in found]

    async def second() -> list[Any]:
        """Derive by the real and the imaginary parts, because `hvp` takes real arguments."""
        is_complex = [np.iscomplexobj(one) for one in hosts]
        parts = [[one.real, one.imag] if z else [one] for one, z in zip(hosts, is_complex, strict=True)]
        ways = [[v.real, v.imag] if z else [v] for v, z in zip(along, is_complex, strict=True)]

        def loss(parts: Any) -> Any:
            operands = [one[0] + 1j * one[1] if len(one) > 1 else one[0] for one in parts]
            return loss_of_ours(call(operands), weights, 2)

        primals, tangents = [
            [[await device.put(x.copy()) for x in row] for row in one] for one in (parts, ways)
        ]
        (made,) = await ta.gradients.hvp(loss, (primals,), (tangents,))
        rows = [[await x.to_host() for x in row] for row in made]
        return [row[0] + 1j * row[1] if len(row) > 1 else row[0] for row in rows]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        firsts, seconds = derivatives_of_torch(sample, weights, along)
    outcomes.append(await stage_of("first", sample, first, firsts))
    outcomes.append(await stage_of("second", sample, second, seconds))
    return outcomes


async def all_outcomes(device: ta.Device, name: str, info: Any) -> list[Outcome]:
    found: list[Outcome] = []
    token = DEVICE.set(device)
    try:
        for dtype in dtypes_of(info):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                samples = samples_of(name, info, dtype)
            for sample in samples:
                found += await outcomes_of(device, sample)
                await trio.lowlevel.checkpoint()
    finally:
        DEVICE.reset(token)
    return found


def bad(outcomes: list[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.kind in ("differs", "fails")]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
async def test_operators_match_pytorch(device: ta.Device, infos: dict[str, Any], name: str) -> None:
    if name not in infos:
        pytest.skip("this version of PyTorch does not have it")
    outcomes = await all_outcomes(device, name, infos[name])
    listed = DIFFERENCES.get(name, {})
    others = [f"{one.stage}: {one.detail}" for one in bad(outcomes) if one.stage not in listed]
    assert not others, "\n".join(others)
    assert {one.stage for one in bad(outcomes)} == set(listed)
    refusals = [one.detail for one in outcomes if one.kind == "refused"]
    assert bool(refusals) == (name in REFUSED), refusals
    for text in refusals:
        assert REFUSED[name] in text


def test_most_operators_are_mapped(infos: dict[str, Any]) -> None:
    assert len(infos.keys() & FUNCTIONS.keys()) >= 500
    assert (DIFFERENCES.keys() | REFUSED.keys()) <= FUNCTIONS.keys()
