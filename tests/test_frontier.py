"""`sparsync frontier`: which trainings it does, what it keeps, each method at its best rate, and its table, picture and page."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.third_party import LineFit
from sparsync_lab import cli
from sparsync_lab.frontier import runs, study
from sparsync_lab.frontier.figures import kind, panels
from sparsync_lab.frontier.picture import picture
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.frontier.study import FrontierStudy, complete
from sparsync_lab.frontier.tables import table
from sparsync_lab.report.parts import replaced
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.terminal import markdown
from sparsync_lab.workloads.one_process import Trained

Trainings = list[tuple[str, int, int, int, float]]  # label, ranks, steps, seed and rate of each
LINE_FIT = f"{Path(__file__).with_name('helpers') / 'third_party.py'}:LineFit"


def made(schemes: str = "dense,topk:density=0.2", **settings: object) -> FrontierStudy:
    return FrontierStudy(parse_schemes(schemes, 0.2), LINE_FIT, **settings)  # pyright: ignore[reportArgumentType]


def pretended(quality: Callable[[SchemeChoice, Key], float]) -> Callable[..., Finished]:
    """Return a stand-in for a training, with this quality at its end and twice it half-way."""

    def train(workload: str, options: object, choice: SchemeChoice, key: Key, count: int) -> Finished:
        end, nbytes = quality(choice, key), 7200.0 if choice.label == "dense" else 900.0
        trained = Trained(((key.steps // 2, 2 * end), (key.steps, end)), nbytes, 6.0, 6.0, 0.5)
        return Finished(key, 9 * 100, 1.0, trained)

    return train


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    """The trainings that were done: dense is best at rate 1 with 10 + seed, others at 2 with 12 + seed; each is 1 worse elsewhere."""
    done: Trainings = []

    def quality(choice: SchemeChoice, key: Key) -> float:
        done.append((choice.label, key.ranks, key.steps, key.seed, key.rate))
        best, end = (1.0, 10.0) if choice.label == "dense" else (2.0, 12.0)
        return end + key.seed + (key.rate != best)

    monkeypatch.setattr(study, "train", pretended(quality))
    # LineFit has no rate to change.
    monkeypatch.setattr(LineFit, "at_rate", lambda self, factor: self)
    monkeypatch.setattr("sparsync_lab.workloads.base.Workload.at_rate", lambda self, factor: self)
    return done


@pytest.mark.parametrize(
    ("best", "asked", "tried", "edge"),
    [
        (1.0, (0.5, 1.0, 2.0), {0.5, 1.0, 2.0}, False),
        (4.0, (0.5, 1.0, 2.0), {0.5, 1.0, 2.0, 4.0, 8.0}, False),
        (0.35, (0.7, 1.4), {0.175, 0.35, 0.7, 1.4}, False),
        (0.0, (1.0, 2.0), {2.0 ** (1 - each) for each in range(10)}, True),
        (5.0, (1.0,), {1.0}, False),  # asked for alone
    ],
)
def test_rates_are_tried_until_the_best_is_neither_the_lowest_nor_the_highest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainings: Trainings,
    best: float,
    asked: tuple[float, ...],
    tried: set[float],
    edge: bool,
) -> None:
    seen: list[float] = []

    def quality(choice: SchemeChoice, key: Key) -> float:
        seen.append(key.rate)
        return 10 + abs(key.rate - best)

    monkeypatch.setattr(study, "train", pretended(quality))
    wanted = made("dense", rates=asked)
    (panel,) = panels(wanted, complete(wanted, tmp_path, 1, print), lower=True)
    assert sorted(seen) == pytest.approx(sorted(tried), rel=0.01)
    assert panel.rows[0].edge == edge


def test_with_a_seed_for_the_rates_the_others_train_at_the_best(tmp_path: Path, trainings: Trainings) -> None:
    complete(made(seeds=(0, 1, 2), rates_seed=1), tmp_path, 1, print)
    assert {(label, rate) for label, *_, seed, rate in trainings if seed == 1} == {
        *(("dense", rate) for rate in (0.5, 1.0, 2.0)),
        *(("topk:density=0.2", rate) for rate in (0.5, 1.0, 2.0, 4.0)),
    }
    assert {(label, seed, rate) for label, *_, seed, rate in trainings if seed != 1} == {
        *(("dense", seed, 1.0) for seed in (0, 2)),
        *(("topk:density=0.2", seed, 2.0) for seed in (0, 2)),
    }


def test_what_is_finished_is_not_done_again(tmp_path: Path, trainings: Trainings) -> None:
    complete(made(rates=(1.0,)), tmp_path, 1, print)
    trainings.clear()
    complete(made("dense,topk:density=0.2,topk:density=0.4", rates=(0.5, 1.0, 2.0, 4.0)), tmp_path, 1, print)
    assert ("dense", 4, 300, 0, 1.0) not in trainings
    assert len(trainings) == 3 + 3 + 4
    # A line that breaks off, as when the machine fails, is done again.
    file = tmp_path / runs.FILE_NAME
    file.write_text(file.read_text()[:-40])
    trainings.clear()
    complete(made("dense,topk:density=0.2,topk:density=0.4", rates=(0.5, 1.0, 2.0, 4.0)), tmp_path, 1, print)
    assert len(trainings) == 1
    assert len(runs.read(tmp_path)) == 12


def test_each_method_is_compared_with_dense_at_its_best_rate_seed_by_seed(tmp_path: Path, trainings: Trainings) -> None:
    asked = made("dense,topk:density=0.2", seeds=(0, 10))
    (panel,) = panels(asked, complete(asked, tmp_path, 1, print), lower=True)
    sparse, dense = panel.rows  # those that send least first
    assert (dense.rate, dense.edge, dense.end.mean, dense.bits) == (1.0, False, 15.0, 64.0)
    assert (sparse.rate, sparse.edge, sparse.end.mean, sparse.bits) == (2.0, False, 17.0, 8.0)
    last = sparse.behind
    assert (last.low, last.mean, last.high) == (pytest.approx(10.0), pytest.approx(15.0), pytest.approx(20.0))
    alone = made("dense,topk:density=0.2", seeds=(0, 10), rates=(1.0,))
    (turned, _) = panels(alone, complete(alone, tmp_path, 1, print), lower=False)[0].rows
    assert turned.behind.mean < 0
    shown = table(panel, "error")
    assert shown.rows[0] == ("topk:density=0.2", "8.00", "6.0", "2", "17.00", "+15.0 (+10.0 to +20.0)")
    assert "| `dense` | 64.0 |" in markdown(shown)


@pytest.mark.parametrize(
    ("metric", "quality", "unit"),
    [("perplexity", math.exp, "nats"), ("bits per byte", lambda loss: loss, "bits per byte")],
)
def test_losses_are_compared_seed_by_seed_with_an_interval_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, quality: Callable[[float], float], unit: str
) -> None:
    gaps = {0: 0.25, 1: 0.5, 2: 0.75}

    def at_end(choice: SchemeChoice, key: Key) -> float:
        return quality(1.0 + key.seed + gaps[key.seed] * (choice.label != "dense"))

    monkeypatch.setattr(study, "train", pretended(at_end))
    asked = made(seeds=(0, 1, 2), rates=(1.0,))
    (panel,) = panels(asked, complete(asked, tmp_path, 1, print), lower=True, metric=metric)
    sparse, _ = panel.rows
    assert panel.dense_deviation == pytest.approx(1.0)
    assert sparse.loss_behind is not None
    assert sparse.loss_behind.mean == pytest.approx(0.5)
    base = 2 if metric == "bits per byte" else math.e
    assert sparse.behind.low == pytest.approx(100 * (base**0.25 - 1))
    assert sparse.loss_behind.half == pytest.approx(4.302653 * 0.25 / math.sqrt(3))
    shown = table(panel, metric)
    place = shown.heads.index(f"{unit}\nbehind dense")
    assert [row[place] for row in shown.rows] == ["+0.500 +- 0.621", "0"]
    assert shown.title.endswith(f"+- 95 % interval; dense's standard deviation 1.0 {unit}")
    assert f"{metric}\nat the end" in shown.heads


def test_with_laprop_each_method_is_compared_with_the_better_one_of_dense_and_laprop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"dense": 10.0, "laprop": 8.0, "laprop:beta2=0.5": 9.0, "topk:density=0.2": 12.0}
    monkeypatch.setattr(study, "train", pretended(lambda choice, key: ends[choice.label]))
    monkeypatch.setattr(study, "check_optimizer", lambda *_: None)  # SGD trains the job
    asked = made("dense,laprop,laprop:beta2=0.5,topk:density=0.2", rates=(1.0,))
    (panel,) = panels(asked, complete(asked, tmp_path, 1, print), lower=True)
    shown = table(panel, "error")
    place = shown.heads.index("% behind the\nbest uncompressed")
    assert {row[0]: row[place] for row in shown.rows} == {
        "dense": "+25.0", "laprop": "0", "laprop:beta2=0.5": "+12.5", "topk:density=0.2": "+50.0"
    }  # fmt: skip
    alone = made(rates=(1.0,))
    (panel,) = panels(alone, complete(alone, tmp_path, 1, print), lower=True)
    assert "% behind the\nbest uncompressed" not in table(panel, "error").heads


def test_a_training_that_diverged_is_the_worst_rate_and_is_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: Trainings
) -> None:
    def quality(choice: SchemeChoice, key: Key) -> float:
        if choice.label != "dense":
            return math.inf
        return math.nan if key.rate == 0.5 else 10.0

    monkeypatch.setattr(study, "train", pretended(quality))
    asked = made()
    found = panels(asked, complete(asked, tmp_path, 1, print), lower=True)
    assert [row.rate for row in found[0].rows] == [1.0, 1.0]
    assert math.isinf(found[0].rows[0].behind.mean)
    assert picture(found, "none of it").startswith(b"\x89PNG")


def test_the_names_say_what_is_published_what_is_ours_and_what_is_the_users_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = parse_schemes("dense,bf16,topk,exact_micro,micro,diloco", 0.01)
    assert [kind(choice) for choice in asked] == [
        *("baseline", "baseline", "published", "ours", "published", "published")
    ]
    monkeypatch.setattr("sparsync.base.registry.installed", lambda kind: {"theirs": "helpers.third_party:Scaled"})
    file = LINE_FIT.removesuffix(":LineFit")
    schemes = f"{file}:Scaled:factor=0.5,helpers.third_party:Scaled,theirs,local_steps(every=2)/theirs"
    assert [kind(choice) for choice in parse_schemes(schemes, 0.01)] == ["your own"] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schemes": "topk"}, "must have dense"),
        ({"ranks": (3,)}, "cannot be split evenly over 3 ranks"),
        ({"rates_seed": 5}, "--rates-seed must be one of the seeds 0"),
        ({"rates": (1.0, 2.0)}, "LineFit has no rate to scale"),
        ({"schemes": "dense,local_steps(every=4:fragments=3)/dense"}, "cannot train this job: fragments"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_trained(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(**{"rates": (1.0,), **settings}).check()  # pyright: ignore[reportArgumentType]


PLAIN_JOBS = Path(__file__).parent / "helpers" / "plain_jobs.py"


@pytest.mark.usefixtures("signal_handlers_are_put_back")
@pytest.mark.filterwarnings("ignore:the exchange before")
def test_a_training_that_fails_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"frontier --workload {PLAIN_JOBS}:Undefined --ranks 2 --steps 6 --rates 1 --out {tmp_path} "
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--schemes", "dense,local_steps(every=1)/dense,bf16"])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "[2/3] local_steps(every=1)/dense, seed 0, rate 1: failed: the last 5 exchanges were dropped" in printed.err
    assert "[3/3] bf16" in printed.err
    assert "a method failed or exchanged nothing" in printed.err
    said = " ".join(printed.out.split())
    assert said.count("!!! local_steps(every=1)/dense FAILED: the last 5 exchanges were dropped") == 2
    assert re.search(r" local_steps\(every=1\)/dense .* failed +-\n", printed.out)
    # What failed is tried again the next time, as it was perhaps the machine that failed.
    assert not any("local_steps" in key.method for key in runs.read(tmp_path))
    assert len(runs.read(tmp_path)) == 2


@pytest.mark.parametrize(("every", "exchanges"), [(4, 1), (5, 0)])
def test_local_steps_that_end_before_an_exchange_is_due_exchanged_nothing(every: int, exchanges: int) -> None:
    (choice,) = parse_schemes(f"local_steps(every={every})/dense", 0.2)
    key = Key("", "", ranks=2, steps=4, seed=0, rate=1.0)
    done = study.train(f"{PLAIN_JOBS}:Least", {}, choice, key)
    assert done.trained.exchanges == exchanges
    assert done.trained.nbytes > 0  # the one at the end
    assert choice.never_due(4) == (not exchanges)


@pytest.mark.usefixtures("signal_handlers_are_put_back")
def test_a_job_beside_has_a_column_with_each_method_at_its_best_rate_there(
    tmp_path: Path, play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quality(choice: SchemeChoice, key: Key) -> float:
        best = 2 if '"width": 8' in key.job else 1
        return 10.0 + (choice.label != "dense") * best + abs(key.rate - best)

    monkeypatch.setattr(study, "train", pretended(quality))
    other = f"gpt-tiny(width=8:layers=1:windows=4:data={play})"
    cli.main(
        f"frontier --workload gpt-tiny --data {play} --schemes dense,topk --beside {other} --out {tmp_path}".split()
    )
    rows = [
        line for line in (tmp_path / "frontier.md").read_text().splitlines() if line.startswith(("| `", "| method"))
    ]
    assert rows[0].endswith(f"| % behind dense, {other} |")
    assert rows[1].endswith("| +10.0 | +20.0 |")
    assert rows[2].endswith("| 0 | 0 |")


def test_a_part_of_a_page_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- begin a -->\nold\n<!-- end a -->\nbetween\n<!-- begin b -->\n<!-- end b -->\n")
    assert replaced(page, "a", "new") == (
        "above\n<!-- begin a -->\n\nnew\n\n<!-- end a -->\nbetween\n<!-- begin b -->\n<!-- end b -->\n"
    )
    with pytest.raises(ValueError, match="has no part 'c'; put the lines <!-- begin c -->"):
        replaced(page, "c", "new")


@pytest.mark.slow
@pytest.mark.usefixtures("signal_handlers_are_put_back")
@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_the_command_writes_table_picture_and_page(
    tmp_path: Path, play: Path, jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- begin tiny -->\n<!-- end tiny -->\n")
    command = f"frontier --workload gpt-tiny --data {play} --option width=8 --option layers=1 --option windows=10 --steps 4 --rates 1 "
    command += f"--schemes dense,topk:density=0.1 --page {page} --part tiny --out {tmp_path / 'out'} --jobs {jobs}"
    cli.main(command.split())
    printed = capsys.readouterr()
    assert " topk:density=0.1 " in printed.out
    assert printed.err.count("[") == 2
    text = page.read_text()
    assert f"sparsync {command}" in text
    assert "(frontier_tiny.png)" in text
    assert (page.parent / "frontier_tiny.png").read_bytes() == (tmp_path / "out" / "frontier.png").read_bytes()
    cli.main(command.split())
    assert capsys.readouterr().err == ""


def test_a_device_is_part_of_a_key_and_a_missing_gpu_is_said(
    trainings: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(made(), tmp_path, 1, lambda line: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda needs a GPU that torch can use for the 6 trainings"):
        complete(made(device="cuda"), tmp_path, 1, lambda line: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    complete(made(device="cuda"), tmp_path, 1, lambda line: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    complete(made(device="cuda"), tmp_path, 1, lambda line: None)  # all are finished
    assert sorted({key.device for key in runs.read(tmp_path)}) == ["cpu", "cuda"]
    assert {row["device"] for row in runs.rows(tmp_path)} == {"cpu", "cuda"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("gpt-tiny", "dense"),
        ("gpt-tiny", "topk:density=0.2"),
        ("gpt-tiny", "steps/two_shot:density=0.2:values=sign"),
        ("gpt-tiny", "local_steps(every=2)/two_shot"),
        ("examples/own_job.py:MyJob", "topk:density=0.2"),
    ],
)
def test_a_training_on_a_gpu_ends_about_where_one_on_the_cpu_does(name: str, scheme: str, tmp_path: Path) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        chosen = parse_schemes(f"dense,{scheme}" if scheme != "dense" else scheme, 0.2)
        job = FrontierStudy(chosen, name, steps=(20,), rates=(1.0,), device=device)
        found = complete(job, tmp_path, 1, lambda line: None)
        ends.append([each.end for each in found.values() if each.key.device == device][-1])
    assert ends[1] == pytest.approx(ends[0], rel=0.02)
