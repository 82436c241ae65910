"""Sends completions to a gateway or to one worker, and counts which answers are lost or changed.

An answer counts as lost when it is not a complete 200, and as changed when its text is not the text that one worker
alone gave for the same prompt at temperature 0.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx

REQUEST_TIMEOUT_S = 120.0
WORDS = "water wheel mill channel gate flow prefill decode cache token river stone grain sluice head race".split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: which endpoint, which text, how many tokens at most, streamed or not."""

    kind: Literal["chat", "text"]
    text: str
    max_tokens: int
    stream: bool = False

    @property
    def path(self) -> str:
        """Path of the endpoint below the server's address."""
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"

    def body(self, model: str) -> dict[str, object]:
        """The request's JSON body, at temperature 0 and without an early end."""
        body: dict[str, object] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
        }
        if self.kind == "chat":
            body["messages"] = [{"role": "user", "content": self.text}]
        else:
            body["prompt"] = self.text
        return body


class LostError(Exception):
    """An answer that is no complete 200; the message says what came instead."""


@dataclass(slots=True)
class Tally:
    """What became of the requests that were sent."""

    sent: int = 0
    lost: int = 0
    changed: int = 0
    reasons: list[str] = field(default_factory=list)
    """One line for each request that was lost or changed."""

    @property
    def answered(self) -> int:
        """Requests with a complete answer, changed ones included."""
        return self.sent - self.lost


def prompts(*, seed: int, count: int, characters: range, max_tokens: int) -> list[Prompt]:
    """Makes `count` prompts, chat and text in turn, streamed every third; sizes spread over `characters`.

    The tiny model's tokenizer works on bytes, so a character is about a token.
    """
    rng = random.Random(seed)
    made = []
    for number in range(count):
        size = characters[round(number * (len(characters) - 1) / max(1, count - 1))]
        text = f"{number} " if size > len(WORDS[0]) else ""
        while len(text) < size:
            text += rng.choice(WORDS) + " "
        kind: Literal["chat", "text"] = "chat" if number % 2 else "text"
        made.append(Prompt(kind, text[:size], max_tokens, stream=number % 3 == 2))
    return made


async def ask(client: httpx.AsyncClient, base_url: str, model: str, prompt: Prompt) -> str:
    """Sends one request and returns the answer's text.

    Raises:
        LostError: the answer is not a complete 200.
    """
    url = base_url + prompt.path
    try:
        if prompt.stream:
            return await _ask_streaming(client, url, model, prompt)
        answer = await client.post(url, json=prompt.body(model))
        if answer.status_code != httpx.codes.OK:
            raise LostError(f"{answer.status_code} {answer.text[:300]}")
        choice = answer.json()["choices"][0]
    except httpx.HTTPError as error:
        raise LostError(repr(error)) from error
    return str(choice["message"]["content"] if prompt.kind == "chat" else choice["text"])


async def _ask_streaming(client: httpx.AsyncClient, url: str, model: str, prompt: Prompt) -> str:
    text, done = "", False
    async with client.stream("POST", url, json=prompt.body(model)) as answer:
        if answer.status_code != httpx.codes.OK:
            raise LostError(f"{answer.status_code} {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise LostError(f"an error inside the stream: {event['error']}")
            for choice in event["choices"]:
                text += (choice["delta"].get("content") or "") if prompt.kind == "chat" else choice["text"]
    if not done:
        raise LostError("the stream ended without [DONE]")
    return text


def client(token: str | None = None, connections: int = 64) -> httpx.AsyncClient:
    """An HTTP client for `ask`; `token` is needed by workers only."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_connections=connections)
    return httpx.AsyncClient(headers=headers, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False)


async def references(
    base_url: str, model: str, wanted: Sequence[Prompt], token: str | None = None
) -> dict[Prompt, str]:
    """What one worker alone answers, one request at a time."""
    async with client(token) as http:
        return {prompt: await ask(http, base_url, model, prompt) for prompt in wanted}


class Traffic:
    """A closed loop of `concurrency` clients that ask the given prompts over and over, until it is stopped."""

    def __init__(self, base_url: str, model: str, expected: Mapping[Prompt, str], concurrency: int) -> None:
        self.tally = Tally()
        self._base_url = base_url
        self._model = model
        self._expected = expected
        self._concurrency = concurrency
        self._stop = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Traffic:
        """Starts the clients."""
        self._http = client(connections=2 * self._concurrency)
        self._clients = [asyncio.create_task(self._ask_on(first)) for first in range(self._concurrency)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Lets each client finish its request, then ends."""
        self._stop.set()
        await asyncio.gather(*self._clients)
        await self._http.aclose()

    async def _ask_on(self, first: int) -> None:
        order = list(self._expected)
        turn = first
        while not self._stop.is_set():
            await self.ask_once(order[turn % len(order)])
            turn += 1

    async def ask_once(self, prompt: Prompt) -> None:
        """Sends one request and counts what became of it."""
        self.tally.sent += 1
        try:
            text = await ask(self._http, self._base_url, self._model, prompt)
        except LostError as lost:
            self.tally.lost += 1
            self.tally.reasons.append(f"lost: {prompt.kind} of {len(prompt.text)} characters: {lost}")
            await asyncio.sleep(0.1)  # a gateway that refuses at once must not be asked in a busy loop
            return
        if text != self._expected[prompt]:
            self.tally.changed += 1
            self.tally.reasons.append(
                f"changed: {prompt.kind} of {len(prompt.text)} characters: {self._expected[prompt]!r} != {text!r}"
            )
