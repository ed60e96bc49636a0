"""A parser of the command line whose errors suggest the nearest known word. Nothing here imports torch."""

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from sparsync.base.registry import nearest
from sparsync_lab.terminal import wrapped

_CHOICE = re.compile(r"(argument .*?: )?invalid choice: '(.*?)'.*\(choose from (.*)\)", re.DOTALL)
_EXAMPLE = "example:"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser; `add_command` adds a command with a sentence and an example."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with the word that was probably meant, and exit with status 2."""
        found = _CHOICE.fullmatch(message)
        if found is not None:
            what, word, known = found.groups()
            hint = nearest(word, re.findall(r"[\w-]+", known))
            message = f"{what or ''}there is no {word!r}; there are {known}{hint}"
        self.print_usage(sys.stderr)
        self.exit(2, f"{wrapped(f'{self.prog}: error: {message}', error=True)}\n")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Exit with status 2 where words are left that no option has taken."""
        if words:
            hints = [nearest(word.partition("=")[0], self._option_string_actions) for word in words if word[0] == "-"]
            self.error(f"unknown arguments: {' '.join(words)}{''.join(hints)}")


class Formatter(argparse.HelpFormatter):
    """Wraps text, long lists of schemes at their commas, but no examples, which stay as they are."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.metavar == "COMMAND":  # its choices stand further right than argparse reckons
            self._action_max_length += self._indent_increment

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = [""]
        for piece in re.findall(r".+?(?:,(?=\S)|\s+|$)", text):
            if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
        return [line.rstrip() for line in lines]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLE):
            return text
        return super()._fill_text(text, width, indent)


def example(command: str) -> str:
    """Return what stands below a help: an example of a command, in as many lines as it has.

    None is longer than a terminal of 80 columns is wide: a command goes on in the next line after a backslash.
    """
    return "\n  ".join([_EXAMPLE, *command.splitlines()])


Run = Callable[[argparse.Namespace, list[str]], None]
"""(options, the arguments they were parsed from) -> None."""
Command = tuple[Run, Callable[[argparse.ArgumentParser], None], str, str]
"""What runs a command, what adds its options, what it does, and an example."""


def add_commands(parser: Parser, commands: Mapping[str, Command]) -> None:
    """Add the commands, each by its name."""
    added = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (run, add_options, what, shown) in commands.items():
        sentence = f"{what[0].upper()}{what[1:]}."
        about = {"help": what, "description": sentence, "epilog": example(shown), "formatter_class": Formatter}
        made = added.add_parser(name, **about)
        add_options(made)
        made.set_defaults(run=run, parser=made)


def run_command(parser: Parser, argv: Sequence[str] | None) -> None:
    """Run the command that the arguments name (None: those of this process), and exit with a status where it fails.

    A ValueError is the user's mistake (status 2), a RuntimeError a failure of the machine or of a rank (1); Ctrl-C and SIGTERM give 130.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, unknown = parser.parse_known_args(arguments)
    options.parser.refuse_unknown(unknown)
    warnings.formatwarning = _told
    signal.signal(signal.SIGTERM, _interrupt)  # so that it stops and cleans up as Ctrl-C does
    try:
        options.run(options, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing is left running", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output, such as head, has closed it
        discard_output()
    except (ValueError, RuntimeError) as error:
        print(wrapped(f"{parser.prog}: error: {error}", error=True), file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None


def discard_output() -> None:
    """Drop what is still to be printed: its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(message: Warning | str, *_: object) -> str:
    """Return a warning for people who do not look for its line in our code."""
    return wrapped(f"sparsync: warning: {message}", error=True) + "\n"


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
