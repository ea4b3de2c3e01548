"""Programs with wrong arguments, results or actions: each is reported by name."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from bad_programs import BadRule, Keeps, Methods, Misspelled, NoParameter, NoSelf, Process, Returns, Rules
from chosen import BACKEND
from sample_programs import Counter, Layer, flat, scaled

import trio_accel as ta

X = np.ones((2, 4))
PARAMETERS = {"weights": np.zeros((4, 3)), "bias": np.zeros(3)}
MANY = ta.Intensity(100, 60.0)
AT_ONCE = ta.Backoff(base=0.0)
isolated = pytest.mark.parametrize("isolation", ["process"])


def open_bad(device: ta.Device, cls: Any, *args: Any, **kwargs: Any) -> Any:
    return ta.open_program(device, cls, *args, intensity=MANY, backoff=AT_ONCE, **kwargs)


async def test_constructors_accept_their_signature(any_device: ta.Device) -> None:
    opening: Any = ta.open_program
    with pytest.raises(
        TypeError, match=r"open_program: Layer: missing a required argument: 'parameters'; it takes \(par"
    ):
        opening(any_device, Layer)
    with pytest.raises(TypeError, match=r"open_program: Layer: there is no option 'heads'; there are "):
        opening(any_device, Layer, PARAMETERS, heads=3)
    with pytest.raises(
        TypeError, match=r"sample_programs:scaled is a function, whose arguments are those of"
    ):
        opening(any_device, scaled, X)
    with pytest.raises(TypeError, match="device must be an open Device, got System"):
        opening(any_device.system, Layer, PARAMETERS)
    with pytest.raises(TypeError, match="a class or a function, got 3"):
        opening(any_device, 3)
    with pytest.raises(TypeError, match="intensity must be Intensity or None, got 3"):
        opening(any_device, Layer, PARAMETERS, intensity=3)
    for name in ("", "a b", "a/b", "a?b", 3):
        with pytest.raises(ValueError, match="open_program: name must be a string without spaces"):
            opening(any_device, Layer, PARAMETERS, name=name)
    with pytest.raises(
        TypeError, match=r"sample_programs\.Layer: parameters\['bias'\] must be an array, .* got set"
    ):
        await opening(any_device, Layer, {"weights": X, "bias": {1}})
    with pytest.raises(
        ValueError, match=r"its arguments are 2.* characters as text, at most 1048576 are allowed"
    ):
        await opening(any_device, Layer, PARAMETERS, scale="x" * (1 << 21))
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 32 deep"):
        await opening(any_device, Layer, PARAMETERS, scale=deep)


async def test_classes_that_no_other_process_finds(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local:
        """Defined here."""

    with pytest.raises(
        ValueError, match="Local is defined in a function; move it to the level of its module"
    ):
        ta.open_program(device, Local)
    with pytest.raises(ValueError, match="<lambda> is defined in a function"):
        ta.open_program(device, lambda x: x)
    monkeypatch.setattr(Layer, "__module__", "__main__")
    told = r"__main__\.Layer is defined in __main__, where it cannot be found by name; move it to a module"
    with pytest.raises(ValueError, match=told):
        ta.open_program(device, Layer, PARAMETERS)
    monkeypatch.setattr(Layer, "__module__", "sample_programs")
    monkeypatch.setattr(sys.modules["sample_programs"], "Layer", None)
    with pytest.raises(
        ValueError, match=r"sample_programs\.Layer is not what its module has under this name"
    ):
        ta.open_program(device, Layer, PARAMETERS)


@isolated
async def test_a_module_that_the_worker_does_not_have(
    any_device: ta.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await any_device.put(X)  # the worker is there, with the search path of before
    for name, text, error in (
        ("only_here", "class Here: ...", ModuleNotFoundError),
        (
            "broken_there",
            "import os\nclass Here: ...\nif os.getpid() != MINE: raise ValueError('not there')",
            Exception,
        ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.py").write_text(text.replace("MINE", str(os.getpid())))
        monkeypatch.syspath_prepend(folder)
        module = __import__(name)
        with pytest.raises(error) as caught:
            await ta.open_program(any_device, module.Here)
        assert name in str(caught.value)
        del sys.modules[name]
    assert any_device.generation == 1


async def test_methods_that_cannot_be_asked(any_device: ta.Device) -> None:
    async with open_bad(any_device, Methods) as program:
        for name in ("_private", "warm_up", "__init__"):
            with pytest.raises(AttributeError, match=f"Methods.{name} is not for asking: it is private"):
                await program.ask(name)
        for method, told in (
            ("missing", "'missing'"),
            (Layer.forward, "Layer.forward"),
            (scaled, "scaled"),
            (3, "3"),
            ([3], r"\[3\]"),
            (X, r"an array of float64 and of shape \(2, 4\)"),
        ):
            with pytest.raises(
                AttributeError, match=f"^{told} is not a method of Methods; pass a method and"
            ):
                await program.ask(method)
        with pytest.raises(
            TypeError, match=r"Methods\.waits is async, and it runs in a thread of the device"
        ):
            await program.ask("waits")
        with pytest.raises(TypeError, match=r"Methods\.generates yields, .*async with program\.stream"):
            await program.ask("generates")
        for given, name, kind in (
            ("static", "static", "staticmethod"),
            (Methods.static, "static", "staticmethod"),
            (Methods.of_class, "of_class", "classmethod"),
            (Methods.computed, "computed", "property"),
            ("value", "value", "int"),
        ):
            with pytest.raises(
                TypeError, match=f"Methods.{name} must be a plain method with self, got {kind}"
            ):
                await program.ask(given)
        for args, kwargs, said in (
            ((1,), {}, "missing a required argument: 'b'"),
            ((1, 2, 3), {}, "too many positional arguments"),
            ((1, 2), {"d": 1}, "there is no option 'd'; there are a, b, c"),
            ((1, 2), {"a": 1}, "multiple values for argument 'a'"),
        ):
            with pytest.raises(TypeError, match=rf"bad_programs\.Methods\.two: .*{said}"):
                await program.ask("two", *args, **kwargs)
        assert await program.ask("two", 1, 2) == [1, 2, 1]


async def test_arguments_that_no_device_has(device: ta.Device) -> None:
    async with open_bad(device, Methods) as program, device.system.open_device("cpu") as other:
        far = await other.put(X)
        released = await device.put(X)
        released.release()
        with pytest.raises(
            ValueError, match=r"bad_programs\.Methods\.two: b\['k'\]\[1\] is on test/cpu:0#2, this runs on"
        ):
            await program.ask(Methods.two, 1, {"k": [1, far]})
        with pytest.raises(ta.StaleRefError, match=r"Methods\.two: a: its memory was released"):
            await program.ask(Methods.two, released, 1)
        with pytest.raises(TypeError, match=r"Methods\.two: a: dtype: .* is not an element type of a device"):
            await program.ask(Methods.two, np.array(["a"]), 1)
        with pytest.raises(TypeError, match=r"Methods\.two: b must be an array, None, .* got object"):
            await program.ask(Methods.two, 1, object())
        pending = device.put(X)
        with pytest.raises(TypeError, match=r"Methods\.two: a must be an array, None, .* got coroutine"):
            await program.ask(Methods.two, pending, 1)
        pending.close()
        with pytest.raises(ValueError, match=r"are 2.* characters as text, at most 1048576 are allowed"):
            await program.ask(Methods.two, 1, "x" * (1 << 21))
        for given, said in ((far, "is on test/cpu:0#2"), (released, "was released")):
            with pytest.raises(
                (ValueError, ta.StaleRefError), match=rf"Layer: parameters\['bias'\]:? .*{said}"
            ):
                await ta.open_program(device, Layer, {"weights": X, "bias": given})


pytestmark = pytest.mark.filterwarnings("ignore:open_device. cpu.0 is open already:RuntimeWarning")


async def test_arrays_that_no_method_changes_are_frozen_while_it_is_open(device: ta.Device) -> None:
    bias = await device.zeros(3)
    parameters = {"weights": PARAMETERS["weights"], "bias": bias}
    said = "the program 'layer-.' is open with this array, which no method of it changes"
    with pytest.raises(TypeError, match="got set"):
        await open_bad(device, Layer, parameters, scale={1})
    await bias.fill(1.0)
    async with ta.open_program(device, Layer, parameters) as program, open_bad(device, Layer, parameters):
        for refuse in (
            lambda: bias.fill(2.0),
            lambda: ta.linalg.scal(2.0, bias),
            lambda: ta.linalg.matmul(bias.reshape(1, 3), np.eye(3), out=bias.reshape(1, 3)),
            lambda: bias.lease(write=True).__aenter__(),
        ):
            with pytest.raises(ValueError, match=said):
                await refuse()
        with pytest.raises(ValueError, match=f"release: {said}"):
            bias.release()
        result = await program.ask(Layer.forward, X)
        np.testing.assert_allclose(await result.to_host(), np.tanh(np.ones((2, 3))), rtol=1e-12)
        # A program already open with it cannot change it either, as its state.
        async with ta.open_program(device, Counter, bias) as counter:
            with pytest.raises(ValueError, match=rf"Counter\.add: counts: {said}"):
                await counter.ask(Counter.add, np.ones(3))
    await bias.fill(2.0)
    bias.release()
    with pytest.raises(ta.StaleRefError, match="was released"):
        await ta.open_program(device, Layer, parameters)


async def test_state_is_released_without_the_programs_knowledge(device: ta.Device) -> None:
    counts = await device.zeros(3)
    async with ta.open_program(device, Counter, counts) as program:
        await program.ask(Counter.add, np.ones(3))
        counts.release()
        for method in (Counter.total, Counter.add):
            with pytest.raises(ta.StaleRefError, match=r"Counter\..*: counts: its memory was released"):
                await program.ask(method, *([np.ones(3)] if method is Counter.add else []))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "shape",
            r"Returns\.shape: its result must be float32 of shape \(2, 3\), .* of shape \(3, 2\)",
        ),
        ("dtype", r"Returns\.dtype: its result must be float32 of .*, got float64 of shape \(2, 3\)"),
        ("nothing", r"Returns\.nothing: its result is not nested as it was declared: .* NoneType"),
        ("nested", r"Returns\.nested: its result is not nested as it was declared: a list of 1"),
        ("other", r"Returns\.other: it was to write its result to out, and returned .* ndarray"),
        ("something", r"Returns\.something: its result is not nested as it was declared: .* int"),
        ("an_object", r"Returns\.an_object: its result\['a'\]\[0\] must be an array, .* got object"),
        ("strings", r"Returns\.strings: its result: dtype: .* is not an element type of a device"),
        ("masked", r"Returns\.masked: its result: a masked array; fill it first"),
        ("coroutine", r"Returns\.coroutine: its result must be an array, .* got generator"),
        ("deep", "nested more than 32 deep"),
        ("long", r"Returns\.long: its result is 2.* bytes as text"),
    ],
)
async def test_undeclared_results(any_device: ta.Device, name: str, said: str) -> None:
    async with open_bad(any_device, Returns) as program:
        with pytest.raises(ta.ActorFailedError, match=said):
            await program.ask(name)
        if BACKEND != "cpu":
            return
        # The returned array does not belong to the program.
        first, part, turned = await program.ask(Returns.own, X)
        np.testing.assert_array_equal(await first.to_host(), X)
        np.testing.assert_array_equal(await part.to_host(), X[:1])
        np.testing.assert_array_equal(await turned.to_host(), X.T)
    assert any_device.generation == 1


async def test_wrong_rules_of_outputs(any_device: ta.Device) -> None:
    async with open_bad(any_device, Rules) as program:
        with pytest.raises(
            TypeError, match=r"Rules\.no_pair: the rule of its outputs must return \(shape, dtype\)"
        ):
            await program.ask(Rules.no_pair, X)
        with pytest.raises(ValueError, match=r"Rules\.negative: the shape of an output has a negative size"):
            await program.ask(Rules.negative, X)
        with pytest.raises(
            TypeError, match=r"Rules\.\w+: an output is declared as .*'no dtype' is not an element type"
        ):
            await program.ask(Rules.no_dtype, X)
        with pytest.raises(ZeroDivisionError) as caught:
            await program.ask(Rules.broken, X)
        assert caught.value.__notes__ == ["in the rule of the outputs of bad_programs.Rules.broken"]
    declare: Any = ta.programs.method
    for wrong in ({"out": 3}, {"updates": "x"}, {"updates": [3]}):
        with pytest.raises(TypeError, match=r"method: (out|updates) must be"):
            declare(**wrong)


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (BadRule, "its rule out= must take (x, how): too many positional arguments"),
        (NoParameter, "updates names 'y', which is not a parameter; there are self.weights, x"),
        (NoSelf, "updates names 'weights', which is not a parameter; did you mean 'self.weights'?"),
        (Misspelled, "updates names 'self.wieghts', which is not a parameter; did you mean 'self.weights'?"),
    ],
)
async def test_declarations_that_do_not_fit_are_refused_at_the_opening(
    any_device: ta.Device, cls: Any, said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        await ta.open_program(any_device, cls, X)
    assert str(caught.value) == f"bad_programs.{cls.__name__}.adds: {said}"


async def test_a_method_is_not_called_and_an_opening_is_not_a_program(any_device: ta.Device) -> None:
    opening: Any = ta.open_program(any_device, Counter, X)
    with pytest.raises(AttributeError, match=r"async with ta\.open_program\(\.\.\.\) as program"):
        await opening.ask("total")
    with pytest.raises(TypeError, match=r"async with ta\.open_program\(\.\.\.\) as program"):
        opening.__enter__()
    async with opening as program:
        with pytest.raises(AttributeError, match=r"write await program\.ask\(Counter\.total, \.\.\.\)"):
            await program.total()
        with pytest.raises(TypeError, match=r"a program is not called itself: write await program\.ask\("):
            program(X)
        with pytest.raises(AttributeError, match=r"'Program' object has no attribute 'totl'$"):
            await program.totl()
        with pytest.raises(TypeError, match=r"Counter\.add: no call takes a timeout: write `with trio\.fail"):
            await program.ask(Counter.add, X, timeout=3)


@pytest.mark.skipif(BACKEND == "cpu", reason="there NumPy takes them")
async def test_numpy_names_the_line_that_takes_an_array_of_a_gpu(any_device: ta.Device) -> None:
    async with open_bad(any_device, Methods) as program:
        with pytest.raises(ta.ActorFailedError, match=r"x = torch\.from_dlpack\(x\)"):
            await program.ask(Methods.exponential, X)


async def test_kept_arrays_of_a_program_are_read_only_and_reported_once(
    device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    x = await device.put(X)
    async with open_bad(device, Keeps) as program:
        for _ in range(3):
            assert await program.ask(Keeps.keep, x) == X.sum()
        await program.ask(Keeps.keep_again, x=x)
        assert await program.ask(Keeps.write) == ["assignment destination is read-only"] * 8
        np.testing.assert_array_equal(await x.to_host(), X)
        with pytest.raises(ta.ActorFailedError, match="assignment destination is read-only"):
            await program.ask(Keeps.write_input, X)
        with pytest.raises(ta.ActorFailedError, match="cannot set WRITEABLE"):
            await program.ask(Keeps.set_input_back, X)
    told = [record.getMessage() for record in caplog.records if record.name == "trio_accel.backends"]
    assert [text.partition(" after its call")[0] for text in told] == [
        "bad_programs.Keeps.keep keeps x",
        "bad_programs.Keeps.keep_again keeps x",
    ]


@pytest.mark.parametrize("name", ["target", "out"])
async def test_a_program_that_keeps_a_writable_array_fails(device: ta.Device, name: str) -> None:
    async with open_bad(device, Keeps) as program:
        method, targets = (
            (Keeps.keep_update, [await device.put(X)]) if name == "target" else (Keeps.keep_out, [])
        )
        with pytest.raises(ta.ActorFailedError, match=f"RuntimeError: .* keeps {name} after its call"):
            await program.ask(method, X, *targets)
        del targets
        others = [await device.put(np.full((2, 4), number)) for number in range(8)]
        # The instance that kept it was released.
        assert await program.ask(Keeps.write) == []
        for number, array in enumerate(others):
            np.testing.assert_array_equal(await array.to_host(), np.full((2, 4), number))


async def test_garbage_of_a_call_is_not_kept(device: ta.Device, caplog: pytest.LogCaptureFixture) -> None:
    target = await device.put(X)
    async with open_bad(device, Keeps) as program:
        gc.disable()
        try:
            for number in range(3):
                out = await program.ask(Keeps.leave_cycle, X * number, target)
                np.testing.assert_array_equal(await out.to_host(), X * number)
        finally:
            gc.enable()
    assert not [record for record in caplog.records if record.name == "trio_accel.backends"]


async def test_text_outside_unicode_comes_back_unchanged(device: ta.Device) -> None:
    async with open_bad(device, Keeps) as program:
        for _ in range(3):
            assert await program.ask(Keeps.text) == "a\ud800" * 1000
            found = await program.ask(Keeps.echo, "\udcff", X)
            assert found["lone"] == ["\udcff"]
            np.testing.assert_array_equal(await found["\udcff"].to_host(), X)


async def test_state_that_no_method_declares_is_read_only(device: ta.Device) -> None:
    async with open_bad(device, Process, X) as program:
        with pytest.raises(ta.ActorFailedError, match="assignment destination is read-only") as caught:
            await program.ask(Process.writes)
        assert caught.value.__cause__ is not None
        assert '@programs.method(updates=["self.' in "".join(caught.value.__cause__.__notes__)
        with pytest.raises(ta.ActorFailedError, match="cannot set WRITEABLE"):
            await program.ask(Process.sets_back)
        assert await program.ask(Process.sums) == X.sum()


async def test_programs_may_print_and_start_threads(device: ta.Device) -> None:
    async with open_bad(device, Process, X) as program:
        assert await program.ask(Process.prints) == 1
        assert await program.ask(Process.starts_threads) == 4
        assert await program.ask(Process.sums) == X.sum()


async def test_a_closed_program_is_asked_no_more(system: ta.System, device: ta.Device) -> None:
    kept = await device.put(X)
    program = await open_bad(device, Process, kept)
    assert repr(program) == f"<Program 'process-1' on {device.path}, open>"
    await program.ask(Process.sums)
    used = (await device.statistics()).memory.used
    other = await open_bad(device, Process, np.ones(1000), name="other")
    assert (await device.statistics()).memory.used >= used + 8000
    await other.aclose()
    await other.aclose()
    assert (await device.statistics()).memory.used == used
    assert other.is_closed
    with pytest.raises(ta.ActorStoppedError, match="program 'other' is closed"):
        await other.ask(Process.sums)
    assert {node.name for node in system.tree().walk()} >= {"process-1"}
    assert not {node.name for node in system.tree().walk()} & {"other"}
    assert await program.ask(Process.sums) == X.sum()
    await program.aclose()
    await device.close()
    await open_bad_on_closed(device)


async def open_bad_on_closed(device: ta.Device) -> None:
    with pytest.raises(ta.DeviceLostError):
        await open_bad(device, Process, 1)


async def test_closing_waits_for_pending_requests(device: ta.Device) -> None:
    program = await open_bad(device, Layer, PARAMETERS)
    right = await (await program.ask(Layer.forward, X)).to_host()
    found: list[ta.AccelRef] = []

    async def ask() -> None:
        found.append(await program.ask(Layer.forward, X))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await program.aclose()
    assert len(found) == 10
    for result in found:
        np.testing.assert_array_equal(await result.to_host(), right)


@pytest.mark.slow
async def test_many_programs_one_after_the_other(device: ta.Device) -> None:
    target = await device.zeros(2)
    for number in range(300):
        async with ta.open_program(device, Counter, target) as program:
            await program.ask(Counter.add, np.ones(2))
            assert program.name == "counter-1"
        assert number < 299 or (await target.to_host()).tolist() == [300.0, 300.0]


@isolated
async def test_too_many_programs_at_once(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.devices.dispatch._link.WORDS", 7)
    programs = [await ta.open_program(device, scaled) for _ in range(5)]
    with pytest.raises(RuntimeError, match="a worker serves at most 5 libraries and programs; close some"):
        await ta.open_program(device, scaled)
    for program in programs[1:]:
        await program.aclose()
    async with ta.open_program(device, flat) as again:
        np.testing.assert_array_equal(await (await again.ask(await device.put(X))).to_host(), X.ravel())
    for _ in range(5):
        async with ta.open_program(device, scaled) as again_scaled:
            assert (await again_scaled.ask(await device.put(X))).shape == X.shape
    await programs[0].aclose()
