"""Nonces of held KV: what travels with a handle, who has which slot, and what stands in memory."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

from headrace_worker.kv.nonce import NOTHING, NOWHERE, PARAM, SLOT_BYTES, Area, Inbox, Nonce, Slots

ADDRESSES = {0: 0x7F00_0000_1000, 1: 0x7F00_0000_2008}
VALUE = 2**62 + 1
"""More than a JSON reader keeps that turns numbers into floats."""


def in_memory(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def test_a_nonce_survives_its_journey() -> None:
    nonce = Nonce(VALUE, ADDRESSES)
    handle = json.loads(json.dumps({"remote_host": "10.0.0.1", PARAM: nonce.as_param()}), parse_int=float)
    assert Nonce.from_params(handle) == nonce


@pytest.mark.parametrize("params", [None, {}, {"remote_host": "10.0.0.1"}], ids=str)
def test_a_plain_vllm_sends_no_nonce(params: dict[str, Any] | None) -> None:
    assert Nonce.from_params(params) is None


@pytest.mark.parametrize(
    "param",
    [
        pytest.param("0x1", id="text"),
        pytest.param({}, id="empty"),
        pytest.param({"value": "0x1"}, id="no addresses"),
        pytest.param({"addresses": {"0": "0x1"}}, id="no value"),
        pytest.param({"value": 1, "addresses": {"0": "0x1"}}, id="value is a number"),
        pytest.param({"value": "0x1", "addresses": {"first": "0x1"}}, id="rank is no number"),
        pytest.param({"value": "0x1", "addresses": ["0x1"]}, id="addresses are a list"),
        pytest.param({"value": "0x0", "addresses": {"0": "0x1"}}, id="value of an empty slot"),
    ],
)
def test_a_malformed_nonce_is_never_found(param: Any) -> None:
    assert Nonce.from_params({PARAM: param}) == Nonce(NOWHERE, {})
    assert NOWHERE != NOTHING, "a read that has no place to look at finds nothing"


def test_a_request_keeps_its_slot_until_it_gives_it_back() -> None:
    slots = Slots(2, areas={0: 1000, 1: 2000})
    slot, value = slots.take("a")
    assert slots.take("a") == (slot, value)
    assert slots.take("b")[0] != slot
    assert slots.nonce("a") == Nonce(value, {0: 1000 + slot * SLOT_BYTES, 1: 2000 + slot * SLOT_BYTES})
    assert slots.give_back("a") == slot
    assert slots.nonce("a") is None
    assert slots.give_back("a") is None
    reused, other = slots.take("c")
    assert reused == slot
    assert other != value


def test_no_nonce_before_the_ranks_have_memory() -> None:
    slots = Slots(2)
    slots.take("a")
    assert slots.nonce("a") is None


def test_a_number_is_never_that_of_an_empty_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _bits: NOTHING)
    assert Slots(1).take("a")[1] != NOTHING


def test_a_rank_shows_the_number_until_it_is_wiped() -> None:
    area = Area(4)
    area.write("a", 2, VALUE)
    assert [in_memory(area.address + slot * SLOT_BYTES) for slot in range(4)] == [NOTHING, NOTHING, VALUE, NOTHING]
    area.wipe("another")
    assert in_memory(area.address + 2 * SLOT_BYTES) == VALUE
    area.wipe("a")
    assert in_memory(area.address + 2 * SLOT_BYTES) == NOTHING
    assert area.size == 4 * SLOT_BYTES


def test_an_inbox_gives_what_came_and_forgets_it() -> None:
    inbox = Inbox(1)
    slot = inbox.open()
    assert slot is not None
    assert inbox.open() is None
    ctypes.c_int64.from_address(inbox.address + slot * SLOT_BYTES).value = VALUE
    assert inbox.close(slot) == VALUE
    again = inbox.open()
    assert again == slot
    assert inbox.close(slot) == NOTHING
