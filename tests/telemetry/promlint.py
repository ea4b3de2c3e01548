"""The rules of `promtool check metrics`, for metrics in the text format of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["problems"]

# Units that are not a base unit, with an SI prefix or without.
_BASE = ("amperes", "bytes", "celsius", "grams", "joules", "kelvins", "meters", "metres", "seconds", "volts")
_PREFIXES = (
    *("pico", "nano", "micro", "milli", "centi", "deci", "deca", "hecto"),
    *("kilo", "kibi", "mega", "mibi", "giga", "gibi", "tera", "tebi", "peta", "pebi"),
)
_OTHER_UNITS = (
    *("bits", "minutes", "hours", "days", "weeks", "fahrenheit", "calories", "inches", "feet", "yards"),
    *("miles", "ounces", "pounds", "tons", "percent"),
)
_UNITS = {*_OTHER_UNITS, *(f"{prefix}{unit}" for prefix in _PREFIXES for unit in (*_BASE, "bits"))}
_ABBREVIATIONS = ("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d")
_TYPES = ("counter", "gauge", "summary", "untyped", "histogram")


def problems(text: str) -> list[str]:
    """List what breaks a rule: the name of a metric, and the rule.

    Args:
        text: All metrics of a program.
    """
    types = re.findall("^# TYPE (\\S+) (\\S+)", text, re.MULTILINE)
    names = [name for name, _ in types]
    found = [f"{name}: described twice" for name in {*names} if names.count(name) > 1]
    counters = [name for name, kind in types if kind == "counter"]
    found += [f"{name}: a counter has the suffix _total" for name in counters if not name.endswith("_total")]
    for metric in text_string_to_metric_families(text):
        # The parser removes the suffix, and does not mind if it is missing.
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        found += [f"{name}: {rule}" for rule in _of_metric(metric, name)]
    return found


def _of_metric(metric: Metric, name: str) -> Iterator[str]:
    labels = {label for sample in metric.samples for label in sample.labels}
    parts = name.lower().split("_")[1:]
    if not metric.documentation:
        yield "no help text"
    if {*name.split("_")} & _UNITS:
        yield "use a base unit"
    if metric.type != "counter" and name.endswith("_total"):
        yield "only a counter has the suffix _total"
    if metric.type not in ("histogram", "summary"):
        if name.endswith(("_count", "_sum")):
            yield "only a histogram or a summary has the suffix _count or _sum"
        if name.endswith("_bucket"):
            yield "only a histogram has the suffix _bucket"
        if "le" in labels:
            yield "only a histogram has the label le"
    if metric.type != "summary" and "quantile" in labels:
        yield "only a summary has the label quantile"
    if {*parts} & {*_TYPES}:
        yield "the type is no part of the name"
    if ":" in name:
        yield "a colon is for recording rules"
    if any(re.search("[a-z][A-Z]", each) for each in (name, *labels)):
        yield "names are in snake_case"
    if {*parts} & {*_ABBREVIATIONS}:
        yield "units are not abbreviated"
