"""No step launches more, or waits for the device more often, than tests/counts.json says, which `python -m studies gpu --counts` writes.

Beside each method the file has its goal. Counts are those of a CPU, see `studies.gpu.launches`; only C++ kernels give these.
"""

import json

import pytest
import torch

from sparsync.comm import LocalWorld
from sparsync.kernels import backend, operations
from studies import parts
from studies.gpu import counts
from studies.gpu.counts import GOALS, kind_of
from studies.gpu.launches import Counts, counted

# The methods of the page, and one of each kind of scheme; other settings of these run in the slow tests.
QUICK = {*counts.SHOWN.values(), "topk", "two_shot", "in_turn", "auto_protect", "micro", "exdyna", "oktopk"}
SLACK = 0.9  # of a figure in the file, which has to be lowered where less is counted
WRITTEN = json.loads(counts.FILE.read_text())
ADVICE = "run `python -m studies gpu --counts`"


def shortfalls(text: str, found: dict[str, dict[str, list[int]]]) -> list[str]:
    """Say what is more than the file has, and what is so much less that the file has to be lowered."""
    wrong: list[str] = []
    for ranks, steps in found.items():
        for which, pair in steps.items():
            for what, now, before in zip(("launches", "syncs"), pair, WRITTEN[text][ranks][which], strict=True):
                if now > before:
                    wrong.append(
                        f"{text}, {ranks}, {which} step: {now} {what}, and {before} before; remove the new ones"
                    )
                elif now < SLACK * before:
                    wrong.append(
                        f"{text}, {ranks}, {which} step: {now} {what}, {before} before; {ADVICE}, which lowers it"
                    )
    return wrong


@pytest.mark.parametrize(
    "text", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in counts.texts()]
)
def test_no_step_launches_or_waits_more_than_before(text: str) -> None:
    if not backend().startswith("cpp"):
        pytest.skip("the reference does not fuse what C++ kernels do")
    assert text in WRITTEN, f"{text} is not in {counts.FILE.name}; {ADVICE}"
    wrong = shortfalls(text, counts.count(text))
    assert not wrong, "\n".join(wrong)


def test_the_file_has_what_there_is_with_its_goals() -> None:
    assert {text: each["goal"] for text, each in WRITTEN.items()} == {
        text: GOALS[kind_of(text)] for text in counts.texts()
    }


def test_the_page_has_the_figures_of_the_file() -> None:
    page = (parts.ROOT / counts.PAGE).read_text()
    assert f"<!-- begin {counts.PART} -->\n\n{counts.page_table(WRITTEN)}\n\n<!-- end {counts.PART} -->" in page


def test_operations_kernels_and_collectives_are_launches_and_what_the_host_reads_are_waits() -> None:
    def counts_of_rank(comm: object) -> list[Counts]:
        x = torch.arange(8.0)
        cases = (
            lambda: x.view(2, 4)[0],  # views
            lambda: x[:0] + 1,  # no elements
            lambda: x + 1,
            lambda: float(x[1]),
            lambda: bool((x > 2).any()),  # two operations, and a number
            lambda: x[x > 2],
            x.tolist,
            lambda: operations.top_k(x, 2),
            lambda: operations.all_finite(x),
            lambda: operations.top_k_nonzero(x, 2),
            lambda: comm.all_reduce(x),  # pyright: ignore[reportAttributeAccessIssue]
        )
        found: list[Counts] = []
        for case in cases:
            with counted() as each:
                case()
            found.append(each)
        return found

    pairs = [(each.launches, each.syncs) for each in LocalWorld(2).run(counts_of_rank)[1]]
    assert pairs == [(0, 0), (0, 0), (1, 0), (0, 1), (2, 1), (2, 1), (0, 1), (1, 0), (1, 1), (1, 1), (1, 0)]
