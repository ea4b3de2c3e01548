"""Agents: the parts between a model and an answer, above devices, patterns and the cluster's store."""

from .._names import export as _export
from ._cache import *
from ._index import *
from ._shared import *
from ._workflow import *
from ._workflow_journal import *
from ._workflow_run import *

_export(__name__)
