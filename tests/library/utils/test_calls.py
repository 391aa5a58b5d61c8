"""Calls with the arguments that a function takes, dotted attributes, components by name, and other small helpers."""

import functools
from types import SimpleNamespace

import pytest

from twinkle import reward
from twinkle.errors import UnknownNameError
from twinkle.reward import FormatReward, MathReward, Reward
from twinkle.utils import (
    call_with_supported_kwargs,
    construct_class,
    deep_getattr,
    ensure_hccl_socket_env,
    filter_from_config_kwargs,
    has_signature_parameter,
    is_last_rank,
    is_valid_ipv6_address,
    signature_info,
)


def plain(a, b=2, *, c=3):
    return a, b, c


def open_ended(a, *args, **options):
    return a, args, options


def test_signatures():
    assert signature_info(plain) == (False, frozenset("abc"))
    assert signature_info(open_ended) == (True, frozenset("a"))
    assert signature_info(functools.partial(plain, c=4)) == (False, frozenset("abc"))
    assert signature_info(SimpleNamespace)[0]
    assert has_signature_parameter(plain, "c")
    assert not has_signature_parameter(plain, "d")
    assert has_signature_parameter(open_ended, "d")

    class Unhashable:
        __hash__ = None

        def __call__(self, a):
            return a

    assert signature_info(Unhashable()) == (False, frozenset("a"))


def test_calls_drop_what_a_function_does_not_take():
    assert call_with_supported_kwargs(plain, 1, c=4, d=5) == (1, 2, 4)
    assert call_with_supported_kwargs(open_ended, 1, 2, d=5) == (1, (2,), {"d": 5})


def test_attributes_by_dotted_names():
    owner = SimpleNamespace(a=SimpleNamespace(b={"c": SimpleNamespace(d=0), "items": 7}))
    assert deep_getattr(owner, "a.b.c.d") == 0
    assert deep_getattr(owner, "a.b.items") == 7  # a key before the method of dicts
    assert deep_getattr(owner, "a.x.y") is None
    assert deep_getattr(owner, "a.b.c.e", default=3) == 3


def test_arguments_of_loading_are_left_out():
    given = {"revision": "main", "device_map": "auto", "token": "t", "trust_remote_code": True, "cache_dir": "/tmp"}
    assert filter_from_config_kwargs({**given, "dtype": "auto", "attn_implementation": "sdpa"}) == {
        "dtype": "auto",
        "attn_implementation": "sdpa",
    }


def test_components():
    built = construct_class("MathReward", Reward, reward, ground_truth_key="answer")
    assert isinstance(built, MathReward)
    assert isinstance(construct_class(FormatReward, Reward, [reward]), FormatReward)
    assert construct_class(built, Reward, reward) is built
    assert construct_class(plain, Reward, reward) is plain
    with pytest.raises(UnknownNameError, match="MathRewards"):
        construct_class("MathRewards", Reward, [SimpleNamespace(a=1), reward])
    with pytest.raises(UnknownNameError, match="answer_key"):
        construct_class("MathReward", Reward, reward, answer_key="a")


def test_addresses():
    for address in ("::1", "fe80::1", "2001:db8::8a2e:370:7334"):
        assert is_valid_ipv6_address(address)
    for text in ("127.0.0.1", "localhost", "::1:80000", "", "[::1]"):
        assert not is_valid_ipv6_address(text)


def test_ranks(monkeypatch):
    for rank, last in (("0", False), ("1", True)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert is_last_rank() == last


def test_variables_of_another_process():
    environ = {"HCCL_IF_BASE_PORT": "1"}
    ensure_hccl_socket_env(29500, environ)
    assert environ == {
        "HCCL_IF_BASE_PORT": "1",
        "HCCL_HOST_SOCKET_PORT_RANGE": "45500-46011",  # 29500 modulo 8000 is 5500
        "HCCL_NPU_SOCKET_PORT_RANGE": "55500-56011",
    }
