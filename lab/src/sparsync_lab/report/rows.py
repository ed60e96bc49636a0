"""The results of a comparison as rows of plain values, one per training: for `sparsync_lab.read_results`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsync_lab.report.format import place_text
from sparsync_lab.report.results import read
from sparsync_lab.report.summary import RunSummary, SchemeFigures, SeedFigures, seed_speedup, summarise

Row = dict[str, Any]  # Any: numbers, texts, None


def rows(folder: Path) -> list[Row]:
    """Read a row per training of all runs in a folder of `compare`. Raises ValueError if there are none."""
    return [row for records in read(folder).runs for row in compared(summarise(records))]


def compared(summary: RunSummary) -> list[Row]:
    """Make the rows of one comparison, in the order of its schemes and seeds."""
    run = summary.run
    about = {
        "run": run.run,
        "time": run.time,
        "place": place_text(run),
        "workload": run.config.get("workload", ""),
        "ranks": run.ranks,
        "limited": run.limited,
        "rate_bits_per_s": run.rate_bits_per_s,
        "delay_s": run.delay_s,
        "jitter_s": run.jitter_s,
        "disturbed": summary.disturbed,
        "parameters": run.workload["parameters"],
        "target": run.target,
        "metric": run.metric,
    }
    return [
        {**about, "scheme": scheme.label, **_figures(summary, scheme, seed)}
        for scheme in summary.schemes
        for seed in scheme.seeds
    ]


def _figures(summary: RunSummary, scheme: SchemeFigures, seed: SeedFigures) -> Row:
    row = {**asdict(seed), **{name: getattr(seed, name) for name in ("reduce_s", "hidden_s", "other_s")}}
    for label in ("dense", "bf16"):
        base = summary.scheme(label)
        beside = next((each for each in base.seeds if each.seed == seed.seed), None) if base else None
        found = seed_speedup(seed, beside)
        row[f"speedup_over_{label}"] = found[0] if found and not found[1] else None
    return row
