"""Decides which decode worker takes a prefilled request: power of two choices among those whose KV cache has room.

Source: TetriInfer (arXiv 2401.11181), section 3.3.4, mechanism T6. The paper states an aim, the lowest average ratio of
heavy to light decodes, and no formula. The comparison of the two drawn workers is ours: fewer heavy residents for a
heavy request, fewer residents for a light one, then more free KV, then the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, final

from headrace_core.api.wire import LoadReport

HEAVY_DECODE_TOKENS: Final = 128
"""A decode of more output tokens than this is heavy (TetriInfer, section 5.1)."""
REPORTS_UNTIL_SEEN: Final = 3
"""Reports after which a placement is taken to be in the report itself: a hand-off and an admission take less than the
200 ms between the first and the third."""


class RandomSource(Protocol):
    """Where the two choices come from. `random.Random` is one; a seeded one makes a run repeatable."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 up to, and without, `stop`."""


@final
@dataclass(slots=True, kw_only=True)
class DecodeLoad:
    """A decode worker as the dispatcher sees it: its last report and what was placed on it since."""

    pod: str
    address: str
    epoch: int
    accepting: bool
    block_size: int
    """Tokens in one KV block; 0: unknown, and then the worker has room for nothing."""
    free_kv_blocks: int
    """May be negative: more was placed than fits."""
    heavy: int
    """Residents that may still generate more than HEAVY_DECODE_TOKENS."""
    residents: int
    """All requests queued, running or on their way there."""

    @property
    def free_tokens(self) -> int:
        """Tokens whose KV still fits: what is comparable between block sizes."""
        return self.free_kv_blocks * self.block_size


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the dispatcher knows of a request."""

    prompt_tokens: int
    bound_tokens: int
    """Upper bound of the output tokens."""
    heavy: bool
    """Whether it is expected to generate more than HEAVY_DECODE_TOKENS."""

    def blocks(self, block_size: int) -> int:
        """KV blocks of prompt and whole answer."""
        return -(-(self.prompt_tokens + self.bound_tokens) // block_size)


class Reason(StrEnum):
    """Why the first of the ranking is the first."""

    BETTER_OF_TWO = "BetterOfTwo"
    ONLY_ONE_FITS = "OnlyOneFits"
    OVERCOMMITTED = "Overcommitted"
    NO_WORKER = "NoWorker"


@final
@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision: workers, the chosen one first and then where to turn if it refuses."""

    ranking: tuple[DecodeLoad, ...]
    reason: Reason

    @property
    def overcommitted(self) -> bool:
        """Whether no worker has free KV for the whole answer."""
        return self.reason is Reason.OVERCOMMITTED


_NOBODY: Final = Dispatch((), Reason.NO_WORKER)


def choose(workers: Iterable[DecodeLoad], request: Request, randomness: RandomSource) -> Dispatch:
    """Rank the accepting decode workers for a request.

    Two workers are drawn from alpha, those with free KV for prompt and bound, and the better one is chosen. With an
    empty alpha it is the least loaded of all. After the chosen one come the rest of alpha, best first, then those
    without room, least loaded first.
    """
    accepting = [worker for worker in workers if worker.accepting]
    if not accepting:
        return _NOBODY
    alpha = [worker for worker in accepting if has_room(worker, request)]
    beta = sorted((worker for worker in accepting if not has_room(worker, request)), key=_least_loaded)
    if not alpha:
        return Dispatch(tuple(beta), Reason.OVERCOMMITTED)
    chosen = alpha[0] if len(alpha) == 1 else _better_of_two(alpha, request, randomness)
    rest = sorted((worker for worker in alpha if worker is not chosen), key=lambda one: _preference(one, request))
    return Dispatch((chosen, *rest, *beta), Reason.ONLY_ONE_FITS if len(alpha) == 1 else Reason.BETTER_OF_TWO)


def has_room(worker: DecodeLoad, request: Request) -> bool:
    """Whether a worker is in alpha: its free KV blocks hold the prompt and the whole answer."""
    return worker.block_size > 0 and request.blocks(worker.block_size) <= worker.free_kv_blocks


def explain(decision: Dispatch, request: Request) -> str:
    """The decision in words, for a log."""
    need = f"{request.prompt_tokens} prompt + {request.bound_tokens} output tokens"
    if not decision.ranking:
        return f"{need}: no decode worker accepts requests"
    first = decision.ranking[0]
    state = f"{first.heavy} heavy of {first.residents} residents, {first.free_tokens} tokens of KV free"
    why = {
        Reason.BETTER_OF_TWO: f"the better of two for a {'heavy' if request.heavy else 'light'} request",
        Reason.ONLY_ONE_FITS: "the only one with room",
        Reason.OVERCOMMITTED: "the least loaded, since none has room for the whole answer",
    }[decision.reason]
    return f"{need}: {first.pod}, {why} ({state})"


def _better_of_two(alpha: Sequence[DecodeLoad], request: Request, randomness: RandomSource) -> DecodeLoad:
    first = randomness.randrange(len(alpha))
    second = randomness.randrange(len(alpha) - 1)
    if second >= first:
        second += 1
    return min(alpha[first], alpha[second], key=lambda worker: _preference(worker, request))


def _preference(worker: DecodeLoad, request: Request) -> tuple[int, int, str]:
    crowd = worker.heavy if request.heavy else worker.residents
    return crowd, -worker.free_tokens, worker.pod


def _least_loaded(worker: DecodeLoad) -> tuple[int, int, str]:
    return worker.residents, -worker.free_tokens, worker.pod


@final
@dataclass(slots=True)
class _Placement:
    blocks: int
    heavy: bool
    after_sequence: int
    """Sequence of the report that was the newest when it was placed."""


@final
@dataclass(slots=True)
class _Entry:
    report: LoadReport
    placements: list[_Placement]


@final
class DecodeTable:
    """The decode workers as last reported, plus this dispatcher's own placements that no report can show yet.

    Without the second part all requests between two reports would see the same state, and go to the same worker.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def hear(self, reports: Iterable[LoadReport]) -> None:
        """Take over the monitor's aggregate. It is complete: a worker that is not in it is out."""
        entries: dict[str, _Entry] = {}
        for report in reports:
            known = self._entries.get(report.pod)
            if known is None or (known.report.boot_id, known.report.epoch) != (report.boot_id, report.epoch):
                entries[report.pod] = _Entry(report, [])
                continue
            newest = report if report.sequence > known.report.sequence else known.report
            unseen = [one for one in known.placements if newest.sequence < one.after_sequence + REPORTS_UNTIL_SEEN]
            entries[report.pod] = _Entry(newest, unseen)
        self._entries = entries

    def place(self, pod: str, request: Request) -> None:
        """Count a request on a worker until its reports show it. A worker that is gone is no error."""
        entry = self._entries.get(pod)
        if entry is not None and entry.report.block_size > 0:
            blocks = request.blocks(entry.report.block_size)
            entry.placements.append(_Placement(blocks, request.heavy, entry.report.sequence))

    def loads(self) -> list[DecodeLoad]:
        """Every worker as it is believed to stand."""
        return [_load(entry) for entry in self._entries.values()]


def _load(entry: _Entry) -> DecodeLoad:
    report = entry.report
    return DecodeLoad(
        pod=report.pod,
        address=report.address,
        epoch=report.epoch,
        accepting=report.accepting,
        block_size=report.block_size,
        free_kv_blocks=report.free_kv_blocks - sum(one.blocks for one in entry.placements),
        heavy=report.heavy_requests + sum(one.heavy for one in entry.placements),
        residents=report.heavy_requests + report.light_requests + len(entry.placements),
    )
