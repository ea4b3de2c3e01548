from __future__ import annotations

import io

import pytest
from rich.console import Console

from trio_accel.cli._solve import ResidualChart


def draw(history: list[float], width: int = 80, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=file, width=width, color_system=None, legacy_windows=False)
    console.print(ResidualChart(history=history))
    file.seek(0)
    return file.read().splitlines()


def test_decades_fall_one_row_at_a_time() -> None:
    assert draw([1.0, 0.1, 0.01, 0.001, 0.0001]) == [
        "    1e+00 █    ",
        "    1e-01 ██   ",
        "    1e-02 ███  ",
        "    1e-03 ████ ",
        "          0   4",
    ]


@pytest.mark.parametrize("count", [2, 7, 64, 65, 1000])
@pytest.mark.parametrize("width", [30, 80, 200])
def test_it_fits_its_width(count: int, width: int) -> None:
    lines = draw([10.0 ** (-12 * index / count) for index in range(count)], width)
    assert len(lines) <= 9
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("    1e+00 ")
    assert lines[-1].strip().startswith("0")
    assert lines[-1].strip().endswith(str(count - 1))


def test_an_increase_between_columns_is_not_hidden() -> None:
    history = [1.0] * 1000
    history[500] = 1e6
    lines = draw(history)
    assert lines[0].lstrip().startswith("1e+06")
    assert lines[0].count("█") == 1


def test_one_value_and_exact_zeros() -> None:
    assert len(draw([1.0])) == 2
    assert len(draw([1.0, 0.0])) >= 2


def test_plain_characters_where_blocks_cannot_be_written() -> None:
    text = "\n".join(draw([1.0, 0.1, 0.01], encoding="ascii"))
    assert text.isascii()
    assert "##" in text
