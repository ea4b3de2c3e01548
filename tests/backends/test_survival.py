"""Memory that outlives its device: another one takes over its contents in kept chunks."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keepers import Keeper

from trio_accel.backends.base import DType, NotSupportedError, OutOfMemoryError, PlacedBlock
from trio_accel.backends.base.contract.ops import ArraySpec, CopyFromHostSpec, FillSpec
from trio_accel.backends.base.kit.host import read_only

KIB = 1024
# Seconds; a child of a plug-in may import PyTorch twice on a busy machine.
PATIENCE = 100
ROOT = Path(__file__).parents[2]


@pytest.fixture
def keeper():
    with Keeper() as opened:
        yield opened


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def all_of(block, nbytes):
    return ArraySpec(block, 0, DType.uint8, (nbytes,), (1,))


def put(rig, block, host):
    """Make a block under an id and fill it."""
    rig.device.allocate(block, host.nbytes)
    rig.enqueue("memory", CopyFromHostSpec(host, all_of(block, host.nbytes)))


def get(rig, block, nbytes):
    return rig.get(all_of(block, nbytes))


def test_a_chunk_is_exported_before_its_block_is_there(open_kept, keeper):
    with open_kept(keeper) as rig:
        assert not keeper.kept
        rig.device.allocate(1, 1000)
        place = rig.device.placement(1)
        assert (place.block, place.nbytes) == (1, 1000)
        assert place.offset + 1000 <= keeper.kept[place.chunk][0]
        assert rig.device.memory().reserved == sum(nbytes for nbytes, _ in keeper.kept.values())


# A limit of which a sixteenth, at least 256 MiB, is kept while it is empty.
LITTLE = 2 << 30


def test_another_device_reads_the_written_bytes_bit_for_bit(open_kept, keeper):
    contents = {1: noise(1, 1), 2: noise(0), 3: noise(100_001, 3), 4: noise(270 << 20, 4)}
    with open_kept(keeper) as first:
        for block, host in contents.items():
            put(first, block, host)
        first.stream.synchronize()
        places = [first.device.placement(block) for block in contents]
    assert not keeper.dropped  # closing gives no chunk back: they are not the device's
    assert len({place.chunk for place in places}) > 1
    with open_kept(keeper, LITTLE) as second:
        keeper.map_into(second.device)
        assert second.device.memory().used == 0
        second.device.adopt(reversed(places))
        assert [second.device.placement(block) for block in contents] == places
        for block, host in contents.items():
            assert np.array_equal(get(second, block, host.size), host)
        for block in contents:
            second.device.free(block)
        assert second.device.memory().used == second.device.memory().blocks == 0
        assert len(keeper.dropped) == 1  # by the rules of its allocator: one empty chunk is kept
        kept = set(keeper.kept)
        put(second, 5, noise(1000, 5))
        assert second.device.placement(5).chunk in kept  # and used again
        assert np.array_equal(get(second, 5, 1000), noise(1000, 5))


def test_a_spare_follows_while_the_other_device_makes_and_drops_chunks(open_kept, keeper):
    mapped = set()

    def follow(device):
        for chunk in mapped - keeper.kept.keys():
            device.unmap_chunk(chunk)
        for chunk in keeper.kept.keys() - mapped:
            keeper.map_into(device, chunk)
        mapped.clear()
        mapped.update(keeper.kept)

    sizes = {1: 1000, 2: 300 << 20, 3: 600 << 20, 4: 1000}
    with open_kept(keeper, LITTLE) as spare:
        with open_kept(keeper, LITTLE) as active:
            for block, nbytes in sizes.items():
                active.device.allocate(block, nbytes)
                _mark(active, block, nbytes)
                follow(spare.device)
            assert len(mapped) == 3
            active.stream.synchronize()
            places = [active.device.placement(block) for block in (1, 4)]
            for block in (2, 3):
                active.device.free(block)
                follow(spare.device)
            assert len(mapped) < 3
        dropped = list(keeper.dropped)
        spare.device.adopt(places)
        assert keeper.dropped == dropped
        for block in (1, 4):
            _check(spare, block, sizes[block])
        spare.device.allocate(5, 600 << 20)
        assert not keeper.kept.keys() & set(keeper.dropped)


def test_a_mapped_chunk_is_nobodys_until_it_is_adopted(open_kept, keeper):
    with open_kept(keeper) as first:
        first.device.allocate(1, 1000)
        theirs = first.device.placement(1).chunk
    with open_kept(keeper) as second:
        keeper.map_into(second.device)
        second.device.allocate(2, 8)
        made = second.device.placement(2).chunk
        assert made > theirs
        second.device.free(2)
        second.device.unmap_chunk(theirs)
        assert not keeper.dropped
        for chunk in (theirs, made, 99):
            with pytest.raises(KeyError, match=str(chunk)):
                second.device.unmap_chunk(chunk)
        keeper.map_into(second.device, theirs)  # it may come again
        second.device.adopt([])
        assert not keeper.dropped  # two empty chunks are not too much
        with pytest.raises(KeyError):
            second.device.unmap_chunk(theirs)


def test_empty_chunks_of_another_process_are_given_back(open_kept, keeper):
    with open_kept(keeper) as first:
        for block, nbytes in enumerate([1000, 140 << 20, 200 << 20]):
            first.device.allocate(block, nbytes)
        survivor = first.device.placement(0)
        small, large = (first.device.placement(block).chunk for block in (1, 2))
    if small == survivor.chunk:
        pytest.skip("this backend's first chunk holds them all")
    with open_kept(keeper) as second:
        keeper.map_into(second.device)
        second.device.adopt([survivor])
        assert keeper.dropped == [small]
        second.device.allocate(7, 200 << 20)
        assert second.device.placement(7).chunk == large


def test_a_place_is_true_for_the_host(open_kept, backend, keeper):
    with open_kept(keeper) as rig:
        contents = {block: noise(1000 * block, block) for block in (1, 2, 3)}
        for block, host in contents.items():
            put(rig, block, host)
        rig.stream.synchronize()
        places = {block: rig.device.placement(block) for block in contents}
        try:
            hosts = {place.chunk: keeper.host(backend, place.chunk) for place in places.values()}
        except NotSupportedError as error:
            pytest.skip(f"the host does not address the device's memory: {error}")
        for block, place in places.items():
            assert np.array_equal(_part(hosts, place), contents[block])
        _part(hosts, places[2])[:] = 7
        assert (get(rig, 2, 2000) == 7).all()
    assert (_part(hosts, places[2]) == 7).all()  # the mapping is the array's


def _part(hosts, place):
    return hosts[place.chunk][place.offset : place.offset + place.nbytes]


def test_the_limit_counts_adopted_blocks(open_kept, keeper):
    with open_kept(keeper) as first:
        for block, nbytes in ((1, 60 * KIB), (2, 30 * KIB)):
            first.device.allocate(block, nbytes)
        places = [first.device.placement(block) for block in (1, 2)]
    for limit, free in ((100 * KIB, 10 * KIB), (50 * KIB, 0)):
        with open_kept(keeper, limit) as second:
            keeper.map_into(second.device)
            second.device.adopt(places)
            full = second.device.memory()
            assert (full.used, full.peak, full.blocks, full.limit) == (90 * KIB, 90 * KIB, 2, limit)
            assert full.reserved == sum(nbytes for nbytes, _ in keeper.kept.values())
            with pytest.raises(OutOfMemoryError) as caught:
                second.device.allocate(3, 20 * KIB)
            assert (caught.value.requested, caught.value.free) == (20 * KIB, free)
            second.device.free(1)
            second.device.allocate(3, 20 * KIB)


def test_a_refused_adoption_changes_nothing(open_kept, keeper):
    with open_kept(keeper) as first:
        first.device.allocate(1, 5000)
        place = first.device.placement(1)
        size = keeper.kept[place.chunk][0]
    with open_kept(keeper) as second:
        keeper.map_into(second.device)
        second.device.allocate(2, 8)
        for wrong in (
            [place, PlacedBlock(3, 1000, place.chunk, place.offset + 4096)],  # overlaps
            [place, place],
            [PlacedBlock(2, 8, place.chunk, 0)],  # the id is taken
            [PlacedBlock(3, 8, 99, 0)],  # no such chunk
            [PlacedBlock(3, 8, second.device.placement(2).chunk, 1 << 20)],  # not mapped: its own
            [PlacedBlock(3, 1000, place.chunk, size - 512)],
        ):
            with pytest.raises(ValueError, match="block"):
                second.device.adopt(wrong)
        with pytest.raises(ValueError, match=f"chunk {place.chunk} is there already"):
            keeper.map_into(second.device, place.chunk)
        assert second.device.memory().blocks == 1
        second.device.adopt([place])
        with pytest.raises(ValueError, match="block 1"):
            second.device.adopt([place])
        assert second.device.memory().blocks == 2
        with pytest.raises(KeyError, match="9"):
            second.device.placement(9)


def test_a_descriptor_is_taken_over_even_if_the_chunk_is_not(open_kept, backend, keeper):
    with open_kept(keeper) as rig:
        rig.device.allocate(1, 8)
        chunk = rig.device.placement(1).chunk
        nbytes, kept = keeper.kept[chunk]
        for number, size in ((chunk, nbytes), (chunk + 1, 2 * nbytes), (chunk + 1, 0)):
            descriptor = os.dup(kept)
            with pytest.raises(ValueError, match=r"chunk|nbytes"):
                rig.device.map_chunk(number, size, descriptor)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
        with pytest.raises((ValueError, NotSupportedError)):
            backend.map_host(kept, 2 * nbytes)
    descriptor = os.dup(kept)
    with pytest.raises(RuntimeError, match="closed"):
        rig.device.map_chunk(chunk + 1, nbytes, descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_read_only_mapping_is_not_written_to(open_kept, backend, keeper):
    with open_kept(keeper) as first:
        put(first, 1, noise(1000))
        first.stream.synchronize()
        place = first.device.placement(1)
        nbytes, kept = keeper.kept[place.chunk]
        reading = read_only(kept) if backend.shares_memory_with_host else os.dup(kept)
        with open_kept(keeper) as second:
            second.device.map_chunk(place.chunk, nbytes, reading, write=False)
            second.device.expect([place])
            assert np.array_equal(get(second, 1, 1000), noise(1000))
            # A kernel's write would lose the context, and end a process with the stand-in driver.
            with pytest.raises(ValueError, match="read-only"):
                second.apply("memory", FillSpec(7, all_of(1, 1000)))
            if backend.name == "cuda":
                assert _access(second.device.blocks.block(1)[0]) == 1
            second.device.free(1)
            second.device.unmap_chunk(place.chunk)
        assert np.array_equal(get(first, 1, 1000), noise(1000))


def test_memory_of_another_device_of_the_process_is_read_and_outlives_it(open_rig, backend):
    with open_rig() as second:
        with open_rig() as first:
            put(first, 1, noise(1000))
            first.stream.synchronize()
            place = first.device.placement(1)
            if not second.device.reaches(first.device.info):
                pytest.skip("the backend cannot map memory twice")
            for chunk, block in ((-1, 7), (-2, 8)):
                second.device.map_peer(chunk, first.device, place.chunk)
                second.device.expect([place._replace(block=block, chunk=chunk)])
            with pytest.raises(ValueError, match="is there already"):
                second.device.map_peer(-1, first.device, place.chunk)
            with pytest.raises(KeyError):
                second.device.map_peer(-3, first.device, 99)
            assert np.array_equal(get(second, 7, 1000), noise(1000))
            # A kernel's write would lose the context, and end a process with the stand-in driver.
            with pytest.raises(ValueError, match="read-only"):
                second.apply("memory", FillSpec(7, all_of(7, 1000)))
            if backend.name == "cuda":
                assert _access(second.device.blocks.block(7)[0]) == 1
            second.device.free(7)
            second.device.unmap_chunk(-1)
            first.device.free(1)
        assert np.array_equal(get(second, 8, 1000), noise(1000))
        second.device.free(8)


def test_without_a_keeper_no_memory_is_taken_over(rig):
    with pytest.raises(RuntimeError, match="without a keeper"):
        rig.device.adopt([])


SIZES = st.integers(0, 5000) | st.integers(20 << 20, 80 << 20)
STEPS = st.lists(SIZES | st.integers(-20, -1), max_size=10)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lives=st.lists(STEPS, min_size=2, max_size=4))
def test_blocks_live_on_from_device_to_device(open_kept, lives):
    """Positive sizes are allocated; a negative number frees one of the blocks."""
    alive: dict[int, int] = {}
    ids = itertools.count(1)
    places: list[PlacedBlock] = []
    with Keeper() as keeper:
        for steps in lives:
            keeper.dropped.clear()  # the next device does not know their ids
            with open_kept(keeper) as rig:
                keeper.map_into(rig.device)
                rig.device.adopt(places)
                for step in steps:
                    if step >= 0:
                        alive[block := next(ids)] = step
                        rig.device.allocate(block, step)
                        _mark(rig, block, step)
                    elif alive:
                        block = list(alive)[step % len(alive)]
                        del alive[block]
                        rig.stream.synchronize()
                        rig.device.free(block)
                for block, nbytes in alive.items():
                    _check(rig, block, nbytes)
                places = [rig.device.placement(block) for block in alive]
                assert rig.device.memory().used == sum(alive.values())
            assert {place.chunk for place in places} <= keeper.kept.keys()


def _edges(block, nbytes):
    size = min(nbytes, 16)
    return [ArraySpec(block, start, DType.uint8, (size,), (1,)) for start in (0, nbytes - size)]


def _mark(rig, block, nbytes):
    for edge in _edges(block, nbytes):
        rig.enqueue("memory", FillSpec(block, edge))


def _check(rig, block, nbytes):
    for edge in _edges(block, nbytes):
        assert (rig.get(edge) == block).all()


def _access(address):
    """Ask the driver what a GPU may do with its memory: 1 is to read, 3 also to write."""
    from cuda.bindings import driver  # where that backend is tested

    location = driver.CUmemLocation()
    location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    code, flags = driver.cuMemGetAccess(location, address)
    assert not int(code)
    return int(flags)


CHILD = """
import resource, signal, socket, sys
import numpy as np
from trio_accel.backends import resolve
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec, CopyFromHostSpec, FillSpec

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
link = socket.socket(fileno=int(sys.argv[3]))

class Keeper:
    def keep(self, chunk, nbytes, descriptor):
        socket.send_fds(link, [f"{chunk} {nbytes}".encode()], [descriptor])

    def drop(self, chunk):
        pass

backend, info = resolve(sys.argv[1])
device = backend.open_device(info.index, memory_limit=None, keeper=Keeper())
stream, memory = device.open_stream("main"), device.open_library("memory")
device.allocate(7, 1_000_001)
place = device.placement(7)
array = ArraySpec(7, 0, DType.uint8, (1_000_001,), (1,))
noise = np.random.default_rng(7).integers(0, 256, 1_000_001, np.uint8)
memory.enqueue(CopyFromHostSpec(noise, array), stream)
if sys.argv[2] == "kill":
    stream.synchronize()
link.send(f"{place.nbytes} {place.chunk} {place.offset}".encode())
if sys.argv[2] == "crash":
    stream.crash()
    memory.enqueue(FillSpec(0, array), stream)
signal.pause()
"""


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_memory_survives_the_death_of_its_process(open_kept, backend, keeper, end):
    with open_kept(keeper) as rig:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine:
            mine.settimeout(PATIENCE)
            with theirs:
                child = subprocess.Popen(
                    [
                        sys.executable,
                        "-X",
                        "faulthandler",
                        "-c",
                        CHILD,
                        backend.name,
                        end,
                        str(theirs.fileno()),
                    ],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONFAULTHANDLER": ""},
                    pass_fds=[theirs.fileno()],
                    stderr=subprocess.PIPE,
                )
            try:
                told, (descriptor,), _, _ = socket.recv_fds(mine, 100, 1)
                rig.device.map_chunk(*map(int, told.split()), descriptor)
                nbytes, chunk, offset = map(int, mine.recv(100).split())
                if end == "kill":
                    child.kill()
                _, complaint = child.communicate(timeout=PATIENCE)
            finally:
                child.kill()
                child.wait(PATIENCE)
                child.stderr.close()
        assert child.returncode == -(signal.SIGKILL if end == "kill" else signal.SIGSEGV)
        assert not complaint  # a deliberate death is quiet
        rig.device.adopt([PlacedBlock(7, nbytes, chunk, offset)])
        assert np.array_equal(get(rig, 7, nbytes), noise(nbytes, 7))


def test_expected_blocks_are_read_before_they_are_adopted(open_kept, keeper):
    contents = {1: noise(1000, 1), 2: noise(100_001, 2), 3: noise(5000, 3)}
    with open_kept(keeper) as first:
        for block, host in contents.items():
            put(first, block, host)
        first.stream.synchronize()
        places = [first.device.placement(block) for block in contents]
    with open_kept(keeper) as second:
        keeper.map_into(second.device)
        second.device.expect(places[:2])
        second.device.expect(places[:1])
        for block in (1, 2):
            assert second.device.placement(block) == places[block - 1]
            assert np.array_equal(get(second, block, contents[block].size), contents[block])
        with pytest.raises(KeyError, match="3"):
            second.device.placement(3)
        # They are not its own: nothing is counted, and nothing is placed over them.
        assert second.device.memory().used == second.device.memory().blocks == 0
        put(second, 9, noise(2000, 9))
        assert second.device.placement(9).chunk not in {place.chunk for place in places}
        second.device.adopt([places[0], places[2]])
        assert second.device.memory().blocks == 3
        for block in (1, 3, 9):
            expected = contents.get(block, noise(2000, 9))
            assert np.array_equal(get(second, block, expected.size), expected)
        with pytest.raises(KeyError, match="2"):
            second.device.placement(2)
        # The device's own memory is unchanged.
        second.device.expect([places[0]._replace(offset=places[2].offset)])
        assert second.device.placement(1) == places[0]
        for block in (1, 3, 9):
            second.device.free(block)
        assert second.device.memory().used == second.device.memory().blocks == 0


def test_a_moved_block_is_found_at_its_new_address(open_kept, keeper):
    with open_kept(keeper) as first:
        put(first, 1, noise(1000, 1))
        put(first, 2, noise(1000, 2))
        first.stream.synchronize()
        one, two = first.device.placement(1), first.device.placement(2)
    with open_kept(keeper) as second:
        keeper.map_into(second.device)
        second.device.expect([one])
        assert np.array_equal(get(second, 1, 1000), noise(1000, 1))
        moved = PlacedBlock(1, *two[1:])
        second.device.adopt([moved])
        assert second.device.placement(1) == moved
        assert np.array_equal(get(second, 1, 1000), noise(1000, 2))


def test_blocks_are_not_expected_without_a_mapped_chunk(open_kept, open_rig, keeper):
    with open_kept(keeper) as first:
        put(first, 1, noise(1000, 1))
        first.stream.synchronize()
        place = first.device.placement(1)
        nbytes = keeper.kept[place.chunk][0]
    with open_kept(keeper) as second:
        with pytest.raises(ValueError, match="block 1"):
            second.device.expect([place])
        keeper.map_into(second.device)
        for wrong in (
            place._replace(chunk=place.chunk + 1),
            place._replace(offset=nbytes),
            place._replace(offset=-512),
            place._replace(nbytes=nbytes + 1),
        ):
            with pytest.raises(ValueError, match="block 1"):
                second.device.expect([wrong])
        # A block is also dropped with its chunk.
        second.device.expect([place])
        second.device.unmap_chunk(place.chunk)
        with pytest.raises(KeyError, match="1"):
            second.device.placement(1)
        second.device.adopt([])
        with pytest.raises(ValueError, match="block 1"):
            second.device.expect([place])
    with open_rig() as alone, pytest.raises(ValueError, match="block 1"):
        alone.device.expect([place])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_adopted_blocks_count_and_expected_blocks_do_not(open_kept, data):
    """Any expected blocks, in any places: afterwards all is as if nothing had been."""
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=8))
    with Keeper() as keeper:
        with open_kept(keeper) as first:
            for block, nbytes in enumerate(sizes):
                put(first, block, noise(nbytes, block))
            first.stream.synchronize()
            places = {block: first.device.placement(block) for block in range(len(sizes))}
        alive = data.draw(st.sets(st.sampled_from(sorted(places))))
        with open_kept(keeper) as second:
            keeper.map_into(second.device)
            for _ in range(data.draw(st.integers(0, 3))):
                told = data.draw(st.lists(st.tuples(*[st.sampled_from(sorted(places))] * 2)))
                # Also at the address of another one of them.
                expected = [PlacedBlock(block, *places[other][1:]) for block, other in told]
                second.device.expect(expected)
                for block, place in {place.block: place for place in expected}.items():
                    assert second.device.placement(block) == place
            second.device.adopt([places[block] for block in alive])
            for block, place in places.items():
                if block in alive:
                    assert second.device.placement(block) == place
                    assert np.array_equal(get(second, block, place.nbytes), noise(place.nbytes, block))
                else:
                    with pytest.raises(KeyError):
                        second.device.placement(block)
            counts = second.device.memory()
            assert (counts.blocks, counts.used) == (len(alive), sum(sizes[block] for block in alive))
            for block in alive:
                second.device.free(block)
            assert second.device.memory().used == second.device.memory().blocks == 0
