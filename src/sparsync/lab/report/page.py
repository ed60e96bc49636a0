"""The report of a comparison: tables on the terminal, report.html and PNG files, all made from results.jsonl alone."""

import base64
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sparsync.lab.extra import lab_extra
from sparsync.lab.report.format import banner, place_text
from sparsync.lab.report.lead import details, lead, nothing_finite, paragraph
from sparsync.lab.report.results import Results, read
from sparsync.lab.report.summary import Summary, summarise
from sparsync.lab.report.tables import WIDTH, as_text, remarks, tables
from sparsync.lab.report.verdict import WITHIN

PAGE = "report.html"
_ALT = {  # in the order of the tables
    "quality_over_time.png": "Quality over training time, a curve for each scheme",
    "quality_over_steps.png": "Quality over training steps, a curve for each scheme",
    "quality_over_bytes.png": "Quality over bytes sent per rank, a curve for each scheme",
    "step_breakdown.png": "Where the time of a training step goes, a bar for each scheme",
}
_METHOD = (
    "The choice: with a target, the scheme that reaches it soonest with every seed; without one, the scheme with the shortest step "
    "of those whose quality is near dense's, at most {within:g} % behind it. It must be faster than the plain all-reduce, the "
    "sooner of bf16 and dense, with every seed, and by more than the noise: the difference between computing steps of the run, and "
    "3 % at least. Schemes that did not finish do not count. From how fast links on the plain all-reduce takes as long is "
    "extrapolated: the time that a link needs for the bytes changes with its rate, and all else stays.",
    "All schemes of a run start from the same weights and see the same batches in the same order. Training time is the sum "
    "of the steps, a mean over the ranks; evaluations, start-up and the exchange of measurements do not count.",
    "A target counts as reached at the first evaluation at or beyond it; the time is interpolated linearly between that "
    "evaluation and the one before. How many times as fast means: the baseline's time to the target, over the scheme's. "
    "Where one of the two did not reach the target, its whole training time bounds the ratio from one side (< or >).",
    "Compute is the median step of a copy of the model that does not communicate, measured in the same run, a mean over the ranks. "
    "Communicate is the time inside the communicator, waiting for slower ranks included; scheme is the rest of the reduction. Where the "
    "three add up to more than the step, reduction and computing overlapped, and the difference is what was hidden; where they add "
    "up to less, it is other. The limit in the last column is the computing step of the slowest rank, for which all others wait.",
    "Bits per parameter and step are the payload that a rank sends in a step x 8 / parameters of the model. "
    "Payload counts the bytes that the communicator was given to send; interface counts those that left the rank's network "
    "interface, framing and acknowledgements included. The least time of a link is payload x 8 / rate.",
)


def report(folder: Path, run: str | None = None, within: float = WITHIN) -> tuple[Path, ...]:
    """Write four PNG images and report.html into `folder`, print the tables, and return the paths.

    The files come first: whoever reads the output, such as head, may close it. Where they cannot be made, the tables
    are printed all the same.
    Shows the newest run that trained anything, or the one with the id `run`; runs are not mixed. `within`: how many percent behind
    dense's quality its choice may be. Raises ValueError when the folder holds no such results, RuntimeError when it cannot be written
    or a package of the extra [lab] is missing.
    """
    results = read(folder)
    summary = _chosen(results, run)
    terminal = sys.stdout.isatty()
    text = as_text(
        summary,
        width=min(WIDTH, shutil.get_terminal_size().columns) if terminal else WIDTH,
        colour=terminal,
        ascii_only=not (sys.stdout.encoding or "utf-8").lower().startswith("utf"),
        within=within,
    )
    try:
        with lab_extra("matplotlib"):
            from sparsync.lab.report.plots import hues, pictures
        images = pictures(summary, within)
        page = render(summary, images, hues(summary), _others(results, summary, within), within)
        written = _write(Path(folder), {**images, PAGE: page.encode()})
    except RuntimeError:
        print(text)
        raise
    print(text)
    print(f"Written to {folder}: {', '.join(path.name for path in written)}")
    print(f"Report: {Path(folder) / PAGE}")
    return written


def check_finite(folder: Path) -> None:
    """Raise RuntimeError where the newest run of the folder compared nothing, because dense never was finite."""
    if wrong := nothing_finite(_chosen(read(folder), None)):
        raise RuntimeError(wrong)


def render(
    summary: Summary,
    images: Mapping[str, bytes],
    hues: Mapping[str, str],
    others: Sequence[Any] = (),  # Any: see `_others`
    within: float = WITHIN,
) -> str:
    """Return the page as HTML that needs no other file: images inside, no script, nothing loaded from anywhere."""
    with lab_extra("jinja2"):
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup, escape
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("sparsync.lab.report").joinpath("templates/report.html.j2").read_text("utf-8")
    )
    run = summary.run
    return template.render(
        place=place_text(run),
        time=run.time,
        run=run.run,
        banner=banner(run),
        lead=lead(summary, within),
        details=details(summary),
        parts=_parts(summary, images),
        hues=hues,
        lines=lambda head: Markup("<br>").join(escape(line) for line in head.split("\n")),
        remarks=remarks(summary),
        notes=summary.notes,
        method=[text.format(within=within) for text in _METHOD],
        command=_command(run.command),
        sections=_sections(summary),
        others=others,
    )


def _chosen(results: Results, wanted: str | None) -> Summary:
    """Return the run to show, with the notes of the file, and a note when the newest run recorded no training."""
    if wanted is not None:
        found = [records for records in results.runs if records.run.run == wanted]
        if not found:
            known = ", ".join(records.run.run for records in results.runs)
            raise ValueError(f"{results.path} has no run {wanted!r}; it has {known}")
        return summarise(found[0], results.notes)
    trained = [records for records in results.runs if any(trace.steps for trace in records.traces.values())]
    newest = results.runs[-1]
    if not trained or trained[-1] is newest:
        return summarise(newest, results.notes)
    note = f"The newest run, {newest.run.run}, recorded no training; this is the one before it that did."
    return summarise(trained[-1], (*results.notes, note))


def _others(results: Results, shown: Summary, within: float) -> list[dict[str, str]]:
    """Return the other runs of the file, newest first, with a sentence for each."""
    return [
        {"run": records.run.run, "text": f"{records.run.time}: {paragraph(summarise(records), within)}"}
        for records in reversed(results.runs)
        if records.run.run != shown.run.run
    ]


def _parts(
    summary: Summary, images: Mapping[str, bytes]
) -> list[dict[str, Any]]:  # Any: pictures and a table, for the template
    """Return the tables, each under the pictures of the same subject."""
    subjects = (["quality_over_time.png", "quality_over_steps.png"], ["quality_over_bytes.png"], ["step_breakdown.png"])
    return [
        {"table": table, "pictures": [_image(images[name], _ALT[name]) for name in names]}
        for table, names in zip_longest(tables(summary), subjects, fillvalue=())
    ]


def _image(image: bytes, alt: str) -> dict[str, str]:
    return {"alt": alt, "base64": base64.b64encode(image).decode()}


def _write(folder: Path, contents: Mapping[str, bytes]) -> tuple[Path, ...]:
    written = []
    for name, content in contents.items():
        path = folder / name
        try:
            path.write_bytes(content)
        except OSError as error:
            raise RuntimeError(
                f"cannot write {path}: {error.strerror}; make the folder writable, or copy results.jsonl to one that is"
            ) from error
        written.append(path)
    return tuple(written)


def _command(argv: Sequence[str]) -> str:
    """Return the command as a user types it: the program by its name, not by its path."""
    return shlex.join([Path(argv[0]).name, *argv[1:]]) if argv else ""


def _sections(summary: Summary) -> list[dict[str, Any]]:  # Any: a title and its entries, for the template
    run = summary.run
    schemes = [(scheme.label, ", ".join(f"{k} = {v}" for k, v in _flat(scheme.config))) for scheme in summary.schemes]
    return [
        {"title": "Schemes", "entries": schemes},
        {"title": "Configuration", "entries": list(_flat(run.config))},
        {"title": "Workload", "entries": list(_flat(run.workload))},
        {"title": "Versions", "entries": list(_flat(run.versions))},
        {"title": "Machine", "entries": list(_flat(run.machine))},
    ]


def _flat(mapping: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:  # Any: JSON
    """Yield the entries of a nested mapping by dotted name, as text."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, str):
            yield above + key, value
        else:
            yield above + key, json.dumps(value)
