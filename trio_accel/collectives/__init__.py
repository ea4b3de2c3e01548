"""Collectives: operations on one array from each of several devices, in worlds that heal."""

from .._names import export as _export
from ._communicators import *
from ._errors import *
from ._operations import *
from ._ranks import *
from ._world import *

_export(__name__)
