"""Clusters of mixed GPU generations, as fast as they were measured (Gavel, Narayanan et al., OSDI 2020).

A table has the steps per second of each job type on one K80, P100 and V100. Which of them is the fastest, and by how
much, differs from job to job: a cluster's speeds are those of one job type.
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline import scenario
from paceline.scenario import Scenario

TABLE = Path(__file__).parents[3] / "shared" / "data" / "trace_gavel_throughputs" / "simulation_throughputs_alone.csv"
GENERATIONS = ("k80", "p100", "v100")


class Mix(msgspec.Struct, frozen=True):
    """How many GPUs of each generation."""

    k80: int
    p100: int
    v100: int

    @property
    def name(self) -> str:
        return ", ".join(f"{count} {kind.upper()}" for kind, count in zip(GENERATIONS, self.counts, strict=True))

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.k80, self.p100, self.v100


def job_types(table: Path = TABLE) -> dict[str, tuple[float, float, float]]:
    """Steps per second on one GPU of each generation, of the job types that ran on all of them."""
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["num_gpus"] == "1"]
    found = {row["job_type"]: tuple(float(row[kind] or 0) for kind in GENERATIONS) for row in rows}
    return {job: speeds for job, speeds in found.items() if min(speeds) > 0}  # type: ignore[misc]


def spread(speeds: Sequence[float]) -> float:
    """How many times as fast as the slowest the fastest is."""
    return max(speeds) / min(speeds)


def nearest(jobs: dict[str, tuple[float, float, float]], wanted: float) -> str:
    """The job type whose fastest GPU is so many times as fast as its slowest, as nearly as there is one."""
    return min(jobs, key=lambda job: abs(math.log(spread(jobs[job]) / wanted)))


def cluster(job: str, mix: Mix, seconds_per_sample: float, jitter: str, seed: int, table: Path = TABLE) -> Scenario:
    """Such GPUs, each as fast as it was measured on this job type; the fastest has speed 1."""
    groups = "".join(
        f'[[workers]]\ncount = {count}\nspeed = "trace:{table.name}:{job}:{kind}"\n'
        for kind, count in zip(GENERATIONS, mix.counts, strict=True)
        if count
    )
    text = f'seed = {seed}\n[compute]\nseconds_per_sample = {seconds_per_sample!r}\njitter = "{jitter}"\n{groups}'
    return scenario.parse(text, "mixed_gpus", table.parent)
