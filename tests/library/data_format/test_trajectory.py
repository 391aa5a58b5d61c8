"""A trajectory's user data: written as JSON, and read back whatever program wrote them."""

import json
import subprocess
import sys

import twinkle.data_format
from twinkle.data_format import pack_value, user_data_get


def test_values_survive():
    for value in (1, 1.5, "七", [1, {"a": None}], True):
        assert user_data_get([("key", pack_value(value))], "key") == value


def test_text_is_not_escaped_and_strangers_become_text():
    assert pack_value("七") == '"七"'
    assert json.loads(pack_value({"at": 1j})) == {"at": "1j"}


def test_first_pair_with_the_key():
    items = [("other", "1"), ["key", "2"], ("key", "3"), ("key",), "key", ("key", "4", "5")]
    assert user_data_get(items, "key") == 2
    assert user_data_get(items, "missing", 9) == 9


def test_notes_of_others():
    assert user_data_get([("key", "not json")], "key") == "not json"
    assert user_data_get([("key", 5)], "key") == 5
    assert user_data_get(None, "key", 1) == 1
    assert user_data_get({"key": 2}, "key", 1) == 1


def test_the_package_is_light():
    code = "import sys, twinkle.data_format; print({'numpy', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_public_names():
    assert twinkle.data_format.__all__ == sorted(set(twinkle.data_format.__all__))
    assert all(hasattr(twinkle.data_format, name) for name in twinkle.data_format.__all__)
