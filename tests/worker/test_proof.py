"""Proofs of held KV: what travels with a handle, and the memory that the scheduler and the ranks share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_worker.kv.proof import NO_NONCE, NONCE_BYTES, Nonces, Proof, place

NONCE = "ab" * NONCE_BYTES


@pytest.fixture
def name() -> Iterator[str]:
    yield (unique := f"test-{os.getpid()}")
    Nonces.forget(unique)


def test_a_proof_survives_its_journey() -> None:
    proof = Proof.fresh(7)
    assert Proof.from_params({"remote_host": "10.0.0.1"} | proof.as_params()) == proof


def test_no_two_proofs_are_alike() -> None:
    assert len({Proof.fresh(0).nonce for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="none"),
        pytest.param({"headrace_nonce_slot": 1}, id="no nonce"),
        pytest.param({"headrace_nonce": NONCE}, id="no slot"),
        pytest.param({"headrace_nonce_slot": "1", "headrace_nonce": NONCE}, id="slot is text"),
        pytest.param({"headrace_nonce_slot": -1, "headrace_nonce": NONCE}, id="slot before the memory"),
        pytest.param({"headrace_nonce_slot": 1, "headrace_nonce": "xy" * NONCE_BYTES}, id="nonce is not hexadecimal"),
        pytest.param({"headrace_nonce_slot": 1, "headrace_nonce": "abab"}, id="nonce is short"),
        pytest.param({"headrace_nonce_slot": 1, "headrace_nonce": NO_NONCE.hex()}, id="nonce of a cleared slot"),
    ],
)
def test_what_is_no_proof(params: dict[str, Any]) -> None:
    assert Proof.from_params(params) is None


def test_a_slot_holds_its_nonce_until_it_is_cleared() -> None:
    nonces = Nonces.private(4)
    proof = Proof.fresh(2)
    nonces.write(proof)
    assert [nonces.read(slot) for slot in range(4)] == [NO_NONCE, NO_NONCE, proof.nonce, NO_NONCE]
    nonces.clear(2)
    assert nonces.read(2) == NO_NONCE


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_is_refused(slot: int) -> None:
    with pytest.raises(IndexError, match=f"slot {slot} of 4"):
        Nonces.private(4).read(slot)


def test_the_address_is_where_the_nonce_lies() -> None:
    nonces = Nonces.private(4)
    proof = Proof.fresh(3)
    nonces.write(proof)
    address, length, _ = nonces.place(3)
    assert ctypes.string_at(address, length) == proof.nonce
    assert place(nonces.address, 3) == nonces.place(3)


def test_all_processes_of_an_engine_see_the_same_nonces(name: str) -> None:
    scheduler, rank = Nonces.shared(name, 8), Nonces.shared(name, 8)
    proof = Proof.fresh(5)
    scheduler.write(proof)
    assert rank.read(5) == proof.nonce
    scheduler.clear(5)
    assert rank.read(5) == NO_NONCE


def test_forgotten_nonces_stay_with_those_who_have_them(name: str) -> None:
    scheduler, rank = Nonces.shared(name, 8), Nonces.shared(name, 8)
    Nonces.forget(name)
    proof = Proof.fresh(5)
    scheduler.write(proof)
    assert rank.read(5) == proof.nonce
    assert Nonces.shared(name, 8).read(5) == NO_NONCE
