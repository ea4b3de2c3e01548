"""Helpers for tests of programs that use devices."""

from ._faults import FaultInjection, inject_fault

__all__ = ["FaultInjection", "inject_fault"]
