"""The place in a sequence: saved, restored, shared out, and kept while workers end."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import pytest

import trio_accel as ta

kinds = pytest.mark.parametrize("kind", ["philox4x32_10", "mrg32k3a", "xorwow"])


@kinds
async def test_a_saved_state_continues_from_its_position(device: ta.Device, kind: Any) -> None:
    generator = ta.random.Generator(device, kind, seed=2**64 - 1)
    await generator.uniform(1000)
    saved = json.loads(json.dumps(generator.state))
    expected = [
        await (await draw).to_host() for draw in (generator.bits(99), generator.integers(99, -5, 1 << 50))
    ]
    other = ta.random.Generator(device, kind)
    other.state = saved
    assert (other.seed, other.state) == (2**64 - 1, saved)
    again = [await (await draw).to_host() for draw in (other.bits(99), other.integers(99, -5, 1 << 50))]
    for one, two in zip(expected, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert other.state == generator.state


@kinds
async def test_spawned_generators(device: ta.Device, kind: Any) -> None:
    generator = ta.random.Generator(device, kind, seed=11)
    saved = generator.state
    children = [*generator.spawn(2), *generator.spawn(1)]
    # NumPy's own way to the seeds.
    expected = np.random.SeedSequence(11).spawn(3)
    assert [child.seed for child in children] == [
        int(one.generate_state(1, np.uint64)[0]) for one in expected
    ]
    assert {child.kind for child in children} == {kind}
    assert generator.state == {**saved, "spawned": 3}
    generator.state = saved
    assert [child.seed for child in generator.spawn(3)] == [child.seed for child in children]
    words = [await (await one.bits(100)).to_host() for one in (generator, *children)]
    assert not any(
        np.intersect1d(one, two).size for number, one in enumerate(words) for two in words[:number]
    )


@pytest.mark.parametrize("isolation", ["process"])
@kinds
async def test_a_killed_worker_repeats_nothing(system: ta.System, device: ta.Device, kind: Any) -> None:
    generator, whole = (ta.random.Generator(device, kind, seed=3) for _ in range(2))
    expected = [await (await whole.bits(100)).to_host() for _ in range(3)]
    drawn = [await (await generator.bits(100)).to_host()]
    pid = (await device.statistics()).pid
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    while len(drawn) < 3:
        before = generator.state
        try:
            drawn.append(await (await generator.bits(100)).to_host())
        except ta.AccelError:
            # Numbers lost with the worker are drawn again only because this program says so.
            assert generator.state != before
            generator.state = before
    for one, two in zip(drawn, expected, strict=True):
        np.testing.assert_array_equal(one, two)
    assert (await device.statistics()).pid != pid


async def test_a_draw_that_failed_is_not_repeated(device: ta.Device) -> None:
    generator, whole = (ta.random.Generator(device, "xorwow", seed=13) for _ in range(2))
    expected = await (await whole.bits(300)).to_host()
    first = await (await generator.bits(100)).to_host()
    ta.testing.inject_fault(device, ta.random.SequenceBits, fail=RuntimeError("crash"))
    with pytest.raises(ta.ActorFailedError):
        await generator.bits(100)
    last = await (await generator.bits(100)).to_host()
    np.testing.assert_array_equal(np.concatenate([first, last]), np.delete(expected, slice(100, 200)))


async def test_invalid_states(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    good = generator.state
    for wrong, match in (
        ({**good, "kind": "xorwow"}, "kind must be 'philox4x32_10', got 'xorwow'"),
        ({**good, "position": 7}, "position must be a multiple of 524288, got 7"),
        ({**good, "position": -1}, "position must be from 0 below"),
        ({**good, "position": 1 << 82}, "position must be from 0 below"),
        ({**good, "seed": 1.0}, "seed must be from 0 below 18446744073709551616, got 1.0"),
        ({**good, "spawned": True}, "spawned must be from 0"),
        ({"kind": "philox4x32_10"}, "must have kind, seed, position, spawned"),
        (7, "must have kind, seed, position, spawned, got 7"),
    ):
        with pytest.raises(ValueError, match=match):
            generator.state = wrong  # type: ignore[assignment]
    assert generator.state == good
    with pytest.raises(ValueError, match="n_children must be from 0 to 1000, got -1"):
        generator.spawn(-1)
    with pytest.raises(TypeError):
        generator.advance(1.5)  # type: ignore[arg-type]
