"""``trio-accel top``: the events that a dashboard's page reads, drawn in the terminal."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext, suppress
from typing import Any

import trio
from rich.live import Live

from trio_accel.cli._console import can_redraw, cut, make_console
from trio_accel.cli._run import InputError, InterruptError, printable, run_async

# Seconds until the first event, and between events: a page has at least one a minute. The maximum bytes of an
# event.
_FIRST, _NEXT, _MAX_EVENT_BYTES = 5.0, 90.0, 1 << 26
# Raised after the program has ended, and for anything but a snapshot.
_ENDS = (OSError, trio.BrokenResourceError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
# Figures shown in milliseconds and MiB.
_UNITS = {"p50": 1e3, "p99": 1e3, "used": 2**-20, "limit": 2**-20, "memory": 2**-20}
# The lists of a snapshot, each with a head and the columns of a row.
_LISTS = {
    "devices": ("STATE            MIB      OF MIB  DEVICE", "{state:12} {used:>7} {limit:>11}  {path}"),
    "processes": (
        "    MIB    CPU S  CPU %  PROCESS",
        "{memory:>7} {processor_seconds:8.1f} {percent:6.1f}  {pid:<8} {path}",
    ),
    "operations": (" PER S  P50 MS  P99 MS  MESSAGE", "{rate:6.1f} {p50:>7} {p99:>7}  {message_type} {path}"),
    "readings": ("      VALUE         MEAN  FIGURE", "{value:11.6g} {mean:>12}  {name}{labels} {path}"),
    "actors": ("STATE        RESTARTS  ACTOR", "{state:12} {restarts:8}  {branch}  {error}"),
}


def show_top(url: str, *, is_once: bool) -> int:
    """Show a program until it ends or a signal is received; or show it once.

    Raises:
        InputError: No dashboard has such an address, or none answers, or its program has ended.
    """
    # A dashboard is served only to its own machine, and its address has a port.
    match = re.fullmatch(r"(?:http://)?(?:(?:127\.0\.0\.1|localhost):)?([0-9]{1,5})/?", url)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise InputError(f"{url} is not an address of a dashboard, such as http://127.0.0.1:8080/")
    live = Live(console=make_console(), screen=True, auto_refresh=False)
    if is_once or not can_redraw(live.console):
        print(run_async(lambda: _watch(int(match[1]), None)))
    else:
        with suppress(InterruptError):
            run_async(lambda: _watch(int(match[1]), live))
    return 0


async def _watch(port: int, live: Live | None) -> str:
    """Draw each received snapshot, or return the first one."""
    problem, rest = "nothing listens there", b""
    with suppress(*_ENDS), trio.move_on_after(_FIRST) as limit, live or nullcontext():
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            problem = "no dashboard answers there, or it has its 16 readers already"
            await stream.send_all(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
            while len(rest) < _MAX_EVENT_BYTES and (part := await stream.receive_some()):
                *lines, rest = (rest + part).split(b"\n")
                for now in [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]:
                    if live is None:
                        return _draw(now)
                    live.update(cut(_draw(now, live.console.height)), refresh=True)
                    problem, limit.deadline = "the program has ended", trio.current_time() + _NEXT
    raise InputError(f"127.0.0.1:{port}: {problem}", code=1)


def _draw(now: dict[str, Any], height: int = 1 << 30) -> str:
    """Draw a snapshot in `height` lines. The head of each list counts the omitted rows."""
    lines = [f"{now['system']}, process {now['pid']}, up for {now['uptime']:.0f} s"]
    if (loop := now["loop"])["count"]:
        held = "{count} holds of the loop, {seconds:.1f} s in all, the longest {longest:.1f} s".format_map(
            loop
        )
        lines += [held + (f" by {loop['longest_at']}" if loop["longest_at"] else "")]
    for name, (head, columns) in _LISTS.items():
        rows = [columns.format_map(_texts(row)) for row in now[name]]
        room = max((height - len(lines)) // (1 if name == "actors" else 4) - 1, 1)
        if rows or name not in ("readings", "processes"):  # most programs, or machines, show none
            lines += [head + (f" ({len(rows) - room} more)" if len(rows) > room else ""), *rows[:room]]
    return "\n".join(printable(line.rstrip()) for line in lines)


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    """Add the texts of a row: an actor's branch of the tree, figures in other units, a histogram's mean."""
    memory = row.get("memory")
    fields: dict[str, Any] = {**row, **memory, "memory": None} if isinstance(memory, dict) else row
    figures = {
        key: f"{fields[key] * unit:.2f}" for key, unit in _UNITS.items() if fields.get(key) is not None
    }
    branch, error = re.sub("[^/]*/", "  ", row["path"]), (row.get("last_error") or "").partition(":")[0]
    count, labels = sum(row.get("counts", ())), "".join(f" {key}={of}" for key, of in row.get("labels", ()))
    # JSON has null for NaN and infinities.
    value = math.nan if row.get("value") is None else row["value"]
    shown = {"value": count, "mean": f"{value / count:.6g}"} if count else {"value": value, "mean": "-"}
    texts = {"branch": branch, "error": error, "labels": labels, "percent": 100 * row.get("load", 0), **shown}
    return {**row, **dict.fromkeys(_UNITS, "-"), **figures, **texts}
