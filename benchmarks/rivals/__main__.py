"""``python -m benchmarks.rivals KIND``: measures what its input asks for, line by line."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

_MODULES = {"bare": "_bare", "engine": "_engine", "cupy": "_cupy", "torch": "_torch"}


def say(**words: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer until nobody asks any more."""
    kind = sys.argv[1]
    try:
        rival = importlib.import_module(f"{__package__}.{_MODULES[kind]}").make()
    except Exception as error:  # noqa: BLE001  # whoever asked is told
        return say(error=f"{kind} cannot be measured: {error!r}")
    say(ready=kind)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say(value=getattr(rival, request["name"])(**request["arguments"]))
        except Exception as error:  # noqa: BLE001  # the same
            say(error=f"{kind} {request['name']} failed: {error!r}")
    return None


if __name__ == "__main__":
    main()
