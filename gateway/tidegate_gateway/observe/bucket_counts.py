"""A Prometheus histogram for one thread. It takes no lock and finds its bucket by a binary search.

`prometheus_client.Histogram` compares a value with one bound after the other and takes two locks, which costs a call with
six observations a twentieth of the gateway's time. Observations and scrapes happen on the event loop only.
"""

import bisect
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, registry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Buckets:
    """The observations with one set of labels."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._sum += value
        self._counts[bisect.bisect_left(self._bounds, value)] += 1

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds the counts, each with those of all lower buckets."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        family.add_metric(labels, rows, self._sum)


class Histogram(registry.Collector):
    """One metric."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labelnames = labels
        self._bounds = tuple(map(float, buckets))
        self._children: dict[tuple[str, ...], Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The buckets of these values of the labels."""
        if len(values) != len(self._labelnames):
            raise ValueError(f"{self._name} has the labels {', '.join(self._labelnames)}")
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Buckets(self._bounds)
        return found

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The metric without observations: its names cannot be used twice."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, child in self._children.items():
            child.add_to(family, values)
        yield family
