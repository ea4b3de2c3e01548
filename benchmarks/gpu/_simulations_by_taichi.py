"""The steps of the simulations in examples/simulations, as kernels of Taichi.

Each has the arithmetic of the example. State stays in fields on the device. A step is one kernel, or eight
for cloth, and kernels take no arguments: this is the cheapest call that Taichi has. The modules of the
examples are given, not imported: their constants are read from them. So is Taichi, which need not be there.
"""

# ruff: noqa: C901, PLR0912, PLR0915  # kernels are written out
# Taichi refuses kernels that say `-> None`: mypy is told to let them be.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

__all__ = ["STEPS", "Peer"]

Numbers: TypeAlias = Any
Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

# Cells, and sums of them, of which one thread makes a sum.
_CHUNK = 128


@attrs.frozen(kw_only=True)
class Peer:
    """A simulation in Taichi's fields.

    Attributes:
        put: Puts a state there, given as the arrays that the example has.
        step: Asks for one step, and does not wait for it.
        got: Copies the state to the host, as the arrays that the example has.
    """

    put: Callable[[Sequence[Numbers]], None]
    step: Callable[[], None]
    got: Callable[[], Sequence[Numbers]]


def _inner(ti: Any) -> Compiler:
    """What makes a function that kernels call; Taichi takes annotations for types of its own."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__annotations__.clear()
        made: Callable[..., Any] = ti.func(function)
        return made

    return compiled


def particles(ti: Any, module: Any, size: int) -> Peer:
    """Sort grains by counting those of each cell, then push; grains of one cell have any order.

    Prefix sums are made of chunks of chunks: Taichi's own are for GPUs alone.
    """
    kernel: Compiler = ti.kernel
    inner = _inner(ti)
    cells = int(np.sqrt(2 * size)) + 2
    total, fall, high = cells * cells, 0.02 / cells, cells - 1e-6
    stiffness, damping, bounce = module.STIFFNESS, module.DAMPING, module.BOUNCE
    fine = -(-total // _CHUNK)
    coarse = -(-fine // _CHUNK)
    chunk = _CHUNK
    grains, by_cells = (ti.Vector.field(4, ti.f64, size) for _ in range(2))
    tags, tags_by_cells = (ti.field(ti.f64, size) for _ in range(2))
    counts, starts, slots = (ti.field(ti.i32, shape) for shape in (total, total + 1, size))
    sums, tops = ti.field(ti.i32, fine), ti.field(ti.i32, coarse)
    starts[total] = size

    @inner
    def cell_of(k: Any) -> Any:
        return ti.cast(grains[k][0], ti.i32) * cells + ti.cast(grains[k][1], ti.i32)

    @kernel
    def step():  # type: ignore[no-untyped-def]
        for cell in range(total):
            counts[cell] = 0
        for k in range(size):
            slots[k] = ti.atomic_add(counts[cell_of(k)], 1)
        for part in range(fine):
            found = 0
            for cell in range(part * chunk, ti.min(part * chunk + chunk, total)):
                found += counts[cell]
            sums[part] = found
        for part in range(coarse):
            found = 0
            for each in range(part * chunk, ti.min(part * chunk + chunk, fine)):
                found += sums[each]
            tops[part] = found
        ti.loop_config(serialize=True)
        for part in range(1, coarse):
            tops[part] += tops[part - 1]
        for part in range(coarse):
            before = 0
            if part > 0:
                before = tops[part - 1]
            for each in range(part * chunk, ti.min(part * chunk + chunk, fine)):
                found = sums[each]
                sums[each] = before
                before += found
        for part in range(fine):
            before = sums[part]
            for cell in range(part * chunk, ti.min(part * chunk + chunk, total)):
                starts[cell] = before
                before += counts[cell]
        for k in range(size):
            place = starts[cell_of(k)] + slots[k]
            by_cells[place] = grains[k]
            tags_by_cells[place] = tags[k]
        for k in range(size):
            grain = by_cells[k]
            at, speed = ti.Vector([grain[0], grain[1]]), ti.Vector([grain[2], grain[3]])
            row, column = ti.cast(at[0], ti.i32), ti.cast(at[1], ti.i32)
            left, right = ti.max(column - 1, 0), ti.min(column + 2, cells)
            force = ti.Vector([fall, 0.0])
            for r in range(ti.max(row - 1, 0), ti.min(row + 2, cells)):
                for j in range(starts[r * cells + left], starts[r * cells + right]):
                    other = by_cells[j]
                    apart = at - ti.Vector([other[0], other[1]])
                    squared = apart.dot(apart)
                    if 0 < squared < 1:
                        part = 1 / ti.sqrt(squared)
                        closing = (ti.Vector([other[2], other[3]]) - speed).dot(apart) * part * part
                        force += apart * (stiffness * (part - 1) + damping * closing)
            speed += force
            new = at + speed
            held = ti.math.clamp(new, 0.0, high)
            for axis in ti.static(range(2)):
                if held[axis] != new[axis]:
                    speed[axis] *= -bounce
            grains[k] = ti.Vector([held[0], held[1], speed[0], speed[1]])
            tags[k] = tags_by_cells[k]

    def put(state: Sequence[Numbers]) -> None:
        grains.from_numpy(np.stack(state[:4], axis=-1))
        tags.from_numpy(state[4])

    def got() -> Sequence[Numbers]:
        return [*np.moveaxis(grains.to_numpy(), -1, 0), tags.to_numpy()]

    return Peer(put=put, step=step, got=got)


def cloth(ti: Any, module: Any, size: int) -> Peer:
    """Verlet's method; new places take the room of those before. A kernel is two small steps."""
    kernel: Compiler = ti.kernel
    inner = _inner(ti)
    n, (bx, by, bz), radius = size, module.BALL, module.RADIUS
    stiffness, kept, fall, pairs = module.STIFFNESS, module.KEPT, module.FALL / n / n, module.SMALL_STEPS // 2
    springs = [(a, b, float(np.hypot(a, b) / (n - 1))) for a, b in module.NEIGHBOURS]
    assert 2 * pairs == module.SMALL_STEPS, "a kernel is two small steps"
    first, second = (ti.Vector.field(3, ti.f64, (n, n), layout=ti.Layout.SOA) for _ in range(2))

    @inner
    def moved(now: Any, before: Any, i: Any, j: Any) -> Any:
        at = now[i, j]
        pull = ti.Vector([0.0, 0.0, 0.0])
        for a, b, rest in ti.static(springs):
            if 0 <= i + a < n and 0 <= j + b < n:
                apart = now[i + a, j + b] - at
                pull += apart * (1 - rest / apart.norm())
        new = at
        if j > 0 or 0 < i < n - 1:
            new += (at - before[i, j]) * kept - ti.Vector([0.0, 0.0, fall]) + stiffness * pull
        ball = ti.Vector([bx, by, bz])
        out = new - ball
        return ball + out * ti.max(1.0, radius / out.norm())

    @kernel
    def pair():  # type: ignore[no-untyped-def]
        for i, j in ti.ndrange(n, n):
            second[i, j] = moved(first, second, i, j)
        for i, j in ti.ndrange(n, n):
            first[i, j] = moved(second, first, i, j)

    def step() -> None:
        for _ in range(pairs):
            pair()

    def put(state: Sequence[Numbers]) -> None:
        first.from_numpy(np.stack(state[:3], axis=-1))
        second.from_numpy(np.stack(state[3:], axis=-1))

    def got() -> Sequence[Numbers]:
        return [*np.moveaxis(first.to_numpy(), -1, 0), *np.moveaxis(second.to_numpy(), -1, 0)]

    return Peer(put=put, step=step, got=got)


def filters(ti: Any, module: Any, size: int) -> Peer:
    """Pan, smooth, and draw: the edges are found where the tone is made."""
    kernel: Compiler = ti.kernel
    inner = _inner(ti)
    height, width, reach = size, size * 16 // 9, module.REACH
    far, unlike = 1 / (2 * module.FAR**2), 1 / (2 * module.UNLIKE**2)
    images = [ti.field(ti.f32, (3, height, width)) for _ in range(2)]
    flat, grey, drawing = (
        ti.field(dtype, shape)
        for dtype, shape in (
            (ti.f32, (3, height, width)),
            (ti.f32, (height, width)),
            (ti.u8, (3, height, width)),
        )
    )

    @inner
    def smooth(image: Any, c: Any, i: Any, j: Any) -> Any:
        middle, total, weight = image[c, i, j], 0.0, 0.0
        for a, b in ti.static(ti.ndrange((-reach, reach + 1), (-reach, reach + 1))):
            near = image[c, ti.math.clamp(i + a, 0, height - 1), ti.math.clamp(j + b, 0, width - 1)]
            apart = near - middle
            part = ti.exp(-(a * a + b * b) * far - unlike * apart * apart)
            total += part * near
            weight += part
        return total / weight

    @inner
    def edge(i: Any, j: Any) -> Any:
        up, down = ti.max(i - 1, 0), ti.min(i + 1, height - 1)
        left, right = ti.max(j - 1, 0), ti.min(j + 1, width - 1)
        dx = grey[up, right] + 2 * grey[i, right] + grey[down, right]
        dx -= grey[up, left] + 2 * grey[i, left] + grey[down, left]
        dy = grey[down, left] + 2 * grey[down, j] + grey[down, right]
        dy -= grey[up, left] + 2 * grey[up, j] + grey[up, right]
        return ti.sqrt(dx * dx + dy * dy)

    def from_to(old: Any, new: Any) -> Callable[[], None]:
        @kernel
        def step():  # type: ignore[no-untyped-def]
            for c, i, j in ti.ndrange(3, height, width):
                new[c, i, j] = old[c, i, (j + 2) % width]
            for c, i, j in ti.ndrange(3, height, width):
                flat[c, i, j] = smooth(new, c, i, j)
            for i, j in ti.ndrange(height, width):
                grey[i, j] = 0.299 * flat[0, i, j] + 0.587 * flat[1, i, j] + 0.114 * flat[2, i, j]
            for i, j in ti.ndrange(height, width):
                dark = ti.math.clamp(1.3 - 1.5 * edge(i, j), 0.0, 1.0)
                for c in ti.static(range(3)):
                    t = ti.math.clamp(flat[c, i, j], 0.0, 1.0)
                    drawing[c, i, j] = ti.cast(255 * t * t * (3 - 2 * t) * dark, ti.u8)

        return step

    steps = [from_to(*images), from_to(*images[::-1])]

    def step() -> None:
        steps[0]()
        steps.reverse()
        images.reverse()

    def put(state: Sequence[Numbers]) -> None:
        images[0].from_numpy(state[0])
        drawing.from_numpy(state[1])

    def got() -> Sequence[Numbers]:
        return images[0].to_numpy(), drawing.to_numpy()

    return Peer(put=put, step=step, got=got)


def lattice_boltzmann(ti: Any, module: Any, size: int) -> Peer:
    """Pull what flows in, and let it collide."""
    kernel: Compiler = ti.kernel
    kinds, omega = module.cylinder(size)
    omega, (height, width) = float(omega), kinds.shape
    directions, weights, opposite = module.DIRECTIONS, module.WEIGHTS, module.OPPOSITE
    inlet = [float(each) for each in module.equilibrium(*map(np.float64, (1, 0, module.SPEED)))]
    is_fluid, is_solid = module.FLUID, module.SOLID
    kind = ti.field(ti.u8, (height, width))
    kind.from_numpy(kinds)
    flows = [ti.Vector.field(9, ti.f64, (height, width), layout=ti.Layout.SOA) for _ in range(2)]

    def from_to(old: Any, new: Any) -> Callable[[], None]:
        @kernel
        def step():  # type: ignore[no-untyped-def]
            for i, j in ti.ndrange(height, width):
                g = ti.Vector.zero(ti.f64, 9)
                rho, v, u = 0.0, 0.0, 0.0
                for k in ti.static(range(9)):
                    down, right = ti.static(directions[k][0]), ti.static(directions[k][1])
                    g[k] = old[(i - down) % height, (j - right) % width][k]
                    rho += g[k]
                    v += down * g[k]
                    u += right * g[k]
                v /= rho
                u /= rho
                rest = 1 - 1.5 * (u * u + v * v)
                for k in ti.static(range(9)):
                    if kind[i, j] == is_fluid:
                        c = directions[k][1] * u + directions[k][0] * v
                        still = weights[k] * rho * (rest + 3 * c + 4.5 * c * c)
                        new[i, j][k] = g[k] + omega * (still - g[k])
                    elif kind[i, j] == is_solid:
                        new[i, j][k] = g[opposite[k]]
                    else:
                        new[i, j][k] = inlet[k]

        return step

    steps = [from_to(*flows), from_to(*flows[::-1])]

    def step() -> None:
        steps[0]()
        steps.reverse()
        flows.reverse()

    def put(state: Sequence[Numbers]) -> None:
        flows[0].from_numpy(np.stack(state, axis=-1))

    def got() -> Sequence[Numbers]:
        return [*np.moveaxis(flows[0].to_numpy(), -1, 0)]

    return Peer(put=put, step=step, got=got)


STEPS: dict[str, tuple[str, Callable[[Any, Any, int], Peer]]] = {
    "particles": ("f64", particles),
    "cloth": ("f64", cloth),
    "filters": ("f32", filters),
    "lattice_boltzmann": ("f64", lattice_boltzmann),
}
"""By the name of an example, Taichi's type of numbers, and what makes its steps.

They are made of Taichi, the example's module, and a size.
"""
