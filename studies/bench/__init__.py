"""Benchmarks, each of which checks its results and prints the physical limit measured in the same run."""

import argparse
from collections.abc import Sequence
from importlib import import_module


def main(words: Sequence[str]) -> None:
    """Run the benchmark that the first word names."""
    parser = argparse.ArgumentParser("python -m studies bench", description=__doc__)
    parser.add_argument("subject", choices=("kernels", "overlap", "reductions", "steps"), help="what to measure")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `python -m studies bench SUBJECT --help`")
    given = parser.parse_args(words)
    import_module(f"studies.bench.{given.subject}").main(given.arguments)
