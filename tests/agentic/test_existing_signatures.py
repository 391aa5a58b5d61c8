"""The arguments of the agents' classes have the names, the order and the defaults that existing scripts rely on.

``NEEDED`` is an argument without a default, ``ANY`` a default that scripts do not rely on. Further arguments may follow
if they have a default.
"""

import inspect
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("datasets")

NEEDED = inspect.Parameter.empty
ANY = object()

_SKIPPED = ("system", "tool", "assistant")
_TRACES: dict[str, Any] = {"trace_dir": None, "trace_callback": None, "success_callback": None}
_TURNS: dict[str, Any] = {"sampling_params": None, "max_turns": 6, "max_trajectory_tokens": None, **_TRACES}

SIGNATURES: dict[str, dict[str, Any]] = {
    "tools.tool_manager:ToolManager": {"tools": None},
    "tools.extract_condensed:ExtractCondensed": {"chunks": NEEDED},
    "envs.base:StepResult": {"observation": "", "reward": 0.0, "done": False, "info": ANY},
    "envs.env_tool:EnvTool": {"env": NEEDED, "tool_name": "env_action", "description": ANY, "parameters": None},
    "envs.openenv:OpenEnv": {
        "env_name": None,
        "env_cls": None,
        "env_kwargs": None,
        "action_cls": None,
        "action_mapper": None,
    },
    "envs:OpenEnvClient": {
        "env_name": None,
        "env_cls": None,
        "base_url": None,
        "action_cls": None,
        "action_mapper": None,
        "tools": None,
        "reset_kwargs": None,
        "connect_timeout_s": 10.0,
        "message_timeout_s": 120.0,
        "client_kwargs": None,
    },
    "envs:EnvPool": {"pool_size": 32, "device_mesh": None, "env_kwargs": None},
    "envs:EnvPool.step_batch": {"indices": NEEDED, "tool_names": NEEDED, "arguments_list": NEEDED},
    "envs:EnvPoolAdapter": {"pool": NEEDED, "idx": NEEDED},
    "envs.agentenv:AgentEnv": {
        "template": NEEDED,
        "api_url": None,
        "api_key": None,
        "sandbox_timeout": 300,
        "command_timeout": 120,
        "setup_commands": None,
        "sandbox_envs": None,
        "metadata": None,
        "refresh_timeout": True,
        "include_default_tools": True,
    },
    "rollout.multi_turn:MultiTurnRollout": {"sampler": NEEDED, "template": NEEDED, "tool_manager": None, **_TURNS},
    "rollout.api_multi_turn:APIMultiTurnRollout": {
        "api": NEEDED,
        "tool_manager": NEEDED,
        "sampling_params": None,
        "max_turns": 6,
        "concurrency": 8,
        "extra_body": None,
        **_TRACES,
    },
    "rollout.multi_turn_condense:MultiTurnCondenseRollout": {
        "sampler": NEEDED,
        "template": NEEDED,
        "tool_manager": NEEDED,
        "chunker": NEEDED,
        "condenser": NEEDED,
        **_TURNS,
        "condenser_kwargs": None,
        "post_compress_callback": None,
    },
    "data_format:Chunks": {"chunks": NEEDED},
    "data_format:Chunks.to_trajectory": {"block_wrapper": ("<block_{n}>", "</block_{n}>")},
    "chunker.native:NativeChunker": {"chunk_size": 1024, "separators": None, "passage_boundary_re": None},
    "condenser.model:ModelCondenser": {
        "sampler": NEEDED,
        "compression_ratio": 2.0,
        "sampling_params": None,
        "system_prompt": None,
        "user_prompt_template": None,
        "min_chars": 200,
        "min_budget_chars": 250,
        "template": None,
        "skip_roles": _SKIPPED,
        "skip_pattern": None,
        "related_query": None,
        "rounds": None,
        "batch_size": None,
        "lora_path": None,
    },
    "condenser.keyword:KeywordCondenser": {
        "num_relations": 3,
        "max_first_sentence_chars": 160,
        "num_keywords": 8,
        "compression_ratio": 4.0,
        "spacy_model": "en_core_web_sm",
        "min_chars": 200,
        "skip_roles": _SKIPPED,
        "rounds": None,
    },
    "protocol.openai:OpenAI": {"model": NEEDED, "api_key": None, "base_url": None, "client_kwargs": None},
    "reward.f1:F1Reward": {"answer_pattern": None},
    "reward:CoTReward": {},
    "reward:ToolExploreReward": {"f1_threshold": 0.5, "answer_pattern": None},
    "sampler.router_sampler:RouterSampler": {
        "sampler": NEEDED,
        "fallback_endpoint": NEEDED,
        "fallback_model": "default",
        "fallback_api_key": "",
        "method": "entropy",
        "threshold": 2.0,
        "top_k_logprobs": 10,
        "fallback_temperature": 0.7,
        "fallback_max_tokens": 4096,
        "timeout": 120.0,
    },
    "preprocessor:QualityPreprocessor": {"pipeline": NEEDED, "dropped_log_path": ""},
    "preprocessor:FixUnicodeFilter": {"normalization": "NFC", "role": "assistant"},
    "preprocessor:RemoveRepeatSentencesFilter": {
        "lowercase": False,
        "ignore_special_character": True,
        "role": "assistant",
    },
    "preprocessor:SpecialCharsFilter": {"max_ratio": 0.25, "role": "assistant"},
    "preprocessor:TokenNumFilter": {
        "hf_tokenizer": "Qwen/Qwen2.5-0.5B",
        "min_num": 10,
        "max_num": 8192,
        "role": "assistant",
    },
    "preprocessor:HardFilter": {
        "min_user_chars": 10,
        "min_user_chars_cjk": 6,
        "min_assistant_chars_2turn": 80,
        "min_thinking_chars": 200,
        "allow_incomplete_role": False,
        "system_deny_keywords": ANY,
        "max_chars_per_round": ANY,
        "max_total_chars": ANY,
        "max_rounds": ANY,
    },
    "preprocessor:DeadLoopFilter": {
        "hesitation_density_threshold": 7.0,
        "cascade_window": 800,
        "cascade_threshold": 5,
        "repetition_threshold": 0.45,
        "ngram_size": 8,
        "ngram_min_words": 30,
        "think_hesitation_density_threshold": 15,
        "think_cascade_threshold": 20,
        "think_repetition_threshold": 0.65,
    },
    "preprocessor:DedupFilter": {"prefix_chars": 100, "asst_chars": 100},
    "preprocessor:IntentClassifier": {"detectors": None, "intent_field": "intent", "drop_no_key_rounds": True},
    "preprocessor:MessageNormalizer": {},
    "preprocessor:MessageSanityFilter": {
        "check_role_order": True,
        "check_tool_matching": True,
        "check_content_integrity": True,
        "check_lang_match": True,
        "check_agent_min_visible": True,
        "trim_to_assistant": True,
        "filter_sensitive": True,
        "sensitive_words_file": None,
        "extra_sensitive_words": None,
        "min_turns": 2,
        "max_msg_chars": 80000,
        "min_agent_visible_chars": 50,
    },
    "preprocessor:ModelFilter": {"patterns": None, "field": "model_id"},
    "preprocessor:PIIPresidioFilter": {
        "languages": ("en", "zh"),
        "spacy_models": None,
        "entity_strategy": None,
        "default_strategy": "mask",
        "score_threshold": 0.5,
        "roles": ("user", "assistant", "system"),
        "consistency": True,
        "persistent_consistency": False,
        "hash_salt": "",
        "record_counts": False,
    },
    "preprocessor:RefuseFilter": {"check_window": 600},
    "preprocessor:TokenSoupFilter": {
        "replacement_char_ratio": 0.02,
        "control_char_ratio": 0.01,
        "private_use_ratio": 0.03,
        "special_token_count": 20,
        "script_chaos_threshold": 0.55,
        "script_chaos_min_chars": 40,
        "max_chars": 0,
    },
    "preprocessor:ScoreFilter": {
        "template": NEEDED,
        "backend": NEEDED,
        "scorers": NEEDED,
        "intents": None,
        "keep_if_no_key_rounds": False,
        "drop_row_on_any_fail": True,
        "max_prompt_tokens": 1024,
        "trace_dir": ANY,
        "trace_callback": None,
        "success_callback": None,
    },
    "preprocessor:ChrMinScorer": {"threshold": 0.47},
    "preprocessor:SIFDScorer": {"ifd_threshold": None},
    "preprocessor:OpenAIBackend": {"endpoint": NEEDED, "model": "default", "api_key": "", "timeout": 120},
    "preprocessor:SamplerBackend": {"sampler": NEEDED, "embed_endpoint": "", "embed_model": "bge-m3"},
}
BY_NAME_ONLY = {"condenser.model:ModelCondenser": 2}  # how many arguments may be given by position


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_and_their_defaults(path: str) -> None:
    module, _, name = path.partition(":")
    found: Any = import_module(f"twinkle_agentic.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    expected = SIGNATURES[path]
    parameters = [each for each in inspect.signature(found).parameters.values() if each.name != "self"]
    assert [each.name for each in parameters[: len(expected)]] == list(expected)
    for each in parameters[: len(expected)]:
        if expected[each.name] is not ANY:
            assert each.default == expected[each.name], each.name
    for place, each in enumerate(parameters):
        if place < BY_NAME_ONLY.get(path, len(expected)):
            assert each.kind is each.POSITIONAL_OR_KEYWORD, each.name
        else:
            assert each.default is not NEEDED, each.name
