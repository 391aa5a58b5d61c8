"""Dashboards and docs name only metrics and labels that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.servers.exposition import parse
from twinkle.server.config import load_config
from twinkle.server.telemetry.instruments import INSTRUMENTS, table
from twinkle.server.telemetry.metrics import Metrics, Reading, render

COOKBOOK = ROOT / "cookbook" / "observability"
DASHBOARDS = sorted((COOKBOOK / "grafana" / "dashboards").glob("*.json"))


def exposed() -> dict[str, set[str]]:
    """Return sample names with their labels, from an exposition in which every instrument has a value."""
    metrics = Metrics()
    for one in INSTRUMENTS:
        if not one.read and one.kind == "counter":
            metrics.counter(one, *one.labels).inc()
        elif not one.read:
            metrics.histogram(one, *one.labels).observe(1)
    text, _ = render(metrics.families(Reading(one, 1, one.labels) for one in INSTRUMENTS if one.read), "")
    return {
        name: {label for labels in series for label in dict(labels)} for name, series in parse(text.decode()).items()
    }


EXPOSED = exposed()

# --- PromQL, as far as the dashboards use it --------------------------------------------------------------------------

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\s*\()")
_RANGE = re.compile(r"\[[^\]]*\]")
_MATCHER = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:=~|!~|!=|=)\s*\"\"\s*(?:,|$)")
_VARIABLE = re.compile(r"label_values\((\w+),\s*(\w+)\)")
_FUNCTIONS = {"sum", "rate", "increase", "max", "min", "avg", "topk", "histogram_quantile"}


def unknown_names(query: str) -> list[str]:
    """Return the names in a query that the server does not have."""
    text = _RANGE.sub("", _STRING.sub('""', query))
    used: set[str] = set()
    wrong: list[str] = []
    groupings = [label.strip() for group in _GROUPING.findall(text) for label in group.split(",")]
    text = _GROUPING.sub("", text)
    functions = re.findall(r"([A-Za-z_]\w*)\s*\(", text)
    wrong += [name for name in functions if name not in _FUNCTIONS]
    text = re.sub(r"[A-Za-z_]\w*\s*\(", "(", text)
    for name, matchers in _SELECTOR.findall(text):
        if name not in EXPOSED:
            wrong.append(name)
            continue
        used |= EXPOSED[name]
        found = _MATCHER.findall(matchers)
        assert len(found) == len([one for one in matchers.split(",") if one.strip()]), f"cannot read {{{matchers}}}"
        wrong += [label for label in found if label not in EXPOSED[name]]
    return wrong + [label for label in groupings if label not in used]


def labels_of_result(query: str) -> set[str]:
    """Return the labels by which a query is grouped, or else all labels of its metrics."""
    grouped = {label.strip() for group in _GROUPING.findall(query) for label in group.split(",")}
    return grouped or {label for name in re.findall(r"\w+", query) for label in EXPOSED.get(name, ())}


def targets(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_queries_name_only_what_there_is(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    found = targets(dashboard)
    assert len(found) >= len(dashboard["panels"]) >= 6
    for target in found:
        assert unknown_names(target["expr"]) == [], target["expr"]
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert legend <= labels_of_result(target["expr"]), target
    for variable in dashboard["templating"]["list"]:
        name, label = _VARIABLE.fullmatch(variable["query"]).groups()
        assert label in EXPOSED[name]


def test_there_are_four_with_ids_of_their_own() -> None:
    assert [file.stem for file in DASHBOARDS] == ["sampling", "server_overview", "tenants", "training"]
    assert len({json.loads(file.read_text())["uid"] for file in DASHBOARDS}) == 4


def test_every_metric_is_shown_somewhere() -> None:
    queries = " ".join(target["expr"] for file in DASHBOARDS for target in targets(json.loads(file.read_text())))
    uptime = {"twinkle_uptime_seconds"}
    assert {one.name for one in INSTRUMENTS if one.name not in queries} == uptime


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("sum by (model) (rate(twinkle_trained_token_total[5m]))", ["twinkle_trained_token_total", "model"]),
        ("rate(twinkle_trained_tokens[5m])", ["twinkle_trained_tokens"]),
        ('twinkle_queue_depth{modell="a"}', ["modell"]),
        ('twinkle_queue_depth{model="a", lane=~"b,c"}', ["lane"]),
        ("sum by (kind) (twinkle_queue_depth)", ["kind"]),
        ("twinkle_queue_depth / twinkle_qeue_depth", ["twinkle_qeue_depth"]),
        (
            "histogram_quantile(0.5, sum by (le) (rate(twinkle_batch_tokens_buckets[5m])))",
            ["twinkle_batch_tokens_buckets", "le"],
        ),
        ("rates(twinkle_ops_total[5m])", ["rates"]),
        ('sum by (model, queue) (twinkle_queue_depth{model=~"$model", queue!="training"})', []),
        ("histogram_quantile(0.5, sum by (le, model) (rate(twinkle_batch_tokens_bucket[$__rate_interval])))", []),
    ],
)
def test_a_misspelt_name_is_noticed(query: str, wrong: list[str]) -> None:
    assert unknown_names(query) == wrong


# --- other files with metric names ------------------------------------------------------------------------------------


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    assert f"\n\n{table()}\n\n" in page, "the table comes from: python -m twinkle.server.telemetry"


def test_names_are_well_formed() -> None:
    assert len({one.name for one in INSTRUMENTS}) == len(INSTRUMENTS)
    for one in INSTRUMENTS:
        assert re.fullmatch(r"twinkle_[a-z_]+", one.name)
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert bool(one.buckets) == (one.kind == "histogram")
        assert list(one.buckets) == sorted(one.buckets)
        assert one.meaning.endswith(".")


def test_the_compose_file_mounts_what_is_here() -> None:
    compose = yaml.safe_load((COOKBOOK / "docker-compose.yaml").read_text())
    (service,) = compose["services"].values()
    mounted = dict(volume.split(":")[:2] for volume in service["volumes"] if volume.startswith("./"))
    assert all((COOKBOOK / source).exists() for source in mounted)
    provider = yaml.safe_load((COOKBOOK / "grafana" / "provisioning.yaml").read_text())["providers"][0]
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    ports = [port.rpartition(":")[2] for port in service["ports"]]
    assert ports == ["3000", "4317", "4318"]


def test_the_configuration_beside_it_is_good() -> None:
    config, notes = load_config(COOKBOOK / "server.yaml")
    assert config.telemetry.enabled
    assert config.telemetry.otlp_endpoint.endswith(":4317")
    assert notes == []
