"""One scheme a file; the table below is the only registry."""

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sparsync.base.scheme import Scheme

# name -> (where its constructor lives, what it is in a line)
TABLE: dict[str, tuple[str, str]] = {
    "dense": ("sparsync.schemes.dense:Dense", "every element, in the gradient's own precision"),
    "bf16": ("sparsync.schemes.dense:Dense.bf16", "every element, in 16 bits on the wire"),
    "topk": ("sparsync.schemes.topk_allgather:TopK", "each rank's largest elements, gathered; the rest is kept back"),
    "skip_reduce": (
        "sparsync.schemes.skip_reduce:SkipReduce",
        "a ring that leaves out some of its reduce-scatter steps",
    ),
    "micro": (
        "sparsync.schemes.micro:MiCRO",
        "exclusive partitions go round the ranks; exactly the asked number of elements is summed",
    ),
    "exdyna": (
        "sparsync.schemes.exdyna:ExDyna",
        "as micro, with partitions that change size until they hold equally much",
    ),
    "oktopk": (
        "sparsync.schemes.oktopk:OkTopk",
        "the k largest sums over ranks; traffic does not grow with their number",
    ),
    "ring_pruning": (
        "sparsync.schemes.skip_reduce:SkipReduce.ring_pruning",
        "the thesis's Skip-Reduce: always the same steps are left out",
    ),
    "random_pruning": (
        "sparsync.schemes.random_pruning:RandomPruning",
        "each element loses some ranks; saves no traffic, for comparison",
    ),
}


def names() -> list[str]:
    """The names `get` knows."""
    return list(TABLE)


def describe(name: str) -> str:
    """What the scheme called `name` is, in a line."""
    return _entry(name)[1]


def settings(name: str) -> dict[str, Any]:  # Any: whatever a setting defaults to
    """The settings `get(name, ...)` takes, with their defaults."""
    return {key: parameter.default for key, parameter in inspect.signature(_constructor(name)).parameters.items()}


def get(name: str, **config: Any) -> Scheme:  # Any: the settings of the scheme, checked by its constructor
    """A new scheme by name, e.g. `get("topk", density=0.01)`.

    "NAME.published" is the setting that reproduces the authors' algorithm. Raises ValueError for an unknown name or setting.
    """
    known = list(settings(name))
    for key in config:
        if key not in known:
            raise ValueError(f"scheme {name!r} has no setting {key!r}; it has {', '.join(known)}{_nearest(key, known)}")
    return _constructor(name)(**config)


def _constructor(name: str) -> Callable[..., Scheme]:
    base, _, setting = name.partition(".")
    if setting not in ("", "published"):
        raise ValueError(f"a scheme has the settings {base!r} and '{base}.published', got {name!r}")
    module, _, path = _entry(base)[0].partition(":")
    found: Any = import_module(module)  # Any: a module, then a class, then perhaps one of its constructors
    for part in path.split("."):
        found = getattr(found, part)
    return found.published if setting and "." not in path else found  # a named setting is its own published one


def _entry(name: str) -> tuple[str, str]:
    if name not in TABLE:
        raise ValueError(f"unknown scheme {name!r}; there are {', '.join(TABLE)}{_nearest(name, list(TABLE))}")
    return TABLE[name]


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
