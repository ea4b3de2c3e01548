"""How the result of ``demo encode`` looks on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trio_accel.cli._errors import printable
from trio_accel.cli._results import count_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from trio_accel.cli._encode import EncodeData, Query
    from trio_accel.cli._encode_load import Outcome

__all__ = ["render_encoding"]

# Of a sentence so much is shown: two lines of a terminal of 80 columns.
_SHOWN = 130


def render_encoding(data: EncodeData) -> RenderableType:
    """The model, the queries with what is nearest, and the fates of requests."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(data):
        facts.add_row(name, Text(printable(value)))
    parts: list[RenderableType] = [facts, Text(), *[_query(query) for query in data.queries]]
    if data.load is not None:
        parts.append(_load(data.load))
    return Group(*parts)


def _facts(data: EncodeData) -> Iterator[tuple[str, str]]:
    yield "model", f"{data.model}: {count_of(data.layers, 'layer')}, {data.width} numbers for each sentence"
    size = f"{data.nbytes / 1e6:.1f} MB in {count_of(data.arrays, 'array')}"
    yield "weights", f"{size}, on the device after {data.loading_seconds:.2f} s"
    text = f"{data.text}: {count_of(data.sentences, 'sentence')}, {count_of(data.tokens, 'token')}"
    yield "text", f"{text}, encoded in {data.encoding_seconds:.2f} s"


def _query(query: Query) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("", Text(printable(query.query), style="bold"))
    for one in query.nearest:
        text = printable(one.sentence)
        table.add_row(f"{one.similarity:.2f}", text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")
    return Padding(table, (0, 0, 1, 0))


def _load(load: Outcome) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(f"requests of {count_of(load.clients, 'client')}")
    table.add_column("", justify="right")
    for outcome, number in load.outcomes.items():
        table.add_row(outcome, str(number))
    table.add_row("together", str(load.requests))
    faults = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    faults.add_column(load.fault)
    faults.add_column("generation", justify="right")
    faults.add_column("answers again", justify="right")
    for number, fault in enumerate(load.faults, 1):
        after = "never" if fault.recovery_ms is None else f"{fault.recovery_ms:.0f} ms"
        faults.add_row(str(number), f"{fault.generation_before} → {fault.generation_after}", after)
    return Group(Padding(table, (0, 0, 1, 0)), Padding(faults, (0, 0, 1, 0)))
