"""A matrix is trusted once it was found right; until then its product checks its reads."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import numpy as np
import pytest
import scipy.sparse

from trio_accel.backends.base import LibraryError, NotSupportedError
from trio_accel.backends.base.contract.ops import ArraySpec, CopyFromHostSpec
from trio_accel.sparse import spmv

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("only_cuda")]

cusparse = pytest.importorskip("nvmath.bindings.cusparse")


def product(rig: Any, indptr: list[int], indices: list[int], columns: int = 2, index: str = "int32") -> Any:
    """The product of an all-ones matrix with a vector of 1, 2, ...."""
    rows = len(indptr) - 1
    arrays = [rig.put(np.array(values, index)) for values in (indptr, indices)]
    data, x = rig.put(np.ones(len(indices))), rig.put(np.arange(1.0, columns + 1))
    return spmv.spec((rows, columns), *arrays, data, x, rig.empty((rows,), "float64"))


def write(rig: Any, array: ArraySpec, values: list[int]) -> None:
    rig.apply("memory", CopyFromHostSpec(np.array(values, np.int32), array))


def believed(rig: Any) -> list[bool]:
    """For each matrix found right, whether it was passed to cuSPARSE."""
    return [seen.product is not None for seen in rig.library("sparse")._seen.values() if seen.is_right]


def known_product(rig: Any) -> Any:
    """Of a matrix that cuSPARSE has; its result is 3, 2."""
    spec = product(rig, [0, 2, 3], [0, 1, 1])
    for _ in range(3):
        rig.apply("sparse", spec)
    return spec


def test_the_first_product_checks_and_the_next_is_the_librarys(rig: Any) -> None:
    spec = product(rig, [0, 2, 3], [0, 1, 1])
    rig.enqueue("sparse", spec)
    assert believed(rig) == []
    rig.finish(rig.stream)
    assert believed(rig) == [False]
    np.testing.assert_array_equal(rig.get(spec.out), [3, 2])
    rig.apply("sparse", spec)
    assert believed(rig) == [True]
    np.testing.assert_array_equal(rig.get(spec.out), [3, 2])


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 1, 2], [0, 2], "indices: a matrix of 2 columns"),
        ([0, 1, 2], [-1, 0], "indices: a matrix of 2 columns"),
        ([0, 1, 2], [0, 2**31 - 1], "indices: a matrix of 2 columns"),
        ([0, 2, 1, 2], [0, 1], "indptr: its elements must not decrease"),
        # Two things are wrong, and either is reported.
        ([0, 9, 2], [0, 1], "indptr: "),
        ([0, -5, 2], [0, 1], "indptr: "),
        ([0, 1, 3], [0, 1], "indptr: 2 rows need 3 elements from 0 to at most 2"),
        ([3], [], "indptr: 0 rows need 1 elements from 0 to at most 0"),
        ([0, 1], [], "indptr: 1 rows need 2 elements from 0 to at most 0"),
    ],
)
def test_a_wrong_structure_is_reported_each_time_and_hurts_nobody(
    rig: Any, indptr: list[int], indices: list[int], message: str, index: str
) -> None:
    wrong, right = product(rig, indptr, indices, index=index), product(rig, [0, 2], [0, 1], index=index)
    for _ in range(2):
        with pytest.raises(LibraryError, match=message):
            rig.apply("sparse", wrong)
        rig.apply("sparse", right)
        np.testing.assert_array_equal(rig.get(right.out), [3])
    assert len(believed(rig)) == 1
    assert rig.stream.failure is None


def test_another_array_is_another_structure(rig: Any) -> None:
    right = product(rig, [0, 1, 2], [0, 1])
    for _ in range(2):
        rig.apply("sparse", right)
    wrong = attrs.evolve(right, matrix_indices=rig.put(np.array([0, 5], np.int32)))
    with pytest.raises(LibraryError, match="indices"):
        rig.apply("sparse", wrong)
    with pytest.raises(LibraryError, match="indices"):
        # As many columns are no more.
        rig.apply("sparse", attrs.evolve(right, matrix=(2, 1), x=rig.put(np.ones(1))))


@pytest.mark.parametrize("which", ["indptr", "indices"])
def test_a_block_that_becomes_another_is_believed_no_more(rig: Any, which: str) -> None:
    """A program that drops its arrays gets the next ones of that size in the same blocks."""
    spec = known_product(rig)
    other = product(rig, [0, 1], [0])
    rig.apply("sparse", other)
    assert believed(rig) == [True, False]
    array = getattr(spec, f"matrix_{which}")
    rig.device.renew(array.block)
    assert believed(rig) == [False]
    write(rig, array, [7] * array.shape[0])
    with pytest.raises(LibraryError, match=which):
        rig.apply("sparse", spec)
    write(rig, array, [0, 2, 3] if which == "indptr" else [0, 1, 1])
    for _ in range(2):
        rig.apply("sparse", spec)
        np.testing.assert_array_equal(rig.get(spec.out), [3, 2])
    assert believed(rig) == [False, True]


def test_a_look_that_a_write_has_overtaken_proves_nothing(rig: Any) -> None:
    spec = product(rig, [0, 2, 3], [0, 1, 1])
    rig.apply("sparse", product(rig, [0, 2], [1, 0]))
    hold = rig.stream.hold()
    rig.enqueue("sparse", spec)
    rig.device.renew(spec.matrix_indices.block)
    hold.release()
    rig.stream.synchronize()
    assert believed(rig) == [False]
    for _ in range(2):
        rig.apply("sparse", spec)
    assert believed(rig) == [False, True]


def test_matrices_that_make_way_are_checked_again(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    structures = "trio_accel.backends.cuda.libraries.sparse"
    monkeypatch.setattr(sys.modules[structures], "_MOST_STRUCTURES", 2)
    specs = [product(rig, [0, 2, 3], [0, 1, 1]), product(rig, [0, 1, 2, 3], [0, 1, 1])]
    results = [3, 2], [1, 2, 2], [2]
    specs.append(product(rig, [0, 1], [1]))
    for _ in range(4):
        for spec, expected in zip(specs, results, strict=True):
            rig.apply("sparse", spec)
            np.testing.assert_array_equal(rig.get(spec.out), expected)
        assert len(believed(rig)) <= 3


def test_a_released_block_is_forgotten(rig: Any) -> None:
    spec = known_product(rig)
    rig.free(spec.matrix_indices)
    assert believed(rig) == []


def test_the_status_belongs_to_its_own_operation(rig: Any) -> None:
    wrong, right = product(rig, [0, 1, 2], [0, 7]), product(rig, [0, 2], [0, 1])
    # Loading at the first use waits for every stream.
    rig.apply("sparse", product(rig, [0, 2], [1, 0]))
    hold = rig.stream.hold()
    events = []
    for spec in (right, wrong, right):
        rig.enqueue("sparse", spec)
        events.append(rig.stream.record())
    hold.release()
    rig.stream.synchronize()
    assert [type(event.error) for event in events] == [type(None), LibraryError, type(None)]


def test_vectors_of_another_length_are_refused_at_once(rig: Any) -> None:
    spec = product(rig, [0, 1, 2], [0, 1])
    for _ in range(2):
        with pytest.raises(LibraryError, match=r"x must have shape \(2,\), got .* x of shape \(3,\)"):
            rig.enqueue("sparse", attrs.evolve(spec, x=rig.put(np.ones(3))))
        with pytest.raises(LibraryError, match=r"SpmvSpec.out must have shape \(2,\), got \(1,\)"):
            rig.enqueue("sparse", attrs.evolve(spec, out=rig.empty((1,), "float64")))
        rig.apply("sparse", spec)


@pytest.mark.parametrize("times", [1, 3])
def test_a_matrix_in_views_of_larger_arrays(rig: Any, times: int) -> None:
    matrix = scipy.sparse.random_array((20, 30), density=0.3, rng=np.random.default_rng(2), format="csr")
    x = np.arange(30.0)

    def spread(values: Any) -> Any:
        whole = np.full(2 * len(values) + 1, 99, values.dtype)
        whole[1::2] = values
        return rig.put_as_laid_out(whole[1::2])

    arrays = [spread(part) for part in (matrix.indptr, matrix.indices, matrix.data, x)]
    out = rig.empty((20,), "float64")
    for _ in range(times):
        rig.apply("sparse", spmv.spec((20, 30), *arrays, out))
    assert believed(rig) == [times > 1]
    np.testing.assert_allclose(rig.get(out), matrix @ x, rtol=1e-12)


def test_so_many_are_cached_and_no_more(rig: Any) -> None:
    specs = [product(rig, [0, 1, 2], [0, 1]) for _ in range(260)]
    for _ in range(3):
        for spec in specs:
            rig.apply("sparse", spec)
        assert len(believed(rig)) <= 257
    for spec in specs:
        np.testing.assert_array_equal(rig.get(spec.out), [1, 2])


def test_a_product_that_cusparse_refuses_leaves_nothing(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def refuse(_: int, operation: int, alpha: int, matrix: int, *others: object) -> int:
        made.append(matrix)
        raise cusparse.cuSPARSEError(int(cusparse.Status.INVALID_VALUE))

    spec = product(rig, [0, 1, 2], [0, 1])
    rig.apply("sparse", spec)
    with monkeypatch.context() as patch:
        patch.setattr(cusparse, "sp_mv_buffer_size", refuse)
        with pytest.raises(LibraryError, match="sparse refused: INVALID_VALUE") as caught:
            rig.enqueue("sparse", spec)
    assert caught.value.code == "INVALID_VALUE"
    for matrix in made:
        with pytest.raises(cusparse.cuSPARSEError, match="INVALID_VALUE"):
            cusparse.destroy_sp_mat(matrix)
    rig.apply("sparse", spec)
    np.testing.assert_array_equal(rig.get(spec.out), [1, 2])


@pytest.mark.parametrize("which", ["matrix_data", "x", "out", "x with gaps", "out with gaps"])
def test_the_same_matrix_with_other_arrays(rig: Any, which: str) -> None:
    spec = known_product(rig)
    name = which.split(maxsplit=1)[0]
    values = {"matrix_data": [1.0, 1.0, 5.0], "x": [3.0, 4.0], "out": [0.0, 0.0]}[name]
    if "gaps" in which:
        whole = rig.put(np.repeat(values, 2))
        other = attrs.evolve(whole, shape=(2,), strides=(16,))
    else:
        other = rig.put(np.array(values))
    changed = attrs.evolve(spec, **{name: other})
    expected = {"matrix_data": [3, 10], "x": [7, 4], "out": [3, 2]}[name]
    # In turns: each finds what the one before has left.
    for _ in range(3):
        rig.apply("sparse", changed)
        np.testing.assert_array_equal(rig.get(changed.out), expected)
        rig.apply("sparse", spec)
        np.testing.assert_array_equal(rig.get(spec.out), [3, 2])


@pytest.mark.parametrize("name", ["x", "out"])
@pytest.mark.parametrize("what", ["dtype", "length"])
def test_a_known_matrix_with_wrong_vectors(rig: Any, name: str, what: str) -> None:
    spec = known_product(rig)
    wrong = np.ones(2, np.float32) if what == "dtype" else np.ones(3)
    with pytest.raises((LibraryError, NotSupportedError), match=r"(x|out) must have (dtype|shape) .*, got"):
        rig.apply("sparse", attrs.evolve(spec, **{name: rig.put(wrong)}))
    rig.apply("sparse", spec)
    np.testing.assert_array_equal(rig.get(spec.out), [3, 2])


@pytest.mark.parametrize("name", ["matrix_indptr", "matrix_indices", "matrix_data", "x", "out"])
def test_a_known_matrix_after_the_release_of_an_array(rig: Any, name: str) -> None:
    spec = known_product(rig)
    rig.free(getattr(spec, name))
    with pytest.raises(KeyError, match="does not exist"):
        rig.apply("sparse", spec)
