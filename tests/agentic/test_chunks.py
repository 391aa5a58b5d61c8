"""Conversations as chunks: what a chunker makes of messages, and what becomes of chunks as messages again."""

import copy

import pytest

from twinkle.errors import InvalidInputError
from twinkle_agentic.chunker import Chunker, NativeChunker
from twinkle_agentic.chunker.native import _hard_cut, _split_keep
from twinkle_agentic.data_format import Chunks

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"what": "cat"}}}
CONVERSATION = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is the cat?"},
        {"role": "assistant", "content": "", "reasoning_content": "I must look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "on the mat", "tool_call_id": "c1"},
        {"role": "assistant", "content": "On the mat."},
        {"role": "user", "content": "Thanks."},
    ]
}


def text(content, role="user", turn=1, **raw):
    return {"type": "text", "content": content, "role": role, "round": turn, **({"raw": raw} if raw else {})}


def test_a_conversation_becomes_chunks():
    assert NativeChunker()(CONVERSATION).chunks == [
        text("Be brief.", "system", 0),
        text("Where is the cat?"),
        text("I must look.", "assistant", kind="reasoning_content"),
        text(
            '{"name": "find", "arguments": {"what": "cat"}}',
            "assistant",
            kind="tool_call",
            tool_call=CALL,
            tool_call_id="c1",
        ),
        text("on the mat", "tool", tool_call_id="c1", message=3),
        text("On the mat.", "assistant"),
        text("Thanks.", turn=2),
    ]


def test_chunks_become_the_same_conversation_again():
    before = copy.deepcopy(CONVERSATION)
    assert NativeChunker()(CONVERSATION).to_trajectory() == before
    assert before == CONVERSATION


def test_answers_of_two_tools_stay_apart():
    """Also where they have no ids, as rollouts with a template make them."""
    messages = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert NativeChunker()({"messages": messages}).to_trajectory()["messages"] == messages


def test_media_return_to_where_they_were():
    blocks = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "What is it?"}]
    trajectory = {
        "messages": [
            {"role": "user", "content": blocks},
            {"role": "user", "content": "<image>", "images": ["b.png"]},
        ],
        "images": ["c.png"],
        "audios": ["d.wav"],
    }
    chunks = NativeChunker()(trajectory)
    assert [(chunk["type"], chunk["content"]) for chunk in chunks] == [
        ("image", "c.png"),
        ("audio", "d.wav"),
        ("image", "a.png"),
        ("text", "What is it?"),
        ("text", "<image>"),
        ("image", "b.png"),
    ]
    back = chunks.to_trajectory()
    assert (back["images"], back["audios"]) == (["c.png"], ["d.wav"])
    assert back["messages"] == [
        # equal roles in a row are one message
        {
            "role": "user",
            "content": [blocks[0], {"type": "text", "text": "What is it?\n\n<image>"}],
            "images": ["b.png"],
        }
    ]


def test_texts_of_equal_roles_are_joined_by_a_blank_line():
    chunks = Chunks([text("one"), text("two\n\n"), text("\nthree"), text("four", "assistant"), text("five", turn=2)])
    assert chunks.to_trajectory() == {
        "messages": [
            {"role": "user", "content": "one\n\ntwo\n\nthree"},
            {"role": "assistant", "content": "four"},
            {"role": "user", "content": "five"},
        ]
    }


def test_chunks_made_by_hand_may_leave_out_what_is_usual():
    chunks = Chunks([{"content": "one", "role": "user"}, {"content": "two", "role": "user", "raw": None}])
    assert chunks.to_trajectory() == {"messages": [{"role": "user", "content": "one\n\ntwo"}]}
    with pytest.raises(InvalidInputError, match="type: got 'table', allowed: text, image, video, audio"):
        Chunks([{"type": "table", "content": 1}]).to_trajectory()


CONDENSED = Chunks(
    [
        text("short", condensed=True, original="long"),
        text("as it was"),
        text("brief", condensed=True, original="lengthy"),
        text("ok", "tool", condensed=True, original="a long result"),
    ]
)


def test_condensed_texts_are_numbered():
    assert [message["content"] for message in CONDENSED.to_trajectory()["messages"]] == [
        "<block_1>short</block_1>\n\nas it was\n\n<block_2>brief</block_2>",
        "ok",
    ]
    assert {number: chunk["raw"]["original"] for number, chunk in CONDENSED.blocks().items()} == {
        1: "long",
        2: "lengthy",
    }


def test_the_wrapper_can_be_chosen():
    first, _ = CONDENSED.to_trajectory(block_wrapper=("[{n}:", "]"))["messages"]
    assert first["content"] == "[1:short]\n\nas it was\n\n[2:brief]"


@pytest.mark.parametrize("block", ["text", {"type": "table"}, {"text": "no type"}])
def test_unknown_blocks_are_refused(block):
    with pytest.raises(InvalidInputError, match=r"content: got .*, allowed: a block of the type text, image, "):
        NativeChunker()({"messages": [{"role": "user", "content": [block]}]})


# --- cutting ----------------------------------------------------------------------------------------------------------


def pieces(content, **options):
    chunker = NativeChunker(**options)
    found = [chunk["content"] for chunk in chunker({"messages": [{"role": "user", "content": content}]})]
    assert "".join(found) == content
    return found


def test_paragraphs_are_merged_up_to_the_size():
    assert pieces("aaaa\n\nbbbb\n\ncccc", chunk_size=12) == ["aaaa\n\nbbbb\n\n", "cccc"]
    assert pieces("aaaa\n\nbbbb\n\ncccc", chunk_size=11) == ["aaaa\n\n", "bbbb\n\ncccc"]
    assert pieces("aaaa\n\nbbbb", chunk_size=10) == ["aaaa\n\nbbbb"]


def test_long_paragraphs_are_cut_at_ever_finer_places():
    assert pieces("One two. Three four.\nxxxxxxxxxxxxxxx", chunk_size=10) == [
        "One two. ",
        "Three ",
        "four.\n",
        "xxxxxxxxxx",
        "xxxxx",
    ]


def test_own_separators():
    assert pieces("a|bb|ccc", chunk_size=3, separators=["|"]) == ["a|", "bb|", "ccc"]
    assert pieces("aaaaa|b", chunk_size=3, separators=["|"]) == ["aaa", "aa|", "b"]  # at last between characters


def test_passages_are_never_merged():
    question = "Read:\nPassage 1: ab\nPassage 2: cd"
    assert pieces(question, chunk_size=100) == [question]
    assert pieces(question, chunk_size=100, passage_boundary_re=r"^Passage \d:") == [
        "Read:\n",
        "Passage 1: ab\n",
        "Passage 2: cd",
    ]


def test_only_the_first_user_message_is_cut():
    messages = [
        {"role": "system", "content": "s" * 9},
        {"role": "user", "content": "u" * 9},
        {"role": "assistant", "content": "a" * 9},
        {"role": "user", "content": "v" * 9},
    ]
    found = [chunk["content"] for chunk in NativeChunker(chunk_size=5)({"messages": messages})]
    assert found == ["s" * 9, "u" * 5, "u" * 4, "a" * 9, "v" * 9]


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(ValueError, match=f"chunk_size: got {size}, allowed: a number of characters ≥ 1"):
        NativeChunker(size)


def test_wrong_options_are_refused():
    with pytest.raises(InvalidInputError, match=r"passage_boundary_re: .*a regular expression"):
        NativeChunker(passage_boundary_re="(")
    with pytest.raises(InvalidInputError, match="separators: got '; ', allowed: a list of texts"):
        NativeChunker(separators="; ")


def test_helpers_that_scripts_import():
    assert _split_keep("a. b. c", ". ") == ["a. ", "b. ", "c"]
    assert _split_keep("a. ", ". ") == ["a. "]
    assert _hard_cut("abcdefg", 3) == ["abc", "def", "g"]


def test_a_chunker_of_ones_own():
    class Words(Chunker):
        def __call__(self, trajectory):
            return Chunks([text(word) for word in trajectory["messages"][0]["content"].split()])

    assert len(Words()({"messages": [{"role": "user", "content": "a b"}]})) == 2
    with pytest.raises(TypeError, match="abstract"):
        Chunker()
