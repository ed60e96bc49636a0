"""A rank's state between two steps, in the parts that travel to other ranks and those that stay."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparsync.base.state import TABLES

Part = Mapping[str, Any]  # Any: tensors, numbers and text, nested


class Snapshot(NamedTuple):
    """What `Handle.snapshot` returns and `Handle.restore` takes, on the same rank or on another one. What is missing stays as it is."""

    moved: Part | None = None  # the common weights and what else moves with them; None where gradients are exchanged
    shared: Part | None = None  # what else all ranks have in common
    # What this rank has for the others: vectors by parameter name, in "scheme" what it holds back, also nested, and in "learnt" what local
    # steps have learnt since the last exchange. They may be added to those of another rank, or multiplied. "still" has the parameters that
    # do not move now.
    own: Part | None = None
    moves: Sequence[Part] = ()  # of the common weights, which `restore` replays first


def held_in(state: Part) -> dict[str, Any]:
    """Return what a scheme's state holds back: vectors by kind and parameter name."""
    return {key: each for key, each in state.items() if key not in TABLES}


def with_held(state: Part, held: Part | None) -> dict[str, Any]:
    """Return the state of a scheme with what is `held` back, of the same scheme; None: with nothing that a rank has alone."""
    found = {key: each for key, each in state.items() if key in TABLES}
    return {**found, **held} if held is not None else _without_own(found)


def _without_own(state: Part) -> dict[str, Any]:
    inner = {key: _without_own(each) for key, each in state.get("schemes", {}).items()}
    found = {key: each for key, each in state.items() if key != "own"}
    return {**found, "schemes": inner} if inner else found
