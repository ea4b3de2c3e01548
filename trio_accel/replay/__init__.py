"""Replay: what a device was asked, asked again elsewhere, and the first operation that differs."""

from .._names import export as _export
from ._compare import *
from ._journal import *
from ._load import *
from ._lockstep import *
from ._recorder import *
from ._replay import *
from ._report import *

_export(__name__)
