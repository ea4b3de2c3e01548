"""Pictures of a terminal: what tmux showed, drawn as SVG that needs no script, no font and no other file."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

import attrs
from rich.color import ColorType
from rich.console import Console
from rich.style import Style
from rich.text import Text

# How long the last screen is shown.
LAST_SECONDS = 9.0

FONT, WIDTH, HEIGHT, MARGIN, BAR = 14.0, 8.43, 18.0, 18.0, 34.0
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
GROUND, FRAME, PLAIN, DIM = "#0d1117", "#30363d", "#d1d7e0", "#7d8590"
# By the numbers that terminals have for them; the bright ones begin again at 8.
COLOURS = ("#6e7681", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", PLAIN)

_LOOKS = re.compile(r"\x1b\[[0-9;]*m")


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


@attrs.frozen
class Terminal:
    """A terminal in tmux, on a server of its own: the user's settings and sessions are left alone.

    Attributes:
        name: Of the server and the session.
        columns: Its width.
        rows: Its height.
    """

    name: str
    columns: int
    rows: int

    @contextmanager
    def open(self) -> Iterator[None]:
        """Have it open, with a shell in an empty folder; ended at the end."""
        path = shlex.quote(str(Path(sys.executable).parent))
        shell = f"env PS1='$ ' PATH={path}:$PATH bash --norc --noprofile"
        size = ("-x", str(self.columns), "-y", str(self.rows))
        self._tmux("new-session", "-d", "-s", self.name, *size, f"cd $(mktemp -d) && {shell}")
        try:
            yield
        finally:
            self._tmux("kill-session", "-t", self.name)

    def press(self, *keys: str) -> None:
        """Press keys, by the names that tmux has for them."""
        self._tmux("send-keys", "-t", self.name, *keys)

    def type(self, text: str) -> None:
        """Type text."""
        self._tmux("send-keys", "-t", self.name, "-l", text)

    def lines(self) -> tuple[str, ...]:
        """What it shows, with escape sequences for colours."""
        shown = self._tmux("capture-pane", "-e", "-p", "-t", self.name).split("\n")[: self.rows]
        lines, carried = list[str](), ""
        for line in shown:
            # tmux does not say again in a line what holds since the one before.
            lines.append(carried + line.rstrip() if line.strip() else "")
            carried = "".join(_LOOKS.findall((carried + line).rpartition("\x1b[0m")[2]))
        return (*lines, *[""] * (self.rows - len(lines)))

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self.name, "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout  # noqa: S603


def draw(screens: list[Screen], terminal: Terminal, title: str) -> str:
    """The picture of a run."""
    end = screens[-1].at
    whole = end + LAST_SECONDS
    lines = _stays(screens, terminal.rows, whole)
    styles: dict[tuple[float, float], str] = {}
    body = [_drawn(line, styles, whole) for line in lines]
    width, height = 2 * MARGIN + terminal.columns * WIDTH, BAR + terminal.rows * HEIGHT + MARGIN
    last = "\n".join(Text.from_ansi(line).plain for line in screens[-1].lines)
    dots = "".join(
        f'<circle cx="{MARGIN + 2 + 18 * number}" cy="{BAR / 2}" r="5.5" fill="{fill}"/>'
        for number, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" \
height="{height:g}" role="img">
<title>{title}</title>
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


def _stays(screens: list[Screen], rows: int, whole: float) -> list[Line]:
    """Every line that was there, once for each time that it came."""
    lines: list[Line] = []
    for row in range(rows):
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
    console = Console(width=1000, color_system="standard", legacy_windows=False)
    spans: list[str] = []
    column = 0
    for segment in Text.from_ansi(line).render(console):
        words = segment.text.replace("\n", "")
        style = segment.style or Style.null()
        text = words.strip(" ")
        if style.reverse:
            place = f'x="{MARGIN + WIDTH * column:.1f}" y="{y - FONT:g}" width="{WIDTH * len(words):.1f}"'
            spans.append(f'<rect {place} height="{HEIGHT:g}" fill="{_fill(style) or PLAIN}"/>')
        if text:
            x = MARGIN + WIDTH * (column + len(words) - len(words.lstrip(" ")))
            look = _look(style)
            place = f'x="{x:.1f}" y="{y:g}" textLength="{WIDTH * len(text):.1f}"'
            spans.append(f"<text {place}{look}>{escape(text)}</text>")
        column += len(words)
    return spans


def _look(style: Style) -> str:
    fill = GROUND if style.reverse else _fill(style)
    looks = [f"fill:{fill}"] if fill else []
    if style.bold:
        looks.append("font-weight:bold")
    if style.underline:
        looks.append("text-decoration:underline")
    return f' style="{";".join(looks)}"' if looks else ""


def _fill(style: Style) -> str:
    """The colour of text; none where it is that of all text."""
    colour = style.color
    if colour is not None and colour.type is ColorType.STANDARD and colour.number is not None:
        return COLOURS[colour.number % 8]
    if colour is not None and not colour.is_default:
        return colour.get_truecolor().hex
    return DIM if style.dim else ""
