"""Kinds of devices: what they have in common, and one folder for each."""

from ._registry import (
    candidates,
    describe,
    driver_checks,
    list_devices,
    register,
    resolve,
    resolve_for_worker,
)

__all__ = [
    "candidates",
    "describe",
    "driver_checks",
    "list_devices",
    "register",
    "resolve",
    "resolve_for_worker",
]
