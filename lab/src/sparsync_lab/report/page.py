"""Write the report of a comparison from results.jsonl alone: tables on the terminal, report.html and PNG files."""

import json
import shlex
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from sparsync_lab.report.choice import WITHIN, failure, sentences
from sparsync_lab.report.format import place_text
from sparsync_lab.report.results import Results, read
from sparsync_lab.report.rows import compared, write_csv
from sparsync_lab.report.summary import RunSummary, summarise
from sparsync_lab.report.tables import as_text, remarks, tables
from sparsync_lab.terminal import manner

PAGE = "report.html"
_ALT = {
    "quality_over_time": "Quality over training time, a curve for each scheme",
    "quality_over_steps": "Quality over training steps, a curve for each scheme",
}
_METHOD = (
    f"The choice is the fastest of the schemes at most {WITHIN:g} % behind dense's quality: by the time to the target where any scheme "
    "reached it with every seed, else by the time of a step. It must be faster than the plain all-reduce (the faster of bf16 and dense) "
    "with every seed, and by more than the noise.",
    "Training time is the sum of the steps, a mean over the ranks, without evaluations and start-up. A target counts as reached on the "
    "straight line between two evaluations. If only one of two schemes reached it, the other's training time bounds the speed-up (< or >).",
    "Communicate is the time inside the communicator, waiting for slower ranks included; scheme is the rest of the reduction. What these "
    "and compute are above the step was hidden; what they are below it is other. docs/compare.md has the rest.",
)


def report(folder: Path, csv: Path | None = None) -> tuple[Path, ...]:
    """Write two PNG images and report.html into `folder`, print the tables, and return the paths.

    The tables are printed even if the files cannot be made. Shows the newest run that trained anything; runs are not mixed.
    `csv`: a file for the numbers of each training. Raises ValueError if the folder holds no such results, RuntimeError if writing fails.
    """
    summary = _newest(read(folder))
    from sparsync_lab.report.plots import pictures  # loads matplotlib

    try:
        drawn = pictures(summary)
        page = render(summary, drawn)
        images = {f"{name}.png": picture for name, picture in drawn.items()}
        written = _write(Path(folder), {**images, PAGE: page.encode()})
        if csv is not None:
            write_csv(csv, compared(summary))
    finally:
        print(as_text(summary, *manner()))
    print(f"Report: {Path(folder) / PAGE}, with {len(images)} pictures (.png) beside it")
    if csv is not None:
        print(f"Numbers: {csv}")
    return written


def trained(folder: Path) -> list[str]:
    """List the labels of the schemes that the folder's newest run has begun; none if it has not taken a step."""
    traces = read(folder).runs[-1].traces
    return [label for label, _ in traces] if any(trace.steps for trace in traces.values()) else []


def check(folder: Path) -> None:
    """Raise RuntimeError if the folder's newest run failed: see `choice.failure`."""
    if wrong := failure(_newest(read(folder))):
        raise RuntimeError(wrong)


def render(
    summary: RunSummary,
    pictures: Mapping[str, bytes],
) -> str:
    """Render the page as self-contained HTML: images are embedded, and nothing is loaded or scripted."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("sparsync_lab.report").joinpath("templates/report.html.j2").read_text("utf-8")
    )
    run = summary.run
    return template.render(
        place=place_text(run),
        time=run.time,
        run=run.run,
        banners=summary.banners,
        sentences=sentences(summary),
        pictures=[(_ALT[name], b64encode(png).decode()) for name, png in pictures.items()],
        tables=tables(summary),
        labels={scheme.name: scheme.label for scheme in summary.schemes},
        lines=lambda text: Markup("<br>").join(escape(line) for line in text.split("\n")),
        remarks=remarks(summary),
        notes=summary.notes,
        method=_METHOD,
        command=shlex.join(["sparsync", *run.command[1:]]),
        settings=_settings(summary),
    )


def _newest(results: Results) -> RunSummary:
    """Summarise the run to show, with a note if the newest run recorded no training."""
    trained = [records for records in results.runs if any(trace.steps for trace in records.traces.values())]
    newest = results.runs[-1]
    if not trained or trained[-1] is newest:
        return summarise(newest)
    note = f"The newest run, {newest.run.run}, recorded no training; this is the one before it that did."
    return summarise(trained[-1], [note])


def _write(folder: Path, contents: Mapping[str, bytes]) -> tuple[Path, ...]:
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise RuntimeError(
            f"cannot write {error.filename}: {error.strerror}; make the folder writable, or copy results.jsonl to one that is"
        ) from error
    return tuple(folder / name for name in contents)


def _settings(summary: RunSummary) -> str:
    """Format all settings of the run as readable JSON."""
    run = summary.run
    schemes = {scheme.label: scheme.config for scheme in summary.schemes}
    config = {**run.config, "schemes": len(schemes)}
    parts = {"schemes": schemes, "configuration": config, "workload": run.workload}
    return json.dumps({**parts, "versions": run.versions, "machine": run.machine}, indent=1)
