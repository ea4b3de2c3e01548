"""Programs: your own classes and functions as supervised actors of a device; their arrays survive them."""

from .._names import export as _export
from ..backends.base import Refused as Refused
from ..backends.base.kit.programs import is_cancelled as is_cancelled
from ..backends.base.kit.programs import report_progress as report_progress
from ..backends.base.kit.ranks import ProgramRank as ProgramRank
from ..backends.base.kit.ranks import current_rank as current_rank
from ._messages import ProgramActor as ProgramActor
from ._method import *
from ._open import *
from ._program import *
from ._progress import on_progress as on_progress
from ._streams import *

_export(__name__)
