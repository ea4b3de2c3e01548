"""Replay: run a device's recorded operations again elsewhere, and find the first one that differs."""

from .._names import export as _export
from ._compare import *
from ._journal import *
from ._load import *
from ._lockstep import *
from ._recorder import *
from ._replay import *
from ._report import *

_export(__name__)
