"""The recorded metrics of one server process, and their text for Prometheus."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinkle.server.telemetry.instruments import INSTRUMENTS, Instrument


@dataclass(frozen=True)
class Reading:
    """The present value of an instrument with ``read``. ``labels`` are in the order of the instrument's labels."""

    instrument: Instrument
    value: float
    labels: tuple[str, ...] = ()


class Metrics:
    """The counters and histograms that one process records as they change. Other values are read, see ``Reading``.

    Recording is thread-safe and takes about a microsecond, if the caller keeps the series: look it up once, where its
    labels are known beforehand.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # they would add a second series to each metric, and nothing uses them
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        recorded = [one for one in INSTRUMENTS if not one.read]
        self._counters = {
            one: Counter(one.name, one.meaning, one.labels, registry=self._registry)
            for one in recorded
            if one.kind == "counter"
        }
        self._histograms = {
            one: Histogram(one.name, one.meaning, one.labels, buckets=one.buckets, registry=self._registry)
            for one in recorded
            if one.kind == "histogram"
        }

    def counter(self, instrument: Instrument, *labels: str) -> Counter:
        return self._counters[instrument].labels(*labels)

    def histogram(self, instrument: Instrument, *labels: str) -> Histogram:
        return self._histograms[instrument].labels(*labels)

    def families(self, readings: Iterable[Reading]) -> list[Metric]:
        """Return all recorded metrics and these readings."""
        return [*self._registry.collect(), *_families_of(readings)]


def render(families: Sequence[Metric], accept: str) -> tuple[bytes, str]:
    """Return the text of metrics and its content type, which ``accept``, a scraper's header, chooses."""
    encode, content_type = choose_encoder(accept)
    text: bytes = encode(_Collected(families))
    return text, content_type


def of_all_replicas(replicas: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """Join the metrics of several processes. Each sample gets a label ``replica`` that names its process."""
    joined: dict[str, Metric] = {}
    for replica, families in replicas.items():
        for family in families:
            together = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            together.samples += [
                sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
            ]
    return list(joined.values())


class _Collected(CollectorRegistry):
    """A registry of families that are already collected: the encoders accept only registries."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _families_of(readings: Iterable[Reading]) -> list[Metric]:
    grouped: dict[Instrument, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
    for reading in readings:
        grouped[reading.instrument][reading.labels] += reading.value
    return [_family(instrument, values) for instrument, values in grouped.items()]


def _family(instrument: Instrument, values: Mapping[tuple[str, ...], float]) -> Metric:
    kind = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(
        instrument.name, instrument.meaning, labels=instrument.labels
    )
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
