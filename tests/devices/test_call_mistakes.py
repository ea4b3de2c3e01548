"""Mistakes with calls: each is refused by name with a remedy, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import operator
import re
import types
import warnings
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN

import trio_accel as ta
from trio_accel import arrays, linalg, nn

pytestmark = pytest.mark.any_backend

# The first is asked step by step, the second would be recorded, the third would run a template.
TURNS = 3


async def made(make: Callable[[], Any]) -> Any:
    """The result of a function, awaited if possible."""
    value = make()
    return await value if isinstance(value, Awaitable) else value


async def refused(make: Callable[[], Any], kind: type[Exception]) -> str:
    """The text of the error: the same each time that the mistake is made."""
    texts: list[str] = []
    for _ in range(TURNS):
        with pytest.raises(kind) as caught:
            await made(make)
        texts.append(str(caught.value))
        # Its frames have the arrays.
        del caught
    assert len(set(texts)) == 1, texts
    return texts[0]


async def blocks(device: ta.Device) -> int:
    gc.collect()
    await device.synchronize()
    return (await device.statistics()).memory.blocks


async def test_awaited_twice(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    y = x + 1.0
    await y
    with pytest.raises(
        RuntimeError, match=r"<Call arrays\.add> was awaited before, or in another call; keep its"
    ):
        await y
    with pytest.raises(RuntimeError, match=r"<Call arrays\.add> was awaited before"):
        await (y * 2.0)
    inner = x * 3.0
    await (inner + 1.0)
    with pytest.raises(RuntimeError, match=r"<Call arrays\.multiply> was awaited before"):
        await inner
    with pytest.raises(RuntimeError, match=r"<Call arrays\.multiply> was awaited before"):
        inner.start()
    with pytest.raises(RuntimeError, match=r"<Call arrays\.multiply> was awaited before"):
        assert inner.shape


async def test_never_awaited(device: ta.Device) -> None:
    x = await device.put(np.ones(2))

    def forget() -> None:
        hidden = nn.relu(x @ x)
        shared = hidden + 1.0
        arrays.concat([shared, shared * 2.0], axis=0).to_host()

    told = re.escape("<Call AccelRef.to_host> was never awaited: nothing of it has run")
    with pytest.warns(RuntimeWarning, match=f"^{told}$") as noted:
        forget()
    assert len(noted) == 1
    # The line that let it go.
    assert noted[0].filename == __file__


async def test_a_call_with_a_refused_layout_does_not_warn(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    with pytest.raises(ValueError, match="broadcast"):
        assert (x + 1.0 + np.ones(3)).shape


async def test_a_long_chain_without_await(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    calls: list[Any] = [x]
    for _ in range(20_000):
        calls = [calls[0] + 1.0]
    with pytest.warns(RuntimeWarning, match="never awaited") as noted:
        calls.clear()
    assert len(noted) == 1


async def test_an_awaited_part_does_not_warn(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    inner = x + 1.0
    outer = [inner * 2.0]
    with pytest.warns(RuntimeWarning, match=r"<Call arrays\.multiply> was never awaited"):
        outer.clear()
    assert (await (await inner).to_host())[0] == 2.0
    del inner


async def test_closed_calls_do_not_warn(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    call = (x + 1.0) * 2.0
    call.close()
    call.close()
    with pytest.raises(RuntimeError, match="was awaited before"):
        await call


async def test_of_two_devices(system: ta.System, device: ta.Device) -> None:
    async with system.open_device(BACKEND, options=INLINE, name="other") as other:
        x, y = await device.put(np.ones(2)), await other.put(np.ones(2))
        for ask in (lambda: x + y, lambda: (x + 1.0) * y, lambda: (x + 1.0) * (y + 1.0)):
            text = await refused(ask, ValueError)
            assert re.fullmatch(
                r"arrays\.(add|multiply): x2 is on test/other, this runs on test/\w+:0; "
                r"copy it there: await x2\.copy_to\(device\)",
                text,
            ), text
        # Cases in which it makes sense.
        z = (x + 1.0) * await y.copy_to(device)
        assert (await z.to_host())[0] == 2.0


async def test_of_a_closed_device(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        x = await device.put(np.ones(2))
        for _ in range(TURNS):
            await ((x + 1.0) * 2.0)
        kept, later = (x + 1.0) * 2.0, x * np.ones(2)
    for call in (kept, later, x - 1.0, (x - 1.0).to_host()):
        with pytest.raises(ta.DeviceLostError, match="closed"):
            await call


async def test_released_arrays(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    for _ in range(TURNS):
        await ((x + 1.0) * 2.0).to_host()
        await ((x * 3.0) + x)
    y = await device.put(np.ones(2))
    y.release()
    for _ in range(TURNS):
        with pytest.raises(ta.StaleRefError, match=r"^arrays\.add: x1: its memory was released"):
            await ((y + 1.0) * 2.0).to_host()
        with pytest.raises(ta.StaleRefError, match=r"^arrays\.add: x2: its memory was released"):
            await ((x * 3.0) + y)


async def test_too_long(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    y: Any = x
    for _ in range(4097):
        y = y + 1.0
    with pytest.raises(ValueError, match=r"^a chain has at most 4096 calls: await one in between$"):
        await y
    with pytest.raises(ValueError, match="at most 4096 calls"):
        y.start()
    del y
    assert await blocks(device) == 1


async def test_a_list_that_holds_its_own_call(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    for make in (arrays.stack, arrays.concat, linalg.multi_dot):
        for after in (lambda call: call, lambda call: (call + 1.0) * 2.0):
            members: list[Any] = [x, x]
            call: Any = make(members)
            members.append(after(call))
            text = "is an operand of itself; take it out of the list in it"
            with pytest.raises(ValueError, match=text):
                await call
            with pytest.raises(ValueError, match=text):
                make([x, x, members[-1]]).start()
            with pytest.raises(ValueError, match=text):
                assert members[-1].shape
            with pytest.raises(ValueError, match=text):
                await ta.gather(x + 1.0, members[-1])
    nested: Any = [x]
    nested.append(nested)
    for ask in (arrays.stack, arrays.concat, arrays.asarray):
        with pytest.raises((TypeError, ValueError)) as told:
            await ask(nested)
        assert len(str(told.value)) < 260
    del told


def _enter(call: Any) -> None:
    with call:
        pass


WITHOUT_AWAIT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bool": (bool, "a Call cannot be a truth value: its elements are on the device; use await call.item()"),
    "if": (lambda call: 1 if call > 0 else 2, "a Call cannot be a truth value"),
    "float": (float, r"float\(\) of a Call: its element is on the device; use float\(await call.item\(\)\)"),
    "int": (int, r"int\(\) of a Call"),
    "complex": (complex, r"complex\(\) of a Call"),
    "round": (round, r"round\(\) of a Call"),
    "iteration": (list, r"a Call is not iterable: it was not awaited; await call\.to_host\(\)"),
    "unpacking": (lambda call: [one for one, two in [call]], "a Call is not iterable"),
    "in": (lambda call: 1.0 in call, "a Call is not searched"),
    "element": (lambda call: call.__setitem__(0, 1.0), r"a Call is not assigned to, .* await call\[index\]"),
    "numpy": (np.asarray, r"a Call is not a host array; use await call.to_host\(\)"),
    "ufunc": (np.sin, r"np\.sin of a Call: write await ta\.arrays\.sin\(x\)$"),
    "format": (lambda call: f"{call:.2f}", r"format '.2f' of a Call: it is on the device"),
    "text": (lambda call: call + "1", r"unsupported operand type\(s\) for \+: 'Call' and 'str'"),
    "none": (lambda call: call * None, r"unsupported operand type\(s\) for \*: 'Call' and 'NoneType'"),
    "copy": (lambda call: __import__("copy").deepcopy(call), "a Call is bound to its device"),
    "with": (_enter, r"a Call is not a context manager; async with ref\.lease\(\) holds the array"),
    "subscript of an index": (
        lambda call: [1, 2][call],
        r"a Call is not an index: .* use int\(await call\.item\(\)\)",
    ),
    "slice": (lambda call: [1, 2][call:], "a Call is not an index"),
    "range": (range, "a Call is not an index"),
    "index of NumPy": (lambda call: np.ones(3)[call], "a Call is not"),
    "shape": (np.zeros, "expected a sequence of integers|a Call is not"),
    "reshape": (lambda call: call.args[0].reshape(call), "a Call is not an index"),
    "trunc": (math.trunc, r"trunc\(\) of a Call"),
    "floor": (math.floor, r"float\(\) of a Call"),
    "divmod": (lambda call: divmod(call, 2), r"divmod\(\) of a Call: write await ta\.gather\(x1 // x2"),
    "divmod of a number": (lambda call: divmod(2, call), r"divmod\(\) of a Call"),
    "reversed": (reversed, "a Call is not iterable"),
    "async for": (aiter, "a Call is not iterable"),
    "unpacking of arguments": (lambda call: print(*call), "is not iterable"),
    "deletion": (lambda call: call.__delitem__(0), "a Call is not assigned to"),
    "several of NumPy": (lambda call: np.concatenate([call, call + 1.0]), r"np\.concatenate of a Call"),
    "reduction of NumPy": (np.add.reduce, r"np\.add\.reduce of a Call"),
    "length": (lambda call: len(call[0]), r"len\(\) of a Call without axes; await call\.item\(\) gives its"),
    "call": (lambda call: call(), "is not an async function; await it"),
    "text before": (lambda call: "1" + call, "can only concatenate str"),
    "order of none": (lambda call: call < None, r"'<' not supported between .*'Call' and 'NoneType'"),
}


# Python's warnings are errors here: a call that a refusal names ends without one.
@pytest.mark.parametrize("kind", WITHOUT_AWAIT)
async def test_use_without_await(device: ta.Device, kind: str) -> None:
    use, text = WITHOUT_AWAIT[kind]
    x = await device.put(np.ones(2))
    found = await refused(lambda: use(x + 1.0), TypeError)
    assert re.search(text, found), found


@pytest.mark.parametrize("mistake", [bool, float, list, np.sin, lambda call: call(), lambda call: call.mean])
async def test_a_refused_call_can_be_awaited_as_the_error_advises(
    device: ta.Device, mistake: Callable[[Any], Any]
) -> None:
    call: Any = (await device.put(np.ones(1))) + 1.0
    with pytest.raises((TypeError, AttributeError)):
        mistake(call)
    assert await call.item() == 2.0


def plain() -> Any:
    async def coroutine() -> None: ...

    return coroutine()


REFUSING: dict[str, Callable[[ta.Device, Any, Any], Any]] = {
    "put": lambda device, x, value: device.put(value),
    "shape": lambda device, x, value: device.full(value, 1.0),
    "value": lambda device, x, value: device.full(3, value),
    "size": lambda device, x, value: device.host_empty(value),
    "message": lambda device, x, value: device.ask(value),
    "submission": lambda device, x, value: device.submit(value),
    "device": lambda device, x, value: x.copy_to(value),
    "dtype": lambda device, x, value: x.cast(value),
    "index": lambda device, x, value: x[value],
    "member": lambda device, x, value: ta.gather([value]),
    "program": lambda device, x, value: ta.run(value, x),
    "weights": lambda device, x, value: ta.weights.save("nowhere/at all", {"a": value}),
    "file": lambda device, x, value: ta.weights.load(value, "nowhere"),
    "axis": lambda device, x, value: arrays.sum(x, axis=value),
    "fill": lambda device, x, value: x.fill(value),
    "operand": lambda device, x, value: arrays.add(value, None),
    "out": lambda device, x, value: x.to_host(out=value),
}


@pytest.mark.parametrize("make", [lambda x: x + 1.0, lambda x: plain()], ids=["call", "coroutine"])
@pytest.mark.parametrize("function", REFUSING)
async def test_an_awaitable_as_an_argument_is_refused_without_a_warning(
    device: ta.Device, function: str, make: Callable[[Any], Any]
) -> None:
    x = await device.put(np.ones(3))
    text = await refused(lambda: REFUSING[function](device, x, make(x)), TypeError)
    assert re.search("Call|coroutine|list|AccelRef|NoneType", text)


async def test_a_begun_coroutine_is_not_closed(device: ta.Device) -> None:
    @types.coroutine
    def pause() -> Generator[None, None, None]:
        yield

    async def two() -> int:
        await pause()
        return 2

    begun: Any = two()
    begun.send(None)
    with pytest.raises(TypeError):
        await device.put(begun)
    with pytest.raises(StopIteration) as ended:
        begun.send(None)
    assert ended.value.value == 2


async def test_a_probe_for_an_attribute_silences_no_warning(device: ta.Device) -> None:
    x = await device.put(np.ones(3))

    def probe() -> None:
        call = x + 1.0
        assert not hasattr(call, "__cuda_array_interface__")
        assert call != "a text"

    with pytest.warns(RuntimeWarning, match=r"<Call arrays\.add> was never awaited"):
        probe()


async def test_plus_equal(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    before = y = x
    y += 1.0  # type: ignore[misc]
    assert isinstance(y, ta.Call)
    assert (await y.to_host())[0] == 2.0
    assert (await before.to_host())[0] == 1.0
    with pytest.raises(TypeError, match=r"await ref\[index\]\.assign\(value\) writes an array or a number"):
        x[0] += 1.0  # type: ignore[index]
    with pytest.raises(TypeError, match="an AccelRef is not searched"):
        assert (x + 1.0) in x


BAD: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "no promotion": (
        lambda x, i: (i + 1) * x,
        TypeError,
        r"^arrays\.multiply: x1 is int64 and x2 is float32, which the array API standard does not promote",
    ),
    "one dtype": (
        lambda x, i: (x + 1.0) @ i,
        TypeError,
        r"^linalg\.matmul: operands must share a dtype, got a float32, b int64; write await b\.cast\('float",
    ),
    "shapes": (lambda x, i: (x + 1.0) @ np.ones((5, 2), "f4"), ValueError, r"^linalg\.matmul: .*\(5, 2\)"),
    "broadcast": (lambda x, i: (x + 1.0) * np.ones(7, "f4"), ValueError, r"^arrays\.multiply: .*7"),
    "bits of a float": (lambda x, i: (x + 1.0) << 1, TypeError, r"^arrays\.bitwise_left_shift: "),
    "number": (lambda x, i: (i + 1) + 2**70, (ValueError, OverflowError, TypeError), r"^arrays\.add: x2"),
    "axis": (lambda x, i: arrays.sum(x + 1.0, axis=5), (ValueError, IndexError), r"^arrays\.sum: axis"),
    "axis that is a call": (lambda x, i: arrays.sum(x, axis=x + 1.0), TypeError, r"^arrays\.sum: axis"),
    "unknown option": (lambda x, i: arrays.sum(x + 1.0, axes=1), TypeError, r"^arrays\.sum.*axes"),
    "too few": (lambda x, i: linalg.matmul(x), TypeError, r"^matmul\(\) missing 1 required .*'b'"),
    "index": (lambda x, i: (x + 1.0)[9], IndexError, r"9"),
    "list as an index": (lambda x, i: (x + 1.0)[[0, 1]], TypeError, r"index"),
    "call as an index": (lambda x, i: (x + 1.0)[i + 1], TypeError, r"index"),
    "reshape": (lambda x, i: (x + 1.0).reshape(5), ValueError, r"reshape|5"),
    "item": (
        lambda x, i: (x + 1.0).item(),
        ValueError,
        r"^item: the array must have exactly one element, got shape \(3, 3\)$",
    ),
    "cast": (lambda x, i: (x + 1j).cast("float32"), TypeError, r"complex"),
    "fill": (lambda x, i: (i + 1).fill(1.5), (TypeError, ValueError), r"^devices\.Fill|fill"),
    "assign": (lambda x, i: (x + 1.0).assign(np.ones(7, "f4")), ValueError, r"^assign: value of "),
    "text": (lambda x, i: arrays.add(x + 1.0, "1"), TypeError, r"^arrays\.add: x2"),
    "None": (lambda x, i: arrays.add(x + 1.0, None), TypeError, r"^arrays\.add: x2"),
    "list": (lambda x, i: (x + 1.0) + [1.0, 2.0, 3.0], TypeError, r"^arrays\.add: x2 .*np\.asarray"),
    "objects": (lambda x, i: (x + 1.0) * np.array([object()] * 3), TypeError, r"^arrays\.multiply: x2"),
    "dates": (lambda x, i: (x + 1.0) * np.zeros(3, "M8[s]"), TypeError, r"^arrays\.multiply: x2.*datetime64"),
    "other end first": (lambda x, i: (x + 1.0) * np.ones(3, ">f4"), TypeError, r"^arrays\.multiply: x2.*>f4"),
    "out of another shape": (
        lambda x, i: (x + 1.0).to_host(out=np.zeros(5, "f4")),
        ValueError,
        r"to_host: out|ToHost: out",
    ),
    "coroutine": (lambda x, i: (x + 1.0) * x.copy_to(x.device), TypeError, "write `await` before"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_wrong_arguments(device: ta.Device, kind: str) -> None:
    ask, error, text = BAD[kind]
    x, i = await device.put(np.ones((3, 3), "f4")), await device.put(np.ones((3, 3), "i8"))
    found = await refused(lambda: ask(x, i), error)
    assert re.search(text, found), found
    assert "\n" not in found
    assert len(found) < 260
    assert "NoneType' object" not in found
    # Nothing of the chain is left, and the device is as before.
    assert await blocks(device) == 2
    assert (await (x + 1.0).to_host())[0, 0] == 2.0


async def test_a_call_as_out(device: ta.Device) -> None:
    """By then it is a separate array, which is overwritten; an operand equal to `out`, as without calls."""
    for turn in range(TURNS + 1):
        x = await device.put(np.full((2, 2), float(turn)))
        y = x + 1.0
        found = await arrays.multiply(y, 3.0, out=y).to_host()
        assert found.tolist() == [[(turn + 1) * 3.0] * 2] * 2
        found = await linalg.matmul(x, x, out=x * 0.0).to_host()
        assert found.tolist() == [[2.0 * turn * turn] * 2] * 2

    def itself() -> Any:
        z = x + 1.0
        return linalg.matmul(z, x, out=z)

    text = await refused(itself, ValueError)
    assert re.match(r"linalg\.matmul: out must not share memory with a", text), text


async def test_a_host_array_as_out(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    for turn in range(TURNS + 1):
        out = np.full(3, float(turn))
        # It is read before it is written.
        assert await (x + out).to_host(out=out) is out
        assert out.tolist() == [turn + 1.0] * 3
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    assert "read-only" in await refused(lambda: (x + 1.0).to_host(out=read_only), ValueError)


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
async def test_singular_matrices(device: ta.Device) -> None:
    x = await device.put(np.zeros((3, 3)))
    for _ in range(TURNS):
        with pytest.raises(ta.LinAlgError, match=r"^linalg\.solve: .*singular") as caught:
            await (linalg.solve(x * 2.0, np.ones((3, 1))) + 1.0).to_host()
        assert caught.value.operation == "linalg.Solve"
        with pytest.raises(ta.LinAlgError, match=r"^linalg\.cholesky: .*positive definite"):
            await (linalg.cholesky(x) @ x)
        del caught
    device.state.blocks.spare = None  # type: ignore[attr-defined]  # memory for results in between
    assert await blocks(device) == 1


async def test_a_result_of_the_host_is_an_operand_next_to_an_array(device: ta.Device) -> None:
    x = await device.put(np.full(3, 2.0))
    for _ in range(TURNS + 1):
        assert (await arrays.add((x + 1.0).to_host(), x).to_host()).tolist() == [5.0] * 3
        assert (await (x * arrays.sum(x).item()).to_host()).tolist() == [12.0] * 3


HOST_OPERATORS: list[tuple[Callable[[Any, Any], Any], str]] = [
    (operator.add, "+"),
    (operator.sub, "-"),
    (operator.mul, "*"),
    (operator.truediv, "/"),
    (operator.floordiv, "//"),
    (operator.mod, "%"),
    (operator.pow, "**"),
    (operator.matmul, "@"),
    (operator.and_, "&"),
    (operator.or_, "|"),
    (operator.xor, "^"),
    (operator.lshift, "<<"),
    (operator.rshift, ">>"),
]
COMPARISONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}


@pytest.mark.parametrize("isolation", ["inline"])
async def test_an_operator_of_a_number_of_the_host_asks_for_the_await(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    makes: list[tuple[Callable[[], Any], str, str]] = [
        (x.to_host, "to_host gives an array of the host", "await call.to_host()"),
        (lambda: (x + 1.0).to_host(out=np.ones(3)), "to_host gives an array", "await call.to_host()"),
        (lambda: arrays.sum(x).item(), "item gives a number of the host", "await call.item()"),
        (x[:1].item, "item gives a number of the host", "await call.item()"),
    ]

    def says(reason: str, expression: str) -> str:
        return f"^{re.escape(reason)}.*; await it first: {re.escape(expression)}$"

    for make, reason, use in makes:
        for apply, sign in HOST_OPERATORS:
            with pytest.raises(TypeError, match=says(reason, f"{use} {sign} 2")):
                apply(make(), 2)
            with pytest.raises(TypeError, match=says(reason, f"2 {sign} {use}")):
                apply(2, make())
            with pytest.raises(TypeError, match=says(reason, f"... {sign} {use}")):
                apply(np.ones(3), make())
            with pytest.raises(TypeError, match=says(reason, f"{use} {sign} {use}")):
                apply(make(), make())
            # An array on the device next to it makes a call.
            apply(make(), x + 1.0).silence()
            apply(x, make()).silence()
        for sign, apply in COMPARISONS.items():
            with pytest.raises(TypeError, match=says(reason, f"{use} {sign} 2")):
                apply(make(), 2)
        for apply_one, text in ((operator.neg, "-"), (operator.pos, "+"), (operator.invert, "~")):
            with pytest.raises(TypeError, match=says(reason, f"{text}{use}")):
                apply_one(make())
        with pytest.raises(TypeError, match=says(reason, f"abs({use})")):
            abs(make())
    assert await blocks(device) == 1


@pytest.mark.parametrize("isolation", ["inline"])
async def test_a_function_of_a_number_of_the_host_asks_for_the_await(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: arrays.add(x.to_host(), 1.0),
            "arrays.add: to_host gives .*: arrays.add(await call.to_host(), ...)",
        ),
        (
            lambda: arrays.add(1.0, x[0].item()),
            "arrays.add: item gives .*: arrays.add(await call.item(), ...)",
        ),
        (lambda: arrays.sqrt(x[0].item()), "arrays.sqrt: item gives .*: arrays.sqrt(await call.item())"),
        (
            lambda: linalg.matmul(x.to_host(), np.ones(3)),
            "linalg.matmul: to_host gives .*await call.to_host(), ...)",
        ),
        (
            lambda: linalg.cholesky(x.to_host()),
            "linalg.cholesky: to_host gives .*: linalg.cholesky(await call.to_host(), ...)",
        ),
    ]
    for make, says in cases:
        pattern = re.escape(says).replace(re.escape(".*"), ".*")
        assert re.match(f"^{pattern}$", await refused(make, TypeError))


async def test_two_tasks_that_await_one_call(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    call = x + 1.0
    outcomes: list[str] = []

    async def ask() -> None:
        try:
            outcomes.append(str((await call).shape))
        except RuntimeError as error:
            outcomes.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
    assert min(outcomes) == "(3,)"
    assert "was awaited before" in max(outcomes)


async def test_an_index_out_of_range(device: ta.Device) -> None:
    x, places = await device.put(np.ones((3, 2))), await device.put(np.array([0, 7]))
    text = await refused(lambda: nn.embedding(places, x * 2.0) + 1.0, ta.OutOfRangeError)
    assert text.startswith("nn.embedding: index 7 is not from 0 to 2 ("), text
    # Completed changes are not repeated, so the call ends with the step's error.
    for _ in range(TURNS):
        with pytest.raises(ta.OutOfRangeError, match=r"\b7 is ") as caught:
            await nn.embedding(places, arrays.add(x, 1.0, out=x))
        assert "nn.embedding" in (caught.value.operation or "")
        del caught
        await x.fill(1.0)
    # A repeated step has its own error, because nothing keeps the arrays of the chain.
    for _ in range(TURNS):
        with pytest.raises(ta.OutOfRangeError) as told:
            await (nn.embedding(places, x * 2.0) @ x.T)
        assert told.value.__context__ is None
        del told
    assert await blocks(device) == 2


async def test_no_array_at_all(device: ta.Device) -> None:
    x = await device.put(np.ones((3, 2)))
    text = await refused(lambda: linalg.lstsq(x + 1.0, None), TypeError)
    assert text == "linalg.lstsq: b must be an AccelRef or a NumPy array, got None"
    text = await refused(lambda: nn.glu(3) + 1.0, TypeError)
    assert text.startswith("nn.glu: x must be an AccelRef or a NumPy array, got ")


async def test_an_abandoned_call_ends_in_silence(device: ta.Device) -> None:
    call: Any = (await device.put(np.ones(2))) + 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            type(call)("no function")
    call.close()


SEVERAL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an index": (lambda x: linalg.svd(x)[0, 1], "tuple indices must be integers or slices, not tuple"),
    "a sum": (lambda x: linalg.svd(x) + 1.0, r"an operand is a SVDResult, which holds an array; pass its"),
    "of gather": (lambda x: ta.gather(x + 1.0, x * 2.0) * 2.0, r"got tuple; make one array of its arrays"),
    "a reduction": (lambda x: arrays.sum(arrays.nonzero(x)), r"await ta\.arrays\.stack\(value\)$"),
    "an item": (lambda x: linalg.eigh(x).item(), "an operand is of type EighResult; await the call"),
    "on the host": (lambda x: (x * 2.0).to_host()[0], "type ndarray; await .* use it as an array of NumPy"),
    "a list": (lambda x: linalg.matmul([x * 2.0], x), r"await ta\.arrays\.stack\(value\)$"),
}


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("mistake", SEVERAL)
async def test_results_other_than_one_array_of_a_device(device: ta.Device, mistake: str) -> None:
    x = await device.put(np.eye(2))
    make, text = SEVERAL[mistake]
    assert re.search(text, await refused(lambda: make(x), TypeError))
    assert device.generation == 1
