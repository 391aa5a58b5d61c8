"""Read the server's metrics as a Prometheus scraper does."""

import httpx
from prometheus_client.parser import text_string_to_metric_families


def scrape(url: str, **headers: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Return the values at /metrics as ``{sample name: {labels: value}}``."""
    answer = httpx.get(f"{url}/metrics", headers=headers, trust_env=False)
    assert answer.status_code == 200, answer.text
    return parse(answer.text)


def parse(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Return the values of an exposition as ``{sample name: {labels: value}}``."""
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


def value(samples: dict[str, dict[frozenset[tuple[str, str]], float]], name: str, **labels: str) -> float:
    """Return the sum of all series of ``name`` that have these labels; 0 if there are none."""
    series = samples.get(name, {})
    return sum(number for given, number in series.items() if labels.items() <= dict(given).items())
