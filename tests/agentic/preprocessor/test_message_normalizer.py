"""MessageNormalizer: heartbeats, roles, the four forms of embedded calls, equal roles."""

import copy
import json

import pytest

from twinkle.data_format import pack_value
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor import MessageNormalizer, MessageSanityFilter


def user(content, **more):
    return {"role": "user", "content": content, **more}


def said(content, *calls, **more):
    made = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": json.dumps(arguments)}}
        for name, function, arguments in calls
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **more}


def tool(content, name):
    return {"role": "tool", "tool_call_id": name, "content": content}


def normalized(*messages, **more):
    row = {"messages": list(messages), **more}
    before = copy.deepcopy(row)
    kept, dropped = MessageNormalizer()([row])
    assert (row, dropped) == (before, [])
    (new,) = kept
    for message in new["messages"]:
        for call in message.get("tool_calls") or ():  # arguments are JSON text, compared without its spaces
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    return new["messages"]


def test_heartbeat_rounds_are_taken_out():
    beat = user("Read HEARTBEAT.md if it exists. If nothing needs attention, reply HEARTBEAT_OK.")
    idle, work = said("HEARTBEAT_OK"), said("The build is red. I restarted it.")
    question, answer = user("How are you today?"), said("Well.")
    assert normalized(beat, idle, question, answer) == [question, answer]
    assert normalized(question, answer, user("[heartbeat]"), said("ok")) == [question, answer]
    assert normalized(beat, work) == [beat, work]
    assert normalized(user("What is a heartbeat?"), answer) == [user("What is a heartbeat?"), answer]
    assert normalized(beat, idle) == []


def test_developer_becomes_system_and_equal_roles_become_one():
    assert normalized(
        {"role": "developer", "content": "Be kind."}, {"role": "system", "content": "Be brief."}, user("a"), user("b")
    ) == [{"role": "system", "content": "Be kind.\n\nBe brief."}, user("a\n\nb")]
    assert normalized(user("a"), said("x", reasoning_content="r"), said("y", reasoning_content="s")) == [
        user("a"),
        said("x\n\ny", reasoning_content="r\n\ns"),
    ]
    image = {"type": "image", "image": "cat.png"}
    assert normalized(user([image]), user("what?")) == [user([image, {"type": "text", "text": "what?"}])]
    two = [tool("1", "a"), tool("2", "b")]
    called = said("", ("a", "f", {}), ("b", "f", {}))
    assert normalized(user("q"), called, *two) == [user("q"), called, *two]
    split = [said("", ("a", "f", {})), said("", ("b", "g", {}))]
    assert normalized(user("q"), *split) == [user("q"), said("", ("a", "f", {}), ("b", "g", {}))]


def test_hermes():
    text = 'Let me look.\n<tool_call>\n{"name": "find", "arguments": {"what": "猫"}}\n</tool_call>'
    two = text + '<tool_call>{"name": "ls", "arguments": "{}"}</tool_call>'
    answer = "<tool_response>\nhere\n</tool_response>"
    assert normalized(user("q"), said(text), user(answer), said("Here.")) == [
        user("q"),
        said("Let me look.", ("call_1", "find", {"what": "猫"})),
        tool("here", "call_1"),
        said("Here."),
    ]
    assert normalized(
        user("q"), said(two), user(answer + "<tool_response>a b</tool_response> And now?"), said("ok")
    ) == [
        user("q"),
        said("Let me look.", ("call_1", "find", {"what": "猫"}), ("call_2", "ls", {})),
        tool("here", "call_1"),
        tool("a b", "call_2"),
        user("And now?"),
        said("ok"),
    ]
    answered = normalized(user("q"), said(text), {"role": "tool", "name": "find", "content": "here"})[2]
    assert answered == {**tool("here", "call_1"), "name": "find"}
    broken = said("<tool_call>{not json}</tool_call>")
    assert normalized(user("q"), broken) == [user("q"), broken]


def test_react():
    whole = (
        'Thought: I need the weather.\nAction: weather\nAction Input: {"city": "Paris"}\nObservation: 21 degrees\n'
        "Thought: Now I know.\nFinal Answer: It is 21 degrees."
    )
    assert normalized(user("q"), said(whole)) == [
        user("q"),
        said("I need the weather.", ("call_1", "weather", {"city": "Paris"})),
        tool("21 degrees", "call_1"),
        said("Now I know.\n\nIt is 21 degrees."),
    ]
    assert normalized(
        user("q"), said("Action: search\nAction Input: cats"), user("Observation: many"), said("Many.")
    ) == [
        user("q"),
        said("", ("call_1", "search", {"input": "cats"})),
        tool("many", "call_1"),
        said("Many."),
    ]
    assert normalized(user("q"), said("Thought: hm\nAction: stop"))[1] == said("hm", ("call_1", "stop", {}))
    plain = said("Thought: this is only a word.\nThe end.")
    assert normalized(user("q"), plain) == [user("q"), plain]


def test_vcp():
    text = (
        "好的。\n<<<[TOOL_REQUEST]>>>\nmaid:「始」小克「末」,\ntool_name:「始」Search「末」,\n"
        "query:「始」猫, 狗「末」\n<<<[END_TOOL_REQUEST]>>>"
    )
    nameless = said("<<<[TOOL_REQUEST]>>>query:「始」猫「末」<<<[END_TOOL_REQUEST]>>>" + text)
    assert normalized(user("q"), nameless)[1]["content"].startswith("<<<[TOOL_REQUEST]>>>query")
    result = "[[VCP调用结果信息汇总:\n- 找到两只猫\nVCP调用结果结束]]"
    assert normalized(user("找猫"), said(text), user(result), said("两只。")) == [
        user("找猫"),
        said("好的。", ("call_1", "Search", {"query": "猫, 狗"})),
        tool(result, "call_1"),
        said("两只。"),
    ]


def test_cline():
    text = "I will read it.\n<read_file>\n<path>src/a.py</path>\n</read_file>"
    assert normalized(
        user("Fix a.py"),
        said(text),
        user("[read_file for 'src/a.py'] Result:\nprint(1)"),
        said("<attempt_completion><result>Done: it prints 1.</result></attempt_completion>"),
    ) == [
        user("Fix a.py"),
        said("I will read it.", ("call_1", "read_file", {"path": "src/a.py"})),
        tool("print(1)", "call_1"),
        said("<attempt_completion><result>Done: it prints 1.</result></attempt_completion>"),
    ]
    html = said("Use <b>bold</b> and <path>x</path>.")
    assert normalized(user("q"), html) == [user("q"), html]


def test_a_final_answer_after_calls_is_text():
    call = "<execute_command><command>ls</command></execute_command>"
    text = f"{call}<attempt_completion><result>ok</result></attempt_completion>"
    assert normalized(user("q"), said(text))[1] == said("ok", ("call_1", "execute_command", {"command": "ls"}))


def test_calls_are_not_read_in_thoughts_nor_beside_real_calls():
    thought = said('<think>Maybe <tool_call>{"name": "f"}</tool_call>?</think>No.')
    assert normalized(user("q"), thought) == [user("q"), thought]
    unclosed = said('<tool_call>{"name": "f"}</tool_call><think>Was that right')
    assert normalized(user("q"), unclosed) == [user("q"), unclosed]
    behind = said('<think>Yes.</think><tool_call>{"name": "f"}</tool_call>')
    assert normalized(user("q"), behind)[1] == said("<think>Yes.</think>", ("call_1", "f", {}))
    real = said('<tool_call>{"name": "f"}</tool_call>', ("x", "g", {}))
    assert normalized(user("q"), real) == [user("q"), real]


def test_an_answer_that_is_no_result_stays_with_the_user():
    call = said('<tool_call>{"name": "f"}</tool_call>')
    assert normalized(user("q"), call, user("Never mind."), said("ok"))[2] == user("Never mind.")


@pytest.mark.parametrize(
    "row", [{}, {"messages": None}, {"messages": []}, {"messages": [3]}, {"messages": [{"role": "x"}]}]
)
def test_rows_without_valid_messages_are_left_alone(row):
    assert MessageNormalizer()([row]) == ([row], [])


def test_key_rounds_must_come_later():
    row = {"messages": [user("a"), user("b"), said("c")], "user_data": [("key_rounds", pack_value([2]))]}
    with pytest.raises(InvalidInputError, match="before IntentClassifier"):
        MessageNormalizer()([row])


def test_columns_and_a_following_check():
    text = '<tool_call>{"name": "find", "arguments": {"what": "cat"}}</tool_call>'
    answer = "The cat sits on the roof of the house beside the chimney."
    messages = [user("Where is my cat?"), said(text), user("<tool_response>roof</tool_response>"), said(answer)]
    kept, _ = MessageNormalizer()({"messages": [messages], "id": [7]})
    assert kept[0]["id"] == 7
    assert MessageSanityFilter()(kept) == (kept, [])
