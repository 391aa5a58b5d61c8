"""Chat templates with the layouts of well-known models, each with a plain function that writes the same text by hand.

The function is the slow reference. It returns, piece by piece, the text of a conversation and whether the piece is to
be learned. It shares no code with the library.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

Pieces = list[tuple[str, bool]]  # (text, whether it is learned)


@dataclass(frozen=True)
class Layout:
    name: str
    source: str
    reference: Callable[[list[dict], list[dict] | None, bool], Pieces]  # messages, tools, enable_thinking
    special: tuple[str, ...]
    bos: str | None = None
    eos: str = "<|im_end|>"
    tools: bool = False  # whether it can render tools, calls and results
    system: bool = True


def calls_of(message: dict) -> list[dict]:
    return [call["function"] for call in message.get("tool_calls") or []]


def arguments_of(call: dict) -> dict:
    arguments = call["arguments"]
    return (json.loads(arguments) if arguments else {}) if isinstance(arguments, str) else arguments


def inline_thought(message: dict) -> str:
    """Return the text for a template without support for thinking: the thought is part of the content."""
    thought = message.get("reasoning_content")
    content = message.get("content") or ""
    return f"<think>\n{thought}\n</think>\n\n{content}" if thought else content


def separated(message: dict) -> tuple[str, str]:
    """Return (thought, answer), wherever the message has its thought."""
    content = message.get("content") or ""
    if isinstance(message.get("reasoning_content"), str):
        return message["reasoning_content"], content
    if "</think>" in content:
        thought, answer = content.split("</think>", 1)
        return thought.split("<think>")[-1].strip("\n"), answer.lstrip("\n")
    return "", content


# --- ChatML, plain and with the assistant's part marked -----------------------------------------------------------

CHATML_SOURCE = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def chatml(messages, tools, thinking, *, learn_newline: bool = True) -> Pieces:
    pieces: Pieces = []
    for message in messages:
        said = message["role"] == "assistant"
        text = inline_thought(message) if said else message["content"]
        pieces += [(f"<|im_start|>{message['role']}\n", False), (f"{text}<|im_end|>", said)]
        pieces.append(("\n", said and learn_newline))
    return pieces


MARKED_SOURCE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{{ '<|im_end|>' }}{% endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def marked(messages, tools, thinking) -> Pieces:
    return chatml(messages, tools, thinking, learn_newline=False)


# --- Qwen3: tools in the system turn, thoughts dropped before the last question, calls as JSON in tags ------------

QWEN3_SOURCE = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- 'TOOLS:' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if loop.index0 > ns.last_query %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
                {{- content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""


def qwen3(messages, tools, thinking, *, steady: bool = False) -> Pieces:
    pieces: Pieces = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        shown = system + "\n\n" if system is not None else ""
        pieces.append((f"<|im_start|>system\n{shown}TOOLS:{listed}<|im_end|>\n", False))
    elif system is not None:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last_query = questions[-1] if questions else len(messages) - 1
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "user" or (role == "system" and i > 0):
            pieces.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", False))
        elif role == "assistant":
            thought, answer = separated(message)
            pieces.append(("<|im_start|>assistant\n", False))
            if i > last_query and (steady or i == len(messages) - 1 or thought):
                if not thinking and not thought.strip("\n"):
                    pieces.append(("<think>\n\n</think>\n\n", False))  # already part of the generation prompt
                else:
                    pieces.append(("<think>\n" + thought.strip("\n") + "\n</think>\n\n", True))
                pieces.append((answer.lstrip("\n"), True))
            else:
                pieces.append((answer, True))
            for k, call in enumerate(calls_of(message)):
                gap = "\n" if k or answer else ""
                written = json.dumps(arguments_of(call), ensure_ascii=False)
                text = f'{gap}<tool_call>\n{{"name": "{call["name"]}", "arguments": {written}}}\n</tool_call>'
                pieces.append((text, True))
            pieces.append(("<|im_end|>\n", True))
        elif role == "tool":
            before = "" if i and messages[i - 1]["role"] == "tool" else "<|im_start|>user"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            text = f"{before}\n<tool_response>\n{content}\n</tool_response>" + ("<|im_end|>\n" if last else "")
            pieces.append((text, False))
    return pieces


def qwen3_steady(messages, tools, thinking) -> Pieces:
    return qwen3(messages, tools, thinking, steady=True)


# --- Llama 3: a header for each role, trimmed content, calls as bare JSON ------------------------------------------

LLAMA3_SOURCE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{%- for t in tools %}{{- t | tojson(indent=2) + '\n\n' }}{%- endfor %}{%- endif %}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- for tool_call in message.tool_calls %}
            {{- '{"name": "' + tool_call.function.name + '", "parameters": ' }}
            {{- tool_call.function.arguments | tojson + '}' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""


def llama3(messages, tools, thinking) -> Pieces:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"].strip(), messages[1:]
    shown = "".join(json.dumps(tool, ensure_ascii=False, indent=2) + "\n\n" for tool in tools or [])
    pieces: Pieces = [(f"<|bos|><|start_header_id|>system<|end_header_id|>\n\n{shown}{system}<|eot_id|>", False)]
    for message in messages:
        if message["role"] == "tool":
            text = json.dumps(message["content"], ensure_ascii=False)
            pieces.append((f"<|start_header_id|>ipython<|end_header_id|>\n\n{text}<|eot_id|>", False))
        elif calls_of(message):
            written = "".join(
                f'{{"name": "{call["name"]}", "parameters": {json.dumps(arguments_of(call), ensure_ascii=False)}}}'
                for call in calls_of(message)
            )
            pieces.append(("<|start_header_id|>assistant<|end_header_id|>\n\n", False))
            pieces.append((written + "<|eot_id|>", True))
        else:
            said = message["role"] == "assistant"
            pieces.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
            text = inline_thought(message) if said else message["content"]
            pieces.append((text.strip() + "<|eot_id|>", said))
    return pieces


# --- Llama 2: no header and no generation prompt; the answer follows [/INST] --------------------------------------

LLAMA2_SOURCE = """{% for message in messages %}{% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}
{%- elif message['role'] == 'system' %}{{- '<<SYS>>' + message['content'].strip() + '<</SYS>>' }}
{%- else %}{{- ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""


def llama2(messages, tools, thinking) -> Pieces:
    pieces: Pieces = []
    for message in messages:
        if message["role"] == "user":
            pieces.append((f"<s>[INST] {message['content'].strip()} [/INST]", False))
        elif message["role"] == "system":
            pieces.append((f"<<SYS>>{message['content'].strip()}<</SYS>>", False))
        else:
            pieces.append((f" {inline_thought(message).strip()} </s>", True))
    return pieces


# --- Zephyr: the generation prompt inside the loop, white space from the template's own lines ---------------------

ZEPHYR_SOURCE = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def zephyr(messages, tools, thinking) -> Pieces:
    pieces: Pieces = []
    for message in messages:
        said = message["role"] == "assistant"
        text = inline_thought(message) if said else message["content"]
        pieces += [(f"<|{message['role']}|>\n", False), (f"{text}</s>\n", said)]
    return pieces


# --- DeepSeek R1: thinking opened by the prompt, dropped from every turn; no header after a tool's answer ----------

R1_SOURCE = """{{- bos_token }}
{%- for message in messages %}{% if message['role'] == 'system' %}{{- message['content'] }}{% endif %}{% endfor %}
{%- set ns = namespace(after_tool=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.after_tool = false %}{{- '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- for other in messages[loop.index:] %}{%- set ns.later = loop.length %}{%- endfor %}
        {%- if not ns.after_tool %}{{- '<|Assistant|>' }}{%- endif %}
        {%- set ns.after_tool = false %}
        {{- message['content'].split('</think>')[-1] }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|call|>' + call['function']['name'] + '\n' }}
            {{- call['function']['arguments'] | tojson + '<|call_end|>' }}
        {%- endfor %}
        {{- '<|eos|>' }}
    {%- elif message['role'] == 'tool' %}
        {%- set ns.after_tool = true %}
        {{- '<|result|>' + message['content'] + '<|result_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_tool %}{{- '<|Assistant|><think>\n' }}{%- endif %}"""


def r1(messages, tools, thinking) -> Pieces:
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    pieces: Pieces = [("<|bos|>" + system, False)]
    for i, message in enumerate(messages):
        if message["role"] == "user":
            pieces.append(("<|User|>" + message["content"], False))
        elif message["role"] == "tool":
            pieces.append((f"<|result|>{message['content']}<|result_end|>", False))
        elif message["role"] == "assistant":
            if i == 0 or messages[i - 1]["role"] != "tool":
                pieces.append(("<|Assistant|>", False))
            pieces.append((inline_thought(message).split("</think>")[-1], True))
            for call in calls_of(message):
                written = json.dumps(arguments_of(call), ensure_ascii=False)
                pieces.append((f"<|call|>{call['name']}\n{written}<|call_end|>", True))
            pieces.append(("<|eos|>", True))
    return pieces


# --- Gemma: the assistant is called model, the system text joins the first question; written with a macro and a count

GEMMA_SOURCE = """{%- macro turn(role, text) %}{{ '<start_of_turn>' + role + '\n' + text | trim + '<end_of_turn>\n' }}
{%- endmacro %}
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\n\n' %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set first = '' %}{%- set rest = messages %}
{%- endif %}
{%- for i in range(rest | length) %}
    {%- set message = rest[i] %}
    {%- set before = rest[i - 1] %}
    {%- if message.role == 'assistant' %}{{- turn('model', message.content) }}
    {%- else %}{{- turn(message.role, (first if i == 0 else '') + message.content) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""


def gemma(messages, tools, thinking) -> Pieces:
    first = ""
    if messages[0]["role"] == "system":
        first, messages = messages[0]["content"] + "\n\n", messages[1:]
    pieces: Pieces = [("<bos>", False)]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            pieces.append(("<start_of_turn>model\n", False))
            pieces.append((inline_thought(message).strip() + "<end_of_turn>\n", True))
        else:
            text = ((first if i == 0 else "") + message["content"]).strip()
            pieces.append((f"<start_of_turn>{message['role']}\n{text}<end_of_turn>\n", False))
    return pieces


# --- A thought in every turn, empty or not, and an empty one in the prompt when thinking is off ----------------------

THINKER_SOURCE = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\n<think>' + (message.thinking or '') + '</think>\n' + message.content }}
    {%- else %}
        {{- '<|' + message.role + '|>\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
    {%- if not enable_thinking %}{{- '<think></think>\n' }}{%- endif %}
{%- endif %}"""


def thinker(messages, tools, thinking) -> Pieces:
    pieces: Pieces = []
    for message in messages:
        pieces.append((f"<|{message['role']}|>\n", False))
        if message["role"] == "assistant":
            thought, answer = separated(message)
            pieces.append((f"<think>{thought}</think>\n", thinking or bool(thought)))
            pieces.append((answer, True))
        else:
            pieces.append((message["content"], False))
    return pieces


# --- DeepSeek V4, which has no Jinja template; the wording of its tools' introduction is the library's ----------------


def deepseek_v4(messages, tools, thinking) -> Pieces:
    from twinkle.template.dsml import _TOOLS

    pieces: Pieces = [("<｜begin▁of▁sentence｜>", False)]
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        pieces.append((f"\n\n{_TOOLS}{listed}\n", False))
    asking = [i for i, message in enumerate(messages) if message["role"] in ("user", "tool")]
    # The last user turn begins after the last message that is not the user's.
    last = max(asking)
    while last - 1 in asking:
        last -= 1
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        thinks = thinking and (bool(tools) or i >= last)
        if role == "system":
            pieces.append((content, False))
        elif role == "assistant":
            thought, answer = separated(message)
            calls = []
            for call in calls_of(message):
                calls.append(f'<｜DSML｜invoke name="{call["name"]}">\n')
                for key, value in arguments_of(call).items():
                    kind = "true" if isinstance(value, str) else "false"
                    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    calls.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{shown}</｜DSML｜parameter>\n')
                calls.append("</｜DSML｜invoke>\n")
            block = "\n\n<｜DSML｜tool_calls>\n" + "".join(calls) + "</｜DSML｜tool_calls>" if calls else ""
            said = (thought + "</think>" if thinks else "") + answer + block + "<｜end▁of▁sentence｜>"
            pieces.append((said, True))
        else:
            pieces.append(("\n\n" if i - 1 in asking else "<｜User｜>", False))
            pieces.append((content if role == "user" else f"<tool_result>{content}</tool_result>", False))
            if i + 1 < len(messages) and messages[i + 1]["role"] == "assistant":
                pieces.append(("<｜Assistant｜>" + ("<think>" if thinks else "</think>"), False))
    return pieces


_V4_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_QWEN_TOKENS = (*_CHATML_TOKENS, "<think>", "</think>", "<tool_call>", "</tool_call>")
_LLAMA3_TOKENS = ("<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_R1_TOKENS = (
    *("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<think>", "</think>"),
    *("<|call|>", "<|call_end|>", "<|result|>", "<|result_end|>"),
)

LAYOUTS = [
    Layout("chatml", CHATML_SOURCE, chatml, _CHATML_TOKENS),
    Layout("marked", MARKED_SOURCE, marked, _CHATML_TOKENS),
    Layout("qwen3", QWEN3_SOURCE, qwen3, _QWEN_TOKENS, tools=True),
    Layout("llama3", LLAMA3_SOURCE, llama3, _LLAMA3_TOKENS, bos="<|bos|>", eos="<|eot_id|>", tools=True),
    Layout("llama2", LLAMA2_SOURCE, llama2, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    Layout("zephyr", ZEPHYR_SOURCE, zephyr, ("</s>",), eos="</s>"),
    Layout("r1", R1_SOURCE, r1, _R1_TOKENS, bos="<|bos|>", eos="<|eos|>", tools=True),
    Layout(
        "gemma", GEMMA_SOURCE, gemma, ("<bos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<end_of_turn>"
    ),
    Layout("thinker", THINKER_SOURCE, thinker, ("<|user|>", "<|system|>", "<|assistant|>", "<think>", "</think>")),
]

# Layouts of template classes that do more than apply their tokenizer's chat template.
DEEPSEEK_V4 = Layout("deepseek_v4", "", deepseek_v4, _V4_TOKENS, bos=_V4_TOKENS[0], eos=_V4_TOKENS[1], tools=True)
STEADY_QWEN3 = Layout("steady_qwen3", QWEN3_SOURCE, qwen3_steady, _QWEN_TOKENS, tools=True)
