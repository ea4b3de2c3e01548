"""Kernels and expressions of the user's own as operations of a graph."""

from __future__ import annotations

import re

import numpy as np
from graph_arrays import matrix
from graph_kernels import halves

import trio_accel as ta
from trio_accel import graphs, jit, linalg


async def test_a_kernel_in_a_graph(device: ta.Device) -> None:
    x = await device.put(matrix(1))

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        (half,) = await halves(n=36, x=x)
        return await linalg.matmul(half, x)

    graph = await graphs.capture(device, step, x)
    for _ in range(3):
        found = await (await graph.replay()).to_host()
        np.testing.assert_allclose(found, (0.5 * matrix(1) + 1.0) @ matrix(1), rtol=1e-12)
    other = await device.put(matrix(2))
    found = await (await graph(other)).to_host()
    np.testing.assert_allclose(found, (0.5 * matrix(2) + 1.0) @ matrix(2), rtol=1e-12)


async def test_expressions_in_a_graph(device: ta.Device) -> None:
    blend = ta.jit.elementwise("out = a * x + y")
    total = ta.jit.reduction("x * x", "a + b")
    x, y = await device.put(matrix(1)), await device.put(matrix(2))

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> tuple[ta.AccelRef, ta.AccelRef]:
        mixed = await blend(2.0, x, y)
        return mixed, await total(mixed)

    expected = [await ref.to_host() for ref in await step(x, y)]
    graph = await graphs.capture(device, step, x, y)
    for _ in range(3):
        for ref, host in zip(await graph.replay(), expected, strict=True):
            np.testing.assert_array_equal(await ref.to_host(), host)


async def test_names_of_kernels_in_dot(device: ta.Device) -> None:
    """A name expression may have what ends a text of DOT."""
    name = """strange<'"', '\\n'>"""
    kernel = jit.Kernel(
        name, "__global__", parameters={"x": jit.updates("float64")}, grid=1, block=1, cpu="numpy:negative"
    )

    async def step(x: ta.AccelRef) -> None:
        await kernel(x)

    graph = await graphs.capture(device, step, await device.zeros(3))
    (label,) = re.findall(r'label="((?:[^"\\]|\\.)*)"\];\n', graph.dot())
    told, _, outs = label.rpartition("\\n")
    assert re.sub(r"\\(.)", r"\1", told) == f"jit.{name}"
    assert outs == "float64 (3,)"
