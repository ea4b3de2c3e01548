"""Random programs of one expression, asked as one chain of calls or step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import arrays, jit, linalg, nn
from trio_accel.devices.operations._calls import SpentCall, evaluate
from trio_accel.devices.operations._chain import arguments_of, replaced

N = 4
MOST_STEPS = 12
Host = npt.NDArray[Any]
Step = Callable[[Any, Any, Any, Mapping[str, Any]], Any]

LEAVES = ("x", "y", "view", "whole", "part", "h", "g")
"""What a program begins with: arrays of the device, a view of one, two to write to, and two of the host."""
HOSTS = ("h", "g")


def _cast(x: Any, dtype: str = "float64") -> Any:
    # A reference becomes a call, which has methods that make calls.
    return x.astype(dtype) if isinstance(x, np.ndarray) else (+x).cast(dtype)


def _both(x: Any, y: Any) -> Any:
    made = SUM_AND_PRODUCT(x, y)
    return made[0] - made[1]


def _largest(x: Any) -> Any:
    made = arrays.top_k(x, N)
    return made[0] * made[1]


SUM_AND_PRODUCT = jit.elementwise("s = x + y; p = x * y", inputs=["x", "y"], outputs=["s", "p"])
STEPS: dict[str, Step] = {
    "add": lambda x, y, k, of: x + y,
    "subtract from": lambda x, y, k, of: y - x,
    "multiply": lambda x, y, k, of: x * y,
    "twice": lambda x, y, k, of: x + x,
    "number": lambda x, y, k, of: x * k,
    "number first": lambda x, y, k, of: k - x,
    "maximum": lambda x, y, k, of: arrays.maximum(x, y),
    "where": lambda x, y, k, of: arrays.where(x > y, y, x),
    "negative": lambda x, y, k, of: -x,
    "absolute": lambda x, y, k, of: abs(x),
    "copysign": lambda x, y, k, of: arrays.copysign(x, y),
    "tanh": lambda x, y, k, of: arrays.tanh(x),
    "relu": lambda x, y, k, of: nn.relu(x),
    "gelu": lambda x, y, k, of: nn.gelu(x),
    "softmax": lambda x, y, k, of: arrays.softmax(x, axis=-1),
    "sum": lambda x, y, k, of: arrays.sum(x, axis=0, keepdims=True) + y,
    "mean": lambda x, y, k, of: x - arrays.mean(x),
    "cumulative_sum": lambda x, y, k, of: arrays.cumulative_sum(x, axis=1),
    "sort": lambda x, y, k, of: arrays.sort(x, axis=0),
    "clip": lambda x, y, k, of: arrays.clip(x, -0.5, 0.5),
    "matmul": lambda x, y, k, of: linalg.matmul(_cast(x), _cast(y)),
    "matmul of a view": lambda x, y, k, of: _cast(x).T @ _cast(y),
    "transposed": lambda x, y, k, of: (+x).T,
    "backwards": lambda x, y, k, of: x[::-1, ::-1],
    "row": lambda x, y, k, of: x[1] + y,
    "new axis": lambda x, y, k, of: (x[:, None] * y)[:, 2],
    "reshape": lambda x, y, k, of: (+x).copy().reshape(2, -1).reshape((N, N)),
    "cast": lambda x, y, k, of: _cast(x, "float32"),
    "cast to whole": lambda x, y, k, of: _cast(arrays.clip(x, -9.0, 9.0), "int32").cast("float32"),
    "concat": lambda x, y, k, of: arrays.concat([_cast(x), _cast(y)], axis=0)[1 : N + 1],
    "stack": lambda x, y, k, of: arrays.stack((_cast(y), _cast(x)), axis=1)[:, 1],
    "take": lambda x, y, k, of: arrays.take(x, np.array([3, 0, 1, 1]), axis=0),
    "solve": lambda x, y, k, of: linalg.solve(_cast(x), _cast(y)),
    "two results": lambda x, y, k, of: _both(x, y),
    "one of two results": lambda x, y, k, of: SUM_AND_PRODUCT(y, x)[1],
    "two results of a function": lambda x, y, k, of: _largest(x) + y,
    "fill": lambda x, y, k, of: (x + 0.5).fill(k),
    "fill a part": lambda x, y, k, of: (x + 0.5)[1:3].fill(k)[:1] + y,
    "assign": lambda x, y, k, of: (x + 0.5).assign(_cast(y, "float32")),
    "out": lambda x, y, k, of: arrays.add(_cast(x), y, out=of["whole"]),
    "out, filled": lambda x, y, k, of: arrays.add(_cast(x), y, out=of["whole"])[0].fill(k) + x,
    "out that is a view": lambda x, y, k, of: arrays.multiply(_cast(x), y, out=of["part"]),
}

WRITING = frozenset({name for name in STEPS if name.startswith("out")})
ENDS: dict[str, Callable[[Any], Any]] = {
    "stays": lambda call: call,
    "stays as a view": lambda call: call[1:, ::2].T,
    "host": lambda call: call.to_host(),
    "host of a view": lambda call: call[1:, ::2].T.to_host(),
    "item": lambda call: arrays.sum(call).item(),
    "empty": lambda call: call[:0].to_host(),
}
NUMBERS = [2.0, -0.0, 0.0, float("nan"), float("inf"), 3, np.float32(1.5), np.float64(-0.0), -7]


@attrs.frozen
class Node:
    """A step: the function, two operands by their places modulo what there is, and a number."""

    kind: str
    first: int
    second: int
    number: Any


@attrs.frozen
class Program:
    """An expression.

    Attributes:
        nodes: The steps. The last one is awaited together with its operands.
        end: How the chain ends.
        one_host: Whether the two arrays of the host are the same.
        dtypes: Those of the leaves.
        order: Strides of the host arrays.
    """

    nodes: Sequence[Node]
    end: str
    one_host: bool
    dtypes: Mapping[str, str]
    order: str

    def call(self, leaves: Mapping[str, Any]) -> Any:
        """Make the calls."""
        value = self.values(leaves)[-1]
        return ENDS[self.end](value)

    def values(self, leaves: Mapping[str, Any]) -> list[Any]:
        """Make the calls of the nodes, which share operands."""
        values: list[Any] = [leaves[name] for name in LEAVES if name not in HOSTS]
        hosts = [leaves[name] for name in HOSTS]
        for node in self.nodes:
            # A host array is not a first operand: NumPy would compute.
            others = [*hosts, *values]
            # The last results are used most, so that programs are deep.
            first = values[-1 - node.first % len(values)]
            second = others[-1 - node.second % len(others)]
            # Numbers that differ are handed over from the third on.
            more = leaves.get("more", 0.0) if type(node.number) is float else 0
            values.append(STEPS[node.kind](first, second, node.number + more, leaves))
        made = values[-len(self.nodes) :]
        # Reversed views of an array are not calls yet.
        return [one if isinstance(one, ta.Call) else +one for one in made]

    def host(self, turn: int) -> dict[str, Host]:
        """The contents of one turn's leaves."""
        generator = np.random.default_rng(turn)
        rows = {"whole": N, "part": 2 * N}
        made = {
            name: generator.standard_normal((rows.get(name, N), N)).astype(self.dtypes.get(name, "float64"))
            for name in LEAVES
        }
        made.update({name: _laid_out(made[name], self.order) for name in HOSTS})
        if self.one_host:
            made["g"] = made["h"]
        return made

    async def put(self, device: ta.Device, turn: int) -> dict[str, Any]:
        """Make the leaves on a device."""
        host = self.host(turn)
        leaves: dict[str, Any] = {name: await device.put(host[name]) for name in ("x", "y", "whole", "part")}
        leaves["view"] = leaves["x"].T[::-1]
        leaves["all"], leaves["part"] = leaves["part"], leaves["part"][1 : 2 * N : 2]
        return leaves | {name: host[name] for name in HOSTS}

    async def renew(self, leaves: dict[str, Any], turn: int) -> None:
        """Give the leaves other contents, in place on the device."""
        host = self.host(turn)
        for name in ("x", "y", "whole"):
            await leaves[name].assign(host[name])
        await leaves["all"].fill(float(turn))
        leaves.update({name: host[name] for name in HOSTS})
        leaves["more"] = 0.3 * (turn // 2)


def _laid_out(host: Host, order: str) -> Host:
    made = {
        "C": host,
        "F": np.asfortranarray(host),
        "reversed": host[::-1, ::-1],
        "gaps": host.repeat(2, axis=0)[::2],
    }[order]
    made.flags.writeable = order != "gaps"
    return made


def programs(*, kinds: Sequence[str] = tuple(STEPS)) -> st.SearchStrategy[Program]:
    """Programs of these steps."""
    places = st.integers(0, 5)
    nodes = st.builds(Node, st.sampled_from(kinds), places, st.integers(0, 9), st.sampled_from(NUMBERS))
    floats = st.sampled_from(["float32", "float64"])
    return st.builds(
        Program,
        st.lists(nodes, min_size=1, max_size=MOST_STEPS),
        st.sampled_from([*ENDS]),
        st.booleans(),
        st.fixed_dictionaries(dict.fromkeys(("x", "y", "h"), floats)),
        st.sampled_from(["C", "F", "reversed", "gaps"]),
    )


async def step_by_step(call: SpentCall[Any]) -> Any:
    """Await the calls that a call is made of one by one, operands first, in their order."""
    values: dict[int, Any] = {}

    async def value_of(call: SpentCall[Any]) -> Any:
        if id(call) not in values:
            for each in arguments_of(call):
                if isinstance(each, SpentCall):
                    await value_of(each)
            args, named = replaced(call, values)
            values[id(call)] = await evaluate(call.function, args, named)
        return values[id(call)]

    try:
        return await value_of(call)
    finally:
        call.close()


async def outcome(awaitable: Any) -> Any:
    """The bits of a result, or the error."""
    try:
        result = await awaitable
    except (ta.AccelError, ValueError, TypeError) as error:
        return type(error), str(error)
    if isinstance(result, ta.AccelRef):
        result = await result.to_host()
    if isinstance(result, np.ndarray):
        return result.dtype, result.shape, result.tobytes()
    return type(result), np.asarray(result).tobytes()


async def contents(leaves: Mapping[str, Any]) -> list[bytes]:
    """The bits of the leaves."""
    arrays = [leaves[name] for name in ("x", "y", "whole", "all")]
    return [*[(await ref.to_host()).tobytes() for ref in arrays], *[leaves[name].tobytes() for name in HOSTS]]
