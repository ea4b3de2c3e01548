"""A custom operation may hand only some objects to the backend; others are refused in the caller's task."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from isolations import inline
from outside_library import Broken

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base.contract.ops import CopySpec, FillSpec, MatmulSpec, OperationSpec
from trio_accel.devices import LibraryActor, Operand, Operation, Planned, Planner

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_library.py"
BLAS = "trio_accel.linalg:BlasActor"


@attrs.frozen(eq=False)
class Converted(Operation[LibraryActor, ta.AccelRef]):
    """A copy with another dtype, by `Planner.convert`."""

    a: Operand
    dtype: ta.DType
    library: ClassVar[str] = "trio_accel.devices:MemoryActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        a = planner.convert(planner.read("a", self.a), self.dtype)
        out = planner.output(a.shape, a.dtype)
        return Planned(CopySpec(a, out.spec), out)


@attrs.frozen(eq=False)
class Scaled(Operation[LibraryActor, ta.AccelRef]):
    """``alpha * a @ a``, with unchecked arguments."""

    alpha: Any
    a: ta.AccelRef
    library: ClassVar[str] = BLAS

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        a = planner.read("a", self.a)
        out = planner.output(a.shape, a.dtype)
        return Planned(linalg.gemm.spec(self.alpha, a, a, 0.0, "N", "N", out.spec), out)


@attrs.frozen(eq=False)
class Set(Operation[LibraryActor, ta.AccelRef]):
    """Set every element to the given value."""

    value: Any
    a: ta.AccelRef
    library: ClassVar[str] = "trio_accel.devices:MemoryActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(FillSpec(self.value, planner.update("a", self.a)), self.a)


@attrs.frozen(eq=False)
class Careless(Operation[LibraryActor, ta.AccelRef]):
    """A reference or a host array where the specification of an array belongs."""

    a: Any
    spec: type[OperationSpec]
    library: ClassVar[str] = BLAS

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        out = planner.output((2, 2), ta.DType.float64)
        if self.spec is linalg.axpy.spec:
            return Planned(linalg.axpy.spec(1.0, self.a, out.spec), out)
        return Planned(MatmulSpec(self.a, self.a, out.spec), out)


async def test_complex_is_not_converted_to_real(system: ta.System, device: ta.Device) -> None:
    host = np.array([1.0 + 2.0j, 3.0 - 1.0j])
    a = await device.put(host)
    for operand in (a, host):
        with pytest.raises(TypeError) as caught:
            await device.ask(Converted(operand, ta.DType.float64))
        assert str(caught.value) == (
            "test_own_operations.Converted: a: complex128 to float64 would drop the imaginary parts; a "
            "complex dtype keeps them; to have the real parts alone, take them on the host: "
            "await device.put((await ref.to_host()).real)"
        )
    with pytest.raises(TypeError, match=r"complex128 to int32 would drop the imaginary parts"):
        device.submit(Converted(a, ta.DType.int32))
    single = await (await device.ask(Converted(a, ta.DType.complex64))).to_host()
    np.testing.assert_array_equal(single, host.astype(np.complex64))
    truth = await (await device.ask(Converted(np.array([0j, 1j]), ta.DType.bool))).to_host()
    assert truth.tolist() == [False, True]
    assert {node.restarts for node in system.tree().walk()} == {0}


async def test_cast_reports_the_same(device: ta.Device) -> None:
    a = await device.put(np.array([1j]))
    with pytest.raises(TypeError, match=r"cast: dtype: complex128 to float32 .*to_host\(\)\)\.real"):
        await a.cast("float32")


async def test_the_other_conversions_match_numpy(device: ta.Device) -> None:
    """Lossy conversions need an explicit request: integers from fractions, and fewer digits."""
    host = np.array([-1.5, 2.5, 1e3])
    for source, dtype in ((host, "int16"), (np.array([2**53 + 1, 2**31]), "float32"), (host, "uint8")):
        given = source if dtype != "uint8" else source[1:2]
        result = await (await device.ask(Converted(given, ta.DType.of(dtype)))).to_host()
        np.testing.assert_array_equal(result, given.astype(dtype))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a string": ("2", TypeError, r"Scaled: GemmSpec\.alpha must be a number, got str"),
    "nothing": (None, TypeError, r"Scaled: GemmSpec\.alpha must be a number, got NoneType"),
    "a list": ([1.0], TypeError, r"Scaled: GemmSpec\.alpha must be a number, got list"),
    "an array": (np.ones(1), TypeError, r"Scaled: GemmSpec\.alpha must be a number, got ndarray"),
    "complex": (1j, TypeError, r"Scaled: GemmSpec\.alpha 1j is complex, the arrays are float64"),
    "too large": (10**400, ValueError, r"Scaled: GemmSpec\.alpha 1000\S* is outside the range of float64"),
}


async def test_invalid_factors_are_the_callers_error(system: ta.System, device: ta.Device) -> None:
    a = await device.put(np.eye(2))
    for factor, error, text in WRONG.values():
        with pytest.raises(error, match=text):
            await device.ask(Scaled(factor, a))
        with pytest.raises(error, match=text):
            device.submit(Scaled(factor, a))
    for factor in (3, 3.0, np.float32(3), np.int64(3), 1000.0):
        result = await (await device.ask(Scaled(factor, a))).to_host()
        np.testing.assert_array_equal(result, float(factor) * np.eye(2))
    assert {node.restarts for node in system.tree().walk()} == {0}


async def test_exact_values_that_no_plan_can_depend_on(system: ta.System, device: ta.Device) -> None:
    bad: list[Any] = [1.5, [1], None, (1, [2]), {"a": 1}, object()]
    good: list[Any] = ["fine", ("fine", (1, 2)), b"fine", np.int64(3), ta.DType.int8, True]
    for given in bad:
        with pytest.raises(TypeError, match=r"Broken: BrokenSpec\.how must be an integer, a name, or a"):
            await device.ask(Broken(given))
    for given in good:
        await device.ask(Broken(given))
    assert {node.restarts for node in system.tree().walk()} == {0}


async def test_elements_that_an_array_cannot_hold(system: ta.System, device: ta.Device) -> None:
    whole = await device.zeros(3, "int8")
    for value, error, text in (
        ("x", TypeError, r"Set: FillSpec\.value must be a number, got 'x'"),
        (1000, ValueError, r"Set: FillSpec\.value 1000 is outside -128 to 127, the array is int8"),
        (0.5, ValueError, r"Set: FillSpec\.value 0\.5 is not an integer, the array is int8"),
        (1j, TypeError, r"Set: FillSpec\.value 1j is complex, the array is int8"),
    ):
        with pytest.raises(error, match=text):
            await device.ask(Set(value, whole))
    assert (await (await device.ask(Set(-128, whole))).to_host()).tolist() == [-128] * 3
    assert {node.restarts for node in system.tree().walk()} == {0}


async def test_arrays_must_be_specifications(system: ta.System, device: ta.Device) -> None:
    a = await device.put(np.eye(2))
    for spec, field in ((MatmulSpec, "a"), (linalg.axpy.spec, "x")):
        for given in (a, np.eye(2), None):
            with pytest.raises(TypeError) as caught:
                await device.ask(Careless(given, spec))
            assert str(caught.value) == (
                f"test_own_operations.Careless: {spec.__name__}.{field} must be an ArraySpec, got "
                f"{type(given).__name__}; planner.read() and planner.update() return one, and "
                "planner.output() a reference that has it as .spec"
            )
    assert {node.restarts for node in system.tree().walk()} == {0}


@inline
async def test_the_example_multiplies_by_the_conjugate(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.spec_from_file_location("own_library", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "own_library", module)
    found.loader.exec_module(module)
    rng = np.random.default_rng(0)
    for dtype in ("int32", "float32", "float64", "complex64", "complex128"):
        host = (10 * (rng.normal(size=(7, 3)) + 1j * rng.normal(size=(7, 3)))).astype(np.complex128)
        given = (host if dtype.startswith("complex") else host.real).astype(dtype)
        wide = given.astype(np.complex128)
        gram = await device.ask(module.Gram(given))
        assert gram.dtype == ("float64" if dtype == "int32" else dtype)
        tolerance = 1e-5 if gram.dtype in ("float32", "complex64") else 1e-12
        np.testing.assert_allclose(
            await gram.to_host(), wide.conj().T @ wide, rtol=tolerance, atol=tolerance * 100
        )
