"""Situations, cases and verdicts, and the table of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from helpers.distributed import run
from helpers.known_gradients import row
from sparsync.attached import checkpoint
from sparsync.runtime.handle import Handle

SCHEMES = {  # name -> row of the invariants' table of schemes
    "Dense": "dense",
    "TopK": "topk-0.1",
    "SkipReduce": "skip-default",
    "ExactMiCRO": "exact_micro-0.1",
    "ExactExDyna": "exact_exdyna-0.1",
    "ExactOkTopk": "exact_oktopk-0.1",
    "TwoShot": "two-shot-0.1",
}
WORKS, REFUSED, ABSENT, FAILS = "works", "refused", "-", "fails"
SAME = "the same bits"  # this claim needs no note; page.py explains it


class RefusedError(Exception):
    """An integration refused the situation."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an integration's errors into RefusedError."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise RefusedError(str(error)) from error


class WithHandle:
    """What a training with a handle saves and resumes."""

    handle: Handle

    def residual(self) -> dict[str, Tensor]:
        return self.state()["scheme"].get("residual", {})

    def state(self) -> dict[str, Any]:
        return self.handle.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        self.handle.load_state_dict(state)

    def load_any(self, states: Sequence[Mapping[str, Any]]) -> None:
        checkpoint.restore(self.handle, states)


@dataclass(frozen=True)
class TrialVerdict:
    word: str  # WORKS, REFUSED, ABSENT or FAILS
    reason: str = ""


@dataclass(frozen=True)
class Case:
    """One situation with one integration. `claim` states what was checked if it works; `trial` judges each row of SCHEMES."""

    claim: str
    trial: Callable[[Sequence[str]], Mapping[str, TrialVerdict]]


def absent(reason: str) -> Case:
    """Make the case of a situation that does not arise with this integration."""
    return Case("-", lambda ids: dict.fromkeys(ids, TrialVerdict(ABSENT, reason)))


def trial(
    body: Callable[[str], Any], judge: Callable[[str, list[Any]], None], P: int = 2
) -> Callable[[Sequence[str]], dict[str, TrialVerdict]]:
    """Run `body(id)` on P ranks, for all schemes in the same processes; `judge(id, results)` raises if a result is wrong."""

    def found(ids: Sequence[str]) -> dict[str, TrialVerdict]:
        ranks = run(everything, P, body=body, ids=ids, within_s=600)
        return {id: verdict([rank[id] for rank in ranks], lambda values, id=id: judge(id, values)) for id in ids}

    return found


def everything(body: Callable[[str], Any], ids: Sequence[str]) -> dict[str, Any]:
    """Collect the result, or the exception, of each scheme on this rank."""
    found: dict[str, Any] = {}
    for id in ids:
        try:
            found[id] = body(id)
        except Exception as error:
            found[id] = error if isinstance(error, RefusedError) else AssertionError(f"{type(error).__name__}: {error}")
    return found


def verdict(values: list[Any], judge: Callable[[list[Any]], None]) -> TrialVerdict:
    """Judge the ranks' results. A refusal counts only if all ranks get the same error."""
    values = [value for value in values if value is not None]  # None: a rank outside the group
    errors = [value for value in values if isinstance(value, Exception)]
    if len({str(error) for error in errors if isinstance(error, RefusedError)}) == 1 and len(errors) == len(values):
        return TrialVerdict(REFUSED, str(errors[0]))
    if errors:
        return TrialVerdict(FAILS, str(errors[0]))
    try:
        judge(values)
    except AssertionError as error:
        return TrialVerdict(FAILS, f"what came out is wrong: {error}")
    return TrialVerdict(WORKS)


def cells(cases: Mapping[str, Case], situations: Sequence[str]) -> dict[str, dict[str, TrialVerdict]]:
    """Find the verdicts by situation and name of the scheme."""
    found: dict[str, dict[str, TrialVerdict]] = {}
    for situation in situations:
        by_id = cases[situation].trial(list(SCHEMES.values()))
        found[situation] = {name: _of_any(row(id).make().name, by_id[id]) for name, id in SCHEMES.items()}
    return found


def _of_any(scheme: str, verdict: TrialVerdict) -> TrialVerdict:
    """Remove the scheme's name from the reason, so that equal reasons share a note."""
    name, _, rest = verdict.reason.partition(" ")
    return replace(verdict, reason=f"the scheme {rest}") if name == scheme else verdict


def markdown(
    integrations: Mapping[str, Mapping[str, Case]], verdicts: Mapping[str, Mapping[str, Mapping[str, TrialVerdict]]]
) -> str:
    """Format a table with a row per situation and a column per integration, and numbered notes below it.

    A note states what was checked beyond equal bits, why something is refused, or why the situation does not arise.
    """
    numbers: dict[str, int] = {}

    def cell(case: Case, by_scheme: Mapping[str, TrialVerdict]) -> str:
        words = {verdict.word for verdict in by_scheme.values()}
        told = [str(numbers.setdefault(note, len(numbers) + 1)) for note in _notes(case, by_scheme)]
        word = words.pop() if len(words) == 1 else WORKS
        return f"{word} ({', '.join(told)})" if told else word

    rows = [
        ["situation", *integrations],
        *(
            [situation, *(cell(cases[situation], verdicts[name][situation]) for name, cases in integrations.items())]
            for situation in next(iter(verdicts.values()))
        ),
    ]
    head, *merged = _merged(list(zip(*_merged(rows), strict=True)))
    head, *merged = zip(head, *merged, strict=True)
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *merged)]
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in numbers.items())])


def _merged(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Merge rows that are equal except for the first cell, which then joins all names."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [["; ".join(some), *cells] for cells, some in names.items()]


def _notes(case: Case, by_scheme: Mapping[str, TrialVerdict]) -> list[str]:
    """List the notes of a cell: on schemes that do not work, and on checks beyond equal bits."""
    schemes: dict[TrialVerdict, list[str]] = {}
    for name, verdict in by_scheme.items():
        schemes.setdefault(verdict, []).append(name)
    notes = [
        verdict.reason if len(schemes) == 1 else f"{verdict.word} with {', '.join(names)}: {verdict.reason}"
        for verdict, names in schemes.items()
        if verdict.word != WORKS
    ]
    works = any(verdict.word == WORKS for verdict in schemes)
    return [*notes, case.claim] if works and case.claim != SAME else notes
