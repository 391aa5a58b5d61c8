"""The reference page and print-config match the schema."""

import pytest

from tests.support.paths import ROOT
from twinkle.server.config import default_config, describe, older
from twinkle.server.config.reference import _section_tables, tables
from twinkle.server.config.server_config import ServerConfig

PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_has_the_tables_of_the_schema():
    assert PAGE.read_text().endswith(f"\n\n{tables()}\n"), "the tables come from: python -m twinkle.server.config"


def test_a_default_that_depends_on_other_keys_is_described():
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| `runtime` |")]
    assert row.split(" | ")[2] == "`ray` in a file with `applications`, otherwise `embedded`"


def test_every_key_is_described():
    rows = [line for table in _section_tables() for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    for row in rows:
        *_, meaning, _ = row.split(" |")
        assert meaning.strip().endswith("."), row
        assert "None" not in row


def test_every_older_key_is_on_the_page():
    listed = {key.rpartition(".")[2] for keys in older.older_keys() for key in keys.split(", ")}
    handlers = (older._QUEUE, older._SERVER, older._ADAPTER, older._PERSISTENCE, older._MODEL)
    assert {key for keys in handlers for key in keys} <= listed


@pytest.mark.parametrize(
    "section", ["http_options", "auth", "clients", "limits", "persistence", "telemetry", "logging"]
)
def test_print_config_explains_every_key(section):
    lines = [line.strip() for line in describe(default_config()).splitlines()]
    for name, field in type(getattr(ServerConfig(), section)).model_fields.items():
        (at,) = [index for index, line in enumerate(lines) if line.startswith(f"{name}:")][:1]
        comment = lines[at - 1]
        assert comment.startswith("# ")
        assert " ".join(field.description.split()).endswith(comment[2:])
