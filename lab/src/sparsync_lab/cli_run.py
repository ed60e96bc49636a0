"""Run commands, and turn errors into exit statuses. Nothing here imports torch."""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from sparsync_lab.terminal import wrapped


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
