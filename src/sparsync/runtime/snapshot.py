"""A rank's state between two steps, in the parts that travel to other ranks and those that stay."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparsync.feedback import PER_RANK

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
    """Return what a scheme's state holds back: vectors by parameter name, of inner schemes too."""
    inner = {key: held_in(each) for key, each in state.get("schemes", {}).items()}
    return {key: state[key] for key in PER_RANK if key in state} | ({"schemes": inner} if inner else {})


def with_held(state: Part, held: Part | None) -> dict[str, Any]:
    """Return the state of a scheme with what is `held` back, of the same scheme; None: with nothing that a rank has alone."""
    found = {key: value for key, value in state.items() if held is not None or key != "own"}
    for key in PER_RANK:
        if key in found:
            found[key] = {} if held is None else held[key]
    for key, inner in state.get("schemes", {}).items():
        found["schemes"] = {**found["schemes"], key: with_held(inner, held and held["schemes"][key])}
    return found
