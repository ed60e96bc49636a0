"""`sparsync traffic`: lines with the counts, the same at each call, and errors that name the fix."""

import json
from pathlib import Path

import pytest
import torch

from helpers.quick import one_in
from sparsync import schemes
from sparsync.core import Bucket
from sparsync_lab import cli, workloads
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.traffic.command import Study
from sparsync_lab.traffic.observe import Observed
from sparsync_lab.traffic.stream import OfJob, Synthetic, heavy_tailed, layers

pytestmark = pytest.mark.usefixtures("signal_handlers_are_put_back")
THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"
ALL = ",".join(schemes.names())
SMALL = ["--ranks", "3", "--elements", "2000", "--density", "0.05", "--steps", "4"]


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    capsys.readouterr()
    cli.main(["traffic", "--json", "-", *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error message of a refused command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


def choice(text: str, density: float = 0.05) -> SchemeChoice:
    return parse_schemes(text, density)[0]


@pytest.mark.slow
def test_every_scheme_has_a_line_a_step_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "--scheme", ALL, *SMALL)
    labels = ALL.split(",")
    assert [(each["step"], each["scheme"]) for each in found[: -len(labels)]] == [
        (step, label) for step in range(4) for label in labels
    ]
    assert [each["scheme"] for each in found[-len(labels) :]] == labels
    for each in found[: -len(labels)]:
        assert each["kind"] == "step"
        assert len(each["bytes"]) == len(each["words"]) == len(each["messages"]) == len(each["local"]) == 3
        assert each["words"] == [nbytes / 4 for nbytes in each["bytes"]]
        assert each["union"] == each["density"] * each["elements"]
    for each in found[-len(labels) :]:
        assert each["kind"] == "summary"
        assert each["after_50"] is None


@pytest.mark.parametrize("text", one_in(5, ALL.split(",")))
def test_counted_traffic_is_the_cost_that_the_scheme_reports(text: str) -> None:
    """The same scheme runs again, beside the observation."""
    stream = Synthetic(ranks=3, elements=500, seed=1)
    observed = Observed(choice(text), stream.ranks, stream.layout)
    again = [choice(text).make().start() for _ in range(stream.ranks)]
    from sparsync.comm import LocalWorld

    for step in range(3):
        gradients = stream.gradients(step)
        record = observed.reduce(step, gradients)
        reports = LocalWorld(3).run(
            lambda comm, gradients=gradients, step=step: again[comm.rank].reduce(
                Bucket("traffic", gradients[comm.rank].clone(), step, stream.layout), comm
            )
        )
        assert record["bytes"] == [report.cost.nbytes for report in reports]
        assert record["messages"] == [report.cost.messages for report in reports]
        assert record["local"] == [report.selected for report in reports]
        assert record["union"] == reports[0].union


def test_dense_writes_everything_and_has_no_residual(capsys: pytest.CaptureFixture[str]) -> None:
    for each in lines(capsys, "--scheme", "dense", *SMALL)[:-1]:
        assert each["error"] < 1e-6
        assert each["captured"] == pytest.approx(1.0)
        assert (each["residual_norm"], each["staleness_max"], each["asked"]) == (0.0, 0, 2000)


def test_what_exclusive_selections_leave_out_and_write_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """At a position of the union micro writes the whole mean, so that error squared and captured are the two parts of its energy."""
    for each in lines(capsys, "--scheme", "exact_micro", *SMALL)[:-1]:
        assert each["error"] ** 2 + each["captured"] == pytest.approx(1.0, abs=1e-6)
        assert each["captured"] <= each["best"] + 1e-6


@pytest.mark.slow
def test_no_element_waits_longer_than_the_refresh_allows(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "--scheme", "exact_micro:refresh=0.5:density=0.2", "--elements", "300", "--steps", "25")
    assert 0 < found[-1]["after_1"]["staleness_max"] <= 10


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        cli.main(["traffic", "--scheme", "exact_micro,oktopk", *SMALL, "--json", str(file)])
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_table_is_shown_beside_the_file_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    cli.main(["traffic", "--scheme", "exact_micro,topk", *SMALL, "--json", str(out)])
    assert [json.loads(line).get("step") for line in out.read_text().splitlines()] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        None,
        None,
    ]
    table = capsys.readouterr().out
    assert "exact_micro" in table
    assert "3 ranks, 2000 elements, density 0.05, drawn gradients, seed 0; after step 1" in table


def test_a_rank_has_the_same_gradient_whatever_came_before_and_beside_it() -> None:
    few, many = Synthetic(2, 1000, seed=3), Synthetic(5, 1000, seed=3)
    for step in (0, 25, 3):  # also backwards
        for one, other in zip(few.gradients(step), many.gradients(step), strict=False):
            assert torch.equal(one, other)
    assert not torch.equal(few.gradients(0)[0], Synthetic(2, 1000, seed=4).gradients(0)[0])


def test_drawn_numbers_have_heavy_tails_and_unit_variance() -> None:
    drawn = heavy_tailed(200_000, 0, "noise", 0).double()
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.var()) - 1) < 0.05
    # P(|t| > 4 sqrt 2) = 0.00481 with 4 degrees of freedom; of a normal variable 6e-5 is beyond 4 standard deviations
    assert abs(float((drawn.abs() > 4).double().mean()) - 0.00481) < 0.0007


@pytest.mark.parametrize("n", [1, 2, 17, 1000, 123_457])
def test_layers_cover_every_element_once(n: int) -> None:
    layout = layers(n, seed=0)
    assert [each.span.start for each in layout] == [0, *(each.span.stop for each in layout[:-1])]
    assert layout[-1].span.stop == n
    assert {each.name.split(".")[1] for each in layout} == {"weight", "bias"}


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


def test_gradients_of_a_job_in_a_file_are_reduced_by_a_scheme_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--workload", f"{THIRD_PARTY}:LineFit", "--option", "width=5", "--ranks", "2", "--steps", "3"]
    found = lines(capsys, "--scheme", f"dense,{THIRD_PARTY}:Scaled:factor=0.5", *small)
    assert [each.get("step") for each in found] == [0, 0, 1, 1, 2, 2, None, None]
    assert (found[-1]["ranks"], found[-1]["elements"]) == (2, 6)
    assert all(each["error"] == pytest.approx(0.5) for each in found[1:-2:2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elements", "0"], "--elements: takes a whole number above 0, got '0'"),
        (["--elements", "9", "--workload", "gpt-tiny"], "--elements is of drawn gradients"),
        (["--workload", "gpt-tiny", "--ranks", "3"], "cannot be split evenly over 3 ranks"),
        (["--option", "width=3"], "--option and --data are of a workload, and there is none"),
        (["--density", "2"], "density must be in (0, 1]"),
        (["--scheme", "mikro"], "did you mean 'micro'?"),
        (["--scheme", "topk,topk"], "names one twice"),
        (["--scheme", "skip_reduce:skip=9"], "cannot run on 4 ranks"),
    ],
)
def test_bad_input_is_refused_with_the_cure(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "traffic", *arguments)


def test_a_step_without_any_gradient_has_no_shares() -> None:
    study = Study(parse_schemes("topk", 0.1), Synthetic(2, 20), 1)
    observed = Observed(study.schemes[0], 2, study.stream.layout)
    record = observed.reduce(0, [torch.zeros(20), torch.zeros(20)])
    assert (record["error"], record["captured"], record["residual_norm"]) == (None, None, 0.0)


def test_local_steps_are_not_gradients() -> None:
    local = SchemeChoice("local_steps(every=4)/topk", "topk", {"density": 0.1}, {"every": 4})
    with pytest.raises(ValueError, match=r"leave out local_steps\(...\)/"):
        Study((local,), Synthetic(2, 20), 1)
