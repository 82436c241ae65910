"""Looks up the measured step times of a model on an accelerator, and says where they come from.

The measured ones stand in `data/*_profile.json`, one file a source; a worker's own have the same form. Where nothing is
measured, `model.estimate` answers, and what it gives is marked so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Final, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.costs import NEVER_LARGE, StepCosts
from headrace_core.perf.errors import PerfError
from headrace_core.perf.fit import Residual
from headrace_core.perf.hf_config import known
from headrace_core.perf.model import Efficiency, Placement, estimate
from headrace_core.perf.shape import ModelShape

_FILES: Final = ("distserve_profile.json", "splitwise_profile.json", "vidur_profile.json")


class Kind(StrEnum):
    """Where coefficients come from."""

    MEASURED = "measured"
    """Fitted to measured steps of this model on this accelerator."""
    ESTIMATED = "estimated"
    """Counted from the model's sizes and the accelerator's datasheet."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How far coefficients can be trusted."""

    kind: Kind
    source: str
    assumed: str
    """What of it nobody measured; empty: all is measured, or all is estimated."""
    prefill: Residual | None
    """Error of the prefill fit: against measured steps if measured, else against the counts. None: not stated."""
    decode: Residual | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The step times of one shape, with where they come from."""

    model: str
    accelerator: str
    tensor: int
    pipeline: int
    engine: str
    costs: StepCosts
    provenance: Provenance


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ResidualEntry(_Strict):
    """`fit.Residual` in a file."""

    mape: float = Field(ge=0)
    p95: float = Field(ge=0)
    samples: int = Field(gt=0)

    def residual(self) -> Residual:
        """As the core passes it on."""
        return Residual(self.mape, self.p95, self.samples)


class PrefillEntry(_Strict):
    """Coefficients of a prefill pass, in ms. A square term may be negative: one of DistServe's is."""

    base_ms: float = Field(ge=0)
    token_ms: float = Field(gt=0)
    square_ms: float
    residual: ResidualEntry | None = None


class DecodeEntry(_Strict):
    """Coefficients of a decode step, in ms."""

    base_ms: float = Field(ge=0)
    kv_token_ms: float = Field(ge=0)
    request_ms: float = Field(ge=0)
    from_requests: int = Field(1, ge=1)
    """The smallest batch for which they hold."""
    residual: ResidualEntry | None = None


class ProfileEntry(_Strict):
    """One shape."""

    model: str
    accelerator: str
    tensor: int = Field(ge=1)
    engine: str = ""
    prefill: PrefillEntry
    decode: DecodeEntry
    large_decode: DecodeEntry | None = None
    scheduler_ms: float = Field(0.0, ge=0)
    scheduler_token_ms: float = Field(0.0, ge=0)
    hop_ms_times_stages: float | None = Field(None, ge=0)
    """Each stage of a prefill pass pays this times the number of stages. Absent: each pays the hop of an estimate."""
    assumed: str = ""
    """What of the entry was not measured."""


class ProfileFile(_Strict):
    """A file of measured profiles."""

    schema_version: Literal[1]
    source: str
    licence: str = ""
    profiles: list[ProfileEntry]


def profile_for(placement: Placement, *, engine: str = "", own: Sequence[Path] = ()) -> Profile:
    """The measured profile of a placement, or else an estimate that says so. Arguments and errors as of `find`."""
    measured = find(placement, engine=engine, own=own)
    if measured is not None:
        return measured
    guess = estimate(placement)
    return Profile(
        model=placement.shape.name,
        accelerator=placement.accelerator.name,
        tensor=placement.tensor,
        pipeline=placement.pipeline,
        engine="",
        costs=guess.costs,
        provenance=Provenance(
            kind=Kind.ESTIMATED,
            source=f"counted from the model's sizes and the {placement.accelerator.name} datasheet",
            assumed="",
            prefill=guess.prefill,
            decode=guess.decode,
        ),
    )


def find(placement: Placement, *, engine: str = "", own: Sequence[Path] = ()) -> Profile | None:
    """The measured profile of a placement, None where there is none.

    A model that is shipped matches by its sizes, whatever its name, any other by its name. Files in `own` come before
    the shipped ones; among equals the first wins, unless `engine` names one.

    Raises:
        PerfError: a file in `own` is no profile file, or no file has a profile of `engine`.
    """
    files = (*(read(path) for path in own), *_shipped())
    engines = {entry.engine for file in files for entry in file.profiles}
    if engine and engine not in engines:
        raise PerfError(f"engine: {engine!r} has no profile; there are {', '.join(sorted(engines))}")
    for file in files:
        for entry in file.profiles:
            if engine and entry.engine != engine:
                continue
            if entry.tensor != placement.tensor or accelerator(entry.accelerator) != placement.accelerator:
                continue
            if _is(entry.model, placement.shape):
                return _profile(entry, placement.pipeline, file.source)
    return None


def read(path: Path) -> ProfileFile:
    """A profile file from disk.

    Raises:
        PerfError: it cannot be read, or is no profile file; the message names the field.
    """
    try:
        return ProfileFile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PerfError(f"profile: {path} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        raise PerfError(f"profile: {path}: {field}: {first['msg']}") from error


def measured_kv_tokens(model: str, tensor: int, pipeline: int) -> int | None:
    """KV tokens that fit on A100-80G by DistServe's table (see `data/README.md`); None where it has no such row.

    DistServe's simulator caps a prefill batch with it. What a worker of ours holds is `memory.fit`'s to say.
    """
    return _kv_tokens().get((model, tensor, pipeline))


def _profile(entry: ProfileEntry, pipeline: int, source: str) -> Profile:
    decode = entry.decode
    large = entry.large_decode
    stages = (
        f"each of the {pipeline} stages takes 1/{pipeline} of a pass that was measured whole" if pipeline > 1 else ""
    )
    costs = StepCosts(
        prefill_base_ms=entry.prefill.base_ms,
        prefill_token_ms=entry.prefill.token_ms,
        prefill_square_ms=entry.prefill.square_ms,
        decode_base_ms=decode.base_ms,
        decode_kv_token_ms=decode.kv_token_ms,
        decode_request_ms=decode.request_ms,
        large_decode_base_ms=(large or decode).base_ms,
        large_decode_kv_token_ms=(large or decode).kv_token_ms,
        large_decode_request_ms=(large or decode).request_ms,
        large_decode_from=large.from_requests if large else NEVER_LARGE,
        stages=pipeline,
        hop_ms=_hop_ms(entry, pipeline),
        scheduler_ms=entry.scheduler_ms,
        scheduler_token_ms=entry.scheduler_token_ms,
    )
    return Profile(
        model=entry.model,
        accelerator=entry.accelerator,
        tensor=entry.tensor,
        pipeline=pipeline,
        engine=entry.engine,
        costs=costs,
        provenance=Provenance(
            kind=Kind.MEASURED,
            source=source,
            assumed="; ".join(part for part in (entry.assumed, stages) if part),
            prefill=entry.prefill.residual.residual() if entry.prefill.residual else None,
            decode=decode.residual.residual() if decode.residual else None,
        ),
    )


def _hop_ms(entry: ProfileEntry, pipeline: int) -> float:
    if entry.hop_ms_times_stages is not None:
        return entry.hop_ms_times_stages * pipeline
    return Efficiency().hop_ms if pipeline > 1 else 0.0


def _is(model: str, shape: ModelShape) -> bool:
    try:
        return known(model).same_work(shape)
    except PerfError:
        return model == shape.name


@functools.cache
def _shipped() -> tuple[ProfileFile, ...]:
    folder = resources.files("headrace_core.perf").joinpath("data")
    return tuple(ProfileFile.model_validate(json.loads(folder.joinpath(name).read_text("utf-8"))) for name in _FILES)


@functools.cache
def _kv_tokens() -> dict[tuple[str, int, int], int]:
    text = resources.files("headrace_core.perf").joinpath("data/distserve_kv_tokens.csv").read_text("utf-8")
    rows = [line.split(",") for line in text.splitlines()[1:]]
    return {(model, int(tensor), int(pipeline)): int(tokens) for model, tensor, pipeline, tokens in rows}
