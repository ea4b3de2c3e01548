"""Scripts of crashes that run on an OTP supervisor and on ours; see the README next to this folder."""

from .language import (
    Act,
    Add,
    Child,
    Crash,
    Finish,
    Hook,
    Remove,
    Script,
    Step,
    Supervisor,
    Together,
    Wait,
    Worker,
)
from .log import Event, RawEvent, lines, normalise, side_by_side
from .ours import run_on_ours
from .reference import OtpReference, why_no_otp

__all__ = [
    "Act",
    "Add",
    "Child",
    "Crash",
    "Event",
    "Finish",
    "Hook",
    "OtpReference",
    "RawEvent",
    "Remove",
    "Script",
    "Step",
    "Supervisor",
    "Together",
    "Wait",
    "Worker",
    "lines",
    "normalise",
    "run_on_ours",
    "side_by_side",
    "why_no_otp",
]
