"""Reads the OpenAI API's requests, writes the bodies for the two workers, and cleans and reads their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from pydantic import ValidationError

from headrace_core.api.wire import ErrorCode, Handoff, HandoffAnswer
from headrace_gateway.errors import BadRequest, ModelNotFound

TEXT_MAX_TOKENS = 16
"""What a text completion gets that does not say (OpenAI's API, and vLLM's)."""

CHARACTERS_PER_TOKEN = 4
"""For an estimate where only the order of magnitude counts: the gateway has no tokenizer."""

INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "headrace")
"""Fields that tell a worker where to fetch memory from: never taken from a client, never shown to one."""

# The prefill worker's one token is thrown away and sampled anew by the decode worker. A first token that ends the
# text would free the KV before it is pulled, so all that can end it is left out, and what only shapes the output.
_NOT_FOR_PREFILL = frozenset(
    {
        "stop",
        "stop_token_ids",
        "min_tokens",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "max_completion_tokens",
    }
)


class Endpoint(StrEnum):
    """The paths that take a prompt, the same at the gateway and at a worker."""

    CHAT = "/v1/chat/completions"
    TEXT = "/v1/completions"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request that has passed the checks."""

    request_id: str
    endpoint: Endpoint
    body: Mapping[str, Any]
    stream: bool
    estimated_prompt_tokens: int

    @property
    def max_tokens(self) -> int | None:
        """Output tokens that the client allows. None: as many as the context holds, or what the worker will refuse."""
        if self.endpoint is Endpoint.TEXT:
            value = self.body.get("max_tokens", TEXT_MAX_TOKENS)
        else:
            value = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What the answer of a prefill worker says of the hand-off."""

    kv_transfer_params: Mapping[str, Any] | None
    """The handle by which a decode worker fetches the KV. None: nothing is held."""
    handoff: HandoffAnswer


# --- requests ------------------------------------------------------------------------------------------------------


def parse(raw: bytes, *, endpoint: Endpoint, served_name: str, request_id: str) -> ClientRequest:
    """Check what the gateway acts upon; the rest of the body is the worker's to check.

    Raises BadRequest, whose `param` names the field, or ModelNotFound.
    """
    body = _load(raw)
    _check_model(body, served_name)
    for field in INTERNAL_FIELDS:
        if body.get(field) is not None:
            raise BadRequest(f"{field} is set by the gateway itself: leave it out", param=field)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("stream must be true or false", param="stream")
    if endpoint is Endpoint.CHAT:
        _check_messages(body)
    else:
        _check_prompt(body)
    _refuse_unsupported(body)
    return ClientRequest(
        request_id=request_id,
        endpoint=endpoint,
        body=body,
        stream=bool(stream),
        estimated_prompt_tokens=_estimate_prompt_tokens(body, endpoint),
    )


def _load(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except ValueError as error:  # also bad UTF-8 and numbers of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_model(body: Mapping[str, Any], served_name: str) -> None:
    model = body.get("model")
    if model is None or model == "":
        # As in vLLM: one model is served, so a request that names none means that one.
        return
    if not isinstance(model, str):
        raise BadRequest("model must be a string", param="model")
    if model != served_name:
        raise ModelNotFound(f"the model {model!r} does not exist: this gateway serves {served_name!r}", param="model")


def _check_messages(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if messages is None:
        raise BadRequest("messages is missing: give the list of messages", param="messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("messages must be a list of objects", param="messages")


def _check_prompt(body: Mapping[str, Any]) -> None:
    prompt, embeddings = body.get("prompt"), body.get("prompt_embeds")
    if prompt is None and embeddings is None:
        raise BadRequest("prompt is missing: give a string or a list of token ids", param="prompt")
    if prompt is not None and not isinstance(prompt, str | list):
        raise BadRequest("prompt must be a string or a list of token ids", param="prompt")
    if _count_prompts(prompt) + _count_prompts(embeddings) > 1:
        raise BadRequest("several prompts in one request are not supported: send one request each", param="prompt")


def _count_prompts(prompt: Any) -> int:
    if prompt is None:
        return 0
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for field in ("n", "best_of"):
        # A bool equals 0 or 1: what is no number is left to the worker, whose 400 names the type it wants.
        value = body.get(field)
        if isinstance(value, int | float) and value > 1:
            raise BadRequest(f"{field} above 1 is not supported: send one request each", param=field)
    if body.get("echo"):
        raise BadRequest("echo is not supported: prepend the prompt yourself", param="echo")
    if body.get("prompt_logprobs") is not None:
        raise BadRequest("prompt_logprobs is not supported: leave it out", param="prompt_logprobs")
    if body.get("use_beam_search"):
        raise BadRequest("use_beam_search is not supported: leave it out", param="use_beam_search")


def _estimate_prompt_tokens(body: Mapping[str, Any], endpoint: Endpoint) -> int:
    if endpoint is Endpoint.TEXT:
        return _estimate(body.get("prompt"))
    return sum(_estimate(message.get("content")) for message in body["messages"])


def _estimate(content: Any) -> int:
    if isinstance(content, str):
        return -(-len(content) // CHARACTERS_PER_TOKEN)
    if not isinstance(content, list):
        return 0
    return sum(
        1 if isinstance(part, int) else _estimate(part.get("text") if isinstance(part, dict) else part)
        for part in content
    )


# --- bodies for the workers ----------------------------------------------------------------------------------------


def prefill_body(request: ClientRequest, handoff: Handoff) -> bytes:
    """The body for the prefill worker: compute the prompt, keep its KV for a decode worker (vLLM's NIXL protocol)."""
    body = {name: value for name, value in request.body.items() if name not in _NOT_FOR_PREFILL}
    body["stream"] = False
    body["ignore_eos"] = True
    body["max_tokens"] = 1
    if request.endpoint is Endpoint.CHAT:
        body["max_completion_tokens"] = 1
    body["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return _with_handoff(body, handoff)


def decode_body(request: ClientRequest, kv_transfer_params: Mapping[str, Any], handoff: Handoff) -> bytes:
    """The body for the decode worker: the client's own, with the handle of the KV to fetch."""
    return _with_handoff({**request.body, "kv_transfer_params": dict(kv_transfer_params)}, handoff)


def _with_handoff(body: dict[str, Any], handoff: Handoff) -> bytes:
    body["headrace"] = handoff.model_dump(mode="json")
    return json.dumps(body, separators=(",", ":")).encode()


# --- answers of the workers ----------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What a worker's answer means for the request."""

    PASS = "pass"  # noqa: S105 - hand the answer to the client: a success, or the client's own fault
    REFUSED = "refused"
    KV_FAILED = "kv_failed"
    FAILED = "failed"


def judge(status: int, body: bytes = b"") -> Verdict:
    """What an answer of a worker means. The body is read only for an error."""
    if status < 400:  # noqa: PLR2004 - HTTP's classes
        return Verdict.PASS
    return _judge_error(status, _error_of(body).get("code"))


def judge_first_event(event: bytes) -> tuple[Verdict, int, bytes]:
    """What the first event of a stream means: vLLM sends the status 200 before it has begun, and errors as events.

    Returns the verdict, and for an error the HTTP status and body that it would have had.
    """
    payload = event.partition(b"data:")[2].partition(b"\n")[0].strip()
    if not payload.startswith(b'{"error"'):
        return Verdict.PASS, 200, b""
    code = _error_of(payload).get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500  # noqa: PLR2004 - HTTP's classes
    return _judge_error(status, code), status, payload


def _judge_error(status: int, code: Any) -> Verdict:
    if code == ErrorCode.TRY_ANOTHER:
        return Verdict.REFUSED
    if code == ErrorCode.KV_TRANSFER_FAILED:
        return Verdict.KV_FAILED
    # 401 and 403 speak of the gateway's own token, not of the client's request.
    if 400 <= status < 500 and status not in {401, 403}:  # noqa: PLR2004 - HTTP's classes
        return Verdict.PASS
    return Verdict.FAILED


def _json_of(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _error_of(body: bytes) -> Mapping[str, Any]:
    try:
        parsed = _json_of(body)
    except ValueError:
        return {}
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return error if isinstance(error, dict) else {}


def read_prefill_answer(body: bytes) -> PrefillAnswer:
    """Read the hand-off out of a prefill worker's answer.

    Raises ValueError when the body is not JSON or carries no `headrace` of the right shape.
    """
    parsed = _json_of(body)
    if not isinstance(parsed, dict) or "headrace" not in parsed:
        raise ValueError("the prefill answer has no field headrace")
    kv = parsed.get("kv_transfer_params")
    try:
        handoff = HandoffAnswer.model_validate(parsed["headrace"])
    except ValidationError as error:
        raise ValueError(f"the field headrace of the prefill answer is malformed: {error}") from error
    return PrefillAnswer(kv_transfer_params=kv if isinstance(kv, dict) and kv else None, handoff=handoff)


def clean_answer(body: bytes) -> bytes:
    """A decode worker's whole answer without the fields that are Headrace's own business.

    Raises ValueError when the body is not a JSON object.
    """
    parsed = _json_of(body)
    if not isinstance(parsed, dict):
        raise ValueError("the answer is not a JSON object")  # noqa: TRY004 - as for all that is not what was asked for
    if not parsed.keys() & set(INTERNAL_FIELDS):
        return body
    for field in INTERNAL_FIELDS:
        parsed.pop(field, None)
    return json.dumps(parsed, separators=(",", ":"), ensure_ascii=False).encode()


# --- the gateway's own answers -------------------------------------------------------------------------------------


def models_body(served_name: str, *, created: int, max_model_len: int) -> bytes:
    """The answer to `GET /v1/models`: the one model served. `created` is a Unix time in seconds."""
    model: dict[str, Any] = {"id": served_name, "object": "model", "created": created, "owned_by": "headrace"}
    if max_model_len:
        model["max_model_len"] = max_model_len
    return json.dumps({"object": "list", "data": [model]}).encode()


def error_event(body: bytes) -> bytes:
    """An error as the last event of a stream that has begun (the shape in which vLLM sends one)."""
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
