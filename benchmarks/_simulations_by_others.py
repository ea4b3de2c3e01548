# ruff: noqa: C901, PLR0915  # loops for Numba are written out
"""The steps of the simulations in examples/simulations: loops for Numba, and arrays of NumPy and SciPy.

Each has the arithmetic of the example, in the same order where it is a loop. The modules of the examples are
given, not imported: their constants are read from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
from scipy import fft, ndimage

__all__ = ["OTHERS"]

Numbers: TypeAlias = Any
Step: TypeAlias = Callable[..., Any]
Compiler: TypeAlias = Callable[[Step], Step]


def boltzmann_by_numba(module: Any, compiled: Compiler, size: int) -> Step:
    directions, weights = np.array(module.DIRECTIONS), np.array(module.WEIGHTS)
    opposite, inlet = (
        np.array(module.OPPOSITE),
        np.array(module.equilibrium(*map(np.float64, (1, 0, module.SPEED)))),
    )
    kind, omega = module.cylinder(size)

    @compiled
    def loop(kind: Numbers, f: Numbers, out: Numbers) -> None:
        height, width = kind.shape
        g = np.empty(9)
        for i in range(height):
            for j in range(width):
                rho = u = v = 0.0
                for k in range(9):
                    down, right = directions[k]
                    g[k] = f[k, (i - down) % height, (j - right) % width]
                    rho += g[k]
                    v += down * g[k]
                    u += right * g[k]
                u /= rho
                v /= rho
                rest = 1 - 1.5 * (u * u + v * v)
                for k in range(9):
                    c = directions[k, 1] * u + directions[k, 0] * v
                    if kind[i, j] == 0:
                        out[k, i, j] = g[k] + omega * (weights[k] * rho * (rest + 3 * c + 4.5 * c * c) - g[k])
                    elif kind[i, j] == 1:
                        out[k, i, j] = g[opposite[k]]
                    else:
                        out[k, i, j] = inlet[k]

    def step(*flows: Numbers) -> Numbers:
        f = flows[0].base if flows[0].base is not None and flows[0].base.shape[0] == 9 else np.stack(flows)
        out = np.empty_like(f)
        loop(kind, f, out)
        return tuple(out)

    return step


def boltzmann_by_numpy(module: Any, size: int) -> Step:
    kind, omega = module.cylinder(size)
    inlet = module.equilibrium(*map(np.float64, (1, 0, module.SPEED)))
    roll, choose = cast("Numbers", np.roll), cast("Numbers", np.where)

    def step(*flows: Numbers) -> Numbers:
        g = [roll(f, by, (0, 1)) for f, by in zip(flows, module.DIRECTIONS, strict=True)]
        rest, made = module.equilibrium(*module.moments(*g)), list[Numbers]()
        for k in range(9):
            fluid = g[k] + omega * (rest[k] - g[k])
            made.append(choose(kind == 0, fluid, choose(kind == 1, g[module.OPPOSITE[k]], inlet[k])))
        return tuple(made)

    return step


def cloth_by_numba(module: Any, compiled: Compiler, size: int) -> Step:
    n, springs = size, np.array(module.NEIGHBOURS)
    rest = np.hypot(*springs.T) / (n - 1)
    stiffness, kept, fall, (bx, by, bz) = module.STIFFNESS, module.KEPT, module.FALL / n / n, module.BALL
    radius, count = module.RADIUS, len(springs)

    @compiled
    def loop(now: Numbers, before: Numbers, new: Numbers) -> None:
        for i in range(n):
            for j in range(n):
                x, y, z = now[0, i, j], now[1, i, j], now[2, i, j]
                fx = fy = fz = 0.0
                for k in range(count):
                    a, b = i + springs[k, 0], j + springs[k, 1]
                    if 0 <= a < n and 0 <= b < n:
                        dx, dy, dz = now[0, a, b] - x, now[1, a, b] - y, now[2, a, b] - z
                        pull = 1 - rest[k] / np.sqrt(dx * dx + dy * dy + dz * dz)
                        fx += dx * pull
                        fy += dy * pull
                        fz += dz * pull
                if j > 0 or 0 < i < n - 1:
                    x, y = (
                        x + ((x - before[0, i, j]) * kept + stiffness * fx),
                        y + ((y - before[1, i, j]) * kept + stiffness * fy),
                    )
                    z += (z - before[2, i, j]) * kept - fall + stiffness * fz
                dx, dy, dz = x - bx, y - by, z - bz
                out = max(1.0, radius / np.sqrt(dx * dx + dy * dy + dz * dz))
                new[0, i, j], new[1, i, j], new[2, i, j] = bx + dx * out, by + dy * out, bz + dz * out

    def step(*state: Numbers) -> Numbers:
        now, before = np.stack(state[:3]), np.stack(state[3:])
        for _ in range(module.SMALL_STEPS):
            new = np.empty_like(now)
            loop(now, before, new)
            now, before = new, now
        return *now, *before

    return step


def filters_by_numba(module: Any, compiled: Compiler, size: int) -> Step:
    reach, far, unlike = (
        module.REACH,
        np.float32(1 / (2 * module.FAR**2)),
        np.float32(1 / (2 * module.UNLIKE**2)),
    )

    @compiled
    def smooth(x: Numbers, out: Numbers) -> None:
        colours, height, width = x.shape
        for c in range(colours):
            for i in range(height):
                for j in range(width):
                    total = weight = np.float32(0)
                    for a in range(-reach, reach + 1):
                        for b in range(-reach, reach + 1):
                            t = x[c, min(max(i + a, 0), height - 1), min(max(j + b, 0), width - 1)]
                            d = t - x[c, i, j]
                            w = np.exp(-(np.float32(a * a + b * b) * far) - unlike * d * d)
                            total += w * t
                            weight += w
                    out[c, i, j] = total / weight

    @compiled
    def draw(x: Numbers, grey: Numbers, out: Numbers) -> None:
        colours, height, width = x.shape
        for i in range(height):
            for j in range(width):
                grey[i, j] = (
                    np.float32(0.299) * x[0, i, j]
                    + np.float32(0.587) * x[1, i, j]
                    + np.float32(0.114) * x[2, i, j]
                )
        for i in range(height):
            up, down = max(i - 1, 0), min(i + 1, height - 1)
            for j in range(width):
                left, right = max(j - 1, 0), min(j + 1, width - 1)
                dx = grey[up, right] + 2 * grey[i, right] + grey[down, right]
                dx -= grey[up, left] + 2 * grey[i, left] + grey[down, left]
                dy = grey[down, left] + 2 * grey[down, j] + grey[down, right]
                dy -= grey[up, left] + 2 * grey[up, j] + grey[up, right]
                dark = min(max(np.float32(1.3) - np.float32(1.5) * np.sqrt(dx * dx + dy * dy), 0), 1)
                for c in range(colours):
                    t = min(max(x[c, i, j], 0), 1)
                    out[c, i, j] = np.uint8(255 * t * t * (3 - 2 * t) * dark)

    def step(image: Numbers, _: Numbers) -> Numbers:
        image = np.roll(image, -2, axis=2)
        flat, grey, out = np.empty_like(image), np.empty_like(image[0]), np.empty(image.shape, np.uint8)
        smooth(image, flat)
        draw(flat, grey, out)
        return image, out

    return step


def filters_by_scipy(module: Any, size: int) -> Step:
    reach = module.REACH

    def step(image: Numbers, _: Numbers) -> Numbers:
        image = np.roll(image, -2, axis=2)
        _, height, width = image.shape
        wide = np.pad(image, ((0, 0), (reach, reach), (reach, reach)), mode="edge")
        above: Numbers = 0.0
        below: Numbers = 0.0
        for a in range(2 * reach + 1):
            for b in range(2 * reach + 1):
                near = wide[:, a : a + height, b : b + width]
                far = ((a - reach) ** 2 + (b - reach) ** 2) / (2 * module.FAR**2)
                weight = np.exp(-far - (near - image) ** 2 / np.float32(2 * module.UNLIKE**2))
                above, below = above + weight * near, below + weight
        flat: Numbers = above / below
        grey: Numbers = (
            np.float32(0.299) * flat[0] + np.float32(0.587) * flat[1] + np.float32(0.114) * flat[2]
        )
        edges = np.hypot(*(ndimage.sobel(grey, axis, mode="nearest") for axis in (0, 1)))
        t = np.clip(flat, 0, 1)
        return image, (255 * t * t * (3 - 2 * t) * np.clip(1.3 - 1.5 * edges, 0, 1)).astype(np.uint8)

    return step


def particles_by_numba(module: Any, compiled: Compiler, size: int, *, counts: bool = True) -> Step:
    cells = int(np.sqrt(2 * size)) + 2
    fall, stiffness, damping, bounce = 0.02 / cells, module.STIFFNESS, module.DAMPING, module.BOUNCE

    @compiled
    def by_cells(old: Numbers, new: Numbers, starts: Numbers) -> None:
        for k in range(old.shape[1]):
            starts[int(old[0, k]) * cells + int(old[1, k]) + 1] += 1
        for cell in range(cells * cells):
            starts[cell + 1] += starts[cell]
        at = starts[:-1].copy()
        for k in range(old.shape[1]):
            cell = int(old[0, k]) * cells + int(old[1, k])
            for row in range(5):
                new[row, at[cell]] = old[row, k]
            at[cell] += 1

    @compiled
    def push(g: Numbers, starts: Numbers, out: Numbers) -> None:
        for k in range(g.shape[1]):
            y, x, v, u = g[0, k], g[1, k], g[2, k], g[3, k]
            row, column = int(y), int(x)
            down, right = fall, 0.0
            for r in range(max(row - 1, 0), min(row + 2, cells)):
                for j in range(
                    starts[r * cells + max(column - 1, 0)], starts[r * cells + min(column + 2, cells)]
                ):
                    dy, dx = y - g[0, j], x - g[1, j]
                    squared = dy * dy + dx * dx
                    if 0 < squared < 1:
                        part = 1 / np.sqrt(squared)
                        closing = ((g[2, j] - v) * dy + (g[3, j] - u) * dx) * part * part
                        scale = stiffness * (part - 1) + damping * closing
                        down += dy * scale
                        right += dx * scale
            v += down
            u += right
            held = min(max(y + v, 0.0), cells - 1e-6)
            out[0, k], out[2, k] = held, v if held == y + v else -bounce * v
            held = min(max(x + u, 0.0), cells - 1e-6)
            out[1, k], out[3, k] = held, u if held == x + u else -bounce * u
            out[4, k] = g[4, k]

    def step(*grains: Numbers) -> Numbers:
        old = np.stack(grains)
        new, out, starts = np.empty_like(old), np.empty_like(old), np.zeros(cells * cells + 1, np.int64)
        if counts:
            by_cells(old, new, starts)
        else:
            cell = old[0].astype(np.int64) * cells + old[1].astype(np.int64)
            order = np.argsort(cell, kind="stable")
            new, starts = old[:, order], np.searchsorted(cell[order], np.arange(cells * cells + 1))
        push(new, starts, out)
        return tuple(out)

    return step


def bricks_by_numba(module: Any, compiled: Compiler, size: int) -> Step:
    edge, (grid, voxels) = module.EDGE, module.island(size, 0)
    height, width, paint, total = 8 * size, 12 * size, module.PAINT, float(size * module.EDGE)

    @compiled
    def march(turned: float, grid: Numbers, voxels: Numbers, depth: Numbers, image: Numbers) -> None:
        ax, ay = (0.5 + 1.2 * np.cos(turned)) * total, (0.5 + 1.2 * np.sin(turned)) * total
        az = 0.85 * total
        for i in range(height):
            up = 0.5 - (i + 0.5) / height
            for j in range(width):
                across = (j + 0.5 - width / 2) / height
                wx = -np.cos(turned) - across * np.sin(turned)
                wy = across * np.cos(turned) - np.sin(turned)
                wz = up - 0.6
                wx = 1e-9 if abs(wx) < 1e-9 else wx
                wy = 1e-9 if abs(wy) < 1e-9 else wy
                wz = 1e-9 if abs(wz) < 1e-9 else wz
                nx = min(-ax / wx, (total - ax) / wx)
                ny = min(-ay / wy, (total - ay) / wy)
                nz = min(-az / wz, (total - az) / wz)
                near = max(nx, ny, nz)
                far = max(near, 0.0) + 1e-4
                face = 0 if nx == near else 1 if ny == near else 2
                colour = 0
                for _ in range(4 * size * edge):
                    px, py, pz = np.floor(ax + far * wx), np.floor(ay + far * wy), np.floor(az + far * wz)
                    if min(px, py, pz) < 0 or max(px, py, pz) >= total:
                        break
                    x, y, z = int(px), int(py), int(pz)
                    brick = grid[x // edge, y // edge, z // edge]
                    step = float(edge)
                    if brick >= 0:
                        step = 1.0
                        colour = int(voxels[brick, x % edge, y % edge, z % edge])
                        if colour > 0:
                            break
                    ox = (np.floor(px / step) * step + (step if wx > 0 else 0.0) - ax) / wx
                    oy = (np.floor(py / step) * step + (step if wy > 0 else 0.0) - ay) / wy
                    oz = (np.floor(pz / step) * step + (step if wz > 0 else 0.0) - az) / wz
                    least = min(ox, oy, oz)
                    face = 0 if ox == least else 1 if oy == least else 2
                    far = least + 1e-4
                lit = (0.75 if face == 0 else 0.6 if face == 1 else 1.0) * np.exp(-0.4 * far / total)
                if colour > 0:
                    depth[i, j] = far
                    for c in range(3):
                        image[c, i, j] = np.uint8(255 * (lit * paint[colour, c]))
                else:
                    depth[i, j] = np.inf
                    image[0, i, j] = np.uint8(255 * (0.55 + 0.3 * up))
                    image[1, i, j] = np.uint8(255 * (0.7 + 0.2 * up))
                    image[2, i, j] = np.uint8(255 * 0.9)

    def step(angle: Numbers, *_: Numbers) -> Numbers:
        depth, image = np.empty((height, width)), np.empty((3, height, width), np.uint8)
        march(float(angle) + module.TURN, grid, voxels, depth, image)
        return np.asarray(angle + module.TURN), depth, *image

    return step


def fluid_by_scipy(module: Any, size: int) -> Step:
    """With splines of SciPy in the place of Catmull and Rom: another cubic one."""
    n, dstn, idstn = size, cast("Numbers", fft.dstn), cast("Numbers", fft.idstn)
    source, squares = module.source_of(n, 0), (np.pi * np.arange(1, n + 1)) ** 2
    squares = squares[:, None] + squares
    decay, places = np.exp(-module.VISCOSITY / n * squares), np.indices((n, n)).astype(float)

    def step(curl: Numbers, stream: Numbers, smoke: Numbers) -> Numbers:
        framed = np.pad(stream, 1)
        u = (n + 1) ** 2 / n * (framed[2:, 1:-1] - framed[:-2, 1:-1]) / 2
        v = (n + 1) ** 2 / n * (framed[1:-1, :-2] - framed[1:-1, 2:]) / 2
        middle = places - np.stack([v, u]) / 2
        back = places - [ndimage.map_coordinates(each, middle, order=1, mode="nearest") for each in (v, u)]
        framed = np.pad(smoke, 1, "edge")
        lift = module.BUOYANCY / n * (framed[1:-1, 2:] - framed[1:-1, :-2]) / 2 * (n + 1)
        curl, smoke = (ndimage.map_coordinates(each, back, order=3, mode="nearest") for each in (curl, smoke))
        waves = dstn(curl - lift, type=1) * decay
        return (
            idstn(waves, type=1),
            idstn(waves / squares, type=1),
            np.maximum(np.clip(smoke, 0, 1), source),
        )

    return step


OTHERS: dict[str, dict[str, Callable[..., Step]]] = {
    "lattice_boltzmann": {"Numba": boltzmann_by_numba, "NumPy": boltzmann_by_numpy},
    "cloth": {"Numba": cloth_by_numba},
    "filters": {"Numba": filters_by_numba, "SciPy": filters_by_scipy},
    "particles": {
        "Numba": particles_by_numba,
        "Numba, argsort of NumPy": partial(particles_by_numba, counts=False),
    },
    "bricks": {"Numba": bricks_by_numba},
    "fluid": {"SciPy": fluid_by_scipy},
}
"""By the name of an example and of a library, what makes its step of the example's module, and of a size.

Those for Numba take its compiler before the size.
"""
