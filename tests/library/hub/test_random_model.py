"""``random://``: Transformers loads config and tokenizer, and the tokenizer round-trips any text."""

import random

import pytest

from twinkle.hub import load_tokenizer, resolve
from twinkle.images import ImageProcessing, ImageSize

transformers = pytest.importorskip("transformers")

NAMES = ["llama-1b", "llama-8b", "llama-tiny", "llama-tiny-wide"]
VISION = ["qwen2.5-vl-tiny", "qwen3-vl-tiny", "qwen3.5-tiny", "qwen3.5-moe-tiny", "qwen3-vl-8b", "qwen3.5-35b-a3b"]
TEXTS = [
    "",
    " leading and  double  spaces ",
    "zażółć 日本語 \U0001f469‍\U0001f4bb \U0010ffff",
    "\x00\x1f\x7f\r\n\t",
    "e\u0301 ≠ é",
]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama-1b", (2048, 16, 32, 8, 64, 8192, 128256, True, "llama3", 131072)),
        ("llama-8b", (4096, 32, 32, 8, 128, 14336, 128256, False, "llama3", 131072)),
        ("llama-tiny", (64, 2, 4, 2, 16, 128, 512, True, "default", 2048)),
        ("llama-tiny-wide", (64, 2, 2, 1, 32, 128, 512, True, "default", 2048)),
    ],
)
def test_config(cache_dir, name, shape):
    config = transformers.AutoConfig.from_pretrained(resolve(f"random://{name}").path)
    assert shape == (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        config.tie_word_embeddings,
        config.rope_parameters["rope_type"],
        config.max_position_embeddings,
    )
    assert config.rope_parameters["rope_theta"] == 500000.0
    assert config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(("name", "factor"), [("llama-1b", 32.0), ("llama-8b", 8.0)])
def test_rope_scaling_of_the_real_models(cache_dir, name, factor):
    config = transformers.AutoConfig.from_pretrained(resolve(f"random://{name}").path)
    assert config.rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_number_of_parameters_is_that_of_the_real_models(cache_dir):
    torch = pytest.importorskip("torch")
    counts = {}
    for name in ("llama-1b", "llama-8b"):
        config = transformers.AutoConfig.from_pretrained(resolve(f"random://{name}").path)
        with torch.device("meta"):
            counts[name] = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert counts == {"llama-1b": 1_235_814_400, "llama-8b": 8_030_261_248}


def test_gpt_oss_has_the_shape_and_the_ends_of_the_real_one(cache_dir):
    torch = pytest.importorskip("torch")
    folder = resolve("random://gpt-oss-20b").path
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        assert transformers.AutoModelForCausalLM.from_config(config).num_parameters() == 20_914_757_184
    assert config.layer_types[:3] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config.sliding_window, config.head_dim, config.rope_parameters["factor"]) == (128, 64, 32.0)
    tokenizer = load_tokenizer("random://gpt-oss-20b")
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|return|>", "<|endoftext|>", "<|call|>"]


def test_number_of_parameters_of_the_vision_model_is_that_of_the_real_one(cache_dir):
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.from_pretrained(resolve("random://qwen3-vl-8b").path)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    assert model.num_parameters() == 8_767_123_696


def test_shape_of_linear_attention_and_experts_is_that_of_the_real_model(cache_dir):
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.from_pretrained(resolve("random://qwen3.5-35b-a3b").path)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    shapes = {name.partition("language_model.")[2]: tuple(each.shape) for name, each in model.named_parameters()}
    assert shapes["layers.0.linear_attn.in_proj_qkv.weight"] == (8192, 2048)
    assert shapes["layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert shapes["layers.39.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert model.num_parameters() == 35_107_181_936


@pytest.mark.parametrize("name", NAMES)
def test_special_token_ids_of_config_and_tokenizer_agree(cache_dir, name):
    path = resolve(f"random://{name}").path
    tokenizer = load_tokenizer(f"random://{name}")
    for config in (transformers.AutoConfig, transformers.GenerationConfig):
        loaded = config.from_pretrained(path)
        assert loaded.bos_token_id == tokenizer.bos_token_id == 256
        assert loaded.eos_token_id == tokenizer.eos_token_id == 257
        assert loaded.pad_token_id == tokenizer.pad_token_id == 258


@pytest.mark.parametrize("name", [*VISION, "qwen3-8b", "qwen3-tiny"])
def test_special_token_ids_of_qwen(cache_dir, name):
    config = transformers.AutoConfig.from_pretrained(resolve(f"random://{name}").path)
    tokenizer = load_tokenizer(f"random://{name}")
    for each in (config, config.get_text_config()):
        ids = each.bos_token_id, each.eos_token_id, each.pad_token_id
        assert ids == (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 258, 256)
    if name in VISION:
        names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        ids = [getattr(config, f"{kind}_token_id") for kind in ("vision_start", "vision_end", "image", "video")]
        assert tokenizer.convert_tokens_to_ids(names) == ids == [259, 260, 261, 262]
        assert tokenizer.encode("<|image_pad|>a") == [261, 97]


@pytest.mark.parametrize(("name", "rows"), [("qwen2.5-vl-tiny", 8), ("qwen3-vl-tiny", 8), ("qwen3-vl-8b", 14)])
def test_image_processor(cache_dir, name, rows):
    """A token of Qwen3-VL is 32 pixels wide. Tiny models see at most 64 tokens of an image."""
    processing = ImageProcessing.from_folder(resolve(f"random://{name}").path)
    assert processing.size_of(448, 448) == ImageSize(rows, rows)


def test_a_text_model_has_no_image_processor(cache_dir):
    assert ImageProcessing.from_folder(resolve("random://qwen3-tiny").path) is None


def test_tokens_are_bytes_and_text_survives(cache_dir):
    tokenizer = load_tokenizer("random://llama-tiny")
    generator = random.Random(0)
    code_points = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = [*TEXTS, *("".join(map(chr, generator.choices(code_points, k=200))) for _ in range(20))]
    for text in texts:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template(cache_dir):
    tokenizer = load_tokenizer("random://llama-tiny")
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = tokenizer.encode(text)
    assert ids[:6] == [256, 259, *b"user"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n\nhiassistant\n\n"


def test_chat_with_an_image(cache_dir):
    tokenizer = load_tokenizer("random://qwen3-vl-tiny")
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_seeds_share_a_folder_without_weights(cache_dir):
    first, second = resolve("random://llama-tiny?seed=1"), resolve("random://llama-tiny?seed=2")
    assert (first.random_seed, second.random_seed) == (1, 2)
    assert first.path == second.path
    assert not list(first.path.glob("*.safetensors"))


def test_works_offline(cache_dir, monkeypatch):
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    assert resolve("random://llama-tiny").random_seed == 0
