"""Measure step times of each recipe on five networks, and the choice of `bits="auto"`, for "Which one?" of docs/advise.md.

    .venv/bin/python -m studies dial [--out FOLDER] [--print]

Finished networks are kept in FOLDER. Takes ten minutes on two cores, shared by four ranks.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from sparsync.recipes import rows
from sparsync_lab import cli
from sparsync_lab.report.format import significant
from sparsync_lab.report.page import PICTURE
from sparsync_lab.report.results import RunRecords, Trace, read
from studies import parts

PAGE, PART = "docs/advise.md", "which one"
NETWORKS = {
    "10 Gbit/s": "--link 10gbit",
    "1 Gbit/s": "--link 1gbit",
    "100 Mbit/s": "--link 100mbit",
    "100 Mbit/s, 25 ms one way": "--link 100mbit --delay 25ms",
    "10 Mbit/s": "--link 10mbit",
}
RANKS, STEPS, SEEN = 4, 50, 25  # steps of a training, and its last ones, after `auto` has chosen
RECIPES = sorted(rows("steps", RANKS), key=lambda each: -each.bits)
AUTO = f"bits=auto:{RECIPES[-1].bits:g}"
SCHEMES = [*(each.name for each in RECIPES), AUTO]


def main(argv: Sequence[str]) -> None:
    options = parts.options("dial", __doc__)
    options.add_argument("--out", type=Path, default=Path("build/dial"))
    given = options.parse_args(argv)
    found = {
        name: _measured(given.out / name.replace(" ", "_").replace("/s", ""), link) for name, link in NETWORKS.items()
    }
    parts.put(PAGE, PART, table(found), given.print)


def table(found: dict[str, RunRecords]) -> str:
    """Format the step times of each network and the choice of `auto` as Markdown."""
    heads = [
        "link of a rank",
        *(f"{each.bits:g} bits" for each in RECIPES),
        "`auto` took",
        "that row over the fastest",
        "`auto`",
    ]
    lines, noise = [], 0.0
    for name, records in found.items():
        traces = {scheme: trace for (scheme, _), trace in records.traces.items()}
        times = {scheme: _step_ms(trace) for scheme, trace in traces.items()}
        chosen, least = _chosen(traces), min(times[each.name] for each in RECIPES)
        noise = max(noise, 100 * abs(times[AUTO] / times[f"bits={chosen}"] - 1))
        over = f"{100 * (times[f'bits={chosen}'] / least - 1):+.0f} %"
        shown = [significant(times[each], 3) for each in SCHEMES]
        lines.append([name, *shown[:-1], f"{chosen} bits", over, shown[-1]])
    parameters = next(iter(found.values())).run.workload["parameters"]
    under = (
        f"AdamW, {parameters / 1e6:.2f} M parameters, {RANKS} ranks on two cores: step time in ms, medians of steps {STEPS - SEEN + 1} to "
        f"{STEPS} (`python -m studies dial`). Trainings that send the same differ by up to {noise:.0f} % here. `auto` may take any row: "
        f'`bits=("auto", {RECIPES[-1].bits:g})`.'
    )
    return f"{parts.table(heads, lines)}\n\n{under}"


def _measured(folder: Path, link: str) -> RunRecords:
    if not (folder / PICTURE).exists():
        steps = f"--steps {STEPS} --eval-every {STEPS}"
        command = f"compare --workload gpt --ranks {RANKS} {link} {steps} --schemes {','.join(SCHEMES)}"
        cli.main([*shlex.split(command), "--out", str(folder)])
    return read(folder).runs[-1]


def _step_ms(trace: Trace) -> float:
    return 1e3 * median(each.step_s for each in trace.steps[-SEEN:])


def _chosen(traces: dict[str, Trace]) -> str:
    """Find the bits of the recipe that sends as much as `auto` does in the end."""
    sent = {scheme: median(each.sent_bytes for each in trace.steps[-SEEN:]) for scheme, trace in traces.items()}
    return min(RECIPES, key=lambda each: abs(sent[each.name] - sent[AUTO])).name.removeprefix("bits=")
