"""Make the figures of the pages, from a clone of the repository: `python -m studies --help`."""

import argparse
from collections.abc import Sequence
from importlib import import_module

from sparsync_lab.cli_run import run_command

PARTS = {
    "bench": "kernels, overlap, reductions or steps beside alternatives and the physical limit: CONTRIBUTING.md and others",
    "campaign": "disturbs trainings with faults, and counts where a rank hangs or says nothing of it: docs/reliability.md",
    "cost_table": "what each scheme sends, counted: a table of docs/traffic.md",
    "delays": "the one-way delays that a step of each method waits for: a table of docs/far_links.md",
    "demo_page": "the demo with three seeds, for README.md and docs/schemes.md",
    "dial": "what each recipe takes on five networks: a table of docs/advise.md",
    "downstream": "fine-tunes models that were pre-trained with and without compression: a table of docs/frontier.md",
    "elastic": "random events in elastic runs: tables of docs/reliability.md",
    "far_links": "trainings over links with a delay: tables of docs/far_links.md",
    "goodput": "what kills and joins cost a training that goes on: tables of docs/elastic.md",
    "gpu": "what the library costs on a GPU, and launches counted on a CPU: tables of docs/gpu.md",
    "integrations": "what works where: docs/what_works.md",
    "law": "the gap to dense over bits, parameters, tokens and ranks, and predictions from it: a part of docs/frontier.md",
    "mutations": "faults put into the library, and the tests that must find them",
    "papers": "what the abstracts of the five papers claim, measured: docs/papers.md",
    "predictions": "predicted steps beside measured ones: a table of docs/advise.md",
    "published": "published figures beside what the model of `sparsync simulate` says of them: docs/published.md",
    "records": "checks the runs that docs/records.jsonl has, and writes the tables of docs/compare.md",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one study, with the exit status of the command `sparsync`."""
    run_command(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """Build a parser for the name of a study, which parses its own options."""
    about = "\n".join(f"  {name:13}{what}" for name, what in PARTS.items())
    made = argparse.ArgumentParser(
        "python -m studies",
        description=f"Make the figures of the pages:\n\n{about}",
        epilog="example:\n  python -m studies bench kernels --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("study", choices=PARTS, metavar="STUDY", help="one of these")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="see `python -m studies STUDY --help`")
    made.set_defaults(run=lambda options, _: import_module(f"studies.{options.study}").main(options.arguments))
    return made


if __name__ == "__main__":
    main()
