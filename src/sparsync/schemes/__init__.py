"""One scheme a file; the table below is the only registry."""

import difflib
from dataclasses import fields
from importlib import import_module
from typing import Any

from sparsync.protocols import Scheme

# name -> (where its constructor lives, what it is in a line)
TABLE: dict[str, tuple[str, str]] = {
    "dense": ("sparsync.schemes.dense:Dense", "every element, in the gradient's own precision"),
    "bf16": ("sparsync.schemes.dense:Dense.bf16", "every element, in 16 bits on the wire"),
    "topk": ("sparsync.schemes.topk_allgather:TopK", "each rank's largest elements, gathered; the rest is kept back"),
    "skip_reduce": (
        "sparsync.schemes.skip_reduce:SkipReduce",
        "a ring that leaves out some of its reduce-scatter steps",
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


def get(name: str, **config: Any) -> Scheme:  # Any: the fields of the scheme's own config, checked by its constructor
    """A new scheme by name, e.g. `get("topk", density=0.01)`; `config` are the fields of its class.

    "NAME.published" is the setting that reproduces the authors' algorithm. Raises ValueError for an unknown name or field.
    """
    base, _, setting = name.partition(".")
    make = _constructor(base)
    if setting:
        if setting != "published":
            raise ValueError(f"a scheme has the settings {base!r} and '{base}.published', got {name!r}")
        make = make.published
    known = _fields(base)
    for key in config:
        if key not in known:
            raise ValueError(f"scheme {base!r} has no setting {key!r}; it has {', '.join(known)}{_nearest(key, known)}")
    return make(**config)


def accepts(name: str, field: str) -> bool:
    """Whether the scheme called `name` has a setting called `field`."""
    return field in _fields(name.partition(".")[0])


def _fields(name: str) -> list[str]:
    module, _, path = _entry(name)[0].partition(":")
    owner = getattr(import_module(module), path.split(".")[0])
    return [f.name for f in fields(owner) if f.init]


def _constructor(name: str) -> Any:  # Any: a class or an alternative constructor of one
    module, _, path = _entry(name)[0].partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _entry(name: str) -> tuple[str, str]:
    if name not in TABLE:
        raise ValueError(f"unknown scheme {name!r}; there are {', '.join(TABLE)}{_nearest(name, list(TABLE))}")
    return TABLE[name]


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
