"""Operations that occur again, with other blocks."""

from __future__ import annotations

import math
import pickle
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any, cast

import attrs
import numpy as np
import pytest
from chosen import BACKEND
from hypothesis import given
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopySpec,
    CopyToHostSpec,
    MatmulSpec,
    OperationSpec,
    StatusArray,
    exact,
    packed,
    reads,
    specification,
    status,
    writes,
)
from trio_accel.backends.base.kit.kept_plans import KeptPlans
from trio_accel.devices import Launch
from trio_accel.devices.dispatch import _launch_encoding as _front
from trio_accel.devices.dispatch._launch_encoding import TemplateTable
from trio_accel.devices.dispatch._request import HostArrays
from trio_accel.devices.wire._specs import encode_array
from trio_accel.devices.worker import _launch_decoding as _back
from trio_accel.devices.worker._launch_decoding import LaunchTemplate
from trio_accel.devices.worker._memory import WorkerBlocks

FLOAT32 = DType.float32


@attrs.frozen
class Named:
    """As much of a block as a template needs."""

    id: int
    damaged_by: None = None


@specification
class PackedSpec(OperationSpec):
    """Two arrays, a text and packed scalars."""

    text: str = exact()
    content: bytes = packed()
    a: ArraySpec = reads()
    out: ArraySpec = writes()


@attrs.frozen
class FactorSpec(OperationSpec):
    """Three arrays, and something else."""

    factor: object
    a: ArraySpec = reads()  # noqa: RUF009  # a field specifier
    b: ArraySpec = reads()  # noqa: RUF009  # the same
    out: ArraySpec = writes()  # noqa: RUF009  # the same


class Addresses:
    """Addresses of host arrays that are shared with a worker."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, Any]] = []
        self.looks = 0

    def add(self, host: Any, *where: Any) -> None:
        self._known.append((host, ("shared", *where)))

    def get_by_identity(self, host: Any) -> Any:
        self.looks += 1
        return next((where for known, where in self._known if known is host), None)


class Worker:
    """The objects a worker makes from the messages."""

    def __init__(self) -> None:
        self.table: TemplateTable = TemplateTable(self._take)
        self.templates: dict[int, LaunchTemplate] = {}
        self.bindings: KeptPlans[LaunchTemplate] = KeptPlans()
        self.told: list[Any] = []
        self.addresses: Addresses = Addresses()
        self.asked: list[Any] = []
        self.arrival: Any = object()
        self.is_there = False

    def _take(self, message: Any) -> None:
        plain = pickle.loads(pickle.dumps(message, 5))
        self.told.append(plain)
        if plain[0] == "template":
            assert plain[1] not in self.templates
            self.templates[plain[1]] = LaunchTemplate(plain[2], plain[1], self.bindings)
        else:
            assert plain[0] == "forget_templates"
            for number in plain[1]:
                del self.templates[number]

    def across(self, launch: Launch, number: int = 7) -> Launch | None:
        """The launch as the worker makes it, if it has a template."""
        found = self.table.find(launch, self.addresses.get_by_identity)
        if found is None:
            return None
        number_of_template, blocks, packed = pickle.loads(pickle.dumps(found, 5))
        template = self.templates[number_of_template]
        binding, blocks_by_id = template.bind(blocks), cast("WorkerBlocks", Blocks())
        if not binding.is_found(blocks_by_id):
            binding.find(blocks_by_id)
        return template.launch(number, blocks, binding, self._array_at, packed)

    def _array_at(self, arrivals: list[Any], *where: Any) -> Any:
        self.asked.append(where)
        if not self.is_there:
            arrivals.append(self.arrival)
        return np.ones(3, np.float32)


class Blocks(defaultdict[int, Named]):
    changes = 0

    def __missing__(self, number: int) -> Named:
        return Named(number)


def array(block: int, shape: tuple[int, ...] = (2, 2), offset: int = 0, dtype: DType = FLOAT32) -> ArraySpec:
    return ArraySpec(block, offset, dtype, shape, tuple(4 for _ in shape))


def launch_of(
    spec: OperationSpec,
    *,
    name: str = "test.Product",
    library: str = "a:B",
    made: tuple[tuple[int, int], ...] = (),
    outputs: tuple[int, ...] = (),
    uses: tuple[tuple[str, int], ...] = (),
    **more: Any,
) -> Launch:
    of_outputs: Any = tuple([Named(block) for block in outputs])
    of_uses: Any = tuple([(argument, Named(block)) for argument, block in uses])
    return Launch(
        name,
        spec,
        *spec.blocks(),
        made,
        more.get("staged", ()),
        (),
        of_outputs,
        of_uses,
        [],
        library,
        more.get("fault"),
    )


def product(a: int, b: int, out: int, **changes: Any) -> Launch:
    spec = changes.pop("spec", MatmulSpec(array(a), array(b), array(out)))
    made, uses = ((out, 16),), (("a", a), ("b", b))
    return launch_of(spec, **{"made": made, "outputs": (out,), "uses": uses, **changes})


def test_the_second_operation_of_a_template_makes_it() -> None:
    worker = Worker()
    assert worker.across(product(1, 2, 3)) is None
    assert not worker.told
    for a, b, out in ((1, 2, 4), (5, 6, 7), (2, 1, 8)):
        made = worker.across(product(a, b, out))
        assert made is not None
        assert same(made, product(a, b, out))
        assert made.number == 7
    assert [message[0] for message in worker.told] == ["template"]


def packed_launch(content: bytes, read: int, written: int) -> Launch:
    spec = PackedSpec("text", content, array(read), array(written))
    return launch_of(spec, outputs=(written,), uses=(("a", read), ("out", written)))


def test_packed_scalars_are_sent_next_to_the_template() -> None:
    worker = Worker()
    assert worker.across(packed_launch(b"0", 1, 2)) is None
    crossed = []
    for content, read, written in ((b"1", 1, 2), (b"1", 1, 2), (b"2", 1, 2), (b"3", 4, 5), (b"1", 1, 2)):
        made = worker.across(packed_launch(content, read, written))
        assert made is not None
        assert same(made, packed_launch(content, read, written))
        crossed.append(made)
    assert [message[0] for message in worker.told] == ["template"]
    # If nothing differs, the specification is the same object, by which a library knows its plan.
    assert crossed[0].spec is crossed[1].spec


def same(left: Launch, right: Launch) -> bool:
    """Whether two launches ask for the same; they are compared by identity otherwise."""
    fields = (
        "name",
        "spec",
        "reads",
        "writes",
        "allocations",
        "staged",
        "outputs",
        "uses",
        "library",
        "fault",
    )
    return all(getattr(left, field) == getattr(right, field) for field in fields)


CHANGES = {
    "shape": product(1, 2, 3, spec=MatmulSpec(array(1, (2, 3)), array(2), array(3))),
    "offset": product(1, 2, 3, spec=MatmulSpec(array(1, offset=4), array(2), array(3))),
    "dtype": product(1, 2, 3, spec=MatmulSpec(array(1, dtype=DType.int32), array(2), array(3))),
    "strides": product(1, 2, 3, spec=MatmulSpec(attrs.evolve(array(1), strides=(4, 8)), array(2), array(3))),
    "class": product(1, 2, 3, spec=FactorSpec(1, array(1), array(2), array(3))),
    "one operand": product(1, 1, 3),
    "in place": product(1, 3, 3),
    "size": product(1, 2, 3, made=((3, 32),)),
    "nothing made": product(1, 2, 3, made=()),
    "no outputs": product(1, 2, 3, outputs=()),
    "another output": product(1, 2, 3, outputs=(2,)),
    "an output more": product(1, 2, 3, outputs=(3, 9)),
    "arguments": product(1, 2, 3, uses=(("a", 1), ("c", 2))),
    "an argument less": product(1, 2, 3, uses=(("a", 1),)),
    "the other argument": product(1, 2, 3, uses=(("a", 2), ("b", 1))),
    "name": product(1, 2, 3, name="test.Other"),
    "library": product(1, 2, 3, library="a:C"),
}


def test_different_requests_have_different_templates() -> None:
    launches = [product(1, 2, 3), *CHANGES.values()]
    worker = Worker()
    for launch in launches:
        assert worker.across(launch) is None
    for launch in launches:
        made = worker.across(launch)
        assert made is not None
        assert same(made, launch)
    assert len(worker.templates) == len(launches)


FACTORS: tuple[object, ...] = (
    *((), (0, 1), 0, False, 0.0, -0.0, 1, True, 1.0, math.nan, math.inf, "0", b"0", None, 2**70),
    *(1j, complex(0.0, -0.0), 0j),
)


def test_equal_but_distinct_factors() -> None:
    worker = Worker()
    launches = [product(1, 2, 3, spec=FactorSpec(factor, array(1), array(2), array(3))) for factor in FACTORS]
    for launch in launches:
        assert worker.across(launch) is None
    for factor, launch in zip(FACTORS, launches, strict=True):
        made = worker.across(launch)
        assert made is not None
        spec = made.spec
        assert isinstance(spec, FactorSpec)
        assert (type(spec.factor), repr(spec.factor)) == (type(factor), repr(factor))


@pytest.mark.parametrize("factor", [(1, 2.0), (True,), (np.int64(1),), np.ones(2), DType.int8], ids=repr)
def test_a_specification_with_other_contents_has_no_template(factor: object) -> None:
    worker = Worker()
    launch = product(1, 2, 3, spec=FactorSpec(factor, array(1), array(2), array(3)))
    assert [worker.across(launch) for _ in range(3)] == [None] * 3


def test_staged_requests_and_faults_have_no_template() -> None:
    worker = Worker()
    staged = product(1, 2, 3, staged=(CopySpec(array(1), array(4)),))
    hit = product(1, 2, 3, fault=object())
    assert [worker.across(launch) for launch in (staged, hit) for _ in range(3)] == [None] * 6


NUMBERS = st.integers(1, 4)


@given(
    st.lists(
        st.builds(
            lambda blocks, shape, made, outputs, uses: launch_of(
                MatmulSpec(*[array(block, shape) for block in blocks]),
                made=tuple(made),
                outputs=tuple(outputs),
                uses=tuple(uses),
            ),
            st.tuples(NUMBERS, NUMBERS, NUMBERS),
            st.sampled_from([(1, 1), (2, 2)]),
            st.lists(st.tuples(NUMBERS, st.sampled_from([4, 8])), max_size=2),
            st.lists(NUMBERS, max_size=2),
            st.lists(st.tuples(st.sampled_from(["a", "b"]), NUMBERS), max_size=2),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_the_received_request_equals_the_sent_one(launches: list[Launch]) -> None:
    worker = Worker()
    for launch in launches * 2:
        made = worker.across(launch)
        assert made is None or same(made, launch)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), max_size=80))
def test_the_worker_knows_exactly_the_sent_and_remembered_numbers(
    launched: list[tuple[int, int]],
) -> None:
    worker = Worker()
    worker.table.kept.bound = worker.bindings.bound = 4
    asked = 0
    for extent, times in launched:
        launch = product(1, 2, 3, spec=MatmulSpec(array(1, (extent,)), array(2), array(3)))
        for _ in range(times):
            made = worker.across(launch)
            asked += 1
            assert made is None or same(made, launch)
            known = worker.table.kept.plans.values()
            assert worker.templates.keys() == {plan.number for plan in known}
            assert len(known) <= 4
            assert len(worker.bindings.plans) <= 4
            counts = worker.table.kept.counts
            assert counts.hits + counts.recorded + counts.unplanned == asked
            assert counts.recorded - counts.evicted == len(known)
    numbers = [message[1] for message in worker.told if message[0] == "template"]
    assert numbers == sorted(set(numbers))


def test_a_template_in_use_outlasts_any_number_of_single_templates() -> None:
    worker, hot = Worker(), product(1, 2, 3)
    worker.table.kept.bound = 4
    for extent in range(5, 40):
        worker.across(hot)
        other = product(1, 2, 3, spec=MatmulSpec(array(1, (extent,)), array(2), array(3)))
        assert worker.across(other) is None
        assert worker.across(other) is not None
    counts = worker.table.kept.counts
    assert (counts.recorded, counts.hits, counts.evicted) == (36, 33, 32)


def test_bindings_to_other_blocks_make_way() -> None:
    worker = Worker()
    worker.bindings.bound = 4
    worker.across(product(1, 2, 3))
    for _ in range(2):
        for out in range(3, 20):
            launch = product(1, 2, out)
            made = worker.across(launch)
            assert made is not None
            assert same(made, launch)
            assert len(worker.bindings.plans) <= 4


@pytest.fixture
async def isolated(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process")) as device:
        yield device


async def test_products_that_occur_again(isolated: ta.Device) -> None:
    rng = np.random.default_rng(5)
    hosts = [rng.standard_normal((8, 8)) for _ in range(4)]
    refs = [await isolated.put(host) for host in hosts]
    out = await isolated.zeros((8, 8))
    for _ in range(3):
        for i, j in ((0, 0), (0, 1), (1, 0), (2, 3), (3, 3)):
            expected = hosts[i] @ hosts[j]
            fresh = await ta.linalg.matmul(refs[i], refs[j])
            np.testing.assert_allclose(await fresh.to_host(), expected, rtol=1e-12, atol=1e-12)
            assert await ta.linalg.matmul(refs[i], refs[j].T, out=out) is out
            np.testing.assert_allclose(await out.to_host(), hosts[i] @ hosts[j].T, rtol=1e-12, atol=1e-12)
    statistics = await isolated.statistics()
    assert statistics.memory.blocks == 6


async def test_factors_of_operations_that_occur_again(isolated: ta.Device) -> None:
    x = await isolated.put(np.ones(3))
    for factor in (2.0, 3.0, 2.0, -1.0, 3.0, 0.0, -0.0, -0.0):
        host = await x.to_host()
        await ta.linalg.scal(factor, x)
        assert (await x.to_host()).tobytes() == (factor * host).tobytes()
        await x.fill(1.0)


@pytest.mark.parametrize("kind", [CopyFromHostSpec, CopyToHostSpec])
def test_a_host_array_is_part_of_it_by_its_address(kind: Any) -> None:
    worker, here, there, elsewhere = Worker(), *np.zeros((3, 3), np.float32)
    worker.addresses.add(here, 5, 64, "float32", (3,), None)
    worker.addresses.add(there, 5, 128, "float32", (3,), None)

    def ask(host: Any, block: int) -> Launch | None:
        spec = kind(host=host, **{"out" if kind is CopyFromHostSpec else "source": array(block, (3,))})
        return worker.across(launch_of(spec, outputs=(block,)))

    assert [ask(host, 1) for host in (here, there, elsewhere, elsewhere, elsewhere)] == [None] * 5
    for host, offset in ((here, 64), (there, 128), (here, 64)):
        made = ask(host, 2)
        assert made is not None
        assert made.spec.host.tolist() == [1, 1, 1]  # type: ignore[attr-defined]
        assert made.arrivals == [worker.arrival]
        assert worker.asked.pop() == (5, offset, "float32", (3,), None)
    assert [message[0] for message in worker.told] == ["template", "template"]


def copy_of(host: Any, at: ArraySpec, kind: Any = CopyFromHostSpec, **changes: Any) -> Launch:
    """A copy as it is planned: its specification is another one each time."""
    return launch_of(kind(host, at), **{"outputs": (at.block,), **changes})


def same_copy(made: Launch, launch: Launch) -> bool:
    """Whether two copies are the same but for the host's array, which nothing compares."""
    specs: list[Any] = [attrs.evolve(each.spec, host=None) for each in (made, launch)]
    return same(*[attrs.evolve(each, spec=spec) for each, spec in zip((made, launch), specs, strict=True)])


def test_memory_of_the_application_is_in_no_binding() -> None:
    worker, host, at = Worker(), np.zeros(3, np.float32), array(1, (3,))
    worker.addresses.add(host, 5, 64, "float32", (3,), None)
    worker.across(copy_of(host, at))
    made = worker.across(copy_of(host, at))
    assert made is not None
    assert made.arrivals == [worker.arrival]
    gone = weakref.ref(made.spec.host)  # type: ignore[attr-defined]
    del made
    assert gone() is None
    # Once it is there, it need not be waited for. No binding keeps it.
    worker.is_there = True
    first, second = worker.across(copy_of(host, at)), worker.across(copy_of(host, at))
    assert first is not None
    assert second is not None
    assert first.spec is not second.spec
    assert [first.arrivals, second.arrivals] == [[], []]
    assert len(worker.asked) == 3
    assert all(plan.binding.spec is None for plan in worker.bindings.plans.values())


def test_copies_that_differ_from_a_known_one() -> None:
    worker, host, at = Worker(), np.zeros(3, np.float32), array(1, (3,))
    other, back = np.zeros(3, np.float32), array(1, (3,), offset=4)
    worker.addresses.add(host, 5, 64, "float32", (3,), None)
    worker.addresses.add(other, 5, 128, "float32", (3,), None)
    launches = [
        copy_of(host, at),
        copy_of(host, at, CopyToHostSpec),
        copy_of(other, at),
        copy_of(host, back),
        copy_of(host, at, made=((1, 12),)),
        copy_of(host, at, name="test.Other"),
        copy_of(host, at, outputs=()),
        copy_of(host, array(2, (3,))),
    ]
    for launch in launches * 2:
        worker.across(launch)
    for launch in (*launches, *reversed(launches)):
        made = worker.across(launch)
        assert made is not None
        offset = 128 if launch.spec.host is other else 64  # type: ignore[attr-defined]
        worker.across(launch)
        assert worker.table.find(launch, worker.addresses.get_by_identity) is not None
        assert worker.asked[-1] == (5, offset, "float32", (3,), None)
        assert same_copy(made, launch)


async def test_missing_memory_of_the_worker_fails_only_the_operation(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is sent whole or as a replay."""
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process")) as device:
        monkeypatch.setattr(
            HostArrays, "address", lambda _, host: ("shared", 999, 0, "float32", host.shape, None)
        )
        for _ in range(3):
            with pytest.raises(KeyError, match="999"):
                await device.put(np.ones(4, np.float32))
        monkeypatch.undo()
        assert (await (await device.put(np.ones(4, np.float32))).to_host()).tolist() == [1, 1, 1, 1]
        assert device.generation == 1


@specification
class TellingSpec(OperationSpec):
    """A specification with status words."""

    x: ArraySpec = reads()
    words: StatusArray = status()


def test_words_for_an_answer_begin_as_zeros() -> None:
    """The kernel may fill a part of them, and a worker sends them all: whatever its memory held before."""
    launch = launch_of(TellingSpec(array(1), np.zeros(100, np.int32)), uses=(("x", 1),))
    plain = _front.encode_launch(launch, encode_array, _front.result_of, _front.result_of)
    # NumPy gives the memory of small arrays to the next ones.
    dirt = [np.full(100, -1, np.int32) for _ in range(16)]
    del dirt
    results: list[Any] = []
    _back.decode_launch(plain, 7, cast("Any", Blocks()), lambda: None, results)
    assert [each.tobytes() for each in results] == [bytes(400)]
