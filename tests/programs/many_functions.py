"""Forty functions; workers import this module."""

from __future__ import annotations

from trio_accel.programs import Array


def numbered_0(x: Array) -> Array:
    return x + 0


def numbered_1(x: Array) -> Array:
    return x + 1


def numbered_2(x: Array) -> Array:
    return x + 2


def numbered_3(x: Array) -> Array:
    return x + 3


def numbered_4(x: Array) -> Array:
    return x + 4


def numbered_5(x: Array) -> Array:
    return x + 5


def numbered_6(x: Array) -> Array:
    return x + 6


def numbered_7(x: Array) -> Array:
    return x + 7


def numbered_8(x: Array) -> Array:
    return x + 8


def numbered_9(x: Array) -> Array:
    return x + 9


def numbered_10(x: Array) -> Array:
    return x + 10


def numbered_11(x: Array) -> Array:
    return x + 11


def numbered_12(x: Array) -> Array:
    return x + 12


def numbered_13(x: Array) -> Array:
    return x + 13


def numbered_14(x: Array) -> Array:
    return x + 14


def numbered_15(x: Array) -> Array:
    return x + 15


def numbered_16(x: Array) -> Array:
    return x + 16


def numbered_17(x: Array) -> Array:
    return x + 17


def numbered_18(x: Array) -> Array:
    return x + 18


def numbered_19(x: Array) -> Array:
    return x + 19


def numbered_20(x: Array) -> Array:
    return x + 20


def numbered_21(x: Array) -> Array:
    return x + 21


def numbered_22(x: Array) -> Array:
    return x + 22


def numbered_23(x: Array) -> Array:
    return x + 23


def numbered_24(x: Array) -> Array:
    return x + 24


def numbered_25(x: Array) -> Array:
    return x + 25


def numbered_26(x: Array) -> Array:
    return x + 26


def numbered_27(x: Array) -> Array:
    return x + 27


def numbered_28(x: Array) -> Array:
    return x + 28


def numbered_29(x: Array) -> Array:
    return x + 29


def numbered_30(x: Array) -> Array:
    return x + 30


def numbered_31(x: Array) -> Array:
    return x + 31


def numbered_32(x: Array) -> Array:
    return x + 32


def numbered_33(x: Array) -> Array:
    return x + 33


def numbered_34(x: Array) -> Array:
    return x + 34


def numbered_35(x: Array) -> Array:
    return x + 35


def numbered_36(x: Array) -> Array:
    return x + 36


def numbered_37(x: Array) -> Array:
    return x + 37


def numbered_38(x: Array) -> Array:
    return x + 38


def numbered_39(x: Array) -> Array:
    return x + 39
