"""Situations, cases and verdicts, and the page that shows them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from helpers.distributed import run

SCHEMES = {  # of the table of schemes that the invariants run over
    "Dense": "dense",
    "TopK": "topk-0.1",
    "SkipReduce": "skip-default",
    "MiCRO": "micro-0.1",
    "ExDyna": "exdyna-0.1",
    "OkTopk": "oktopk-0.1",
}
SITUATIONS = (  # every integration has a case for each
    "float32 parameters",
    "float64 parameters",
    "bfloat16 parameters",
    "float16 parameters",
    "parameters of several types",
    "parameters in channels_last",
    "accumulation over backward passes (no_sync)",
    "gradient_as_bucket_view=True",
    "static_graph=True",
    "parameters that ranks do not use (find_unused_parameters=True)",
    "ranks that run out of data (join)",
    "sparse embeddings",
    "two models at once",
    "a group that is not the world",
    "buckets that change",
    "torch.compile",
    "torch.compile with the python reducer",
    "DDP's mixed_precision",
    "an optimizer in the backward pass",
    "a model that is reduced already",
    "Inf on one rank",
    "a loss scaler skips a step (GradScaler)",
    "a rank fails in a step",
    "resuming after a restart",
    "resuming with another number of ranks",
)
WORKS, REFUSED, ABSENT, FAILS = "works", "refused", "does not arise", "fails"


class RefusedError(Exception):
    """An integration refused the situation."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turns what an integration raises into RefusedError."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise RefusedError(str(error)) from error


@dataclass(frozen=True)
class Verdict:
    word: str  # WORKS, REFUSED, ABSENT or FAILS
    reason: str = ""


@dataclass(frozen=True)
class Case:
    """One situation behind one integration. `claim` is what was checked where it works; `trial` finds a verdict for each row of SCHEMES."""

    claim: str
    trial: Callable[[Sequence[str]], Mapping[str, Verdict]]


def absent(reason: str) -> Case:
    """A situation that there is not behind this integration."""
    return Case("-", lambda ids: dict.fromkeys(ids, Verdict(ABSENT, reason)))


def trial(
    body: Callable[[str], Any], judge: Callable[[str, list[Any]], None], P: int = 2
) -> Callable[[Sequence[str]], dict[str, Verdict]]:
    """Runs `body(id)` on P ranks, for all schemes in the same processes; `judge(id, what the ranks returned)` raises where it is wrong."""

    def found(ids: Sequence[str]) -> dict[str, Verdict]:
        ranks = run(everything, P, body=body, ids=ids, within_s=100)
        return {id: verdict([rank[id] for rank in ranks], lambda values, id=id: judge(id, values)) for id in ids}

    return found


def everything(body: Callable[[str], Any], ids: Sequence[str]) -> dict[str, Any]:
    """Return the result, or the exception, of each scheme on this rank."""
    found: dict[str, Any] = {}
    for id in ids:
        try:
            found[id] = body(id)
        except Exception as error:
            found[id] = error if isinstance(error, RefusedError) else AssertionError(f"{type(error).__name__}: {error}")
    return found


def verdict(values: list[Any], judge: Callable[[list[Any]], None]) -> Verdict:
    """Judge what the ranks returned. A refusal counts where all ranks get the same error."""
    values = [value for value in values if value is not None]  # of a rank outside the group
    errors = [value for value in values if isinstance(value, Exception)]
    if len({str(error) for error in errors if isinstance(error, RefusedError)}) == 1 and len(errors) == len(values):
        return Verdict(REFUSED, str(errors[0]))
    if errors:
        return Verdict(FAILS, str(errors[0]))
    try:
        judge(values)
    except AssertionError as error:
        return Verdict(FAILS, f"what came out is wrong: {error}")
    return Verdict(WORKS)


def cells(cases: Mapping[str, Case], situations: Sequence[str] = SITUATIONS) -> dict[str, dict[str, Verdict]]:
    """The verdicts by situation and name of the scheme."""
    found: dict[str, dict[str, Verdict]] = {}
    for situation in situations:
        by_id = cases[situation].trial(list(SCHEMES.values()))
        found[situation] = {name: by_id[id] for name, id in SCHEMES.items()}
    return found


def markdown(integration: str, cases: Mapping[str, Case], verdicts: Mapping[str, Mapping[str, Verdict]]) -> str:
    """The section of one integration: a row for each situation; reasons are numbered and stand below."""
    reasons: dict[str, int] = {}

    def cell(verdict: Verdict) -> str:
        if not verdict.reason:
            return verdict.word
        return f"{verdict.word} ({reasons.setdefault(verdict.reason, len(reasons) + 1)})"

    head = ["situation", "works means", *SCHEMES]
    rows = [head, ["---"] * len(head)]
    for situation, row in verdicts.items():
        rows.append([situation, cases[situation].claim, *map(cell, row.values())])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([f"## {integration}", "", *lines, "", *notes, ""])
