"""The tests of nodes that come with ONNX, for the operations that there are: results by its NumPy code.

`OPERATIONS` describes for each type of node its computation here, and the number of its passing tests. An
adapter that raises `NotSupportedError` refuses a test for a missing feature of the function.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import pytest

import trio_accel as ta
from trio_accel import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    onnx = pytest.importorskip("onnx")
    importlib.import_module("onnx.backend.test.case.node")

Options: TypeAlias = Mapping[str, Any]
Adapter: TypeAlias = Callable[[ta.Device, Options, Sequence[Any]], Awaitable[Sequence[Any]]]
"""Takes the attributes of a node and its inputs, with None for one left out; returns its first outputs."""


@attrs.frozen
class Operation:
    """The test run for one type of node.

    Attributes:
        module: The module of `onnx.backend.test.case.node` with them.
        adapter: Computes a node.
        passed: How many tests pass.
        refused: How many tests are refused.
    """

    module: str
    adapter: Adapter
    passed: int
    refused: int = 0


def refuse_unless(condition: object, what: str) -> None:
    if not condition:
        raise ta.NotSupportedError(what)


def simple(function: Callable[..., Awaitable[Any]], **names: str) -> Adapter:
    """Adapt a function of one array; `names` has the names of options in ONNX."""

    async def adapter(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
        given = {name: options[theirs] for name, theirs in names.items() if theirs in options}
        return [await function(await device.put(inputs[0]), **given)]

    return adapter


async def selu(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    given = options.get("alpha", 1.6732632), options.get("gamma", 1.0507009)
    refuse_unless(np.allclose(given, (1.6732632, 1.0507009), rtol=1e-6), "other factors")
    return [await nn.selu(await device.put(inputs[0]))]


async def hard_sigmoid(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    refuse_unless(np.isclose(options.get("alpha", 0.2), 1 / 6), "another slope")
    return [await nn.hardsigmoid(await device.put(inputs[0]))]


async def swish(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    refuse_unless(options.get("alpha", 1.0) == 1, "another factor")
    return [await nn.silu(await device.put(inputs[0]))]


async def softmax(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    return [await ta.arrays.softmax(await device.put(inputs[0]), options.get("axis", -1))]


async def log_softmax(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    return [await ta.arrays.log_softmax(await device.put(inputs[0]), options.get("axis", -1))]


async def layer_norm(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    x = await device.put(inputs[0])
    axes, eps = tuple(range(x.ndim))[options.get("axis", -1) :], options.get("epsilon", 1e-5)
    bias = inputs[2] if len(inputs) > 2 else 0
    y = await ta.arrays.layer_norm(x, inputs[1], bias, axis=axes, eps=eps)
    mean = await ta.arrays.mean(x, axes, keepdims=True)
    var = await ta.arrays.var(x, axes, keepdims=True)
    return [y, mean, 1 / np.sqrt(await var.to_host() + eps)]


async def rms_norm(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    x = await device.put(inputs[0])
    axes, eps = tuple(range(x.ndim))[options.get("axis", -1) :], options.get("epsilon", 1e-5)
    return [await ta.arrays.rms_norm(x, inputs[1], axis=axes, eps=eps)]


async def batch_norm(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    x, scale, bias, mean, var = [await device.put(each) for each in inputs]
    eps, kept = options.get("epsilon", 1e-5), options.get("momentum", 0.9)
    if not options.get("training_mode", 0):
        return [await nn.batch_norm(x, mean, var, scale, bias, eps=eps)]
    made = await nn.batch_norm_training(x, scale, bias, eps=eps)
    # ONNX keeps the variance of the batch, and PyTorch the variance of a sample.
    moved = [
        kept * await old.to_host() + (1 - kept) * await new.to_host()
        for old, new in ((mean, made.mean), (var, made.var))
    ]
    return [made.y, *moved]


async def instance_norm(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    x, scale, bias = [await device.put(each) for each in inputs]
    return [await nn.instance_norm(x, scale, bias, eps=options.get("epsilon", 1e-5))]


async def group_norm(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    x, scale, bias = [await device.put(each) for each in inputs]
    return [await nn.group_norm(x, options["num_groups"], scale, bias, eps=options.get("epsilon", 1e-5))]


def labels_of(options: Options, inputs: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    given = {"reduction": options.get("reduction", "mean"), "ignore_index": options.get("ignore_index", -100)}
    return (inputs[1], inputs[2] if len(inputs) > 2 else None), given


async def entropy(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    x, (more, named) = await device.put(inputs[0]), labels_of(options, inputs)
    return [await nn.cross_entropy(x, *more, **named), await ta.arrays.log_softmax(x, 1)]


async def nll(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    more, named = labels_of(options, inputs)
    return [await nn.nll_loss(await device.put(inputs[0]), *more, **named)]


async def dropout(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    ratio = float(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else 0.5
    if not (len(inputs) > 2 and inputs[2]):
        ratio = 0.0
    refuse_unless(ratio == 0, "draws of NumPy's generator")
    generator = ta.random.Generator(device, seed=options.get("seed", 0))
    return await nn.dropout(await device.put(inputs[0]), ratio, generator=generator)


def by_parameter(inputs: Sequence[Any], kinds: int) -> list[Sequence[Any]]:
    """Group the arrays of a step, which follow two numbers kind by kind."""
    count = (len(inputs) - 2) // kinds
    return [inputs[2 + place :: count] for place in range(count)]


async def adam(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    refuse_unless(not options.get("norm_coefficient_post"), "decay behind the step")
    step, betas = max(int(inputs[1]), 1), (options.get("alpha", 0.9), options.get("beta", 0.999))
    # ONNX adds epsilon before the root is corrected, and corrects nothing at step 0.
    root = np.sqrt(1 - betas[1] ** step)
    lr = float(inputs[0]) * (1 if inputs[1] > 0 else (1 - betas[0]) / root)
    named = {"lr": lr, "eps": options.get("epsilon", 0.0) / root, "weight_decay": options["norm_coefficient"]}
    found = []
    for arrays in by_parameter(inputs, 4):
        x, grad, m, v = [await device.put(each) for each in arrays]
        await nn.adam(x, grad, m, v, step, betas=betas, **named)
        found.append((x, m, v))
    return [each for kind in zip(*found, strict=True) for each in kind]


async def momentum(device: ta.Device, options: Options, inputs: Sequence[Any]) -> Sequence[Any]:
    beta, is_nesterov = options["beta"] if inputs[1] > 0 else 1.0, options["mode"] == "nesterov"
    refuse_unless(beta == 1 or not is_nesterov, "dampening ahead")
    found = []
    for arrays in by_parameter(inputs, 3):
        x, grad, buffer = [await device.put(each) for each in arrays]
        named = {"momentum": options["alpha"], "weight_decay": options["norm_coefficient"]}
        named |= {"dampening": 1 - beta, "lr": float(inputs[0]), "nesterov": is_nesterov}
        await nn.sgd(x, grad, buffer, **named)
        found.append((x, buffer))
    return [each for kind in zip(*found, strict=True) for each in kind]


# Nodes computed by another capability also have their own line here.
OPERATIONS: dict[str, Operation] = {
    "Adam": Operation("adam", adam, 2),
    "BatchNormalization": Operation("batch_normalization", batch_norm, 4),
    "Celu": Operation("celu", simple(nn.celu, alpha="alpha"), 3),
    "Dropout": Operation("dropout", dropout, 8, 4),
    "Elu": Operation("elu", simple(nn.elu, alpha="alpha"), 3),
    "Gelu": Operation("gelu", simple(nn.gelu, approximate="approximate"), 4),
    "GroupNormalization": Operation("groupnormalization", group_norm, 2),
    "HardSigmoid": Operation("hardsigmoid", hard_sigmoid, 0, 3),
    "HardSwish": Operation("hardswish", simple(nn.hardswish), 1),
    "InstanceNormalization": Operation("instance_normalization", instance_norm, 2),
    "LayerNormalization": Operation("layernormalization", layer_norm, 19),
    "LeakyRelu": Operation("leakyrelu", simple(nn.leaky_relu, negative_slope="alpha"), 3),
    "LogSoftmax": Operation("logsoftmax", log_softmax, 7),
    "Mish": Operation("mish", simple(nn.mish), 1),
    "Momentum": Operation("momentum", momentum, 3),
    "NegativeLogLikelihoodLoss": Operation("negativeloglikelihoodloss", nll, 18),
    "RMSNormalization": Operation("rmsnormalization", rms_norm, 19),
    "Relu": Operation("relu", simple(nn.relu), 1),
    "Selu": Operation("selu", selu, 1, 2),
    "Sigmoid": Operation("sigmoid", simple(nn.sigmoid), 2),
    "Softmax": Operation("softmax", softmax, 7),
    "SoftmaxCrossEntropyLoss": Operation("softmax_cross_entropy_loss", entropy, 34),
    "Softplus": Operation("softplus", simple(nn.softplus), 2),
    "Softsign": Operation("softsign", simple(nn.softsign), 2),
    "Swish": Operation("swish", swish, 1),
}


def cases_of(op_type: str) -> list[Any]:
    """The tests for one type of node; others are made of the functions that define it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Its import makes the tests.
        importlib.import_module(f"onnx.backend.test.case.node.{OPERATIONS[op_type].module}")
    found = onnx.backend.test.case.node._NodeTestCases
    return [
        case
        for case in found
        if [node.op_type for node in case.model.graph.node] == [op_type] and "_expanded" not in case.name
    ]


def options_of(node: Any) -> dict[str, Any]:
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


async def host(x: Any) -> Any:
    return await x.to_host() if isinstance(x, ta.AccelRef) else np.asarray(x)


async def check(device: ta.Device, operation: Operation, case: Any) -> None:
    """Compare the outputs of a node, with the tolerances of the suite."""
    (node,) = case.model.graph.node
    for given, wanted in case.data_sets:
        arrays = iter(given)
        inputs = [np.asarray(next(arrays)) if name else None for name in node.input]
        found = await operation.adapter(device, options_of(node), inputs)
        named = [place for place, name in enumerate(node.output) if name]
        assert len(found) > named[-1], f"{len(found)} outputs of {len(node.output)}"
        for place, want in zip(named, wanted, strict=True):
            got = await host(found[place])
            assert got.shape == want.shape, f"output {place}: {got.shape}, not {want.shape}"
            assert got.dtype == want.dtype, f"output {place}: {got.dtype}, not {want.dtype}"
            np.testing.assert_allclose(
                got.astype(float),
                want.astype(float),
                rtol=case.rtol,
                atol=case.atol,
                err_msg=f"output {place}",
            )


@pytest.mark.parametrize("op_type", OPERATIONS)
async def test_nodes(device: ta.Device, op_type: str) -> None:
    operation, passed, failed, refused = OPERATIONS[op_type], list[str](), list[str](), list[str]()
    for case in cases_of(op_type):
        try:
            await check(device, operation, case)
        except ta.NotSupportedError as error:
            refused.append(f"{case.name}: {error}")
        except (AssertionError, TypeError, ValueError, LookupError, ta.AccelError) as error:
            failed.append(f"{case.name}: {error}")
        else:
            passed.append(case.name)
    print(f"{op_type}: {len(passed)} passed, {len(failed)} failed, {len(refused)} refused")
    assert failed == []
    assert (len(passed), len(refused)) == (operation.passed, operation.refused), refused
