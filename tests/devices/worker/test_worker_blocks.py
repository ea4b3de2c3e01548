"""A worker's knowledge of the blocks that the application has reported to it."""

from __future__ import annotations

import numpy as np
import pytest

from trio_accel.backends.base import DType, StaleRefError
from trio_accel.backends.base.contract.ops import ArraySpec, MatmulSpec
from trio_accel.backends.base.kit.kept_plans import KeptPlans
from trio_accel.devices.base._waits import Availability
from trio_accel.devices.operations._blocks import BlockTable
from trio_accel.devices.wire._specs import encode_spec
from trio_accel.devices.worker._launch_decoding import LaunchTemplate, no_host
from trio_accel.devices.worker._memory import WorkerBlocks


@pytest.fixture
async def blocks() -> WorkerBlocks:
    table = BlockTable("cpu:0", Availability())
    made = WorkerBlocks(table)
    made.adopt(1, 16)
    made.adopt(2, 16)
    return made


@pytest.fixture
def template() -> LaunchTemplate:
    a, b, out = (ArraySpec(position, 0, DType.float32, (2, 2), (8, 4)) for position in range(3))
    spec = encode_spec(MatmulSpec(a, b, out), no_host)
    return LaunchTemplate(
        ("linalg.Matmul", "a:B", spec, ((2, 16),), (2,), (("a", 0), ("b", 1))), 1, KeptPlans()
    )


async def test_a_renamed_block_is_the_same_unless_it_is_invalid(blocks: WorkerBlocks) -> None:
    blocks.name([(3, 16)])
    first, changes = blocks[3], blocks.changes
    blocks.name([(3, 16)])
    assert blocks[3] is first
    assert blocks.changes == changes
    first.mark_damaged("linalg.Matmul", None)
    blocks.name([(3, 16)])
    assert blocks[3] is not first
    assert blocks[3].damaged_by is None
    assert first.is_released
    assert blocks.changes > changes


async def test_new_blocks_are_added_after_one_that_exists(blocks: WorkerBlocks) -> None:
    existing = blocks[2]
    blocks.name([(3, 8), (2, 16), (4, 32)])
    assert {number: block.nbytes for number, block in blocks.items()} == {1: 16, 2: 16, 3: 8, 4: 32}
    assert blocks[2] is existing


async def test_a_released_block_is_gone_and_waits_to_be_given_back(blocks: WorkerBlocks) -> None:
    blocks.let_go((2, 7))
    assert 2 not in blocks
    with pytest.raises(StaleRefError, match="released"):
        blocks[2].check("b")
    assert blocks._blocks.take() == [2]
    # It is the application's; releasing it again, or an unknown one, has no effect.
    changes = blocks.changes
    blocks.let_go((2, 7))
    assert (blocks._blocks.take(), blocks.changes) == ([], changes)


async def test_blocks_are_let_go_after_one_that_nobody_knows(blocks: WorkerBlocks) -> None:
    blocks.let_go((7, 2))
    assert (set(blocks), blocks._blocks.take()) == ({1}, [2])


@pytest.mark.parametrize("change", ["let go", "invalid", "let go and made again"])
async def test_the_findings_of_a_template_hold_until_something_changes(
    blocks: WorkerBlocks, template: LaunchTemplate, change: str
) -> None:
    binding = template.bind((1, 2, 3))
    assert not binding.is_found(blocks)
    blocks.name(binding.allocations)
    binding.find(blocks)
    launches = [template.launch(number, (1, 2, 3), binding) for number in range(2)]
    launches[0].forget()
    assert binding.is_found(blocks)
    # An ended one takes nothing from its successors.
    assert launches[1].outputs == (blocks[3],)
    assert launches[1].uses == (("a", blocks[1]), ("b", blocks[2]))
    if change == "invalid":
        blocks[3].mark_damaged("linalg.Matmul", None)
    else:
        blocks.let_go((3 if "made" in change else 1,))
    assert not binding.is_found(blocks)
    blocks.name(binding.allocations)
    binding.find(blocks)
    assert binding.is_found(blocks)
    again = template.launch(2, (1, 2, 3), binding)
    assert again.outputs == (blocks[3],)
    assert not again.outputs[0].is_released
    assert (again.outputs == launches[1].outputs) is (change == "let go")
    assert again.uses[0][1].is_released is (change == "let go")
    np.testing.assert_array_equal([launch.number for launch in (*launches, again)], [0, 1, 2])
