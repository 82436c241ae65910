"""What the environment may say, and what it is told when it says something else."""

from __future__ import annotations

import pytest

from headrace_core.api.names import Env, Role
from headrace_worker.errors import SettingsError
from headrace_worker.settings import EngineArg, documentation, from_environment

LEAST = {Env.MODEL: "file:///models/tiny/", Env.ROLE: "prefill"}


def test_the_least_environment() -> None:
    settings = from_environment(LEAST)
    assert (settings.role, settings.name, settings.port, settings.engine_args) == (Role.PREFILL, "tiny", 8000, ())


def test_everything_that_the_operator_sets() -> None:
    settings = from_environment(
        LEAST
        | {
            Env.ROLE: "decode",
            Env.SERVED_NAME: "chat",
            Env.MAX_MODEL_LEN: "2048",
            Env.TENSOR_PARALLEL: "2",
            Env.PIPELINE_PARALLEL: "3",
            Env.ENGINE_ARGS: '[{"name": "max-num-seqs", "value": "16"}, {"name": "enforce-eager"}]',
            Env.POD_IP: "127.0.0.9",
            Env.PORT: "8001",
            Env.POD_NAME: "c-w0",
            Env.POD_UID: "u",
            Env.TOKEN_FILE: "/t",
            Env.MODEL_REVISION: "main",
        }
    )
    assert settings.role is Role.DECODE
    assert (settings.name, settings.max_model_len, settings.model_revision) == ("chat", 2048, "main")
    assert (settings.tensor_parallel, settings.pipeline_parallel) == (2, 3)
    assert settings.engine_args == (EngineArg("max-num-seqs", "16"), EngineArg("enforce-eager", ""))
    assert settings.address == "127.0.0.9:8001"
    assert (settings.pod_name, settings.pod_uid) == ("c-w0", "u")
    assert settings.token_file == "/t"


def test_an_ipv6_address_is_one_that_a_url_can_hold() -> None:
    assert from_environment(LEAST | {Env.POD_IP: "fd00::7"}).address == "[fd00::7]:8000"


def test_an_empty_variable_counts_as_unset() -> None:
    assert from_environment(LEAST | {Env.PORT: "", Env.MAX_MODEL_LEN: ""}).port == 8000


BAD = {
    "no model": ({Env.MODEL: ""}, f"{Env.MODEL} is not set: .*hf://ORG/NAME"),
    "no role": ({Env.ROLE: ""}, f"{Env.ROLE} is not set"),
    "another role": ({Env.ROLE: "both"}, f"{Env.ROLE} is 'both': give one of prefill, decode"),
    "port": ({Env.PORT: "0"}, f"{Env.PORT} is '0': give a whole number of at least 1"),
    "length": ({Env.MAX_MODEL_LEN: "-1"}, f"{Env.MAX_MODEL_LEN} is '-1'"),
    "shape": ({Env.TENSOR_PARALLEL: "two"}, f"{Env.TENSOR_PARALLEL} is 'two'"),
    "arguments that are no JSON": ({Env.ENGINE_ARGS: "--x"}, f"{Env.ENGINE_ARGS} is '--x': give a JSON list"),
    "arguments that are no list of objects": ({Env.ENGINE_ARGS: '["x"]'}, f"{Env.ENGINE_ARGS} .*JSON list"),
    "arguments without a name": ({Env.ENGINE_ARGS: '[{"value": "1"}]'}, f"{Env.ENGINE_ARGS} .*JSON list"),
    "seconds": ({"HEADRACE_WORKER_DRAIN_POLL": "nan"}, "HEADRACE_WORKER_DRAIN_POLL is 'nan': give a number of seconds"),
    "endless": ({"HEADRACE_WORKER_SWITCH_TIMEOUT": "inf"}, "HEADRACE_WORKER_SWITCH_TIMEOUT is 'inf'"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_named_with_its_remedy(changes: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        from_environment(LEAST | changes)


def test_each_setting_is_documented() -> None:
    text = documentation()
    for variable in (Env.MODEL, Env.ROLE, Env.TOKEN_FILE, "HEADRACE_WORKER_SHUTDOWN_TIMEOUT"):
        assert variable in text
