"""`sparsync traffic`: counts, the same at each call, and errors that name the fix."""

from pathlib import Path

import pytest
import torch

from helpers.quick import one_in
from sparsync import schemes
from sparsync.comm import LocalWorld
from sparsync.core import Bucket
from sparsync_lab import cli, workloads
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.traffic.command import Study, summary
from sparsync_lab.traffic.observe import Observed, Record
from sparsync_lab.traffic.stream import OfJob, Synthetic, heavy_tailed, layers

pytestmark = pytest.mark.usefixtures("signal_handlers_are_put_back")
THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"
ALL = ",".join(schemes.names())
SMALL = ["--ranks", "3", "--elements", "2000", "--density", "0.05", "--steps", "4"]


def records(schemes: str, stream: Synthetic | OfJob, steps: int = 4) -> tuple[list[Record], list[Record]]:
    """Return the records of all steps, and a summary of each scheme."""
    chosen = parse_schemes(schemes, 0.05)
    found = list(Study(chosen, stream, steps).records())
    return found, [summary(found, each.label) for each in chosen]


def choice(text: str, density: float = 0.05) -> SchemeChoice:
    return parse_schemes(text, density)[0]


@pytest.mark.parametrize("text", one_in(5, ALL.split(",")))
def test_counted_traffic_is_the_cost_that_the_scheme_reports(text: str) -> None:
    """The same scheme runs again, beside the observation."""
    stream = Synthetic(ranks=3, elements=500, seed=1)
    observed = Observed(choice(text), stream.ranks, stream.layout)
    again = [choice(text).make().start() for _ in range(stream.ranks)]
    for step in range(3):
        gradients = stream.gradients(step)
        record = observed.reduce(step, gradients)
        reports = LocalWorld(3).run(
            lambda comm, gradients=gradients, step=step: again[comm.rank].reduce(
                Bucket("traffic", gradients[comm.rank].clone(), step, stream.layout), comm
            )
        )
        assert record["bytes"] == [report.cost.nbytes for report in reports]
        assert record["local"] == [report.selected for report in reports]
        assert record["union"] == reports[0].union


def test_dense_writes_all_energy_and_a_sparse_scheme_leaves_some_that_waits() -> None:
    found, (dense, micro) = records("dense,exact_micro", Synthetic(3, 2000))
    assert [each["scheme"] for each in found] == 4 * ["dense", "exact_micro"]
    for each in found[::2]:
        assert each["captured"] == pytest.approx(1.0)
        assert (each["staleness_max"], each["asked"]) == (0, 2000)
    for each in found[1::2]:
        assert 0 < each["captured"] < 0.99
        assert each["asked"] == 100
    settled = found[3::2]  # without the first step
    assert (dense["after"], micro["after"]) == (1, 1)
    assert micro["bytes_max"] == max(max(each["bytes"]) for each in settled)
    assert micro["bits_mean"] == pytest.approx(sum(sum(each["bytes"]) for each in settled) * 8 / 9 / 2000)
    assert micro["staleness_max"] == max(each["staleness_max"] for each in settled) > 0


def test_a_study_gives_the_same_figures_each_time_and_the_command_shows_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = (records("exact_micro,oktopk", Synthetic(3, 2000)) for _ in range(2))
    assert one == other and len(one[0]) == 8
    cli.main(["traffic", "--scheme", "exact_micro,oktopk", *SMALL])
    said = capsys.readouterr().out
    assert "3 ranks, 2000 elements, density 0.05, drawn gradients, seed 0; after step 1" in said


def test_a_rank_has_the_same_gradient_whatever_came_before_and_beside_it() -> None:
    few, many = Synthetic(2, 1000, seed=3), Synthetic(5, 1000, seed=3)
    for step in (0, 25, 3):  # also backwards
        for one, other in zip(few.gradients(step), many.gradients(step), strict=False):
            assert torch.equal(one, other)
    assert not torch.equal(few.gradients(0)[0], Synthetic(2, 1000, seed=4).gradients(0)[0])


def test_drawn_numbers_have_heavy_tails_and_unit_variance_in_layers_that_cover_all_elements() -> None:
    drawn = heavy_tailed(200_000, 0, "noise", 0).double()
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.var()) - 1) < 0.05
    # P(|t| > 4 sqrt 2) = 0.00481 with 4 degrees of freedom; of a normal variable 6e-5 is beyond 4 standard deviations
    assert abs(float((drawn.abs() > 4).double().mean()) - 0.00481) < 0.0007
    for n in (1, 2, 17, 1000, 123_457):
        layout = layers(n, seed=0)
        assert [each.span.start for each in layout] == [0, *(each.span.stop for each in layout[:-1])]
        assert layout[-1].span.stop == n


def test_gradients_of_a_job_are_those_of_the_dense_training(play: Path) -> None:
    workload = workloads.get("shakespeare-small", vocabulary=16, width=4, batch_size=4, windows=4, data=str(play))
    stream, model = OfJob(workload, 2, 0, 4), workload.model(0)
    assert [each.name for each in stream.layout] == [name for name, _ in model.named_parameters()]
    optimizer, schedule = workload.optimizer(model, 4)
    for step in range(4):
        model.zero_grad()
        workload.loss(model, workload.batch(0, step, 0, 1)).backward()  # the whole batch on one rank
        whole = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        torch.testing.assert_close(torch.stack(stream.gradients(step)).mean(0), whole)
        workload.clip(model)
        optimizer.step()
        schedule.step()


def test_gradients_of_a_job_in_a_file_are_reduced_by_a_scheme_in_a_file() -> None:
    job = OfJob(workloads.get(f"{THIRD_PARTY}:LineFit", width=5), ranks=2, seed=0, steps=3)
    found, _ = records(f"dense,{THIRD_PARTY}:Scaled:factor=0.5", job, steps=3)
    assert [each["elements"] for each in found] == 6 * [6]
    assert all(each["captured"] == pytest.approx(0.25) for each in found[1::2])


def test_a_step_without_any_gradient_has_no_shares() -> None:
    record = Observed(choice("topk"), 2, Synthetic(2, 20).layout).reduce(0, [torch.zeros(20), torch.zeros(20)])
    assert record["captured"] is None
