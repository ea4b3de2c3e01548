"""The rules of `promtool check metrics`, for metrics in the text format of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["problems"]

# Units other than a base unit, with an SI prefix or without.
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
    parts = {*name.lower().split("_")[1:]}
    is_spread = metric.type in ("histogram", "summary")
    rules = {
        "no help text": not metric.documentation,
        "use a base unit": {*name.split("_")} & _UNITS,
        "only a counter has the suffix _total": metric.type != "counter" and name.endswith("_total"),
        "only a histogram or a summary has the suffix _count or _sum": (
            not is_spread and name.endswith(("_count", "_sum"))
        ),
        "only a histogram has the suffix _bucket": not is_spread and name.endswith("_bucket"),
        "only a histogram has the label le": metric.type != "histogram" and "le" in labels,
        "only a summary has the label quantile": metric.type != "summary" and "quantile" in labels,
        "the type is not a part of the name": parts & {*_TYPES},
        "a colon is for recording rules": ":" in name,
        "names are in snake_case": any(re.search("[a-z][A-Z]", each) for each in (name, *labels)),
        "units are not abbreviated": parts & {*_ABBREVIATIONS},
    }
    yield from [rule for rule, is_broken in rules.items() if is_broken]
