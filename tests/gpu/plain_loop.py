"""The encoder called in a plain loop: ``BACKEND SHAPE TOKENS``.

Each line of the input is a number of batches, and the answer to it is how many were done per second.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

from encoder_rounds import Shape, batches_of, encoder_class, random_weights


def main(backend: str, described: str, tokens: str) -> None:
    """Answer until the input ends."""
    shape = Shape(**json.loads(described))
    weights = random_weights(shape)
    pairs: list[Any] = [(one.ids, one.mask) for one in batches_of(shape, int(tokens))]
    torch: Any = None
    if backend != "cpu":
        torch = import_module("torch")
        weights = {name: torch.as_tensor(array, device="cuda") for name, array in weights.items()}
        pairs = [tuple(torch.as_tensor(array, device="cuda") for array in pair) for pair in pairs]
    encoder = encoder_class(backend)(weights, layers=shape.layers, heads=shape.heads, epsilon=shape.epsilon)
    for line in sys.stdin:
        count, start = int(line), time.perf_counter()
        for number in range(count):
            encoder.encode(*pairs[number % len(pairs)], shape.width)
        if torch is not None:
            torch.cuda.synchronize()
        print(count / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
