"""Decides which decode worker takes a prefilled request: power of two choices among those whose KV cache has room.

Source: TetriInfer (arXiv 2401.11181), section 3.3.4, mechanism T6. The paper states an aim, the lowest average ratio of
heavy to light decodes, and no formula. The comparison of the two drawn workers is ours: fewer heavy residents for a
heavy request, fewer residents for a light one, then more free KV, then the name. `PaperRatio` reads the aim literally.
The other policies are there to be compared with; `Random` and `Imbalance` are those of the paper's figure 19.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, final

from headrace_core.api.wire import LoadReport

HEAVY_DECODE_TOKENS: Final = 128
"""A decode of more output tokens than this is heavy (TetriInfer, section 5.1)."""
REPORTS_UNTIL_SEEN: Final = 3
"""Reports after which a placement is taken to be in the report itself: a hand-off and an admission take less than the
200 ms between the first and the third."""
_NO_ROOM: Final = 1 << 60
"""Blocks that no worker has free."""


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


class Dispatching(StrEnum):
    """The policies. Each takes only workers with room (alpha) while there is one, else the least loaded of all."""

    DEFAULT = "Default"
    """Of two drawn: fewer heavy residents for a heavy request, fewer residents for a light one."""
    PAPER_RATIO = "PaperRatio"
    """Of two drawn: the lower ratio of heavy to light residents once the request is there."""
    RANDOM = "Random"
    LEAST_LOADED = "LeastLoaded"
    """The fewest residents."""
    ROUND_ROBIN = "RoundRobin"
    IMBALANCE = "Imbalance"
    """Heavy requests go where most heavy ones are, light ones to the fewest residents: the worst case."""


class Reason(StrEnum):
    """Why the chosen worker is chosen."""

    BETTER_OF_TWO = "BetterOfTwo"
    ONLY_ONE_FITS = "OnlyOneFits"
    OVERCOMMITTED = "Overcommitted"
    NO_WORKER = "NoWorker"
    DRAWN = "Drawn"
    FEWEST_RESIDENTS = "FewestResidents"
    IN_TURN = "InTurn"
    MOST_HEAVY = "MostHeavy"


@final
@dataclass(slots=True)
class Choice:
    """The decision of `pick`: a position in the list of workers, -1 for none."""

    index: int
    reason: Reason


def pick(
    workers: list[DecodeLoad], request: Request, policy: Dispatching, randomness: RandomSource, turn: int = -1
) -> Choice:
    """Choose the decode worker for a request. It makes no list: the simulator asks for each of its requests.

    `turn` is the number of requests dispatched before; only `RoundRobin` reads it.

    Raises:
        ValueError: the policy is `RoundRobin`, and `turn` is missing.
    """
    fitting = _count_with_room(workers, request)
    if fitting == 0:
        index = _fewest_residents(workers, request, needs_room=False)
        return Choice(index, Reason.NO_WORKER if index < 0 else Reason.OVERCOMMITTED)
    if fitting == 1:
        return Choice(_with_room(workers, request, 0), Reason.ONLY_ONE_FITS)
    if policy is Dispatching.DEFAULT or policy is Dispatching.PAPER_RATIO:
        return Choice(_better_of_two(workers, request, policy, fitting, randomness), Reason.BETTER_OF_TWO)
    if policy is Dispatching.RANDOM:
        return Choice(_with_room(workers, request, randomness.randrange(fitting)), Reason.DRAWN)
    if policy is Dispatching.ROUND_ROBIN:
        return Choice(_next_in_turn(workers, request, turn), Reason.IN_TURN)
    if policy is Dispatching.IMBALANCE and request.heavy:
        return Choice(_most_heavy(workers, request), Reason.MOST_HEAVY)
    return Choice(_fewest_residents(workers, request, needs_room=True), Reason.FEWEST_RESIDENTS)


def _count_with_room(workers: list[DecodeLoad], request: Request) -> int:
    """The size of alpha. Blocks are counted anew only where the block size differs from the last worker's."""
    count = 0
    size = 0
    blocks = _NO_ROOM
    for worker in workers:
        if worker.block_size != size:
            size = worker.block_size
            blocks = request.blocks(size) if size > 0 else _NO_ROOM
        if blocks <= worker.free_kv_blocks and worker.accepting:
            count += 1
    return count


def _with_room(workers: list[DecodeLoad], request: Request, rank: int) -> int:
    """The position of one of alpha: `rank` others with room stand before it."""
    size = 0
    blocks = _NO_ROOM
    for index, worker in enumerate(workers):
        if worker.block_size != size:
            size = worker.block_size
            blocks = request.blocks(size) if size > 0 else _NO_ROOM
        if blocks <= worker.free_kv_blocks and worker.accepting:
            if rank == 0:
                return index
            rank -= 1
    raise IndexError("fewer workers have room")


def _better_of_two(
    workers: list[DecodeLoad], request: Request, policy: Dispatching, fitting: int, randomness: RandomSource
) -> int:
    first = randomness.randrange(fitting)
    second = randomness.randrange(fitting - 1)
    if second >= first:
        second += 1
    one, other = _with_room(workers, request, first), _with_room(workers, request, second)
    if policy is Dispatching.PAPER_RATIO:
        return one if _lower_ratio(workers[one], workers[other], request.heavy) else other
    return one if _preferred(workers[one], workers[other], request.heavy) else other


def _preferred(one: DecodeLoad, other: DecodeLoad, heavy: bool) -> bool:
    """Whether `one` is the better place: the smaller crowd, then more free KV, then the name."""
    crowd = one.heavy - other.heavy if heavy else one.residents - other.residents
    return crowd < 0 if crowd else _freer(one, other)


def _freer(one: DecodeLoad, other: DecodeLoad) -> bool:
    more = one.free_kv_blocks * one.block_size - other.free_kv_blocks * other.block_size
    return more > 0 if more else one.pod < other.pod


def _lower_ratio(one: DecodeLoad, other: DecodeLoad, heavy: bool) -> bool:
    """Compare heavy:light with the request placed; 0:0 is 0 and h:0 infinite. Cross products keep it exact."""
    one_heavy, one_light = _placed(one, heavy)
    other_heavy, other_light = _placed(other, heavy)
    one_infinite = one_light == 0 and one_heavy > 0
    other_infinite = other_light == 0 and other_heavy > 0
    if one_infinite or other_infinite:
        return other_infinite if one_infinite != other_infinite else _freer(one, other)
    more = one_heavy * max(other_light, 1) - other_heavy * max(one_light, 1)
    return more < 0 if more else _freer(one, other)


def _placed(worker: DecodeLoad, heavy: bool) -> tuple[int, int]:
    light = worker.residents - worker.heavy
    return (worker.heavy + 1, light) if heavy else (worker.heavy, light + 1)


def _fewest_residents(workers: list[DecodeLoad], request: Request, *, needs_room: bool) -> int:
    """The least loaded of alpha, or of all that accept; -1 for none."""
    best = -1
    for index, worker in enumerate(workers):
        if not worker.accepting or (needs_room and not has_room(worker, request)):
            continue
        if best < 0 or _preferred(worker, workers[best], False):
            best = index
    return best


def _most_heavy(workers: list[DecodeLoad], request: Request) -> int:
    """The one of alpha with the most heavy residents, then the name: free KV would spread them."""
    best = -1
    for index, worker in enumerate(workers):
        if not worker.accepting or not has_room(worker, request):
            continue
        more = 1 if best < 0 else worker.heavy - workers[best].heavy
        if more > 0 or (more == 0 and worker.pod < workers[best].pod):
            best = index
    return best


def _next_in_turn(workers: list[DecodeLoad], request: Request, turn: int) -> int:
    """The first of alpha at or after the position whose turn it is, around the list."""
    if turn < 0:
        raise ValueError("turn is missing: RoundRobin needs the number of requests dispatched before")
    for step in range(len(workers)):
        index = (turn + step) % len(workers)
        if workers[index].accepting and has_room(workers[index], request):
            return index
    raise IndexError("no worker has room")


@final
@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision with all alternatives: workers, the chosen one first and then where to turn if it refuses."""

    ranking: tuple[DecodeLoad, ...]
    reason: Reason

    @property
    def overcommitted(self) -> bool:
        """Whether no worker has free KV for the whole answer."""
        return self.reason is Reason.OVERCOMMITTED


def choose(workers: Iterable[DecodeLoad], request: Request, randomness: RandomSource) -> Dispatch:
    """Rank the accepting decode workers for a request, as `pick` with the default policy chooses.

    After the chosen one come the rest of those with room, best first, then those without room, least loaded first.
    """
    listed = list(workers)
    choice = pick(listed, request, Dispatching.DEFAULT, randomness)
    if choice.index < 0:
        return Dispatch((), choice.reason)
    chosen = listed[choice.index]
    rest = [worker for worker in listed if worker.accepting and worker is not chosen]
    alpha = sorted((worker for worker in rest if has_room(worker, request)), key=lambda one: _preference(one, request))
    beta = sorted((worker for worker in rest if not has_room(worker, request)), key=_least_loaded)
    return Dispatch((chosen, *alpha, *beta), choice.reason)


def has_room(worker: DecodeLoad, request: Request) -> bool:
    """Whether a worker is in alpha: its free KV blocks hold the prompt and the whole answer."""
    return worker.block_size > 0 and request.prompt_tokens + request.bound_tokens <= worker.free_tokens


def explain(decision: Dispatch, request: Request) -> str:
    """The decision in words, for a log."""
    return explain_choice(decision.ranking[0] if decision.ranking else None, decision.reason, request)


def explain_choice(worker: DecodeLoad | None, reason: Reason, request: Request) -> str:
    """A choice in words, for a log; `worker` is the chosen one, None for none."""
    need = f"{request.prompt_tokens} prompt + {request.bound_tokens} output tokens"
    if worker is None:
        return f"{need}: no decode worker accepts requests"
    state = f"{worker.heavy} heavy of {worker.residents} residents, {worker.free_tokens} tokens of KV free"
    why = {
        Reason.BETTER_OF_TWO: f"the better of two for a {'heavy' if request.heavy else 'light'} request",
        Reason.ONLY_ONE_FITS: "the only one with room",
        Reason.OVERCOMMITTED: "the least loaded, since none has room for the whole answer",
        Reason.DRAWN: "drawn from those with room",
        Reason.FEWEST_RESIDENTS: "the one with room and the fewest residents",
        Reason.IN_TURN: "the next in turn with room",
        Reason.MOST_HEAVY: "the one with room and the most heavy residents",
    }[reason]
    return f"{need}: {worker.pod}, {why} ({state})"


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
