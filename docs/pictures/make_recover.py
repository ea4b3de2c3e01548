"""Make `recover.svg`, the README's picture: a run of `trio-accel demo recover` in a terminal, as it moved.

    python docs/pictures/make_recover.py [--screens FILE]

The command runs in tmux, which is the terminal: its screen is read ten times a second, with colours. The
picture has no script and no font of its own. Where nothing moves it shows the last screen. `--screens` draws
from the screens of an earlier run: `recover.json`, which is beside the picture and not in the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from pictures.drawn_terminal import Screen, Terminal, draw  # noqa: E402

TERMINAL = Terminal("trio-accel-picture", 80, 50)
READ_EVERY, AT_MOST = 0.1, 60.0
COMMAND = "trio-accel demo recover"
IS_OVER = "checks hold"


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
    picture.write_text(draw(screens, TERMINAL, COMMAND), encoding="utf-8")
    sys.stdout.write(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB, {screens[-1].at:.1f} s\n")


def record() -> list[Screen]:
    """Run the command in a terminal; its screens, each where something changed."""
    with TERMINAL.open():
        TERMINAL.type(COMMAND)
        time.sleep(0.5)
        screens = [Screen(0.0, TERMINAL.lines())]
        TERMINAL.press("Enter")
        start = time.monotonic()
        while (passed := time.monotonic() - start) < AT_MOST:
            lines = TERMINAL.lines()
            if lines != screens[-1].lines:
                screens.append(Screen(passed, lines))
            if any(IS_OVER in line for line in lines) and "".join(lines).endswith("$"):
                return screens
            time.sleep(READ_EVERY)
    raise SystemExit(f"{COMMAND} did not end with '{IS_OVER}' within {AT_MOST:g} s")


if __name__ == "__main__":
    main()
