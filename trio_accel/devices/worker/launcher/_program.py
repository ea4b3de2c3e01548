"""The command lines of worker processes: isolated interpreters, which import as this program does."""

from __future__ import annotations

import os
import sys

from ....backends.base.modules import search_path

__all__ = ["interpreter_options", "program_arguments"]

# Until the path is set nothing is imported but what the interpreter has loaded by then. The folder of the
# user's own packages is part of the path, but an isolated interpreter has not run its `.pth` files.
_BOOT = """\
import site, sys
path = [*map(eval, sys.argv[1:])]
del sys.argv[1:]
sys.pycache_prefix = {prefix}
if not site.ENABLE_USER_SITE and site.getusersitepackages() in path:
    site.addsitedir(site.getusersitepackages())
sys.path[:] = path
from trio_accel.devices.worker.back._process import main
main()
"""


def program_arguments() -> tuple[str, ...]:
    """What follows the interpreter and its options on the command line of a worker of a device."""
    # As literals of ASCII, one for each entry: whatever encoding the other interpreter takes for arguments,
    # and however long they are together.
    path = map(ascii, search_path())
    return ("-c", _BOOT.format(prefix=ascii(sys.pycache_prefix)), *path)


def interpreter_options() -> tuple[str, ...]:
    """Options of the interpreter of every worker.

    It is isolated: neither the working directory nor variables of the environment say where modules are.
    So what variables say of other things is told by options, but for those that have no option.
    """
    options = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    if not sys.flags.ignore_environment:
        environment = os.environ
        if environment.get("PYTHONDEVMODE"):
            options += ["-X", "dev"]
        if environment.get("PYTHONOPTIMIZE"):
            level = environment["PYTHONOPTIMIZE"]
            options += ["-OO" if level.isdecimal() and int(level) > 1 else "-O"]
        if environment.get("PYTHONTRACEMALLOC", "").isdecimal():
            options += ["-X", f"tracemalloc={environment['PYTHONTRACEMALLOC']}"]
        if environment.get("PYTHONUTF8") in ("0", "1"):
            options += ["-X", f"utf8={environment['PYTHONUTF8']}"]
        for warning in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
            options += ["-W", warning]
    return tuple(options)
