"""What the demo found out: the facts of `build/demo/report.json` and their text on the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from e2e.deployed import Flip


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker as its labels and annotations name it."""

    name: str
    role: str
    epoch: int


@dataclass(slots=True)
class Report:
    """The demo's facts, filled in by the run."""

    seconds: float = 0.0
    pods_before: list[Pod] = field(default_factory=list)
    pods_after: list[Pod] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)
    requests_sent: int = 0
    requests_lost: int = 0
    requests_changed: int = 0
    kv_bytes_moved: int | None = None
    """KV received by all workers, in bytes. None: Prometheus has no sample of it."""
    kv_transfers: int | None = None
    """Requests whose KV was received. None: as above."""

    def write(self, path: Path) -> None:
        """Writes the report as JSON; a flip's pools are called `from` and `to` there."""
        facts = asdict(self)
        for flip in facts["flips"]:
            flip["from"], flip["to"] = flip.pop("from_pool"), flip.pop("to_pool")
        path.write_text(json.dumps(facts, indent=2) + "\n")

    def text(self) -> str:
        """The report for a reader at a terminal."""
        before = {pod.name: pod for pod in self.pods_before}
        lines = ["What happened", "", f"  {'pod':<12}{'before':<22}after"]
        for pod in self.pods_after:
            was = before.get(pod.name)
            old = f"{was.role} (epoch {was.epoch})" if was else "-"
            lines.append(f"  {pod.name:<12}{old:<22}{pod.role} (epoch {pod.epoch})")
        lines += ["", "  The ledger (kubectl get inferenceflips)"]
        for flip in self.flips:
            lines.append(
                f"  {flip.pod}: {flip.from_pool} -> {flip.to_pool}, {flip.outcome}; "
                f"drain {_unit(flip.drain_s, 's')}, switch {_unit(flip.switch_ms, 'ms')}"
            )
            lines.append(f"    because: {flip.reason}")
        lines += [
            "",
            f"  requests    {self.requests_sent} sent, {self.requests_lost} lost, {self.requests_changed} changed",
            f"  KV cache    {_count(self.kv_bytes_moved)} bytes in {_count(self.kv_transfers)} transfers",
            f"  time        {self.seconds:.0f} s",
        ]
        return "\n".join(lines)


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _unit(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.2f} {unit}"
