"""Decides what a reader of a report must be told before trusting its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace_core.sim.outcome import Outcome
from headrace_core.sim.report import Caution, Ends, ProfileKind, ProfileUse, Sample, Stability, Warned
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.statistics import BATCHES, LEAST_IN_BATCH

MOST_PROFILE_ERROR: Final = 0.1
"""Mean relative error of step times above which deflection is held too (K6)."""


def cautions(
    scenario: Scenario,
    outcome: Outcome,
    profiles: Sequence[ProfileUse],
    *,
    sample: Sample,
    ends: Ends,
    stability: Stability,
) -> tuple[Warned, ...]:
    """All cautions that apply, the gravest first."""
    found: list[Warned] = []
    if outcome.stopped_early:
        found.append(
            _warned(
                Caution.STOPPED_EARLY,
                f"the run ended after {scenario.stop_after_misses} misses: later requests count as unfinished",
            )
        )
    found.extend(_steadiness(sample, stability))
    if ends.rejected:
        found.append(
            _warned(
                Caution.REJECTED,
                f"{ends.rejected} requests can never fit into a decode worker's KV cache and count as misses; "
                "give workers more memory or GPUs, or cap prompt and output tokens",
            )
        )
    if ends.unfinished and not outcome.stopped_early:
        found.append(
            _warned(Caution.UNFINISHED, f"{ends.unfinished} requests were not finished at the end and count as misses")
        )
    found.extend(_memory(scenario, outcome))
    found.extend(_profiles(scenario, profiles))
    return tuple(found)


def _steadiness(sample: Sample, stability: Stability) -> list[Warned]:
    if stability.attainment is None or stability.in_system is None:
        least = BATCHES * LEAST_IN_BATCH
        return [
            _warned(
                Caution.TOO_FEW_REQUESTS,
                f"{sample.measured_requests} measured requests cannot show whether the run is stable; "
                f"give at least {least} over some time",
            )
        ]
    if stability.stable:
        return []
    shares, present = stability.attainment, stability.in_system
    return [
        _warned(
            Caution.UNSTABLE,
            "the run has a trend, so its numbers depend on its length: attainment by thirds "
            f"{shares.first:.3f}, {shares.middle:.3f}, {shares.last:.3f}; requests in the system "
            f"{present.first:.1f}, {present.middle:.1f}, {present.last:.1f}; lower the rate or add workers, "
            "or cut a longer warm-up if the rate itself is steady",
        )
    ]


def _memory(scenario: Scenario, outcome: Outcome) -> list[Warned]:
    found: list[Warned] = []
    for pool in scenario.pools:
        full = sum(
            1 for worker in outcome.workers if worker.pool == pool.name and worker.peak_blocks >= worker.kv_blocks
        )
        if full:
            found.append(
                _warned(
                    Caution.KV_FULL,
                    f"{full} of the workers of pool {pool.name} had all KV blocks in use at some time: "
                    "memory limits them",
                )
            )
    return found


def _profiles(scenario: Scenario, profiles: Sequence[ProfileUse]) -> list[Warned]:
    found: list[Warned] = []
    for pool in scenario.pools:
        use = next((profile for profile in profiles if profile.pool == pool.name), None)
        if use is None:
            found.append(
                _warned(Caution.UNKNOWN_PROFILE, f"nothing says where the step times of pool {pool.name} come from")
            )
        elif use.kind is ProfileKind.ESTIMATED and use.prefill_factor == use.decode_factor == 1.0:
            found.append(
                _warned(
                    Caution.ESTIMATED_PROFILE,
                    f"the step times of pool {pool.name} are estimated ({use.source}); "
                    "measure them, or correct them by observed TTFT and TPOT",
                )
            )
        elif (
            use.kind is ProfileKind.MEASURED
            and max(use.prefill_error or 0.0, use.decode_error or 0.0) > MOST_PROFILE_ERROR
        ):
            found.append(
                _warned(
                    Caution.PROFILE_ERROR,
                    f"the step times of pool {pool.name} are off by {_percent(use.prefill_error)} (prefill) and "
                    f"{_percent(use.decode_error)} (decode) on average: {use.source}",
                )
            )
    return found


def _percent(share: float | None) -> str:
    return "an unknown part" if share is None else f"{share:.0%}"


def _warned(caution: Caution, text: str) -> Warned:
    return Warned(caution=caution, text=text)
