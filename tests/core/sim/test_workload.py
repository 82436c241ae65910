"""What arrives: columns and their check, changes of rate and window, arrival laws, length draws."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
import struct
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.sim import arrivals, lengths
from headrace_core.sim.arrivals import Bursts
from headrace_core.sim.length_fits import LENGTH_FITS, length_fit
from headrace_core.sim.lengths import LengthClass, Lengths
from headrace_core.sim.traffic import Traffic
from headrace_core.sim.workload import Workload, WorkloadError, checked, cut_time, first, repeat, scale_rate


def workload(**changes: object) -> Workload:
    base = Workload([0.0, 10.0, 10.0, 40.0], [100, 513, 5, 2000], [7, 1, 129, 128], [], [], 0, "hand")
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival_ms": []}, "arrival_ms: the workload holds no request"),
        ({"arrival_ms": [0.0, 10.0, 9.0, 40.0]}, "request 2 arrives at 9 ms, before its predecessor"),
        ({"arrival_ms": [-1.0, 10.0, 10.0, 40.0]}, "request 0 arrives at -1"),
        ({"arrival_ms": [0.0, math.nan, 10.0, 40.0]}, "request 1 arrives at nan"),
        ({"arrival_ms": [0.0, 1.0, 2.0, math.inf]}, "request 3 arrives at inf"),
        ({"prompt_tokens": [1, 2, 3]}, "prompt_tokens: 3 entries for 4 arrivals"),
        ({"output_tokens": [1, 2, 0, 4]}, "output_tokens: request 2 has 0"),
        ({"slo_class": [0, 1]}, "slo_class: 2 entries for 4 arrivals"),
        ({"slo_class": [0, 1, -1, 0]}, "slo_class: request 2 has -1"),
        ({"prefix": [(1,), (), (), ()]}, "prefix_block_tokens: 0 with prefix hashes"),
        (
            {"prefix": [(), (), (1, 2), ()], "prefix_block_tokens": 16},
            "request 2 has 2 hashes, but its prompt of 5 tokens has 1 blocks of 16",
        ),
    ],
)
def test_a_bad_workload_names_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        checked(workload(**changes))


def test_a_sound_workload_passes_as_it_is() -> None:
    sound = workload(slo_class=[0, 1, 1, 0], prefix=[(1,), (), (2,), (1, 3)], prefix_block_tokens=512)
    assert checked(sound) is sound


def test_the_digest_is_of_the_columns_alone() -> None:
    packed = (
        struct.pack("<Q4d", 4, 0.0, 10.0, 10.0, 40.0)
        + struct.pack("<Q4q", 4, 100, 513, 5, 2000)
        + struct.pack("<Q4q", 4, 7, 1, 129, 128)
        + struct.pack("<QQqQQ", 0, 1, 0, 0, 0)
    )
    assert workload().digest() == sha256(packed).hexdigest()
    assert workload(source="elsewhere").digest() == workload().digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"arrival_ms": [0.0, 10.0, 10.5, 40.0]},
        {"prompt_tokens": [100, 513, 6, 2000]},
        {"output_tokens": [7, 1, 129, 127]},
        {"slo_class": [0, 0, 0, 0]},
        {"prefix": [(1,), (2,), (), ()], "prefix_block_tokens": 512},
        {"prefix": [(1, 2), (), (), ()], "prefix_block_tokens": 512},
        {"prefix_block_tokens": 16},
    ],
)
def test_each_column_counts_in_the_digest(changes: dict[str, object]) -> None:
    assert workload(**changes).digest() != workload().digest()


def test_the_digest_tells_where_one_prefix_ends() -> None:
    one = workload(prefix=[(1,), (2,), (), ()], prefix_block_tokens=512)
    other = workload(prefix=[(1, 2), (), (), ()], prefix_block_tokens=512)
    assert one.digest() != other.digest()


def test_changes_of_rate_window_and_length() -> None:
    base = workload(slo_class=[0, 1, 2, 3], prefix=[(1,), (2,), (3,), (4,)], prefix_block_tokens=512)
    twice = scale_rate(base, 2)
    assert twice.arrival_ms == [0.0, 5.0, 5.0, 20.0]
    assert twice.rate_per_s() == pytest.approx(2 * base.rate_per_s())
    middle = cut_time(base, 10, 40)
    assert (middle.arrival_ms, middle.prompt_tokens, middle.slo_class, middle.prefix) == (
        [0.0, 0.0],
        [513, 5],
        [1, 2],
        [(2,), (3,)],
    )
    assert first(base, 3).arrival_ms == [0.0, 10.0, 10.0]
    assert first(base, 9) is base
    again = repeat(base, 2)
    assert again.arrival_ms == pytest.approx([0, 10, 10, 40, 40 + 40 / 3, 50 + 40 / 3, 50 + 40 / 3, 80 + 40 / 3])
    assert again.prefix == base.prefix * 2
    for changed in (twice, middle, again):
        assert checked(changed).source.startswith("hand, ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: scale_rate(workload(), 0), "rate factor: 0 is not a positive"),
        (lambda: scale_rate(workload(), -2), "rate factor: -2"),
        (lambda: cut_time(workload(), 11, 40), "no request arrives from 0.011 to 0.04 s; the workload spans 0 to 0.04"),
        (lambda: first(workload(), 0), "requests: 0 leaves nothing"),
        (lambda: repeat(workload(), 0), "times: 0 leaves nothing"),
        (lambda: arrivals.poisson(10, -1.0, random.Random(0)), "rate: -1 requests/s is not a positive number"),
        (lambda: arrivals.poisson(0, 1.0, random.Random(0)), "requests: 0"),
        (lambda: arrivals.gamma(10, 1.0, -0.5, random.Random(0)), "variation: -0.5"),
        (lambda: arrivals.bursty(9, 1.0, Bursts(period_ms=0, share=0.1, factor=2), random.Random(0)), "period_ms: 0"),
        (lambda: arrivals.bursty(9, 1.0, Bursts(period_ms=1, share=1, factor=2), random.Random(0)), "share: 1"),
        (lambda: arrivals.bursty(9, 1.0, Bursts(period_ms=1, share=0.5, factor=0.5), random.Random(0)), "factor: 0.5"),
        (lambda: lengths.fixed(0, 5), "prompt tokens: 0"),
        (lambda: lengths.only(lengths.fixed(5, 5), LengthClass.HPHD), "no pair of .* is HPHD"),
        (lambda: lengths.fit(lengths.fixed(5, 5)), "at least two pairs"),
        (lambda: lengths.draw(Lengths([], [], "nothing"), 5, random.Random(0), True), "nothing holds no pair"),
    ],
)
def test_what_cannot_be_made_says_why(change: object, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        change()  # type: ignore[operator]


GAPS = 40_000


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_mean_and_the_variation(variation: float) -> None:
    times_ms = arrivals.gamma(GAPS, 50.0, variation, random.Random(3))
    gaps_ms = [later - earlier for earlier, later in zip([0.0, *times_ms], times_ms, strict=False)]
    assert statistics.fmean(gaps_ms) == pytest.approx(20.0, rel=5 * max(variation, 1e-6) / GAPS**0.5)
    assert statistics.pstdev(gaps_ms) / 20.0 == pytest.approx(variation, rel=0.08, abs=1e-6)


def test_poisson_arrivals_count_as_poisson() -> None:
    """In equal windows the count's variance is its mean, and one gap says nothing of the next."""
    times_ms = arrivals.poisson(GAPS, 50.0, random.Random(4))
    counts = [0] * int(times_ms[-1] // 1000)
    for time_ms in times_ms:
        if time_ms < len(counts) * 1000:
            counts[int(time_ms // 1000)] += 1
    assert statistics.fmean(counts) == pytest.approx(50, rel=0.03)
    assert statistics.pvariance(counts) / statistics.fmean(counts) == pytest.approx(1.0, abs=0.2)
    gaps_ms = [later - earlier for earlier, later in itertools.pairwise(times_ms)]
    assert statistics.correlation(gaps_ms[:-1], gaps_ms[1:]) == pytest.approx(0, abs=0.02)


def test_bursts_keep_the_mean_and_have_the_factor() -> None:
    bursts = Bursts(period_ms=10_000, share=0.2, factor=6)
    times_ms = arrivals.bursty(GAPS, 40.0, bursts, random.Random(5))
    inside = sum(1 for time_ms in times_ms if time_ms % 10_000 < 2_000)
    high, low = inside / 0.2, (GAPS - inside) / 0.8
    assert high / low == pytest.approx(6, rel=0.05)
    assert GAPS * 1000 / times_ms[-1] == pytest.approx(40, rel=0.03)
    assert times_ms == sorted(times_ms)


def test_arrivals_follow_the_seed() -> None:
    one, same, other = (arrivals.poisson(50, 2.0, random.Random(seed)) for seed in (1, 1, 2))
    assert one == same != other


TABLE = Lengths([1 + (k * k * 7919) % 1999 for k in range(700)], [1 + (31 * k) % 400 for k in range(700)], "table")


def test_the_five_classes_split_a_table() -> None:
    parts = {kind: lengths.only(TABLE, kind) for kind in LengthClass}
    assert sum(len(part) for kind, part in parts.items() if kind is not LengthClass.MIXED) == len(TABLE)
    assert parts[LengthClass.MIXED] is TABLE
    for kind, part in parts.items():
        if kind is LengthClass.MIXED:
            continue
        for prompt, output in zip(part.prompt_tokens, part.output_tokens, strict=True):
            assert kind == ("H" if prompt > 512 else "L") + "P" + ("H" if output > 128 else "L") + "D"


@given(st.integers(1, 900), st.booleans(), st.integers(0, 99))
def test_draws_come_from_the_table(count: int, stratified: bool, seed: int) -> None:
    drawn = lengths.draw(TABLE, count, random.Random(seed), stratified)
    pairs = set(zip(TABLE.prompt_tokens, TABLE.output_tokens, strict=True))
    assert len(drawn) == count
    assert set(zip(drawn.prompt_tokens, drawn.output_tokens, strict=True)) <= pairs


def test_as_many_strata_as_pairs_give_each_pair_once() -> None:
    drawn = lengths.draw(TABLE, len(TABLE), random.Random(1), stratified=True)
    assert sorted(zip(drawn.prompt_tokens, drawn.output_tokens, strict=True)) == sorted(
        zip(TABLE.prompt_tokens, TABLE.output_tokens, strict=True)
    )


@pytest.mark.parametrize("fitted", [False, True], ids=["table", "log-normal"])
def test_strata_narrow_the_mean_of_both_lengths(fitted: bool) -> None:
    """The spread of the sample's mean over 60 seeds falls by more than a third, in both columns."""

    def spread(stratified: bool) -> tuple[float, float]:
        samples = [draw(random.Random(seed), stratified) for seed in range(60)]
        return (
            statistics.stdev(statistics.fmean(sample.prompt_tokens) for sample in samples),
            statistics.stdev(statistics.fmean(sample.output_tokens) for sample in samples),
        )

    def draw(randomness: random.Random, stratified: bool) -> Lengths:
        if fitted:
            return lengths.draw_log_normal(lengths.fit(TABLE), 200, randomness, stratified)
        return lengths.draw(TABLE, 200, randomness, stratified)

    for narrow, wide in zip(spread(True), spread(False), strict=True):
        assert narrow < wide * 0.66


def test_a_fit_finds_the_law_it_was_drawn_from() -> None:
    law = lengths.LogNormal(
        prompt_mean=6.0,
        prompt_deviation=0.8,
        output_mean=5.0,
        output_deviation=0.5,
        correlation=-0.4,
        most_prompt_tokens=10**6,
        most_output_tokens=10**6,
        source="law",
    )
    found = lengths.fit(lengths.draw_log_normal(law, 20_000, random.Random(2), stratified=True))
    assert found.prompt_mean == pytest.approx(6.0, abs=0.01)
    assert found.prompt_deviation == pytest.approx(0.8, abs=0.01)
    assert found.output_mean == pytest.approx(5.0, abs=0.01)
    assert found.output_deviation == pytest.approx(0.5, abs=0.01)
    assert found.correlation == pytest.approx(-0.4, abs=0.02)


def test_a_log_normal_draw_stays_within_the_longest_seen() -> None:
    law = replace(lengths.fit(TABLE), most_prompt_tokens=300, most_output_tokens=50)
    drawn = lengths.draw_log_normal(law, 500, random.Random(2), stratified=False)
    assert max(drawn.prompt_tokens) == 300
    assert max(drawn.output_tokens) == 50
    assert min(drawn.prompt_tokens + drawn.output_tokens) >= 1


@pytest.mark.parametrize("name", sorted(LENGTH_FITS))
def test_each_named_fit_has_the_means_it_says(name: str) -> None:
    drawn = lengths.draw_log_normal(length_fit(name.upper()), 5000, random.Random(1), stratified=True)
    prompt, output = {
        "sharegpt": (2340, 439),
        "azure-conversation": (1155, 211),
        "azure-code": (2048, 28),
        "arxiv-summarization": (2588, 291),
    }[name]
    assert statistics.fmean(drawn.prompt_tokens) == pytest.approx(prompt, rel=0.1)
    assert statistics.fmean(drawn.output_tokens) == pytest.approx(output, rel=0.2)


def test_an_unknown_fit_names_the_nearest() -> None:
    with pytest.raises(WorkloadError, match="azure-conversation"):
        length_fit("azure-conversations")


BAD_TRAFFIC = {
    "no lengths": ({"lengths": Lengths([], [], "an empty table")}, "lengths: an empty table holds no pair"),
    "a negative variation": ({"variation": -1.0}, "variation: -1"),
    "no class": ({"class_shares": ()}, "class_shares: none"),
    "a negative share": ({"class_shares": (0.5, -0.5)}, "class_shares: 0.5, -0.5"),
    "shares of nothing": ({"class_shares": (0.0, 0.0)}, "class_shares: 0, 0"),
}


@pytest.mark.parametrize("case", BAD_TRAFFIC)
def test_bad_traffic_is_refused_with_its_field(case: str) -> None:
    changes, said = BAD_TRAFFIC[case]
    with pytest.raises(WorkloadError, match=re.escape(said)):
        Traffic(**{"lengths": Lengths([1], [1], "one pair")} | changes)
