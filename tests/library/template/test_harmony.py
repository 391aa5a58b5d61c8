"""The form of conversations of gpt-oss, harmony: what is learnt of a conversation, and that its text comes back.

The tokenizer is made here. The template writes what the real one writes: a system message of its own, instructions for
the developer's role, channels, calls of tools, and thoughts for the last answer alone.
"""

import numpy as np
import pytest

from tests.support.texts.conversations import save_tokenizer
from twinkle.template import Template

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
HARMONY = """\
{{- "<|start|>system<|message|>You are ChatGPT.\\n\\nReasoning: " + (reasoning_effort or "medium") }}
{{- "\\n\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- set loop_messages = messages[1:] if messages[0].role in ["developer", "system"] else messages %}
{%- if messages[0].role in ["developer", "system"] %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + messages[0].content + "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages %}
    {%- if message.role == "assistant" %}
        {%- if "tool_calls" in message %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name }}
            {{- "<|channel|>commentary json<|message|>" + tool_call.arguments|tojson + "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""
PREAMBLE = (
    "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final.<|end|>"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "so", "reasoning_content": "hm"},
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder = tmp_path_factory.mktemp("harmony") / "saved"
    return Template(str(save_tokenizer(folder, SPECIAL, HARMONY, None, "<|return|>")))


def learnt(template: Template, feature: dict) -> str:
    return template.decode([label for label in feature["labels"] if label != -100])


def test_a_conversation_is_the_templates_text(template: Template) -> None:
    feature = template.encode({"messages": CHAT})
    assert template.decode(feature["input_ids"]) == (
        f"{PREAMBLE}<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>hello<|end|>"
        "<|start|>user<|message|>and?<|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>so<|return|>"
    )
    where = np.flatnonzero(feature["labels"] != -100)
    assert (feature["labels"][where] == feature["input_ids"][where + 1]).all()


def test_what_is_learnt(template: Template) -> None:
    """An answer is learnt from its channel on, as the model itself goes on behind the prompt for it."""
    text = learnt(template, template.encode({"messages": CHAT}))
    assert text == (
        "<|channel|>final<|message|>hello<|end|>"
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so<|return|>"
    )


def test_the_prompt_for_an_answer(template: Template) -> None:
    feature = template.encode({"messages": CHAT[:2]}, add_generation_prompt=True)
    assert template.decode(feature["input_ids"]).endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert (np.asarray(feature["labels"]) == -100).all()


def test_the_random_models_template() -> None:
    template = Template("random://gpt-oss-tiny")
    assert learnt(template, template.encode({"messages": CHAT[1:3]})) == "<|channel|>final<|message|>hello<|return|>"
    assert template.config.model_type == "gpt_oss"
