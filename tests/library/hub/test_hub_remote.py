"""``hf://`` with a small server that speaks the hub's protocol; ``ms://`` with a stand-in for its library."""

import hashlib
import json
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from twinkle.errors import DownloadError, MissingDependencyError
from twinkle.hub import hugging_face, resolve

COMMIT = "a" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "original/model.pth": b"same", "model.gguf": b"same"}
RESOLVE = 'from twinkle.hub import resolve; print(resolve("{model_id}").path)'


class Hub(BaseHTTPRequestHandler):
    """A server with one repository, org/name, for huggingface_hub."""

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/revision/"):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/api/models/org/name/tree/"):
            rows = [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in FILES.items()]
            body = json.dumps(rows).encode()
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            body = FILES[path.split(f"{COMMIT}/")[1]]
        else:
            self.send_error(404, "Not Found")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A running hub.

    The library huggingface_hub reads its address at import, so tests resolve ids in another process.
    """
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TWINKLE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def run(start_python, model_id):
    process = start_python(RESOLVE.format(model_id=model_id))
    output, errors = process.communicate(timeout=120)
    return output.strip(), errors


def test_hugging_face_download_then_offline(hub, start_python, monkeypatch):
    path, errors = run(start_python, "hf://org/name")
    assert path.endswith(f"snapshots/{COMMIT}"), errors
    assert run(start_python, "org/name@main")[0] == path
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    hub.shutdown()
    assert run(start_python, "hf://org/name")[0] == path
    assert sorted(file.name for file in Path(path).rglob("*")) == ["config.json", "model.safetensors"]


def test_hugging_face_unknown_repository(hub, start_python):
    _, errors = run(start_python, "hf://org/other")
    assert "DownloadError: cannot download hf://org/other: " in errors
    assert "give a local directory as model id" in errors


def test_hugging_face_offline_and_not_in_the_cache(hub, start_python, monkeypatch):
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    _, errors = run(start_python, "hf://org/name")
    assert "DownloadError: hf://org/name is not in the local cache and TWINKLE_OFFLINE is set" in errors


def test_hugging_face_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match="'huggingface_hub'"):
        resolve("hf://org/name")


class HubError(Exception):
    """Stand-in for modelscope's base error."""


@pytest.fixture
def modelscope(monkeypatch):
    """A stand-in for the two names of modelscope that we use; the library is not installed here."""
    package, subpackage, errors = (types.ModuleType(f"modelscope{part}") for part in ("", ".hub", ".hub.errors"))
    errors.HubError = HubError
    for module in (package, subpackage, errors):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("TWINKLE_OFFLINE", raising=False)
    return package


def test_modelscope_download(modelscope, tmp_path, monkeypatch):
    calls = []

    def snapshot_download(model_id, *, revision, ignore_patterns, local_files_only):
        calls.append((model_id, revision, local_files_only, "*.gguf" in ignore_patterns))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    modelscope.snapshot_download = snapshot_download
    assert resolve("ms://org/name").path == tmp_path
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    assert resolve("ms://org/name@v1").path == tmp_path
    assert calls == [("org/name", None, False, True), ("org/name", "v1", True, True)]


def test_modelscope_failure(modelscope):
    def snapshot_download(model_id, *, revision, ignore_patterns, local_files_only):
        raise HubError("no such model")

    modelscope.snapshot_download = snapshot_download
    with pytest.raises(DownloadError, match="cannot download ms://org/name: HubError: no such model"):
        resolve("ms://org/name")


def test_modelscope_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(MissingDependencyError, match="'modelscope'"):
        resolve("ms://org/name")


def test_a_long_download_says_how_much_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hugging_face._megabytes_of("org/name", "model") == "0 MB in the cache"
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123.incomplete").write_bytes(bytes(2_000_000))
    assert hugging_face._megabytes_of("org/name", "model") == "2 MB in the cache"
