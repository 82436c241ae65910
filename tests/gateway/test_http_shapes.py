"""Errors in OpenAI's shape: what is refused at the door, with which status, param and headers; probes; the end."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.gateway.fakes import MODEL, decode_answer, decoder, eventually, hang, prefill, stage

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]

REFUSED: list[tuple[str, str, Any, int, str | None]] = [
    ("not JSON", TEXT, b"{", 400, None),
    ("not an object", TEXT, b"[1]", 400, None),
    ("not UTF-8", TEXT, b'{"prompt": "\xff"}', 400, None),
    ("NaN", TEXT, b'{"prompt": "a", "temperature": NaN}', 400, None),
    ("too deep", TEXT, b"[" * 100_000, 400, None),
    ("empty", TEXT, b"", 400, None),
    ("unknown model", TEXT, {"model": "gpt", "prompt": "a"}, 404, "model"),
    ("model no string", TEXT, {"model": 3, "prompt": "a"}, 400, "model"),
    ("no prompt", TEXT, {"model": MODEL}, 400, "prompt"),
    ("prompt of a wrong kind", TEXT, {"prompt": 3}, 400, "prompt"),
    ("two prompts", TEXT, {"prompt": ["a", "b"]}, 400, "prompt"),
    ("two token prompts", TEXT, {"prompt": [[1], [2]]}, 400, "prompt"),
    ("prompt and embeddings", TEXT, {"prompt": "a", "prompt_embeds": "x"}, 400, "prompt"),
    ("stream no bool", TEXT, {"prompt": "a", "stream": "yes"}, 400, "stream"),
    ("n", TEXT, {"prompt": "a", "n": 2}, 400, "n"),
    ("best_of", TEXT, {"prompt": "a", "best_of": 2}, 400, "best_of"),
    ("echo", TEXT, {"prompt": "a", "echo": True}, 400, "echo"),
    ("prompt_logprobs", TEXT, {"prompt": "a", "prompt_logprobs": 0}, 400, "prompt_logprobs"),
    ("beam search", TEXT, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
    ("KV params", TEXT, {"prompt": "a", "kv_transfer_params": {"remote_host": "x"}}, 400, "kv_transfer_params"),
    ("EC params", TEXT, {"prompt": "a", "ec_transfer_params": {}}, 400, "ec_transfer_params"),
    ("hand-off", TEXT, {"prompt": "a", "headrace": {}}, 400, "headrace"),
    ("chat: no messages", CHAT, {"prompt": "a"}, 400, "messages"),
    ("chat: messages of a wrong kind", CHAT, {"messages": "hi"}, 400, "messages"),
    ("chat: a message of a wrong kind", CHAT, {"messages": ["hi"]}, 400, "messages"),
    ("chat: n", CHAT, {"messages": HI, "n": 2}, 400, "n"),
    ("chat: KV params", CHAT, {"messages": HI, "kv_transfer_params": {}}, 400, "kv_transfer_params"),
    ("no such path", "/v1/embeddings", {"input": "a"}, 404, None),
    ("method", "/v1/models", {}, 405, None),
    ("too large", TEXT, b" " * 5000, 413, None),
]


async def test_refusals_are_in_shape_and_reach_no_worker() -> None:
    async with stage(max_body_bytes=200_000) as it:
        for name, path, body, status, param in REFUSED:
            sent = b" " * 300_000 if name == "too large" else body
            async with it.post(sent, path) as response:
                assert response.status == status, name
                assert response.headers["Content-Type"].startswith("application/json"), name
                assert response.headers["X-Request-Id"], name
                answer = await response.json()
            assert answer.keys() == {"error"}, name
            assert answer["error"].keys() == {"message", "type", "param", "code"}, name
            assert answer["error"]["param"] == param, name
            assert answer["error"]["type"] == "invalid_request_error", name
            assert answer["error"]["message"], name
        assert not any(worker.seen for worker in it.workers.values())


SERVED: list[tuple[str, str, Any]] = [
    ("no model", TEXT, {"prompt": "a"}),
    ("token ids", TEXT, {"model": MODEL, "prompt": [1, 2, 3]}),
    ("one prompt in a list", TEXT, {"prompt": ["a"]}),
    ("one token prompt in a list", TEXT, {"prompt": [[1, 2]]}),
    ("explicit ones", TEXT, {"prompt": "a", "n": 1, "best_of": 1, "echo": False, "use_beam_search": False}),
    ("explicit nulls", TEXT, {"prompt": "a", "n": None, "stream": None, "kv_transfer_params": None, "headrace": None}),
    ("lone surrogate", TEXT, b'{"prompt": "\\ud800"}'),
    ("chat", CHAT, {"messages": HI}),
    ("chat with parts", CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
]


@pytest.mark.parametrize(("name", "path", "body"), SERVED, ids=[case[0] for case in SERVED])
async def test_allowed_forms_are_served(name: str, path: str, body: Any) -> None:
    async with stage(prefill("p0"), decoder("d0")) as it, it.post(body, path) as response:
        assert response.status == 200
        assert it["d0"].bodies("decode")[0]["kv_transfer_params"]["remote_engine_id"] == "p0"


async def test_method_not_allowed_names_the_right_one() -> None:
    async with stage(prefill("p0"), decoder("d0")) as it, it.session.get(it.url + TEXT) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_full_gateway_answers_429_and_takes_again() -> None:
    async with stage(prefill("p0"), decoder("d0", hang()), max_in_flight=1) as it:
        task = asyncio.create_task(it.complete())
        await eventually(lambda: it["d0"].seen)
        status, body, headers = await it.complete()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["Retry-After"]) >= 1
        task.cancel()
        await eventually(lambda: it.instance.gateway.admission.in_flight == 0)
        assert (await it.complete())[0] == 200


async def test_body_that_does_not_arrive_gives_408() -> None:
    async def slow() -> Any:
        yield b'{"prompt":'
        await asyncio.sleep(5)

    async with (
        stage(prefill("p0"), decoder("d0"), body_timeout_s=0.2) as it,
        it.session.post(it.url + TEXT, data=slow()) as response,
    ):
        assert response.status == 408
        assert (await response.json())["error"]["code"] == "body_timeout"


async def test_probes_follow_the_life_of_the_gateway() -> None:
    async with stage(prefill("p0"), decoder("d0")) as it:

        async def status(path: str) -> int:
            async with it.session.get(it.url + path) as response:
                return response.status

        readiness = it.instance.gateway.readiness
        assert (await status("/livez"), await status("/readyz")) == (200, 200)
        readiness.synced = False
        assert (await status("/livez"), await status("/readyz")) == (200, 503)
        readiness.synced, readiness.stopping = True, True
        assert (await status("/livez"), await status("/readyz")) == (200, 503)
        assert (await it.complete())[0] == 200, "a request that comes late is still served"


async def test_shutdown_finishes_what_is_in_flight() -> None:
    p0, d0 = prefill("p0"), decoder("d0", decode_answer("abcdefgh", gap_s=0.05))
    async with aiohttp.ClientSession() as session, stage(p0, d0, shutdown_timeout_s=5.0) as it:
        request = session.post(it.url + TEXT, json={"prompt": "a", "stream": True})
        response = await request
        assert b'"a"' in await response.content.readline()
        rest = asyncio.create_task(response.content.read())
        stopping = asyncio.create_task(it.stop_gateway())
        await asyncio.sleep(0.1)
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(it.url + "/livez")
        assert b'"h"' in await rest
        await stopping
