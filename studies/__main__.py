"""What makes the figures of the pages, run from the clone of the repository: `python -m studies --help`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsync_lab.cli_options import add_named, positive
from sparsync_lab.cli_parser import Command, parser_of, run_command
from sparsync_lab.simulate.command import write
from sparsync_lab.writable import check_file

# The modules that have options of their own, and what they do.
PARTS = {
    "cost_forms": "closed forms of costs beside counted ones, to 1024 ranks: a table of docs/cost_model.md",
    "cost_table": "what each scheme sends, counted: a table of docs/traffic.md",
    "dial": "what each recipe takes on five networks: a table of docs/advise.md",
    "delays": "the one-way delays that a step of each method waits for, over links with a delay",
    "demo_page": "the demo with three seeds, for README.md and docs/schemes.md",
    "downstream": "fine-tunes models that were pre-trained with and without compression: a table of docs/frontier.md",
    "elastic": "random events in elastic runs: tables of docs/reliability.md",
    "extra_steps": "trainings of many methods, from which `sparsync advise` takes extra steps: a table of docs/advise.md",
    "far_links": "trainings over links with a delay, and the delays that steps wait for: docs/far_links.md",
    "flush": "the quality of a model before and after `handle.flush()`: a table of docs/adamw_steps.md",
    "fsdp_parameters": "what compressing FSDP2's shard axis does to a training: a table of docs/attach.md",
    "goodput": "what kills and joins cost a training that goes on: tables of docs/elastic.md",
    "gpu": "what the library costs on a GPU, and launches counted on a CPU: tables of docs/gpu.md",
    "integrations": "what works where: the table of docs/what_works.md",
    "kernels_table": "every backend of the kernels of this machine: the table of docs/kernels.md",
    "mutations": "faults put into the library, and the tests that must find them",
    "predictions": "predicted steps beside measured ones: a table of docs/advise.md",
    "resume": "trainings that go on from the optimizer's state alone: a table of docs/adamw_steps.md",
    "records": "checks the runs that docs/records.jsonl has, and writes the tables of docs/compare.md",
    "traffic_by_ranks": "the traffic of few ranks and of many: tables of docs/traffic.md",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one study. Exit status as that of the command `sparsync`."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in PARTS:
        import_module(f"studies.{words[0]}").main(words[1:])
    else:
        run_command(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all studies."""
    commands = _commands() | {name: _part(name, about) for name, about in PARTS.items()}
    return parser_of(
        "python -m studies", "What makes the figures of the pages.", "python -m studies bench kernels", commands
    )


def _commands() -> dict[str, Command]:
    return {
        "bench": (
            _bench,
            _add_bench_options,
            "measure kernels, overlap, reductions or steps beside alternatives and the physical limit",
            "python -m studies bench kernels",
        ),
        "campaign": (
            _campaign,
            _add_campaign_options,
            "disturb trainings with faults, and count where a rank hangs or says nothing of it",
            "python -m studies campaign --trials 20 --only freeze,ddp",
        ),
        "published": (
            _published,
            _add_published_options,
            "compare published figures with what the model of `sparsync simulate` says of them",
            "python -m studies published --json published.json",
        ),
    }


def _part(name: str, about: str) -> Command:
    return (lambda *_: None), (lambda _: None), about, f"python -m studies {name} --help"


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    subjects = ("kernels", "overlap", "reductions", "steps")
    parser.add_argument("subject", choices=subjects, help="what to measure")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `python -m studies bench SUBJECT --help`")


def _add_campaign_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trials", type=int, default=200, help="number of trials (default: 200)")
    add("--seed", type=int, default=0, help="of faults, moments, ranks, weights and data (default: 0)")
    add("--only", default="", metavar="A,B", help="of faults, integrations and schemes these, as named in the records")
    add("--timeout", type=positive, default=3.0, metavar="S", help="of the library, for one operation (default: 3)")
    add("--jobs", type=int, default=4, metavar="N", help="trials at a time; most of their time they wait (default: 4)")
    add_named(parser, "--delay --jitter")
    add("--page", type=Path, default=None, metavar="FILE.md", help="a page, of which the part campaign is written anew")
    add("--out", type=Path, default=Path("campaign"), help="folder of finished trials (default: campaign)")


def _add_published_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", default=None, metavar="FILE", help="write the figures there; -: on standard output, and nothing else")
    add("--page", type=Path, default=None, metavar="FILE.md", help="write the page")


def _bench(options: argparse.Namespace, arguments: list[str]) -> None:
    import_module(f"studies.bench.{options.subject}").main(options.arguments)


def _campaign(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab.netlab import delay_of, restart_with_rights
    from studies.campaign import records
    from studies.campaign.command import campaign

    check_file(options.out / records.FILE_NAME)
    delay = delay_of(options.delay, options.jitter)
    restart_with_rights("studies", arguments)
    only = [name for name in options.only.split(",") if name]
    command = ["python", "-m", "studies", *arguments]
    about = (options.seed, options.trials, options.timeout, only, options.jobs, options.out, options.page, command)
    campaign(*about, delay)


def _published(options: argparse.Namespace, arguments: list[str]) -> None:
    from studies import published

    if options.json is not None:
        found, _ = published.rows()
        content: list[dict[str, Any]] = [{**asdict(row), "error": row.error} for row in found]  # Any: JSON
        if options.json == "-":
            print(json.dumps(content))
        else:
            write(Path(options.json), json.dumps(content, indent=1) + "\n")
    if options.page is not None:
        write(options.page, published.page())
    elif options.json is None:
        print(published.page(), end="")


if __name__ == "__main__":
    main()
