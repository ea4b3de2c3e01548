"""A front end of cuDNN with graphs computed by NumPy, in host-readable memory: the stand-in's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from cuda.bindings import driver
from dnn_references import NUMPYS, Array, results, spread
from numpy.lib.stride_tricks import as_strided

NOWHERE = 1 << 40
DTYPES = {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "INT32": "int32"}


class Names:
    """An enumeration with its names for members."""

    def __getattr__(self, name: str) -> str:
        return name


class UnsupportedError(Exception):
    """The front end's error for graphs without kernels in cuDNN."""


class Tensor:
    def __init__(self, **given: Any) -> None:
        self.dim, self.stride = given.get("dim"), given.get("stride")
        self.data_type, self.uid = given.get("data_type"), given.get("uid")

    def set_output(self, is_output: bool) -> Tensor:
        assert is_output
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def _set_data_type(self, data_type: str) -> Tensor:
        self.data_type = data_type
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def at(self, address: int) -> Array:
        assert address % 16 == 0, "the front end takes tensors for aligned"
        dtype = np.dtype(NUMPYS.get(DTYPES[self.data_type], DTYPES[self.data_type]))
        reach = 1 + sum((extent - 1) * step for extent, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
        steps = [step * dtype.itemsize for step in self.stride]
        return as_strided(np.frombuffer(memory, dtype), self.dim, steps)


class Graph:
    """A described and executed graph: each node computes the values of tensors."""

    built: ClassVar[list[str]] = []
    refused: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **_: Any) -> None:
        self.tensors: list[Tensor] = []
        self.nodes: list[Any] = []
        self.name = ""

    def _make_tensor(self, **given: Any) -> Tensor:
        self.tensors.append(Tensor(**given))
        return self.tensors[-1]

    def _node(self, name: str, compute: Any, count: int = 1) -> list[Tensor]:
        made = [Tensor() for _ in range(count)]
        self.name += f" {name}"
        self.tensors += made
        self.nodes.append((compute, made))
        return made

    def conv_fprop(self, image: Tensor, weight: Tensor, **numbers: Any) -> Tensor:
        return self._node("conv_fprop", lambda of: [forward(of[image], of[weight], numbers)])[0]

    def conv_dgrad(self, *, loss: Tensor, **numbers: Any) -> Tensor:
        weight = numbers.pop("filter")
        made = self._node("conv_dgrad", lambda of: [adjoint(of[weight], of[loss], made[0].dim, numbers)])
        return made[0]

    def conv_wgrad(self, image: Tensor, loss: Tensor, **numbers: Any) -> Tensor:
        made = self._node("conv_wgrad", lambda of: [weights(of[image], of[loss], made[0].dim, numbers)])
        return made[0]

    def bias(self, **given: Tensor) -> Tensor:
        return self._node("bias", lambda of: [of[given["input"]] + of[given["bias"]]])[0]

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
        return self._node(
            "sdpa", lambda of: attended_by(of, [q, k, v], np.zeros((*of[q].shape[:3], 1)), options)[:2], 2
        )

    def sdpa_backward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
        given = [options.pop(name) for name in ("o", "stats", "dO")]

        def compute(of: dict[Tensor, Array]) -> list[Array]:
            out, logs, gradients = attended_by(of, [q, k, v], of[given[2]], options)
            for found, right in zip(given, (out, logs), strict=False):
                # A row that multiplied what it does not see has been mended since.
                known = np.isfinite(right)
                np.testing.assert_allclose(of[found][known], right[known], atol=0.03)
            return gradients

        return self._node("sdpa_backward", compute, 3)

    def _nothing(self, *_: object) -> None:
        """The build of a graph, one step after the other."""

    validate = build_operation_graph = create_execution_plans = _nothing
    deselect_numeric_notes = deselect_workspace_greater_than = _nothing

    def check_support(self) -> None:
        if self.refused & set(self.name.split()):
            raise UnsupportedError(self.name)

    def build_plans(self, _: object) -> None:
        self.built.append(self.name.strip())

    def get_workspace_size(self) -> int:
        return 100

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        return sorted(one.uid for one in self.tensors if one.uid is not None)

    def _execute_with_ptrs(self, addresses: list[int], workspace: int, handle: int) -> None:
        if NOWHERE in addresses:
            raise RuntimeError("nothing is captured")
        assert workspace
        assert driver.cuStreamSynchronize(STREAMS[handle])[0] == 0
        places = dict(zip(self._get_variant_pack_uids_sorted(), addresses, strict=True))
        given = [one for one in self.tensors if one.data_type is not None]
        made = {one for _, outcomes in self.nodes for one in outcomes}
        of: dict[Tensor, Any] = {
            one: one.at(places[one.uid]).astype(float) for one in given if one not in made
        }
        for compute, outcomes in self.nodes:
            for one, value in zip(outcomes, compute(of), strict=True):
                of[one] = value
                if one.uid is not None:
                    target = one.at(places[one.uid])
                    target[...] = np.asarray(value).reshape(target.shape).astype(target.dtype)


STREAMS: dict[int, int] = {}


def create_handle() -> int:
    STREAMS[len(STREAMS) + 1] = 0
    return len(STREAMS)


def set_stream(handle: int, stream: int) -> None:
    STREAMS[handle] = stream


def destroy_handle(handle: int) -> None:
    STREAMS[handle] = -1


# The functions of the extension module that `_cudnn` calls.
data_type = numerical_note = heur_mode = build_plan_policy = diagonal_alignment = Names()
cudnnGraphNotSupportedError = UnsupportedError  # noqa: N816
pygraph = Graph


def taps(x: Array, shape: Sequence[int], counts: Sequence[int], numbers: dict[str, Any]) -> Iterator[Any]:
    """For each place in the window, that and a view of the elements that all windows have there."""
    pads = zip(numbers["pre_padding"], numbers["post_padding"], strict=True)
    padded = np.pad(x, [(0, 0), (0, 0), *pads])
    for place in np.ndindex(*shape[2:]):
        starts = [at * step for at, step in zip(place, numbers["dilation"], strict=True)]
        steps = zip(starts, counts, numbers["stride"], strict=True)
        yield (
            place,
            padded[(..., *[slice(first, first + step * count, step) for first, count, step in steps])],
        )


def grouped(x: Array, groups: int) -> Array:
    return x.reshape(len(x), groups, x.shape[1] // groups, *x.shape[2:])


def forward(x: Array, weight: Array, numbers: dict[str, Any]) -> Array:
    groups = x.shape[1] // weight.shape[1]
    factors = weight.reshape(groups, len(weight) // groups, *weight.shape[1:])
    rows = zip(
        x.shape[2:],
        weight.shape[2:],
        numbers["stride"],
        numbers["dilation"],
        numbers["pre_padding"],
        numbers["post_padding"],
        strict=True,
    )
    counts = [
        (extent + before + behind - (width - 1) * dilation - 1) // stride + 1
        for extent, width, stride, dilation, before, behind in rows
    ]
    out = np.zeros((len(x), len(weight), *counts))
    for place, view in taps(x, weight.shape, counts, numbers):
        made = np.einsum("ngc...,goc->ngo...", grouped(view, groups), factors[(..., *place)])
        out += made.reshape(out.shape)
    return out


def adjoint(weight: Array, grad: Array, shape: Sequence[int], numbers: dict[str, Any]) -> Array:
    names = "stride", "dilation"
    sizes = {name: numbers[name] for name in names}
    groups = shape[1] // weight.shape[1]
    return spread(grad, weight, shape[2:], padding=numbers["pre_padding"], groups=groups, **sizes)


def weights(x: Array, grad: Array, shape: Sequence[int], numbers: dict[str, Any]) -> Array:
    groups = x.shape[1] // shape[1]
    found = np.zeros((groups, shape[0] // groups, *shape[1:]))
    for place, view in taps(x, shape, grad.shape[2:], numbers):
        left, right = grouped(grad, groups), grouped(view, groups)
        axes = (len(left), *left.shape[1:3], -1), (len(right), *right.shape[1:3], -1)
        found[(..., *place)] = np.einsum("ngow,ngcw->goc", left.reshape(axes[0]), right.reshape(axes[1]))
    return found.reshape(shape)


def attended_by(
    of: dict[Tensor, Array], arrays: list[Tensor], grad: Array, options: dict[str, Any]
) -> tuple[Array, Array, list[Array]]:
    query, key, value = (of[one] for one in arrays)
    left, right = options.get("diagonal_band_left_bound"), options.get("diagonal_band_right_bound")
    lengths = [of[options[name]].ravel() if name in options else None for name in ("seq_len_q", "seq_len_kv")]
    mask = of[options["bias"]] if "bias" in options else None
    formula = {
        "mask": mask,
        "scale": options["attn_scale"],
        "left": -1 if left is None else left - 1,
        "right": -1 if right is None else right,
        "is_lower_right": options.get("diagonal_alignment") == "BOTTOM_RIGHT",
        "query_lengths": lengths[0],
        "key_lengths": lengths[1],
    }
    if grad.shape[-1] == 1:
        grad = np.broadcast_to(grad, (*query.shape[:3], value.shape[-1]))
    with np.errstate(invalid="ignore"):
        out, logs, gradients = results(query, key, value, grad, formula, is_bare=True)
    return out, logs[..., None], gradients
