"""Hub operations with stand-ins for the two client libraries; no network."""

import sys
import threading
import types

import pytest

from twinkle.errors import DownloadError, InvalidInputError, MissingDependencyError, UnknownNameError, UploadError
from twinkle.hub import HubOperation, build_model_alias_map, load_model_alias_map, resolve, resolve_model_id_alias
from twinkle.hub.model_id import HuggingFaceId, ModelScopeId, parse_model_id
from twinkle.hub.repository import WEIGHT_FILES

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TWINKLE_FORBID_HF", "TWINKLE_MODEL_ID_ALIASES", "TWINKLE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def hf(monkeypatch, calls, tmp_path):
    """huggingface_hub with its network functions replaced by ones that accept exactly the arguments we send."""

    def create_repo(repo_id, *, token, private, exist_ok):
        calls.append(("create", repo_id, token, private, exist_ok))
        return f"https://hub/{repo_id}"

    def upload_folder(
        *, repo_id, folder_path, path_in_repo, commit_message, commit_description, token, revision, ignore_patterns
    ):
        if commit_message == "fail":
            raise OSError("no space on the hub")
        calls.append(("upload", repo_id, folder_path, path_in_repo, revision, ignore_patterns))
        return f"https://hub/{repo_id}/commit/1"

    def snapshot_download(repo_id, *, repo_type, revision, allow_patterns, ignore_patterns, token, local_files_only):
        calls.append(("download", repo_id, repo_type, revision, allow_patterns, ignore_patterns, local_files_only))
        return str(tmp_path)

    for function in (create_repo, upload_folder, snapshot_download):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)


class HubError(Exception):
    """Stand-in for modelscope's base error."""


@pytest.fixture
def modelscope(monkeypatch, calls, tmp_path):
    """The names of modelscope that we use. The library itself is an optional dependency."""
    package, subpackage, errors = (types.ModuleType(f"modelscope{part}") for part in ("", ".hub", ".hub.errors"))
    errors.HubError = HubError

    class HubApi:
        def login(self, token):
            if token == "bad":
                raise HubError("who are you?")
            calls.append(("login", token))

        def create_repo(self, repo_id, *, token, visibility, repo_type, exist_ok):
            calls.append(("create", repo_id, token, visibility, repo_type, exist_ok))

        def upload_folder(
            self,
            repo_id,
            folder_path,
            *,
            path_in_repo,
            commit_message,
            commit_description,
            token,
            revision,
            ignore_patterns,
        ):
            calls.append(("upload", repo_id, folder_path, path_in_repo, revision, ignore_patterns))

    def snapshot_download(repo_id, *, repo_type, revision, allow_patterns, ignore_patterns, token, local_files_only):
        calls.append(("download", repo_id, repo_type, revision, allow_patterns, ignore_patterns, local_files_only))
        return str(tmp_path)

    package.HubApi, package.snapshot_download = HubApi, snapshot_download
    for module in (package, subpackage, errors):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_source_of_a_name(monkeypatch):
    assert HubOperation.source_type("hf://a/b") == "hf"
    assert HubOperation.source_type("ms://a/b") == HubOperation.source_type("a/b") == "ms"
    assert HubOperation.remove_source_type("hf://a/b") == HubOperation.remove_source_type("a/b") == "a/b"
    with pytest.raises(InvalidInputError, match="s3://a/b"):
        HubOperation.source_type("s3://a/b")
    monkeypatch.setenv("TWINKLE_FORBID_HF", "1")
    with pytest.raises(ValueError, match="TWINKLE_FORBID_HF is set"):
        HubOperation.source_type("hf://a/b")


def test_hf_can_be_forbidden_for_models_too(monkeypatch):
    assert parse_model_id("a/b") == HuggingFaceId("a/b", None)
    monkeypatch.setenv("TWINKLE_FORBID_HF", "1")
    assert parse_model_id("a/b") == ModelScopeId("a/b", None)
    for look_up in (resolve, HubOperation.download_model):
        with pytest.raises(InvalidInputError, match="TWINKLE_FORBID_HF is set"):
            look_up("hf://a/b")


def test_push_to_hugging_face(hf, calls, tmp_path):
    done = HubOperation.push_to_hub("hf://me/model", tmp_path, token="t", private=True, ignore_patterns=["*.pt"])
    assert done == "https://hub/me/model/commit/1"
    assert calls == [
        ("create", "me/model", "t", True, True),
        ("upload", "me/model", tmp_path, None, "main", ["*.pt"]),  # there the branch master is called main
    ]
    with pytest.raises(UploadError, match="cannot upload to hf://me/model: OSError: no space on the hub"):
        HubOperation.push_to_hub("hf://me/model", tmp_path, commit_message="fail")
    with pytest.raises(InvalidInputError, match="folder_path"):
        HubOperation.push_to_hub("hf://me/model", tmp_path / "missing")


def test_push_to_modelscope(modelscope, calls, tmp_path):
    assert HubOperation.push_to_hub("me/model", tmp_path, path_in_repo="x", private=True) == "me/model"
    assert calls == [
        ("create", "me/model", None, "private", "model", True),
        ("upload", "me/model", str(tmp_path), "x", "master", None),
    ]


def test_login(modelscope, calls, monkeypatch):
    assert HubOperation.try_login("t") is True
    assert HubOperation.try_login() is False
    assert calls == [("login", "t")]
    with pytest.raises(UploadError, match="who are you"):
        HubOperation.try_login("bad")
    with pytest.raises(InvalidInputError, match="source"):
        HubOperation.try_login("t", source="gitlab")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert HubOperation.try_login(source="hf") is False


def test_uploads_in_the_background_keep_their_order(hf, calls, tmp_path, monkeypatch):
    release = threading.Event()
    create = huggingface_hub.create_repo

    def slow_create(repo_id, **options):
        if repo_id == "me/a":
            release.wait(30)
        return create(repo_id, **options)

    monkeypatch.setattr(huggingface_hub, "create_repo", slow_create)
    first = HubOperation.async_push_to_hub("hf://me/a", tmp_path, path_in_repo="1")
    HubOperation.async_push_to_hub("hf://me/a", tmp_path, path_in_repo="2")
    HubOperation.async_push_to_hub("hf://me/b", tmp_path, commit_message="fail")
    assert "no space on the hub" in HubOperation.wait_for("hf://me/b")["hf://me/b"]  # not delayed by the other upload
    assert not first.done()
    release.set()
    assert HubOperation.wait_for() == {"hf://me/a": "https://hub/me/a/commit/1"}
    assert [call[3] for call in calls if call[0] == "upload"] == ["1", "2"]
    assert HubOperation.wait_for() == {}
    with pytest.raises(UnknownNameError, match="unknown upload 'hf://me/c'"):
        HubOperation.wait_for(["hf://me/c"])
    with pytest.raises(InvalidInputError, match="s3://x/y"):
        HubOperation.async_push_to_hub("s3://x/y", tmp_path)


def test_download_model(hf, modelscope, calls, tmp_path, monkeypatch):
    local = tmp_path / "model"
    local.mkdir()
    assert HubOperation.download_model(str(local)) == str(local)
    assert calls == []
    assert HubOperation.download_model("org/name", ignore_model=True) == str(tmp_path)
    assert HubOperation.download_model("ms://org/name@v1", ignore_patterns=["*.gguf"]) == str(tmp_path)
    assert HubOperation.download_model("hf://org/name", revision="master", download_model=False) == str(tmp_path)
    weights = list(WEIGHT_FILES)
    assert "*.safetensors" in weights
    assert calls == [
        ("download", "org/name", "model", None, None, weights, False),
        ("download", "org/name", "model", "v1", None, ["*.gguf"], False),
        ("download", "org/name", "model", "main", None, weights, False),
    ]
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    HubOperation.download_model("org/name")
    assert calls[-1] == ("download", "org/name", "model", None, None, None, True)


def test_models_that_no_hub_holds(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path))
    folder = HubOperation.download_model("random://llama-tiny", ignore_model=True)
    assert folder == str(resolve("random://llama-tiny").path)


def test_download_file(hf, modelscope, calls, tmp_path):
    assert HubOperation.download_file("hf://o/n", "dataset", ["*.py"]) == str(tmp_path)
    assert HubOperation.download_file("o/n") == str(tmp_path)
    assert calls == [
        ("download", "o/n", "dataset", None, ["*.py"], None, False),
        ("download", "o/n", "model", None, None, None, False),
    ]
    with pytest.raises(InvalidInputError, match="repo_type"):
        HubOperation.download_file("o/n", "space")


def test_load_dataset(modelscope, calls, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    loaded = []

    def load_dataset(path, *, name, split, streaming, revision=None, token=None, **options):
        loaded.append((path, name, split, streaming, revision, token, options))
        return "rows"

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert HubOperation.load_dataset("hf://o/n", "sub", "test", revision="r", token="t", num_proc=2) == "rows"
    assert HubOperation.load_dataset("o/n", streaming=True) == "rows"
    assert loaded == [
        ("o/n", "sub", "test", False, "r", "t", {"num_proc": 2}),
        (str(tmp_path), None, "train", True, None, None, {}),
    ]
    assert calls == [("download", "o/n", "dataset", None, None, None, False)]


def test_failures_name_the_repository(modelscope, monkeypatch):
    def snapshot_download(repo_id, **options):
        raise HubError("no such repository")

    monkeypatch.setattr(sys.modules["modelscope"], "snapshot_download", snapshot_download)
    with pytest.raises(DownloadError, match="cannot download ms://o/n: HubError: no such repository"):
        HubOperation.download_file("o/n")


def test_modelscope_is_an_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    for use in (
        lambda: HubOperation.load_dataset("o/n"),
        lambda: HubOperation.push_to_hub("o/n", tmp_path),
        lambda: HubOperation.try_login("t"),
    ):
        with pytest.raises(MissingDependencyError, match="'modelscope'"):
            use()


def test_aliases(monkeypatch, tmp_path):
    applications = [
        {"route_prefix": "/api/v1/model/Qwen/small", "args": {"model_id": str(tmp_path)}},
        {"route_prefix": "/api/v1/model/a/b", "args": {"model_id": "a/b"}},
        {"route_prefix": "/api/v1/sampler/Qwen/small", "args": {"model_id": "elsewhere"}},
        {"route_prefix": "/api/v1"},
    ]
    assert build_model_alias_map(applications) == {"Qwen/small": str(tmp_path)}
    clash = [{"route_prefix": "/model/x", "args": {"model_id": name}} for name in ("a/b", "c/d")]
    with pytest.raises(InvalidInputError, match="it has 'a/b' already"):
        build_model_alias_map(clash)

    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", f'{{"Qwen/small": "{tmp_path}"}}')
    assert load_model_alias_map() == {"Qwen/small": str(tmp_path)}
    assert resolve_model_id_alias("Qwen/small") == str(tmp_path)
    assert resolve_model_id_alias("Qwen/other") == "Qwen/other"
    assert HubOperation.download_model("Qwen/small") == str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve("Qwen/small").path == tmp_path
    for wrong in ("[1]", "{", '{"a": 1}'):
        monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", wrong)
        with pytest.raises(InvalidInputError, match="TWINKLE_MODEL_ID_ALIASES"):
            load_model_alias_map()
