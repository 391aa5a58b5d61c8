"""Folders of source and tests stay small: few entries, few tiny files, and no import cycle between files."""

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SOURCE

TESTS = ROOT / "tests"

SERVER, CLIENT, LIBRARY = SOURCE / "twinkle" / "server", SOURCE / "twinkle_client", SOURCE / "twinkle"
AGENTS = SOURCE / "twinkle_agentic"
ROOTS = (SERVER, CLIENT, SOURCE)
MOST_ENTRIES = 20
# files directly in the library; its packages are import paths of scripts and may be more than MOST_ENTRIES
MOST_SINGLE_FILES = 4
SMALL_LINES = 60
MOST_SMALL = 0.15
# Paths that scripts or an operator's settings name, and generated files. They count in neither number.
COMPATIBILITY = {
    SERVER / "launcher.py",
    SERVER / "common",
    SERVER / "ray_serve",
    CLIENT / "common",
    CLIENT / "compatibility.py",
    CLIENT / "http",
    CLIENT / "manager.py",
    CLIENT / "processor",
    CLIENT / "types",
    CLIENT / "utils",
    LIBRARY / "compatibility.py",
    LIBRARY / "torch_util.py",
    LIBRARY / "reward" / "base.py",
    AGENTS / "rollout" / "bridge.py",
}
GENERATED = {"tinker_pb2.py", "tinker_pb2.pyi"}
FACES = {"__init__.py", "__main__.py", "py.typed"}


def counts(path: Path) -> bool:
    compatible = any(path == one or one in path.parents for one in COMPATIBILITY)
    return not compatible and path.name not in GENERATED | FACES and path.name != "__pycache__"


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


FOLDERS = sorted({path.parent for root in (SOURCE, TESTS) for path in files(root) if counts(path)} - {LIBRARY})
of_each_root = pytest.mark.parametrize("root", ROOTS, ids=name_of)


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_folder_has_few_entries(folder: Path) -> None:
    entries = [path.name for path in folder.iterdir() if counts(path)]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_the_library_shows_packages_and_few_single_files() -> None:
    single = [path.name for path in LIBRARY.glob("*.py") if counts(path)]
    assert len(single) <= MOST_SINGLE_FILES, sorted(single)


@of_each_root
def test_few_files_are_tiny(root: Path) -> None:
    counted = [path for path in files(root) if counts(path)]
    small = [path for path in counted if len(path.read_text().splitlines()) < SMALL_LINES]
    assert len(small) <= MOST_SMALL * len(counted), [name_of(path) for path in small]


def test_services_do_not_ask_which_protocol_a_request_came_through() -> None:
    """What is different about native runs is registered: see ``services/training/run_kind.py``."""
    told = [path for path in (SERVER / "services").rglob("*.py") if "native" in path.read_text().lower()]
    assert not told, [str(path.relative_to(SERVER)) for path in told]


# --- imports ----------------------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path) -> dict[str, set[str]]:
    """Return the modules below ``root`` that each module imports, also in functions and for type checkers."""
    modules = {module_of(path): path for path in files(root)}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        named: set[str] = set()
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                named |= {alias.name for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
                below = {f"{statement.module}.{alias.name}" for alias in statement.names}
                named |= below & modules.keys() or {statement.module}
        found[module] = named & modules.keys()
    return found


@of_each_root
def test_no_circle_of_imports(root: Path) -> None:
    """Repeatedly remove the modules that import no remaining module. A cycle would be left over."""
    left = imports(root)
    while leaves := {module for module, needed in left.items() if not needed & (left.keys() - {module})}:
        left = {module: needed for module, needed in left.items() if module not in leaves}
    assert not left, {module: sorted(needed & left.keys()) for module, needed in left.items()}
