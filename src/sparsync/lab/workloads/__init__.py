"""The training jobs of the lab by name. Importing this loads neither torch nor data: listing the names is instant."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING

from sparsync.lab.workloads.store import DataMissingError as DataMissingError

if TYPE_CHECKING:
    from sparsync.lab.workloads.base import Workload as Workload

Option = int | float | str


@dataclass(frozen=True)
class Entry:
    """Where a workload lives, one line about it, and the options that make it differ from its class's defaults."""

    module: str
    kind: str
    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)


WORKLOADS: dict[str, Entry] = {
    "shakespeare": Entry(
        "sparsync.lab.workloads.shakespeare",
        "Shakespeare",
        "word-level LSTM language model on Shakespeare's works, 5.66 M parameters, perplexity",
    ),
    "shakespeare-small": Entry(
        "sparsync.lab.workloads.shakespeare",
        "Shakespeare",
        "the same with 2,000 words and width 192, 1.07 M parameters: minutes on two cores",
        {"vocabulary": 2_000, "width": 192},
    ),
    "fashion": Entry(
        "sparsync.lab.workloads.fashion",
        "Fashion",
        "ResNet classifier on Fashion-MNIST, 1.23 M parameters, accuracy",
    ),
    "fashion-mlp": Entry(
        "sparsync.lab.workloads.fashion",
        "Fashion",
        "multi-layer perceptron on Fashion-MNIST, 1.86 M parameters, accuracy",
        {"network": "mlp"},
    ),
}


def names() -> tuple[str, ...]:
    """The names that `get` knows, in the order of the registry."""
    return tuple(WORKLOADS)


def get(name: str, **options: Option) -> "Workload":
    """The workload called `name`, with `options` in place of its defaults; no data is touched before its `prepare`.

    An option given as text is converted to the type of its default. Raises ValueError for an unknown name or option, with
    the nearest known one, and for a value that the workload refuses.
    """
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}{_nearest(name, WORKLOADS)}; there are {', '.join(WORKLOADS)}")
    entry = WORKLOADS[name]
    kind = getattr(import_module(entry.module), entry.kind)
    defaults: dict[str, Option] = {each.name: getattr(kind, each.name) for each in fields(kind)}
    for option in options:
        if option not in defaults:
            raise ValueError(
                f"workload {name!r} has no option {option!r}{_nearest(option, defaults)}; it has {', '.join(defaults)}"
            )
    given = {option: _converted(option, value, defaults[option]) for option, value in options.items()}
    return kind(**{**entry.options, **given})


def __getattr__(name: str) -> object:
    """The protocol, fetched when first asked for, because its module imports torch."""
    if name == "Workload":
        return import_module("sparsync.lab.workloads.base").Workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _nearest(name: str, known: Iterable[str]) -> str:
    """ ", did you mean ...?" with the known name closest to `name`, empty when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _converted(option: str, value: Option, default: Option) -> Option:
    """`value` in the type of `default`; whole numbers pass as floats, nothing else changes its type but text."""
    kind = type(default)
    if isinstance(value, str) or (kind is float and type(value) is int):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"option {option} takes {kind.__name__}, such as {default!r}, got {value!r}") from None
    if type(value) is not kind:
        raise ValueError(f"option {option} takes {kind.__name__}, such as {default!r}, got {value!r}")
    return value
