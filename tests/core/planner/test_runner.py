"""Trials come out the same, in whatever process they run."""

from __future__ import annotations

import pickle

from headrace_core.planner.deployment import decode_alone
from headrace_core.planner.runner import Here, Processes
from headrace_core.planner.sides import decode_contenders, prefill_contenders
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.sim.cluster import simulate
from headrace_core.sim.lengths import Lengths
from headrace_core.sim.scenario import Network, Scenario
from tests.core.planner.builders import question, shape, space

ASKED = question(lengths=Lengths([50, 400, 900], [5, 20, 9], "three"))


def test_processes_give_what_one_process_gives() -> None:
    contenders = [prefill_contenders(ASKED, space())[0], decode_contenders(ASKED, space())[0]]
    trials = [one.candidate.screening(rate) for one in contenders for rate in (2.0, 9.0, 14.0)]
    here = Here(ASKED.traffic, simulate)
    done: list[int] = []
    with Processes(ASKED.traffic, simulate, processes=2, progress=done.append) as runner:
        assert runner.run(trials) == here.run(trials)
        assert runner.trials == here.trials == len(trials)
    assert done == list(range(1, len(trials) + 1))


def test_everything_of_a_scenario_travels() -> None:
    """Frozen classes too, which pickle by themselves cannot carry when they are compiled."""
    plain = decode_alone(ASKED, shape())
    scenario = Scenario(
        pools=plain.pools,
        slos=plain.slos,
        network=Network(kv_bytes_per_token=1.0, bytes_per_ms=1.0),
        deflection=DeflectionSettings(alpha=1.1),
    )
    assert pickle.loads(pickle.dumps(scenario)) == scenario  # noqa: S301 - our own bytes
    travelled = pickle.loads(pickle.dumps(ASKED.traffic))  # noqa: S301
    assert travelled.lengths.prompt_tokens == ASKED.traffic.lengths.prompt_tokens
