"""Serve a model. Query it with `curl --json '[3, 4]' http://127.0.0.1:8000/predict`; Ctrl-C stops it."""

import argparse
from functools import partial

import numpy as np
import trio
from fastapi import FastAPI
from pydantic import FiniteFloat

import trio_accel as ta
from trio_accel.http import Limits, errors, on_host, run, serve
from trio_accel.patterns import Batcher, Submit
from trio_accel.programs import Array, method

CENTRES = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
OPTIONS = ta.DeviceOptions(isolation="process", stuck_after=10.0, retry=1, spares=1, on_failure="reopen")
LIMITS = Limits(body=500, answer=5.0)
Point = tuple[FiniteFloat, FiniteFloat]
Predictions = Batcher[Point, Array]


class Distances:
    """The model, which is your own class. Its arrays outlive its worker process."""

    def __init__(self, centres: Array) -> None:
        self.centres = centres

    @method(refuses=(ValueError,))
    def predict(self, rows: list[list[float]]) -> Array:
        """Return the distance of each point from each centre. Rows other than points raise a ValueError."""
        return ((np.reshape(rows, (len(rows), 1, 2)) - self.centres) ** 2).sum(axis=2) ** 0.5


async def main(host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    async with ta.open_system("demo") as system, system.open_device("cpu", options=OPTIONS) as device:
        program = await ta.open_program(device, Distances, await device.put(CENTRES))
        batcher = await system.spawn(Predictions, on_host(program, Distances.predict), capacity=1000)
        app = FastAPI(exception_handlers=errors(ValueError))

        @app.post("/predict")
        async def predict(point: Point) -> dict[str, list[float]]:
            return {"distances": (await batcher.ask(Submit(point))).tolist()}

        async with trio.open_nursery() as nursery:
            bound = await nursery.start(
                partial(serve, app, host=host, port=port, system=system, limits=LIMITS)
            )
            print(f"serving on port {bound}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 for any free port (default: 8000)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for all addresses of the machine")
    given = parser.parse_args()
    run(main, given.host, given.port)
