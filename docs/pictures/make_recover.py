"""Make `recover.svg`, the README's picture: a run of `trio-accel demo recover` in a terminal, as it moved.

    python docs/pictures/make_recover.py [--screens FILE]

The command runs in tmux, which is the terminal: its screen is read ten times a second, with colours. The
picture has no script and no font of its own. Where nothing moves it shows the last screen. `--screens` draws
from the screens of an earlier run: `recover.json`, which is beside the picture and not in the repository.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from html import escape
from pathlib import Path

import attrs
from rich.color import ColorType
from rich.console import Console
from rich.style import Style
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS, ROWS = 80, 39
READ_EVERY, AT_MOST = 0.1, 60.0
# How long the last screen is shown.
LAST_SECONDS = 9.0
COMMAND = "trio-accel demo recover"
IS_OVER = "checks hold"

FONT, WIDTH, HEIGHT, MARGIN, BAR = 14.0, 8.43, 18.0, 18.0, 34.0
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
GROUND, FRAME, PLAIN, DIM = "#0d1117", "#30363d", "#d1d7e0", "#7d8590"
# By the numbers that terminals have for them; the bright ones begin again at 8.
COLOURS = ("#6e7681", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", PLAIN)


@attrs.frozen
class Screen:
    """What the terminal showed from a time on.

    Attributes:
        at: Seconds since the command was entered.
        lines: Its lines, with escape sequences for colours.
    """

    at: float
    lines: tuple[str, ...]


@attrs.frozen
class Line:
    """A line of the terminal for as long as it stayed.

    Attributes:
        row: Its number, from 0.
        text: What it held.
        begin: When it came, in seconds.
        end: When it went.
    """

    row: int
    text: str
    begin: float
    end: float


def main() -> None:
    """Run the command, or take the screens of an earlier run, and write the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--screens", type=Path)
    chosen = parser.parse_args().screens
    if chosen is None:
        screens = record()
        kept = [[screen.at, *screen.lines] for screen in screens]
        (HERE / "recover.json").write_text(json.dumps(kept), encoding="utf-8")
    else:
        kept = json.loads(chosen.read_text(encoding="utf-8"))
        screens = [Screen(float(at), tuple(lines)) for at, *lines in kept]
    picture = HERE / "recover.svg"
    picture.write_text(draw(screens), encoding="utf-8")
    sys.stdout.write(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB, {screens[-1].at:.1f} s\n")


def record() -> list[Screen]:
    """Run the command in a terminal; its screens, each where something changed."""
    name = "trio-accel-picture"
    shell = f"env PS1='$ ' PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH bash --norc --noprofile"
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    _tmux("new-session", "-d", "-s", name, *size, f"cd $(mktemp -d) && {shell}")
    try:
        _tmux("send-keys", "-t", name, "-l", COMMAND)
        time.sleep(0.5)
        screens = [Screen(0.0, _lines(name))]
        _tmux("send-keys", "-t", name, "Enter")
        start = time.monotonic()
        while (passed := time.monotonic() - start) < AT_MOST:
            lines = _lines(name)
            if lines != screens[-1].lines:
                screens.append(Screen(passed, lines))
            if any(IS_OVER in line for line in lines) and "".join(lines).endswith("$"):
                return screens
            time.sleep(READ_EVERY)
    finally:
        _tmux("kill-session", "-t", name)
    raise SystemExit(f"{COMMAND} did not end with '{IS_OVER}' within {AT_MOST:g} s")


def _tmux(*arguments: str) -> str:
    # A server of its own: the user's settings and sessions are left alone.
    command = ["tmux", "-L", "trio-accel-picture", "-f", "/dev/null", *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout  # noqa: S603


def _lines(session: str) -> tuple[str, ...]:
    lines = _tmux("capture-pane", "-e", "-p", "-t", session).split("\n")[:ROWS]
    return (*(line.rstrip() for line in lines), *[""] * (ROWS - len(lines)))


def draw(screens: list[Screen]) -> str:
    """The picture of a run."""
    end = screens[-1].at
    whole = end + LAST_SECONDS
    lines = _stays(screens, whole)
    styles: dict[tuple[float, float], str] = {}
    body = [_drawn(line, styles, whole) for line in lines]
    width, height = 2 * MARGIN + COLUMNS * WIDTH, BAR + ROWS * HEIGHT + MARGIN
    last = "\n".join(Text.from_ansi(line).plain for line in screens[-1].lines)
    dots = "".join(
        f'<circle cx="{MARGIN + 2 + 18 * number}" cy="{BAR / 2}" r="5.5" fill="{fill}"/>'
        for number, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" \
height="{height:g}" role="img">
<title>{COMMAND}</title>
<desc>{escape(last.strip())}</desc>
<style>
text {{ font: {FONT:g}px {FONTS}; fill: {PLAIN}; white-space: pre; }}
.l {{ visibility: hidden; animation-duration: {whole:.2f}s; animation-iteration-count: infinite; \
animation-timing-function: step-end; }}
.end {{ visibility: visible; }}
{chr(10).join(styles.values())}
@media (prefers-reduced-motion: reduce) {{ .l {{ animation: none; }} }}
</style>
<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="9" fill="{GROUND}" stroke="{FRAME}"/>
{dots}
{chr(10).join(body)}
</svg>
"""


def _stays(screens: list[Screen], whole: float) -> list[Line]:
    """Every line that was there, once for each time that it came."""
    lines: list[Line] = []
    for row in range(ROWS):
        begin, text = screens[0].at, screens[0].lines[row]
        for screen in screens[1:]:
            if screen.lines[row] != text:
                lines.append(Line(row, text, begin, screen.at))
                begin, text = screen.at, screen.lines[row]
        lines.append(Line(row, text, begin, whole))
    return [line for line in lines if Text.from_ansi(line.text).plain.strip()]


def _drawn(line: Line, styles: dict[tuple[float, float], str], whole: float) -> str:
    """A line of the picture; lines that come and go at once share their animation."""
    y = BAR + line.row * HEIGHT + FONT
    spans = "".join(_spans(line.text, y))
    if (line.begin, line.end) == (0.0, whole):
        return f"<g>{spans}</g>"
    name = f"k{list(styles).index(key) if (key := (line.begin, line.end)) in styles else len(styles)}"
    begin, end = (f"{100 * at / whole:.2f}%" for at in key)
    frames = [f"0%,{end} {{ visibility: hidden }}" if line.begin else f"{end} {{ visibility: hidden }}"]
    frames.append(f"{begin} {{ visibility: visible }}")
    if line.end == whole:
        frames[0] = "0% { visibility: hidden }"
    styles.setdefault(
        key, f"@keyframes {name} {{ {' '.join(frames)} }}\n.{name} {{ animation-name: {name}; }}"
    )
    classes = f"l {name}{' end' if line.end == whole else ''}"
    return f'<g class="{classes}">{spans}</g>'


def _spans(line: str, y: float) -> list[str]:
    """Runs of characters that look alike, each at its place and as wide as its columns."""
    console = Console(width=COLUMNS, color_system="standard", legacy_windows=False)
    spans: list[str] = []
    column = 0
    for segment in Text.from_ansi(line).render(console):
        words = segment.text.replace("\n", "")
        text = words.strip(" ")
        if text:
            x = MARGIN + WIDTH * (column + len(words) - len(words.lstrip(" ")))
            look = _look(segment.style or Style.null())
            place = f'x="{x:.1f}" y="{y:g}" textLength="{WIDTH * len(text):.1f}"'
            spans.append(f"<text {place}{look}>{escape(text)}</text>")
        column += len(words)
    return spans


def _look(style: Style) -> str:
    colour, looks = style.color, list[str]()
    if colour is not None and colour.type is ColorType.STANDARD and colour.number is not None:
        looks.append(f"fill:{COLOURS[colour.number % 8]}")
    elif colour is not None and not colour.is_default:
        looks.append(f"fill:{colour.get_truecolor().hex}")
    elif style.dim:
        looks.append(f"fill:{DIM}")
    if style.bold:
        looks.append("font-weight:bold")
    return f' style="{";".join(looks)}"' if looks else ""


if __name__ == "__main__":
    main()
