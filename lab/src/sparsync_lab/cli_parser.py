"""Parse and run commands with argparse, and turn errors into exit statuses. Nothing here imports torch."""

import argparse
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsync_lab.terminal import wrapped

Run = Callable[[argparse.Namespace, list[str]], None]
"""(options, the arguments they were parsed from) -> None."""
Command = tuple[Run, Callable[[argparse.ArgumentParser], None], str, str]
"""A command's function, the function that adds its options, its summary and an example."""


def parser_of(prog: str, about: str, example: str, commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Build the parser of a program with these commands."""
    parser = argparse.ArgumentParser(prog=prog, **_texts(about, example))
    added = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (run, add_options, what, shown) in commands.items():
        made = added.add_parser(name, help=what, **_texts(f"{what[0].upper()}{what[1:]}.", shown))
        add_options(made)
        made.set_defaults(run=run)
    return parser


def _texts(about: str, example: str) -> dict[str, Any]:  # Any: as argparse takes them
    """Make description and epilog; the lines of the example are not wrapped."""
    epilog = "\n  ".join(["example:", *example.splitlines()])
    raw = argparse.RawDescriptionHelpFormatter
    return {"description": textwrap.fill(about, 79), "epilog": epilog, "formatter_class": raw}


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Run the command in `argv` (None: this process's arguments), and exit with a status if it fails.

    A ValueError is the user's mistake (status 2), a RuntimeError a failure of the machine or a rank (1); Ctrl-C and SIGTERM exit with 130.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments)
    warnings.formatwarning = _told
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop and clean up as for Ctrl-C
    try:
        options.run(options, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing is left running", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, RuntimeError) as error:
        print(wrapped(f"{parser.prog}: error: {error}", error=True), file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None


def _told(message: Warning | str, *_: object) -> str:
    """Format a warning without its place in the code."""
    return wrapped(f"sparsync: warning: {message}", error=True) + "\n"
