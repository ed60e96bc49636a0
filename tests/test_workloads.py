"""The lab's training jobs: their contract with the training loop, on real data where it is installed; jobs by module and by file."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers.quick import one_in
from sparsync_lab import workloads
from sparsync_lab.workloads.base import Batch, Workload, exactly_addable
from sparsync_lab.workloads.byte_level import Code
from sparsync_lab.workloads.gpt import Gpt
from sparsync_lab.workloads.movielens import MovieLens, ratings
from sparsync_lab.workloads.shakespeare import Shakespeare

RANKS = (1, 2, 4, 8, 16)
LINE_FIT = f"{Path(__file__).with_name('helpers') / 'third_party.py'}:LineFit"


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ratings of 90 users, each of 12 out of 130 films."""
    folder = tmp_path_factory.mktemp("films")
    rows = [(user, 1 + (7 * user + 11 * n) % 130, 3, 1000 + n) for user in range(1, 91) for n in range(12)]
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with C source of which a file is held out."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(120):
        (folder / f"{number}.c").write_text(f"int f{number}(void) {{ return {number}; }}\n" * 10)
    return folder


@pytest.fixture(params=one_in(3, ["gpt", "shakespeare", "code", "movielens"]))
def workload(request: pytest.FixtureRequest, films: Path, source: Path) -> Workload:
    # 45 windows: the last chunk is a part of one.
    if request.param == "shakespeare":
        made: Workload = Shakespeare(vocabulary=500, width=16, batch_size=16, length=7, windows=45)
    elif request.param == "gpt":
        made = Gpt(width=16, layers=2, heads=2, context=7, batch_size=16, windows=45, learning_rate=0.02)
    elif request.param == "code":
        options: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "context": 7, "windows": 45}
        made = Code(**options, learning_rate=0.02, data=str(source))
    else:
        made = MovieLens(width=8, batch_size=16, learning_rate=0.02, data=str(films))
    made.prepare()
    return made


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# The registry


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_every_name_gives_a_workload_with_the_options_asked_for(name: str) -> None:
    made = workloads.get(name, batch_size="8", data="somewhere")  # a text takes the type of the default
    assert isinstance(made, Workload)
    assert (vars(made)["batch_size"], vars(made)["data"]) == (8, "somewhere")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shakespear", {}, r"'shakespear'; .*; did you mean 'shakespeare'"),
        ("gpt", {"batchsize": 3}, r"no option 'batchsize'; .*; did you mean 'batch_size'"),
        ("shakespeare", {"width": "wide"}, "option width takes int"),
        ("shakespeare", {"width": 1.5}, "option width takes int"),
        ("shakespeare", {"data": 3}, "option data takes str"),
        ("gpt", {"width": 10, "heads": 4}, "^width must be"),
        ("test_workloads:NotDerived", {}, "class NotDerived has no method 'model'; write it as: def model"),
        ("test_workloads:weights", {}, "must be a class with the methods model, batch and loss, got <function"),
        ("test_workloads:Missing", {}, "has no 'Missing'; classes defined there are: NotDerived"),
        ("nowhere/job.py:Job", {}, "no file nowhere/job.py for the workload"),
    ],
)
def test_what_is_no_job_is_refused_with_the_nearest_name(
    name: str, options: dict[str, int | float | str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        workloads.get(name, **options)


class NotDerived:
    pass


# Jobs by module and by file


@pytest.mark.parametrize("name", [LINE_FIT, "helpers.third_party:LineFit"])
def test_a_job_of_ones_own_is_found_with_its_options(name: str) -> None:
    made = workloads.get(name, width="3")
    assert isinstance(made, Workload)
    assert (vars(made), made.describe()["workload"]) == ({"width": 3, "batch_size": 16}, "LineFit")
    with pytest.raises(ValueError, match="LineFit has no rate to scale; write it as a dataclass"):
        made.at_rate(2.0)


def test_a_file_that_fails_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os\nimport nowhere_at_all\n")
    with pytest.raises(ValueError, match=r"job.py fails when it is imported for a workload: .*nowhere_at_all.* line 2"):
        workloads.get(f"{tmp_path / 'job.py'}:Job")


# The contract with the training loop


def test_the_ranks_shares_are_the_same_global_batch_for_any_number_of_ranks(workload: Workload) -> None:
    whole = workload.batch(3, 5, 0, 1)
    for ranks in RANKS:
        shares = [workload.batch(3, 5, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat([own.input for own in shares]), whole.input)
        assert torch.equal(torch.cat([own.target for own in shares]), whole.target)


def test_another_step_or_seed_gives_another_batch_and_unequal_shares_are_refused(workload: Workload) -> None:
    batches = [workload.batch(seed, step, 0, 1).input for seed, step in ((3, 5), (3, 6), (4, 5))]
    assert not any(torch.equal(batches[a], batches[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    with pytest.raises(ValueError, match="a global batch of 16 samples cannot be split evenly over 3 ranks"):
        workload.batch(0, 0, 0, 3)


def test_a_seed_decides_the_weights_and_nothing_draws_from_torchs_generator(workload: Workload) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = workload.model(7)
    first = weights(model)
    optimizer, schedule = workload.optimizer(model, 10)
    workload.loss(model, workload.batch(0, 0, 0, 1)).backward()
    workload.clip(model)
    optimizer.step()
    schedule.step()
    workload.evaluate(model, 0, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(13)
    assert torch.equal(weights(workload.model(7)), first)
    assert not torch.equal(weights(workload.model(8)), first)


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["shakespeare", "gpt", "movielens"], indirect=True)
def test_the_mean_of_the_ranks_gradients_is_the_gradient_of_the_global_batch(workload: Workload) -> None:
    def gradient(rank: int, ranks: int) -> torch.Tensor:
        model = workload.model(0).double()
        batch = workload.batch(0, 0, rank, ranks)
        given = batch.input.double() if batch.input.is_floating_point() else batch.input
        workload.loss(model, Batch(given, batch.target)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    mean = torch.stack([gradient(rank, 4) for rank in range(4)]).mean(0)
    whole = gradient(0, 1)
    # float64 rounds at 1e-16 of the largest element; the sums have some thousand terms.
    assert (mean - whole).abs().max() < 1e-12 * whole.abs().max()


def test_any_number_of_ranks_finds_the_same_total(workload: Workload) -> None:
    model = workload.model(0)
    total, count = workload.evaluate(model, 0, 1)
    for ranks in (3, 5):
        found = [workload.evaluate(model, rank, ranks) for rank in range(ranks)]
        assert sum(each for each, _ in found) == total
        assert sum(number for _, number in reversed(found)) == count


def test_an_evaluation_leaves_the_model_as_it_was_and_goes_past_distributed_data_parallel(
    workload: Workload, tmp_path: Path
) -> None:
    model = workload.model(0)
    workload.loss(model, workload.batch(0, 0, 0, 1)).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters() if p.grad is not None]
    alone = workload.evaluate(model, 0, 1)
    assert all(layer.training for layer in model.modules())
    for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        wrapped.register_forward_pre_hook(lambda *_: pytest.fail("the forward pass of the wrapper may communicate"))
        assert workload.evaluate(wrapped, 0, 1) == alone
    finally:
        dist.destroy_process_group()


def test_a_few_steps_learn(workload: Workload) -> None:
    model = workload.model(0)
    optimizer, schedule = workload.optimizer(model, 20)
    batch = workload.batch(0, 0, 0, 1)
    before = workload.loss(model, batch).item()
    for _ in range(20):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        workload.clip(model)
        optimizer.step()
        schedule.step()
    assert workload.loss(model, batch).item() < 0.9 * before


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_language_model_clips_the_norm_of_its_gradient(factor: float) -> None:
    workload = Shakespeare(vocabulary=50, width=8, clip_norm=0.5)
    model = workload.model(0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    workload.clip(model, factor)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.5 * factor, rel=1e-4)


def test_a_job_at_another_rate_is_the_same_job_but_for_its_rate(workload: Workload) -> None:
    before, after = workload.describe(), workload.at_rate(0.5).describe()
    assert after["options"].pop("learning_rate") == before["options"].pop("learning_rate") / 2
    assert after == before


def test_exactly_addable_sums_add_in_any_order() -> None:
    # From 1e-12 to 100: float64 cannot hold the plain sums of such numbers.
    x = 10 ** (torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 14 - 12)
    plain = [part.double().sum().item() for part in x.split(7)]
    assert sum(plain) != sum(reversed(plain))
    parts = [exactly_addable(part) for part in x.split(7)]
    assert sum(parts) == sum(reversed(parts)) == sum(sorted(parts))
    assert sum(parts) == pytest.approx(x.double().sum().item(), abs=len(parts) * 2**-21)
    assert math.isnan(exactly_addable(torch.tensor([1.0, math.nan])))


# Shakespeare


def test_a_model_that_has_diverged_is_infinitely_perplexed() -> None:
    workload = Shakespeare(vocabulary=500, width=16, windows=20)
    model = workload.model(0)
    nn.init.constant_(model.output.bias, math.nan)
    assert workload.quality(*workload.evaluate(model, 0, 1)) == math.inf
    assert workload.quality(1e6, 1) == math.inf


# The transformer


@pytest.mark.parametrize(("name", "millions"), [("code", 1.03), pytest.param("code-10m", 10.8, marks=pytest.mark.slow)])
def test_the_models_of_code_have_the_size_they_are_named_after(name: str, millions: float, source: Path) -> None:
    model = workloads.get(name, data=str(source)).model(0)
    assert round(weights(model).numel() / 1e6, 2 if millions < 2 else 1) == millions


def test_only_matrices_decay() -> None:
    model = Gpt(width=16, layers=1, heads=1).model(0)
    optimizer, _ = Gpt().optimizer(model, 10)
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in decaying["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_the_transformers_rate_rises_falls_and_ends_at_a_tenth() -> None:
    optimizer, schedule = Gpt(learning_rate=1.0).optimizer(Gpt(width=16, layers=1, heads=1).model(0), 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


# MovieLens


def test_a_pair_is_a_rating_or_a_film_that_the_user_has_not_rated_in_the_training_data(films: Path) -> None:
    workload = MovieLens(width=8, batch_size=900, negatives=4, data=str(films))
    training = {(user, film) for user, film in ratings(str(films)).training.tolist()}
    epoch = [workload.batch(0, step, 0, 1) for step in range(len(training) * 5 // 900)]
    rated = [tuple(pair) for batch in epoch for pair in batch.input[batch.target == 1].tolist()]
    assert len(rated) == len(set(rated))
    assert set(rated) <= training
    drawn = {tuple(pair) for batch in epoch for pair in batch.input[batch.target == 0].tolist()}
    assert not drawn & training
    share = sum(int(batch.target.sum()) for batch in epoch) / (900 * len(epoch))
    assert share == pytest.approx(0.2, abs=0.01)


def test_a_recommender_that_scores_all_films_alike_has_no_hit(films: Path) -> None:
    workload = MovieLens(width=8, data=str(films))
    model = workload.model(0)
    nn.init.zeros_(model.output.weight)
    assert workload.evaluate(model, 0, 1) == (0.0, 90)
    nn.init.constant_(model.output.bias, math.nan)
    assert workload.evaluate(model, 0, 1) == (0.0, 90)


def test_a_recommender_that_knows_the_held_out_film_always_hits(films: Path) -> None:
    workload = MovieLens(width=130, data=str(films))
    model, data = workload.model(0), ratings(str(films))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.film_factor.weight.copy_(torch.eye(130))
        model.user_factor.weight.scatter_(1, data.ranked[:, :1], 1.0)
        model.output.weight[:, :130] = 1.0
    assert workload.quality(*workload.evaluate(model, 0, 1)) == 100.0


def test_a_size_of_zero_and_a_negative_decay_are_refused() -> None:
    assert vars(workloads.get("gpt-tiny", weight_decay="0.0"))["weight_decay"] == 0
    for option, value in {"layers": "0", "batch_size": "-1", "learning_rate": "nan", "weight_decay": "-0.1"}.items():
        with pytest.raises(ValueError, match=rf"{option} must be .*above"):
            workloads.get("gpt-tiny", **{option: value})
