"""A mixture of experts: a gate chooses experts for each token, and a `MoeRouter` does the rest.

The result of a token is the sum of its experts' results, weighted by the gate. Experts are models: async
callables, or addresses of actors for `Submit`. Each may be on a separate device, because an expert computes
on the device of its matrix. Here all share one device, and the gate runs on the host. Tokens pass through the
host on their way to the experts.

The item is a NumPy array or a device array of shape (tokens, width). The gate gets it as a NumPy array, and
returns logits of shape (tokens, experts); a logit of -inf forbids the expert. Each expert gets the rows of
its tokens, and returns the same number of rows. All experts return rows of the same width.

Options of the router:

* ``top_k``: the number of experts that a token chooses; 2 by default.
* ``normalise``: True, the default, makes the weights of a token sum to 1, as in GShard and Mixtral. With
  False they are the gate's probabilities, as in Switch Transformers.
* ``capacity_factor``: an expert takes its even share of the choices times this factor at once, rounded up.
  None, the default, means no limit. First choices precede second ones, and earlier tokens precede later ones.
* ``overflow``: the treatment of a choice if the expert is full. With ``"drop"``, the default, its share is
  missing from the sum. With ``"wait"``, the router calls the expert again when it is done.
* ``on_failure``: the reaction if an expert raises an error, or does not return a row for each token.
  ``"renormalise"``, the default, increases the weights of the token's other experts, so that their sum does
  not change. A token without other experts has a row of zeros, and is marked in ``is_lost``. ``errors`` maps
  the number of an expert to its error. If all experts fail, the call raises `ExpertsFailedError`. With
  ``"raise"``, the caller gets the first error, and the router cancels the other experts of the call.

A hanging expert delays its call. For a timeout, use a cancel scope in the expert,
``with trio.fail_after(0.1):``. The caller gets an error of the gate, because nothing replaces it. Logits of
another shape, with NaN or infinity, or with fewer than ``top_k`` allowed experts, raise a `ModelOutputError`.

Each reply has the `RoutingStatistics` of its call, and ``GetStatistics()`` returns the sum since the router's
last start. ``auxiliary_loss`` is the load-balancing loss of Switch Transformers without its factor: 1 is an
even load. ``importance_loss`` is the squared coefficient of variation of each expert's weights (Shazeer et
al. 2017). Failures are counted over calls of experts, everything else over tokens.

Run it with: python mixture_of_experts.py --tokens 64 --experts 4
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta
from trio_accel.patterns import GetStatistics, MoeRouter, MoeStatistics, Routed, Submit

Array = npt.NDArray[Any]
WIDTH = 8


class Expert:
    """An expert, which computes on the device of its matrix."""

    def __init__(self, matrix: ta.AccelRef) -> None:
        self.matrix = matrix

    async def __call__(self, tokens: Array) -> ta.AccelRef:
        """Return the rows of its tokens, multiplied by its matrix."""
        return await ta.linalg.matmul(tokens, self.matrix)


class Broken(Expert):
    """An expert that always fails."""

    async def __call__(self, tokens: Array) -> ta.AccelRef:
        """Raise an error."""
        raise ConnectionError("this expert is away")


def dense(tokens: Array, gate: Array, matrices: Array) -> Array:
    """Return the same result without a router, by computing all tokens with all experts."""
    shares = np.exp(tokens @ gate)
    shares[shares < np.sort(shares, axis=1)[:, -2:-1]] = 0
    shares /= shares.sum(axis=1, keepdims=True)
    output: Array = np.einsum("te,tw,ewv->tv", shares, tokens, matrices)
    return output


async def run(tokens: int, experts: int, backend: str | None) -> bool:
    """Return whether the output equals the dense computation."""
    rng = np.random.default_rng(1)
    rows, weights = rng.standard_normal((tokens, WIDTH)), rng.standard_normal((WIDTH, experts))
    matrices = rng.standard_normal((experts, WIDTH, WIDTH))

    async def gate(rows: Array) -> Array:
        await trio.lowlevel.checkpoint()
        logits: Array = rows @ weights
        return logits

    async with ta.open_system("demo") as system, system.open_device(backend) as device:
        models = [Expert(await device.put(matrix)) for matrix in matrices]
        router = await system.spawn(MoeRouter, gate, models, name="moe")
        routed: Routed = await router.ask(Submit(rows))
        is_right = np.allclose(routed.output, dense(rows, weights, matrices), rtol=1e-12)
        print(f"like the dense computation: {'right' if is_right else 'WRONG'}")

        full = await system.spawn(MoeRouter, gate, models, capacity_factor=1.0, name="full")
        told = (await full.ask(Submit(rows))).statistics
        print("chosen", told.counts, "served", told.served)
        print("dropped", told.dropped)

        hurt = await system.spawn(MoeRouter, gate, [*models[:-1], Broken(models[-1].matrix)], name="hurt")
        routed = await hurt.ask(Submit(rows))
        print(routed.errors[experts - 1], "- lost tokens:", routed.is_lost.sum())
        total: MoeStatistics = await hurt.ask(GetStatistics())
        print(f"auxiliary loss {total.routing.auxiliary_loss:.3f}")
    return bool(is_right)


def main() -> int:
    """Return the exit code: 0 if the result is right."""
    parser = argparse.ArgumentParser(description="A mixture of experts.")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--experts", type=int, default=4, help="at least 3")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    return 0 if trio.run(partial(run, **vars(parser.parse_args()))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
