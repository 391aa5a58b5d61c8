"""Metrics as a scraper reads them."""

import httpx
from prometheus_client.parser import text_string_to_metric_families


def scrape(url: str, **headers: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Sample names to values by labels."""
    answer = httpx.get(f"{url}/metrics", headers=headers, trust_env=False)
    assert answer.status_code == 200, answer.text
    return parse(answer.text)


def parse(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


def value(samples: dict[str, dict[frozenset[tuple[str, str]], float]], name: str, **labels: str) -> float:
    """The sum of all series with these labels; 0 without any."""
    series = samples.get(name, {})
    return sum(number for given, number in series.items() if labels.items() <= dict(given).items())
