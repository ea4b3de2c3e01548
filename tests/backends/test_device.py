from __future__ import annotations

import pytest
from chosen import IS_STAND_IN

from trio_accel import linalg, sparse
from trio_accel.backends import resolve
from trio_accel.backends.base import NotSupportedError, ops
from trio_accel.backends.base.contract.ops import (
    CopyFromHostSpec,
    CopySpec,
    CopyToHostSpec,
    FftSpec,
    FillSpec,
    MatmulSpec,
)
from trio_accel.devices import DECLARED

LIBRARIES = {
    "blas": {MatmulSpec, linalg.axpy.spec, linalg.scal.spec, linalg.dot.spec, linalg.nrm2.spec},
    "fft": {FftSpec},
    "memory": {CopyFromHostSpec, CopyToHostSpec, CopySpec, FillSpec},
    "sparse": {sparse.spmv.spec},
}

ALL_LIBRARIES = {
    "arrays",
    "blas",
    "blaslt",
    "dnn",
    "fft",
    "jit",
    "memory",
    "random",
    "solver",
    "sparse",
    "tensor",
}


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_whether_the_conformance_tests_cover_a_backend(name):
    try:
        backend, info = resolve(name)
    except NotSupportedError as error:
        pytest.skip(f"the conformance tests leave out a backend: {error}")
    assert (backend.name, info.index) == (name, 0)


def test_libraries_and_their_contents(rig):
    assert "memory" in rig.device.libraries
    assert list(rig.device.libraries) == sorted(rig.device.libraries)
    for name in LIBRARIES.keys() & set(rig.device.libraries):
        library, operations = rig.library(name), LIBRARIES[name]
        assert library.name == name
        assert {spec.operation for spec in operations} <= library.operations
        library.close()


def test_every_specification_belongs_to_one_library(rig):
    if missing := sorted(ALL_LIBRARIES - set(rig.device.libraries)):
        pytest.skip(f"the backend has no libraries {missing}")
    specs = {getattr(ops, name) for name in ops.__all__ if name.endswith("Spec")}
    specs -= {ops.ArraySpec, ops.OperationSpec}
    # Other tests of this process may have declared operations of their own.
    own = [one for one in DECLARED.values() if one.__module__.startswith("trio_accel.")]
    specs |= {function.spec for function in own if function.spec is not None}
    solver = rig.library("solver").operations
    # cuSOLVER has eigenvalues of general matrices since CUDA 12.8.
    if linalg.eig.spec.operation not in solver:
        specs -= {linalg.eig.spec, linalg.eigvals.spec}
    if DECLARED["linalg.schur"].spec.operation not in solver:
        # Forms of general matrices are on the CPU only, and systems with a structure.
        names = "hessenberg ldl schur solve_banded solve_toeplitz solve_tridiagonal solveh_banded sqrtm"
        specs -= {DECLARED[f"linalg.{name}"].spec for name in names.split()}
        # Launches of a GPU do without it: its products and sums are operations of their own.
        specs -= {DECLARED["sparse.extend_basis"].spec}
    else:
        # The parts of a GPU that a kernel may use.
        specs -= {ops.KernelInfoSpec}
    if "communicators" not in rig.device.libraries:
        specs -= {getattr(ops, name) for name in ops.collectives.__all__ if name.endswith("Spec")}
    if IS_STAND_IN:
        # It lacks cuSOLVER.
        solvers = {
            one.spec for one in DECLARED.values() if one.declaration.library == linalg.Cholesky.library
        }
        specs -= solvers
    if "graphs" not in rig.device.libraries:
        specs -= {ops.BranchSpec, ops.ChainSpec, ops.GraphSpec, ops.LoopSpec}
    # Each program has its own library, made from the arguments of its opening.
    names = [name for name in rig.device.libraries if name != "program"]
    owners = [spec for name in names for spec in rig.library(name).operations]
    assert {spec.operation for spec in specs} <= set(owners)
    # Expressions of the package and of the user are two libraries, with a stream each.
    twice = {name for name in owners if owners.count(name) > 1}
    assert twice <= rig.library("arrays").operations & rig.library("jit").operations
    assert twice >= {ops.ExpressionSpec.operation}
    assert len(owners) == len(set(owners)) + len(twice)


def test_a_missing_library(rig, backend):
    with pytest.raises(NotSupportedError, match="astrology") as caught:
        rig.device.open_library("astrology")
    assert caught.value.backend == backend.name


def test_an_operation_of_another_library(rig):
    array = rig.empty((1,), "float64")
    with pytest.raises(NotSupportedError, match="FillSpec"):
        rig.enqueue("blas", FillSpec(0, array))


def test_an_array_outside_of_its_block_is_refused(rig):
    array = rig.empty((10,), "float64")
    beyond = ops.ArraySpec(array.block, 8, array.dtype, (10,), (8,))
    with pytest.raises(ValueError, match=r"buffer|block"):
        rig.apply("memory", FillSpec(0, beyond))
    unknown = ops.ArraySpec(10**9, 0, array.dtype, (10,), (8,))
    with pytest.raises(KeyError, match="1000000000"):
        rig.apply("memory", FillSpec(0, unknown))


def test_devices_are_described(backend):
    for position, info in enumerate(backend.list_devices()):
        assert (info.backend, info.index) == (backend.name, position)
        assert info.name == f"{backend.name}:{position}"
        assert info.description
        assert info.total_memory > 1 << 20
        assert info.compute_units >= 1
        assert "inline" in info.isolations
    assert backend.unavailable_reason() is None


def test_a_missing_device(backend):
    with pytest.raises(ValueError, match=f"{backend.name}:99"):
        backend.open_device(99, memory_limit=None)
    with pytest.raises(ValueError, match="memory_limit"):
        backend.open_device(0, memory_limit=-1)
