"""Video effects as one graph: glowing lights leave trails, which turn and grow from frame to frame.

The step returns new arrays, so a frame interrupted by a kill is drawn again. The tests compare it with SciPy,
frame by frame. With --port, a page shows the newest frame until Ctrl-C; a slow browser skips frames.

Run it with: python video.py --size 240 --port 8000 --faults
"""

from __future__ import annotations

import numpy as np
import trio
from page import serve
from simulation import Simulation, State, Step, command, simulate

import trio_accel as ta

LIGHTS, ZOOM, TURN, KEPT, TIME, LEAST = 5, 0.98, 0.02, 0.93, 0.04, 0.3
BLUR = (0.06, 0.09, 0.12, 0.15, 0.16, 0.15, 0.12, 0.09, 0.06)


def step_of(height: int, width: int) -> Step:
    """Return the step for pictures of shape (3, h, w): time, light, and the screen's contents."""
    lines = [f"y = (i(1) + 0.5)/{height} - 0.5; x = (i(2) + 0.5 - {width / 2})/{height}"]
    for k in range(LIGHTS):
        lines += [
            f"dy{k} = y - 0.4*sin({1 + 0.31 * k}*t + {k}); dx{k} = x - 0.7*cos({0.7 + 0.23 * k}*t + {2 * k})"
        ]
        lines += [f"l{k} = exp(-900*(dy{k}*dy{k} + dx{k}*dx{k})) * (0.6 + 0.5*cos(i(0)*2.1 + {k}))"]
    cos, sin, down, right = ZOOM * np.cos(TURN), ZOOM * np.sin(TURN), (height - 1) / 2, (width - 1) / 2
    lines += [f"r = clip({down} + {cos}*(i(1) - {down}) - {sin}*(i(2) - {right}), 0, {height - 1})"]
    lines += [f"c = clip({right} + {sin}*(i(1) - {down}) + {cos}*(i(2) - {right}), 0, {width - 1})"]
    lines += [
        f"r0 = minimum(int64(r), {height - 2}); c0 = minimum(int64(c), {width - 2}); u = r - r0; v = c - c0"
    ]
    lines += ["top = (1 - v)*light[i(0), r0, c0] + v*light[i(0), r0, c0 + 1]"]
    lines += ["low = (1 - v)*light[i(0), r0 + 1, c0] + v*light[i(0), r0 + 1, c0 + 1]"]
    lines += [f"out = float32({KEPT}*((1 - u)*top + u*low) + {' + '.join(f'l{k}' for k in range(LIGHTS))})"]
    trails = ta.jit.elementwise("; ".join(lines), inputs=("t", "light"), name="trails")
    taps = [(k - len(BLUR) // 2, weight) for k, weight in enumerate(BLUR)]
    rows = " + ".join(f"{w}*x[i(0), clip(i(1) + ({k}), 0, {height - 1}), i(2)]" for k, w in taps)
    columns = " + ".join(f"{w}*x[i(0), i(1), clip(i(2) + ({k}), 0, {width - 1})]" for k, w in taps)
    bright = ta.jit.elementwise(f"maximum({rows} - {LEAST}, 0)", name="bright")
    blur = ta.jit.elementwise(columns, name="blur")
    show = ta.jit.elementwise(
        f"y = (i(1) + 0.5)/{height} - 0.5; x = (i(2) + 0.5)/{width} - 0.5; dark = 1.1 - 1.6*(x*x + y*y); "
        "screen = uint8(255 * clip(dark*(1 - exp(-1.5*(light + glow))), 0, 1))",
        name="screen",
    )
    pass_time = ta.jit.elementwise(f"t + {TIME}", name="time")

    async def step(t: ta.AccelRef, light: ta.AccelRef, _: ta.AccelRef) -> State:
        t = await pass_time(t)
        light = await trails(t, light, shape=light.shape)
        glow = await blur(await bright(light, shape=light.shape), shape=light.shape)
        return t, light, await show(light, glow)

    return step


async def start(device: ta.Device, size: int, seed: int) -> tuple[State, Step]:
    """Start with a dark screen, at a random time."""
    shape = 3, size, size * 16 // 9
    time = np.random.default_rng(seed).uniform(0, 100)
    arrays = np.asarray(time), np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
    return tuple([await device.put(array) for array in arrays]), step_of(*shape[1:])


def picture(_: np.ndarray, __: np.ndarray, screen: np.ndarray) -> np.ndarray:
    """Return the contents of the screen."""
    return np.ascontiguousarray(np.moveaxis(screen, 0, -1))


SIMULATION = Simulation(start=start, picture=picture)


def main() -> int:
    """Return the exit code."""
    parser = command(__doc__, size=90, steps=100)
    parser.add_argument("--port", type=int, help="port of a page with the newest frame; 0 for any free port")
    arguments = parser.parse_args()
    return trio.run(simulate if arguments.port is None else serve, arguments, SIMULATION)


if __name__ == "__main__":
    raise SystemExit(main())
