"""Parts of a service around `serve`: handlers of errors, the model of a batcher, the main function."""

from __future__ import annotations

import errno
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import Any

import trio

from ..actors import ActorError, NotExecutedError
from ..actors._errors import single
from ..backends.base import AccelError
from ..backends.base.kit.modules import import_extra
from ..devices import AccelRef
from ..programs import Program

__all__ = ["errors", "on_host", "run"]

_logger = logging.getLogger("trio_accel.http")
_MESSAGE_CHARACTERS = 200


def errors(*refused: type[Exception]) -> dict[Any, Callable[[Any, Any], Coroutine[Any, Any, Any]]]:
    """Return exception handlers for Starlette or FastAPI: ``FastAPI(exception_handlers=errors(ValueError))``.

    Errors of devices and actors become 503 with ``Retry-After``, because another try may succeed:
    `AccelError`, `ActorError` and `NotExecutedError`. The bodies are JSON: ``{"error": "..."}``. For FastAPI,
    a 422 names the wrong field also if its value is infinite or NaN, which JSON cannot hold.

    Args:
        refused: Kinds of errors that the client has caused. They become 400 with their text, also if they
            are subclasses of errors for 503.

    Raises:
        TypeError: A kind is not a subclass of `Exception`.
        NotSupportedError: Starlette is not installed.
    """
    for kind in refused:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(f"errors: pass classes of exceptions, got {kind!r}")
    answer = import_extra("starlette.responses", "http").JSONResponse

    async def lost(request: Any, error: Exception) -> Any:
        _logger.info("%s %s: 503 for %r", request.method, request.url.path, error)
        after = getattr(error, "retry_after", None) or 1.0
        return answer({"error": "try again"}, 503, {"Retry-After": f"{max(1, round(after))}"})

    async def refuse(request: Any, error: Exception) -> Any:
        # Half of a surrogate pair cannot be sent.
        text = str(error)[:_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
        return answer({"error": text}, 400)

    async def explain(request: Any, error: Any) -> Any:
        # FastAPI's own handler raises a ValueError for such an input. As a text, it can be sent.
        detail = json.dumps({"detail": sys.modules["fastapi.encoders"].jsonable_encoder(error.errors())})
        return answer(json.loads(detail, parse_constant=str), 422)

    kinds = (AccelError, ActorError, NotExecutedError)
    fastapi = sys.modules.get("fastapi.exceptions")
    invalid = {} if fastapi is None else {fastapi.RequestValidationError: explain}
    return {**dict.fromkeys(kinds, lost), **invalid, **dict.fromkeys(refused, refuse)}


def on_host(program: Program[Any], method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a program's method as an async function with host arrays as results: a `Batcher` model.

    Args:
        program: The program.
        method: A method of its class, such as ``Distances.predict``.

    Returns:
        An async function with the arguments of the method. It returns a NumPy array if the method returns an
        array, and otherwise the result itself. It raises the errors of `Program.ask`, and can be cancelled.
    """

    async def call(*args: Any) -> Any:
        result = await program.ask(method, *args)
        return await result.to_host() if isinstance(result, AccelRef) else result

    return call


def run(main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Run the main function of a program file by Trio.

    ``if __name__ == "__main__": run(main)`` is the end of the file. The function
    runs in a second import of its file, by the name of the file, because worker processes cannot import
    classes of ``__main__``.

    Args:
        main: An async function at the top level of its file.
        args: Its arguments.

    Returns:
        The result of the function.

    Raises:
        SystemExit: A port is taken; the text names it.
        TypeError: `main` is not a function of a file.
        ImportError: Another module has the name of the file.
    """
    try:
        return trio.run(_imported(main), *args)
    except (OSError, BaseExceptionGroup) as error:
        # A taken port is an error of the command line, and a traceback would hide it.
        cause = single(error)
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            raise SystemExit(cause.strerror) from None
        raise


def _imported(main: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    if getattr(main, "__module__", "") != "__main__":
        return main
    code, name = getattr(main, "__code__", None), getattr(main, "__qualname__", ".")
    if code is None or not name.isidentifier() or not Path(code.co_filename).is_file():
        raise TypeError(f"run: pass a function at the top level of a file, got {main!r}")
    spec = main.__globals__.get("__spec__")
    module = import_module(spec.name if spec else Path(code.co_filename).stem)
    path = Path(module.__file__ or "")
    if not (path.is_file() and path.samefile(code.co_filename)):
        raise ImportError(f"run: {code.co_filename} has the name of another module, {path}: rename the file")
    function: Callable[..., Awaitable[Any]] = getattr(module, name)
    return function
