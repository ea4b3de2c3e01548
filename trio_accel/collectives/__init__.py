"""Collectives: operations of many devices on arrays of which each has one, in worlds that heal."""

from .._names import export as _export
from ._communicators import *
from ._errors import *
from ._operations import *
from ._ranks import *
from ._world import *

_export(__name__)
