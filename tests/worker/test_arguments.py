"""Engine arguments of a spec as a command line, and the environment of the engine's processes."""

from __future__ import annotations

import argparse
import json

import pytest

from headrace_core.api.engine_args import OWNED
from headrace_core.api.names import Role
from headrace_worker.engine.arguments import command_line
from headrace_worker.engine.start import environment, owned_arguments
from headrace_worker.settings import Settings


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    made.add_argument("--max-num-seqs", type=int)
    made.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    made.add_argument("--headless", action="store_true")
    made.add_argument("--allowed-origins", nargs="+")
    made.add_argument("--limits", type=json.loads)
    return made


def settings(**changes: object) -> Settings:
    return Settings(**{"model": "file:///models/tiny", "role": Role.PREFILL, "pod_ip": "10.1.2.3"} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max-num-seqs", "64", ["--max-num-seqs=64"]),
        ("max_num_seqs", "64", ["--max-num-seqs=64"]),
        ("enforce-eager", "true", ["--enforce-eager"]),
        ("enforce-eager", "", ["--enforce-eager"]),
        ("enforce-eager", "false", ["--no-enforce-eager"]),
        ("headless", "true", ["--headless"]),
        ("headless", "false", []),
        ("allowed-origins", "a 'b c'", ["--allowed-origins", "a", "b c"]),
        ("limits", '{"image": -1}', ['--limits={"image": -1}']),
        ("max-num-seqs", "-1", ["--max-num-seqs=-1"]),
        ("unknown", "x", ["--unknown=x"]),
    ],
)
def test_one_argument(name: str, value: str, words: list[str]) -> None:
    assert command_line(parser(), [(name, value)]) == words


def test_a_switch_with_another_value_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"enforce-eager is a switch.*'maybe'"):
        command_line(parser(), [("enforce-eager", "maybe")])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"model": "/models/tiny", "served-model-name": "tiny", "tensor-parallel-size": "1"}),
        ({"model": "hf://org/name"}, {"model": "org/name", "served-model-name": "name"}),
        ({"model": "hf://org/name", "model_revision": "v1"}, {"revision": "v1"}),
        ({"served_name": "chat"}, {"served-model-name": "chat"}),
        ({"max_model_len": 2048}, {"max-model-len": "2048"}),
        ({"tensor_parallel": 4, "pipeline_parallel": 2}, {"tensor-parallel-size": "4", "pipeline-parallel-size": "2"}),
    ],
    ids=str,
)
def test_what_headrace_sets(changes: dict[str, object], expected: dict[str, str]) -> None:
    arguments = dict(owned_arguments(settings(**changes)))
    assert {name: arguments.get(name) for name in expected} == expected


def test_a_failed_pull_fails_the_request_and_the_lease_is_the_setting() -> None:
    transfer = json.loads(dict(owned_arguments(settings(kv_lease_s=12)))["kv-transfer-config"])
    assert transfer["kv_load_failure_policy"] == "fail"
    assert transfer["kv_connector_extra_config"]["kv_lease_duration"] == 12


def test_users_cannot_set_what_headrace_sets() -> None:
    refused = {name for owned in OWNED for name in owned.names}
    everything = settings(max_model_len=1, model_revision="v1")
    assert {name for name, _ in owned_arguments(everything)} <= refused


@pytest.mark.parametrize(
    ("pod_ip", "given", "expected"),
    [
        ("10.1.2.3", {}, {"VLLM_HOST_IP": "10.1.2.3", "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3", "UCX_TLS": None}),
        ("127.9.0.1", {}, {"VLLM_HOST_IP": "127.9.0.1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
        ("127.9.0.1", {"UCX_TLS": "shm"}, {"UCX_TLS": None, "UCX_NET_DEVICES": "lo"}),
        ("0.0.0.0", {}, {"VLLM_HOST_IP": None, "VLLM_NIXL_SIDE_CHANNEL_HOST": None}),  # noqa: S104
        ("10.1.2.3", {"VLLM_HOST_IP": "1.1.1.1"}, {"VLLM_HOST_IP": "10.1.2.3"}),
    ],
    ids=str,
)
def test_addresses_are_the_pods_own(pod_ip: str, given: dict[str, str], expected: dict[str, str | None]) -> None:
    made = environment(settings(pod_ip=pod_ip), given)
    assert {name: made.get(name) for name in expected} == expected
