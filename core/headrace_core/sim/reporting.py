"""Makes the report of a simulation: cuts the warm-up, measures, judges, and says what to be careful about."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headrace_core.perf.fit import Correction
from headrace_core.perf.profiles import Kind, Profile
from headrace_core.sim.attainment import Stage, Verdicts, blame, judge
from headrace_core.sim.outcome import Outcome, Status, WorkerTotals
from headrace_core.sim.report import (
    SCHEMA_VERSION,
    ClassAttainment,
    Ends,
    Misses,
    Percentile,
    PoolUse,
    ProfileKind,
    ProfileUse,
    Report,
    Sample,
    Stability,
    Times,
    Totals,
)
from headrace_core.sim.report_cautions import cautions
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.statistics import (
    BATCHES,
    LEAST_BEYOND,
    LEAST_IN_BATCH,
    Thirds,
    estimate_mean,
    estimate_percentiles,
    estimate_share,
    thirds,
    thirds_of_batches,
)
from headrace_core.sim.workload import Workload, WorkloadError

WARMUP_SHARE: Final = 0.1
"""Share of the requests that is left out at the start, where the queues are still filling."""
PERCENTS: Final = (50.0, 90.0, 95.0, 99.0)
LEAST_ATTAINMENT_TREND: Final = 0.02
"""A difference of attainment between the first and the last third that matters."""
LEAST_GROWTH: Final = 1.25
"""A growth of the requests in the system, first third to last, that matters."""


def make_report(
    scenario: Scenario,
    workload: Workload,
    outcome: Outcome,
    profiles: Sequence[ProfileUse] = (),
    warmup_share: float = WARMUP_SHARE,
) -> Report:
    """The report of a run.

    Args:
        scenario: what was simulated; its SLOs are the ones held against.
        workload: what arrived.
        outcome: what came of it.
        profiles: where each pool's step times come from. A pool without one gets a warning.
        warmup_share: share of the requests, in order of arrival, that is left out at the start. The tail is not.

    Raises:
        WorkloadError: the share leaves no request.
    """
    count = len(outcome.arrival_ms)
    if not 0 <= warmup_share < 1:
        raise WorkloadError(f"warmup share: {warmup_share:g} leaves no request; give 0 or more, and less than 1")
    start = int(count * warmup_share)
    verdicts = judge(scenario, outcome)
    met = verdicts.met[start:]
    sample = _sample(outcome, start, warmup_share)
    stability = _stability(outcome, start, met)
    pools = tuple(
        _pool_use(pool.name, [worker for worker in outcome.workers if worker.pool == pool.name])
        for pool in scenario.pools
    )
    totals = _totals(outcome, pools)
    goodput_per_s = sum(met) / len(met) * sample.arrival_rate_per_s if sample.arrival_rate_per_s is not None else None
    ends = _ends(outcome, start)
    return Report(
        schema_version=SCHEMA_VERSION,
        seed=scenario.seed,
        workload=workload.source,
        workload_sha256=workload.digest(),
        scenario_sha256=scenario_digest(scenario),
        profiles=tuple(profiles),
        sample=sample,
        ttft=_times(verdicts.ttft_ms[start:]),
        second_token_wait=_times(_differences(outcome.second_token_ms, outcome.first_token_ms, start)),
        tpot=_times(verdicts.tpot_ms[start:]),
        largest_gap=_times(_largest_gaps(outcome, start)),
        jct=_times(_differences(outcome.last_token_ms, outcome.arrival_ms, start)),
        attainment=estimate_share(met),
        classes=_classes(scenario, outcome, verdicts, start),
        misses=_misses(scenario, outcome, verdicts, start),
        ends=ends,
        goodput_per_s=goodput_per_s,
        goodput_per_gpu_s=_per_gpu(goodput_per_s, totals),
        pools=pools,
        totals=totals,
        stability=stability,
        warnings=cautions(scenario, outcome, profiles, sample=sample, ends=ends, stability=stability),
    )


def profile_use(pool: str, profile: Profile, correction: Correction | None = None) -> ProfileUse:
    """What a report says of a pool's step times."""
    provenance = profile.provenance
    return ProfileUse(
        pool=pool,
        model=profile.model,
        accelerator=profile.accelerator,
        tensor=profile.tensor,
        pipeline=profile.pipeline,
        kind=ProfileKind.MEASURED if provenance.kind is Kind.MEASURED else ProfileKind.ESTIMATED,
        source=provenance.source,
        assumed=provenance.assumed,
        prefill_error=provenance.prefill.mape if provenance.prefill else None,
        decode_error=provenance.decode.mape if provenance.decode else None,
        prefill_factor=correction.prefill if correction else 1.0,
        decode_factor=correction.decode if correction else 1.0,
    )


def scenario_digest(scenario: Scenario) -> str:
    """SHA-256 in hex of all fields of a scenario; of an elasticity policy its type alone."""
    policy = "none"
    if scenario.elasticity is not None:
        policy = type(scenario.elasticity.policy).__qualname__
        policy += f" {scenario.elasticity.interval_ms!r} {scenario.elasticity.switch_ms!r}"
        policy += f" {scenario.elasticity.start_ms!r}"
    return hashlib.sha256(f"{replace(scenario, elasticity=None)!r} {policy}".encode()).hexdigest()


def _sample(outcome: Outcome, start: int, warmup_share: float) -> Sample:
    arrival_ms = outcome.arrival_ms
    measured = len(arrival_ms) - start
    window_ms = arrival_ms[-1] - arrival_ms[start]
    return Sample(
        requests=len(arrival_ms),
        warmup_share=warmup_share,
        warmup_requests=start,
        measured_requests=measured,
        arrival_rate_per_s=(measured - 1) * 1000.0 / window_ms if window_ms > 0 else None,
        window_s=window_ms / 1000.0,
        drain_s=max(0.0, outcome.end_ms - arrival_ms[-1]) / 1000.0,
    )


def _differences(later_ms: list[float], earlier_ms: list[float], start: int) -> list[float]:
    return [later_ms[index] - earlier_ms[index] for index in range(start, len(later_ms))]


def _largest_gaps(outcome: Outcome, start: int) -> list[float]:
    """A request that has no second token has no gap."""
    return [
        math.nan if math.isnan(outcome.second_token_ms[index]) else outcome.largest_gap_ms[index]
        for index in range(start, len(outcome.second_token_ms))
    ]


def _times(values_ms: list[float]) -> Times:
    known_ms = [value for value in values_ms if not math.isnan(value)]
    if not known_ms:
        return Times(samples=0, missing=len(values_ms), mean_ms=None, mean_half_width_ms=None, percentiles=())
    mean = estimate_mean(known_ms)
    estimates = estimate_percentiles(known_ms, PERCENTS)
    return Times(
        samples=len(known_ms),
        missing=len(values_ms) - len(known_ms),
        mean_ms=mean.value,
        mean_half_width_ms=mean.half_width,
        percentiles=tuple(
            Percentile(
                percent=percent,
                value_ms=estimate.value,
                half_width_ms=estimate.half_width,
                enough=len(known_ms) * (100.0 - percent) / 100.0 >= LEAST_BEYOND,
            )
            for percent, estimate in zip(PERCENTS, estimates, strict=True)
        ),
    )


def _classes(scenario: Scenario, outcome: Outcome, verdicts: Verdicts, start: int) -> tuple[ClassAttainment, ...]:
    members: list[list[int]] = [[] for _ in scenario.slos]
    for index in range(start, len(outcome.slo_class)):
        members[outcome.slo_class[index]].append(index)
    return tuple(
        ClassAttainment(
            name=slo.name,
            ttft_slo_ms=slo.ttft_ms,
            tpot_slo_ms=slo.tpot_ms,
            requests=len(rows),
            both=estimate_share([verdicts.met[row] for row in rows]) if rows else None,
            ttft_share=sum(verdicts.ttft_met[row] for row in rows) / len(rows) if rows else None,
            tpot_share=sum(verdicts.tpot_met[row] for row in rows) / len(rows) if rows else None,
        )
        for slo, rows in zip(scenario.slos, members, strict=True)
    )


def _misses(scenario: Scenario, outcome: Outcome, verdicts: Verdicts, start: int) -> tuple[Misses, ...]:
    counts = dict.fromkeys(Stage, 0)
    measured = len(verdicts.met) - start
    for index in range(start, len(verdicts.met)):
        if not verdicts.met[index]:
            counts[blame(scenario, outcome, verdicts, index)] += 1
    ranked = sorted(counts.items(), key=lambda entry: -entry[1])
    return tuple(Misses(stage=stage, requests=many, share=many / measured) for stage, many in ranked if many)


def _ends(outcome: Outcome, start: int) -> Ends:
    status = outcome.status[start:]
    return Ends(
        finished=status.count(Status.FINISHED),
        rejected=status.count(Status.REJECTED),
        unfinished=status.count(Status.UNFINISHED),
        deflected=sum(outcome.deflected[start:]),
        preempted=sum(1 for times in outcome.preemptions[start:] if times),
        preemptions=sum(outcome.preemptions[start:]),
    )


def _pool_use(name: str, workers: list[WorkerTotals]) -> PoolUse:
    held_ms = sum(worker.to_ms - worker.from_ms for worker in workers)
    block_ms = sum((worker.to_ms - worker.from_ms) * worker.kv_blocks for worker in workers)
    priced = bool(workers) and all(worker.price_per_hour > 0 for worker in workers)
    return PoolUse(
        name=name,
        workers=len(workers),
        utilisation=sum(worker.busy_ms for worker in workers) / held_ms if held_ms > 0 else None,
        kv_mean_share=sum(worker.block_ms for worker in workers) / block_ms if block_ms > 0 else None,
        kv_peak_share=max((worker.peak_blocks / worker.kv_blocks for worker in workers), default=0.0),
        gpu_hours=sum(worker.gpus * (worker.to_ms - worker.from_ms) for worker in workers) / 3_600_000,
        cost=sum(worker.price_per_hour * (worker.to_ms - worker.from_ms) for worker in workers) / 3_600_000
        if priced
        else None,
    )


def _totals(outcome: Outcome, pools: tuple[PoolUse, ...]) -> Totals:
    tokens = sum(
        outcome.output_tokens[index] for index in range(len(outcome.status)) if outcome.status[index] == Status.FINISHED
    )
    duration_s, gpu_hours = outcome.end_ms / 1000.0, sum(pool.gpu_hours for pool in pools)
    costs = [pool.cost for pool in pools if pool.workers]
    cost = sum(part for part in costs if part is not None) if costs and None not in costs else None
    return Totals(
        duration_s=duration_s,
        resource_s=sum(worker.busy_ms for worker in outcome.workers) / 1000.0,
        gpu_hours=gpu_hours,
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration_s if duration_s > 0 else None,
        output_tokens_per_gpu_s=tokens / (gpu_hours * 3600.0) if gpu_hours > 0 else None,
        transferred_bytes=outcome.transfer_bytes,
        cost=cost,
        cost_per_million_output_tokens=cost / tokens * 1e6 if cost is not None and tokens else None,
    )


def _per_gpu(rate_per_s: float | None, totals: Totals) -> float | None:
    """A rate over the mean number of GPUs held."""
    if rate_per_s is None or totals.gpu_hours <= 0:
        return None
    return rate_per_s / (totals.gpu_hours * 3600.0 / totals.duration_s)


def _stability(outcome: Outcome, start: int, met: list[bool]) -> Stability:
    """Attainment by thirds of the requests, and the requests in the system by thirds of the arrivals' time."""
    if len(met) < BATCHES * LEAST_IN_BATCH or outcome.arrival_ms[-1] <= outcome.arrival_ms[start]:
        return Stability(stable=None, attainment=None, in_system=None)
    attainment = thirds([1.0 if hit else 0.0 for hit in met])
    in_system = thirds_of_batches(_in_system(outcome, outcome.arrival_ms[start]))
    drifts = attainment.differs and abs(attainment.last - attainment.first) >= LEAST_ATTAINMENT_TREND
    return Stability(stable=not (drifts or _grows(in_system)), attainment=attainment, in_system=in_system)


def _grows(in_system: Thirds) -> bool:
    return in_system.differs and in_system.last >= max(LEAST_GROWTH * in_system.first, in_system.first + 1.0)


def _in_system(outcome: Outcome, from_ms: float) -> list[float]:
    """Requests in the system, mean over each of BATCHES equal slices of the time up to the last arrival."""
    width_ms = (outcome.arrival_ms[-1] - from_ms) / BATCHES
    area_ms = [0.0] * BATCHES
    for index in range(len(outcome.arrival_ms)):
        if outcome.status[index] == Status.REJECTED:
            continue
        last_ms = outcome.last_token_ms[index]
        end_ms = outcome.end_ms if math.isnan(last_ms) else last_ms
        begin_ms = max(outcome.arrival_ms[index], from_ms)
        slot = min(BATCHES - 1, int((begin_ms - from_ms) / width_ms))
        while slot < BATCHES and begin_ms < end_ms:
            border_ms = from_ms + (slot + 1) * width_ms
            area_ms[slot] += max(0.0, min(end_ms, border_ms) - begin_ms)
            begin_ms = max(begin_ms, border_ms)
            slot += 1
    return [area / width_ms for area in area_ms]
