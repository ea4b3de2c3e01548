"""Which operations get a turn, and when."""

from __future__ import annotations

from typing import Any

from trio_accel.devices.engine._leases import LaunchOrder


class Waiting:
    """The attributes of a launch that the order needs."""

    def __init__(
        self,
        library: str,
        *,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        makes: tuple[int, ...] = (),
    ) -> None:
        self.library = library
        self.reads = frozenset(reads)
        self.writes = frozenset((*writes, *makes))
        self.allocations = tuple((block, 8) for block in makes)


def entered(order: LaunchOrder, *launches: Any) -> list[bool]:
    """Enter some; returns whether each may be launched."""
    for launch in launches:
        order.enter(launch)
    return [is_ready(order, launch) for launch in launches]


def is_ready(order: LaunchOrder, launch: Any) -> bool:
    turn = order.turn(launch)
    return turn is None or turn.is_ready


def may_begin(lease: Any) -> bool:
    return lease.is_ready


def test_operations_of_one_library_have_no_turns() -> None:
    order = LaunchOrder()
    launches: list[Any] = [Waiting("blas", writes=(1,)), Waiting("blas", reads=(1,)), Waiting("blas")]
    assert entered(order, *launches) == [True, True, True]
    assert not order.has_turns
    assert list(order) == launches
    for launch in launches:
        order.leave(launch)
    assert not list(order)


def test_a_withdrawn_operation_keeps_its_position_but_not_its_results() -> None:
    order = LaunchOrder()
    first: Any = Waiting("blas", writes=(1,))
    withdrawn: Any = Waiting("fft", reads=(1,), writes=(2,), makes=(3,))
    assert entered(order, first, withdrawn) == [True, False]
    order.leave(withdrawn)
    in_its_block: Any = Waiting("memory", makes=(3,))
    behind: Any = Waiting("memory", reads=(2,))
    # As far as anybody knows, its targets still hold the results of earlier operations.
    assert entered(order, in_its_block, behind) == [True, False]
    order.leave(in_its_block)
    order.leave(first)
    assert is_ready(order, behind)
    order.leave(behind)
    assert order.is_clear


def test_another_library_gives_turns_to_waiting_requests() -> None:
    order = LaunchOrder()
    first: Any = Waiting("blas", writes=(1,))
    second: Any = Waiting("blas", reads=(1,), writes=(2,))
    gone: Any = Waiting("blas", writes=(3,))
    third: Any = Waiting("fft", reads=(2, 3), writes=(1,))
    assert entered(order, first, second, gone) == [True, True, True]
    order.leave(gone)
    order.enter(third)
    assert [is_ready(order, launch) for launch in (first, second, third)] == [True, False, False]
    order.leave(first)
    assert [is_ready(order, launch) for launch in (second, third)] == [True, False]
    order.leave(second)
    assert is_ready(order, third)
    order.leave(third)
    # Nobody waits: a single library takes no turns.
    assert entered(order, third) == [True]
    assert not order.has_turns


def test_a_lease_follows_earlier_work_and_precedes_later_work() -> None:
    order = LaunchOrder()
    before: Any = Waiting("blas", reads=(1,))
    behind: Any = Waiting("blas", reads=(1,))
    order.enter(before)
    lease = order.enter_lease(1, write=True)
    order.enter(behind)
    assert not may_begin(lease)
    assert not is_ready(order, behind)
    order.leave(before)
    assert may_begin(lease)
    assert not is_ready(order, behind)
    order.leave_lease(lease)
    assert is_ready(order, behind)


def test_only_a_lease_is_reckoned_with() -> None:
    order = LaunchOrder()
    lease = order.enter_lease(1, write=False)
    reader: Any = Waiting("blas", reads=(1,))
    writer: Any = Waiting("blas", writes=(1,))
    assert entered(order, reader, writer) == [True, False]
    order.release_all()
    assert is_ready(order, writer)
    order.leave_lease(lease)


def test_work_on_other_arrays_need_not_be_entered_while_nothing_waits() -> None:
    order = LaunchOrder()
    leases = [order.enter_lease(1, write=False), order.enter_lease(2, write=True)]
    reader: Any = Waiting("blas", reads=(1,), makes=(3,))
    others: list[Any] = [Waiting("blas", writes=(1,)), Waiting("fft", reads=(2,)), Waiting("fft", makes=(2,))]
    assert order.admits(reader)
    assert not any(map(order.admits, others))
    # As soon as one waits, the others follow it.
    order.enter(others[0])
    assert not order.admits(reader)
    order.leave_lease(leases[0])
    assert not order.admits(reader)
    order.leave(others[0])
    assert order.admits(reader)
    order.leave_lease(leases[1])
    assert order.is_clear
    assert all(map(order.admits, others))


def test_arrays_that_a_withdrawn_operation_keeps_its_place_for_are_not_free() -> None:
    order = LaunchOrder()
    lease = order.enter_lease(1, write=True)
    withdrawn: Any = Waiting("blas", reads=(1,), writes=(2,))
    behind: Any = Waiting("fft", reads=(2,))
    order.enter(withdrawn)
    order.leave(withdrawn)
    assert not order.admits(behind)
    order.leave_lease(lease)
    assert order.admits(behind)
