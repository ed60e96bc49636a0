"""Advice from a probe: times that are computed by hand, verdicts, and the curve of extra steps."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.futures import Future

from sparsync import Bucket, Dense, Scheme, TopK
from sparsync.attached.joining import Joining
from sparsync_lab import workloads
from sparsync_lab.advise import command, extra_steps
from sparsync_lab.advise.extra_steps import Training
from sparsync_lab.advise.replay import Deviation, deviations
from sparsync_lab.cli import _parser, main
from sparsync_lab.predict import advice, plan, probe_file
from sparsync_lab.predict.advice import Extra, PredictedStep
from sparsync_lab.predict.probe_file import (
    Backward,
    Kernel,
    Latency,
    Memory,
    Operation,
    Probe,
    ProbedGroup,
    ReadyBucket,
    ReducedBucket,
    SchemeTimes,
)
from sparsync_lab.predict.probed import ProbedNetwork
from sparsync_lab.rivals.demo import DeMo
from sparsync_lab.rivals.powersgd import PowerSGD
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.traffic.record import record
from sparsync_lab.traffic.stream import from_record
from sparsync_lab.workloads.base import Workload
from sparsync_lab.workloads.plain import PlainJob
from studies import predictions

N = 1000
SENT = 6000  # bytes of a dense all-reduce of N elements in float32 on 4 ranks: 2 x 3/4 x 4 N
PROBE = Probe(
    ProbedGroup(4, "gloo", 4, "made", "cpu", 8, "2.13.0", "2026-01-01T00:00:00+00:00"),
    tuple(
        Operation(kind, nbytes, seconds, seconds, seconds)
        for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv")
        for nbytes, seconds in ((SENT // 2, 0.25), (SENT, 0.5))
    ),
    Latency(0.0, 0.0, 0.0, 1.0, 0.0625),
    Memory(1e9),
    tuple(Kernel(kind, 1e9, 0.0) for kind in probe_file.KERNELS),
)
TWO_BUCKETS = Backward("made", 1.0, 2.0, 0.125, (ReadyBucket(N, 1.0), ReadyBucket(N, 2.0)))


def test_a_dense_step_is_the_backward_pass_and_what_the_last_bucket_adds() -> None:
    """Forward 1 s, backward 2 s; each reduction takes 0.5 s and 0.0625 s of announcement; the first is hidden; the optimizer 0.125 s."""
    found = advice.step("dense", Dense(), PROBE, TWO_BUCKETS)
    assert found.step_s == pytest.approx(3 + 0.5625 + 0.125, rel=1e-4)  # and what dividing takes
    assert found.hidden == pytest.approx(0.5, rel=1e-3)
    assert found.bits(2 * N) == 8 * (2 * SENT + 2 * 3 * 32) / (2 * N)  # announcements are 32 bytes to each other rank
    assert found.rounds == 4


def test_half_the_bytes_take_half_the_time_where_the_table_says_so() -> None:
    full, half = (advice.step("", each, PROBE, TWO_BUCKETS) for each in (Dense(), Dense.bf16()))
    assert full.reduce_s - half.reduce_s == pytest.approx(0.5, rel=1e-3)


def test_what_measured_buckets_took_beyond_the_prediction_is_added_between_them_in_proportion() -> None:
    """A dense bucket of N elements is predicted right below; of 3 N elements it took 2 s more, so one of 2 N takes 1 s more."""
    plain = {
        n: advice.step("dense", Dense(), PROBE, replace(TWO_BUCKETS, bucket=(ReadyBucket(n, 2.0),)))
        for n in (N, 2 * N, 3 * N, 4 * N)
    }
    measured = (ReducedBucket(N, plain[N].reduce_s), ReducedBucket(3 * N, plain[3 * N].reduce_s + 2.0))
    probe = replace(PROBE, scheme=(SchemeTimes("dense", 0.0, "", measured),))
    for n, beyond in ((N // 2, 0.0), (N, 0.0), (2 * N, 1.0), (3 * N, 2.0), (4 * N, 2.0)):
        bucket = replace(TWO_BUCKETS, bucket=(ReadyBucket(n, 2.0),))
        found, before = (advice.step("dense", Dense(), each, bucket) for each in (probe, PROBE))
        assert found.reduce_s == pytest.approx(before.reduce_s + beyond)
        other = advice.step("another method", Dense(), probe, bucket)
        assert other.reduce_s == before.reduce_s
        assert (found.probed, other.probed) == (True, False)


def test_settings_and_not_their_spelling_decide_which_buckets_count() -> None:
    scheme = TopK(density=0.05, values="int8")
    times = SchemeTimes("topk:values=int8:density=0.05", 0.0, scheme.config_fingerprint(), (ReducedBucket(N, 9.0),))
    probe = replace(PROBE, scheme=(times,))
    assert advice.measured_times("topk:density=0.05:values=int8", scheme, probe) == times
    assert advice.measured_times("topk:values=int8:density=0.05", TopK(density=0.5, values="int8"), probe) is None


def test_a_measured_bucket_counts_no_longer_than_a_larger_one_and_half_of_the_prediction_stays() -> None:
    buckets = (ReducedBucket(N, 8.0), ReducedBucket(2 * N, 1e-6))
    reduction = advice.ReductionTime(Dense(), PROBE, ProbedNetwork(PROBE), SchemeTimes("dense", 0.0, "", buckets))
    for n in (N, 2 * N, 3 * N):
        assert reduction.seconds(n) == reduction.expected_s(n) / 2


def test_steps_around_a_scheme_take_the_buckets_of_that_scheme() -> None:
    [plain] = parse_schemes("local_steps(every=4)/dense", 0.01)
    long = SchemeTimes("dense", 0.0, Dense().config_fingerprint(), (ReducedBucket(2 * N, 100.0),))
    before, after = (command.step(plain, each, TWO_BUCKETS) for each in (PROBE, replace(PROBE, scheme=(long,))))
    assert (before.probed, after.probed) == (False, True)
    expected = advice.ReductionTime(Dense(), PROBE, ProbedNetwork(PROBE), long).beyond_s(2 * N)
    assert after.reduce_s == pytest.approx(before.reduce_s + expected / 4)


# A dense bucket of n >= 500 elements is n / 2000 s on the way, its announcement takes 0.0625 s, and its thread 3 s however small it is.
SLOW_THREAD = replace(
    PROBE,
    scheme=(SchemeTimes("dense", 3.0, Dense().config_fingerprint(), (ReducedBucket(N, 0.5 + 0.0625 + 3.0),)),),
)


@pytest.mark.parametrize(
    ("settings", "exposed_s", "reduce_s"),
    [
        # 1 + 0.0625 + 3 for the bucket of 2000 elements, 0.25 + 0.0625 for the agreement: 4.375 s every 4 steps of 3.125 s.
        ("every=4", 4.375 / 4, 4.375 / 4),
        ("every=4:delay=1", (4.375 - 3.125) / 4, 4.375 / 4),
        ("every=4:delay=2", 0.0, 4.375 / 4),
        # 0.5 + 0.0625 + 3 + 0.3125 for each of two fragments: 3.875 s every 2 steps.
        ("every=4:fragments=2", 3.875 / 2, 3.875 / 2),
        ("every=4:fragments=2:delay=1", (3.875 - 3.125) / 2, 3.875 / 2),
        ("every=4:fragments=2:delay=4", 0.0, 3.875 / 2),
    ],
)
def test_a_local_step_is_its_computing_and_what_the_steps_of_the_delay_leave_of_each_fragment(
    settings: str, exposed_s: float, reduce_s: float
) -> None:
    [choice] = parse_schemes(f"local_steps({settings})/dense", 0.01)
    found = command.step(choice, SLOW_THREAD, TWO_BUCKETS)
    assert found.step_s == pytest.approx(3.125 + exposed_s, rel=1e-5)
    assert found.reduce_s == pytest.approx(reduce_s, rel=1e-5)
    assert found.hidden == pytest.approx(1 - exposed_s / reduce_s, abs=1e-5)
    assert found.probed


@pytest.mark.parametrize("measure_every", [1, 8, 1000])
@pytest.mark.parametrize(("probe", "fixed_s"), [(PROBE, 0.0), (SLOW_THREAD, 3.0)])
def test_a_step_of_adamw_takes_its_part_of_the_time_in_which_the_ratio_is_measured(
    probe: Probe, fixed_s: float, measure_every: int
) -> None:
    """The ratio of 32 blocks takes as long as the smallest all-reduce, 0.25 s, and 0.0625 s to announce, every `measure_every` steps."""
    [choice] = parse_schemes(f"adamw_steps(measure_every={measure_every})/dense", 0.01)
    found = command.step(choice, probe, TWO_BUCKETS)
    assert found.reduce_s == pytest.approx(1 + 0.0625 + fixed_s + 0.3125 / measure_every, rel=1e-5)
    assert found.step_s == 3.125 + found.reduce_s
    assert found.hidden == 0


@pytest.mark.slow
def test_a_probe_of_another_model_than_the_job_is_refused(tmp_path: Path) -> None:
    workload = workloads.get("gpt-tiny", width="32")
    workload.prepare()
    path = tmp_path / "gradients.pt"
    torch.save(record(workload, 0, 2, 2), path)
    with pytest.raises(ValueError, match="the model of the times has 2000 parameters, the job of --workload has"):
        command.advise(PROBE, TWO_BUCKETS, parse_schemes("dense,bf16", 0.01), workload, path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workload, Backward, dict[str, Any]]:
    """Return a job, a timeline of its model, and gradients of its first steps."""
    workload = workloads.get("gpt-tiny", width="32")
    workload.prepare()
    found = record(workload, 0, 2, 2)
    return workload, replace(TWO_BUCKETS, bucket=(ReadyBucket(found["layout"][-1][2], 1.0),)), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("about", "seed", "expected"),
    [
        ({"workload": "another"}, 0, "--gradients are of the job 'another', and --workload is 'gpt'"),
        ({}, 7, "recorded with --seed 0, .* give --seed 0"),
        ({"every": 10}, 0, "one of 10 steps, and a replay needs all of them"),
        ({}, 0, "--gradients has 2 steps"),
    ],
)
def test_gradients_are_those_of_the_first_steps_of_this_job(
    about: dict[str, Any],
    seed: int,
    expected: str,
    tiny: tuple[Workload, Backward, dict[str, Any]],
    tmp_path: Path,
) -> None:
    workload, backward, found = tiny
    path = tmp_path / "gradients.pt"
    torch.save(found | {"about": found["about"] | about}, path)
    with pytest.raises(ValueError, match=expected):
        command.advise(PROBE, backward, parse_schemes("dense,bf16", 0.01), workload, path, seed)


def test_a_method_that_exchanged_nothing_in_the_replay_is_told_and_not_advised(
    tiny: tuple[Workload, Backward, dict[str, Any]], tmp_path: Path
) -> None:
    """Every 30 steps, of which 20 were recorded: the common weights never move. It would be the quickest step by far."""
    workload, backward, found = tiny
    path = tmp_path / "gradients.pt"
    torch.save(found | {"gradients": found["gradients"].repeat(10, 1, 1)}, path)
    choices = parse_schemes("dense,bf16,local_steps(every=10)/dense,local_steps(every=30)/dense", 0.01)
    advised = command.advise(PROBE, backward, choices, workload, path)
    still = "local_steps(every=30)/dense"
    assert advised.exchanged_nothing == (still,)
    assert (still in advised.steps, still in advised.extra) == (True, False)
    assert advised.verdict.label != still
    said = " ".join(command.text(advised, PROBE, backward, choices, width=80).split())
    assert said.count(f"{still} EXCHANGED NOTHING in the replayed steps") == 2
    assert command.table(advised).rows[-1][-2:] == ("exchanged\nnothing", "-")
    assert still not in advised.verdict.why


def test_a_probe_of_another_model_is_refused_without_gradients_too(
    tiny: tuple[Workload, Backward, dict[str, Any]],
) -> None:
    with pytest.raises(ValueError, match="the model of the times has 2000 parameters, the job of --workload has"):
        command.advise(PROBE, TWO_BUCKETS, parse_schemes("dense,bf16", 0.01), tiny[0])


@pytest.mark.parametrize("sizes", [[10], [300_000, 10, 2_000_000, 5, 5], [1_048_576, 1, 1_048_575, 7], [0, 3, 0]])
def test_buckets_are_joined_as_the_integration_joins_them(sizes: list[int]) -> None:
    seen: list[int] = []

    def submit(bucket: Bucket, prepare: object, last: bool) -> Future:
        seen.append(bucket.grad.numel())
        done: Future = Future()
        done.set_result(bucket.grad)
        return done

    joining = Joining(submit, 4 * 2**20)
    joining.begin_step(lambda: None)
    for place, size in enumerate(sizes):
        joining.submit(Bucket(f"bucket{place}", torch.zeros(size), 0), place == len(sizes) - 1)
    assert [sum(sizes[place] for place in group) for group in advice.joined(sizes, 4, 4.0)] == seen


def test_a_missing_kernel_of_the_probe_is_named() -> None:
    with pytest.raises(ValueError, match=r"no \[\[kernel\]\] of kind select"):
        advice.step("topk", TopK(), replace(PROBE, kernel=PROBE.kernel[:1] + PROBE.kernel[2:]), TWO_BUCKETS)


@pytest.mark.parametrize(
    ("kind", "scheme", "seconds"),
    [
        # A matrix of 64 x 64 with factors of 4 columns: four products of 64 x 64 x 4 = 2^14 multiplications.
        ("multiply", PowerSGD(rank=4), 4 * 2**14 / 2**12 + 4 * 0.25),
        # One tile, transformed three times.
        ("transform", DeMo(), 3 * 2**12 / 2**12 + 3 * 0.25),
    ],
)
def test_products_and_transforms_take_their_time(kind: str, scheme: Scheme, seconds: float) -> None:
    slow = tuple(
        Kernel(each, 2.0**12, 0.25) if each == kind else Kernel(each, 1e15, 0.0) for each in probe_file.KERNELS
    )
    found = advice.compute_s(plan(scheme, 64 * 64, 4), replace(PROBE, kernel=slow))
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("method", "kind"),
    [("powersgd", "multiply"), ("demo", "transform"), ("local_steps(every=4)/powersgd", "multiply")],
)
def test_a_probe_of_an_earlier_version_serves_all_methods_but_those_of_newer_kinds(method: str, kind: str) -> None:
    newer = ("multiply", "transform")
    old = probe_file.parse(
        probe_file.text(replace(PROBE, kernel=tuple(each for each in PROBE.kernel if each.kind not in newer)))
    )
    dense, bf16, other = parse_schemes(f"dense,bf16,{method}", 0.01)
    assert set(command.advise(old, TWO_BUCKETS, [dense, bf16]).steps) == {"dense", "bf16"}
    cure = "an earlier version .* run `sparsync probe` again, or add it to the file, or leave this method out"
    said = rf"^{re.escape(method)}: the probe has no \[\[kernel\]\] of kind {kind}, .*{cure}"
    with pytest.raises(ValueError, match=said):
        command.advise(old, TWO_BUCKETS, [dense, bf16, other])
    assert method in command.advise(PROBE, TWO_BUCKETS, [dense, bf16, other]).steps


def _steps(**seconds: float) -> dict[str, PredictedStep]:
    return {label: PredictedStep(label, step_s, 1.0, 0.0, 1.0, 1.0, 0.0, True) for label, step_s in seconds.items()}


def test_the_verdict_is_bf16_unless_the_gain_is_sure() -> None:
    steps = _steps(dense=4.0, bf16=2.0, topk=1.0)
    assert advice.verdict(steps, {}).label == "topk"
    assert "2.0 times as fast as dense bf16, 2.0 times at the low end" in advice.verdict(steps, {}).why
    assert advice.verdict(steps, {"topk": Extra(1.5, 1.2, 1.75)}).label == "topk"
    unsure = advice.verdict(steps, {"topk": Extra(1.5, 1.2, 1.9)})
    assert unsure.label == "bf16"
    assert "topk comes nearest, 1.33 times as fast, 1.05 at the low end" in unsure.why
    never = advice.verdict(steps, {"topk": Extra(2.5, 2.0, 3.0)})
    assert never.label == "bf16"
    assert "topk" not in never.why
    with pytest.raises(ValueError, match="bf16"):
        advice.verdict({"dense": steps["dense"]}, {})


def test_a_method_that_surely_gains_is_named_though_an_unsure_one_may_gain_more() -> None:
    steps = _steps(dense=4.0, bf16=2.0, topk=0.25, two_shot=1.0)
    found = advice.verdict(steps, {"topk": Extra(2.0, 1.5, 16.0), "two_shot": Extra(1.25, 1.0, 1.5)})
    assert found.label == "two_shot"
    assert "Use two_shot: it reaches dense's quality 1.6 times as fast as dense bf16, 1.3 times" in found.why
    assert "topk may be faster, but that is less sure: 4.00 times as fast, 0.50 at the low end" in found.why


def test_the_verdict_is_dense_where_rounding_takes_longer_than_it_saves() -> None:
    steps = _steps(dense=1.0, bf16=2.0, topk=1.0)
    found = advice.verdict(steps, {})
    assert (found.label, "Use dense float32" in found.why) == ("dense", True)


def test_a_verdict_says_that_the_time_of_its_method_was_not_probed() -> None:
    steps = _steps(bf16=2.0, topk=1.0)
    assert "no buckets of it" not in advice.verdict(steps, {}).why
    assert "no buckets of it" in advice.verdict(steps | {"topk": replace(steps["topk"], probed=False)}, {}).why


@pytest.mark.parametrize(
    ("link_s", "fixed_s", "expected"),
    [
        (
            0.25,
            0.0,
            "With dense bf16 a step takes 250 ms, 250 of them beyond computing. Its all-reduces take 250 ms, 0",
        ),
        (0.25, 1.0, "1000 of them for any number of bytes: fewer exchanges help"),
        (0.001, 0.0, "there is little to gain"),
    ],
)
def test_the_answer_begins_with_what_the_plain_all_reduce_waits_for(
    link_s: float, fixed_s: float, expected: str
) -> None:
    operations = tuple(
        Operation(each.kind, nbytes, seconds, seconds, seconds)
        for each in PROBE.operation[::2]
        for nbytes, seconds in ((12, fixed_s), (SENT // 2, fixed_s + link_s))
    )
    probe = replace(PROBE, operation=operations, latency=replace(PROBE.latency, announce_s=0.0))
    backward = Backward("made", 0.0, 0.1 if link_s < 0.01 else 0.0, 0.0, (ReadyBucket(N, 0.0),))
    choices = parse_schemes("dense,bf16", 0.01)
    found = command.advise(probe, backward, choices)
    assert expected in " ".join(command.text(found, probe, backward, choices).split())


def test_the_curve_finds_the_coefficients_that_made_the_factors() -> None:
    made = [
        Training("job", f"m{i}", False, progress, scatter, math.exp(-1.5 * math.log(progress) + 2 * scatter**2))
        for i, (progress, scatter) in enumerate([(0.9, 0.25), (0.5, 0.5), (1.0, 0.375), (0.75, 0.0)])
    ]
    assert extra_steps.fitted(made) == pytest.approx((1.5, 2.0))
    assert all(residual == pytest.approx(0, abs=1e-9) for _, residual in extra_steps.held_out(made))


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_does_not_deviate_needs_no_extra_steps_and_what_deviates_more_needs_more(adaptive: bool) -> None:
    curve = extra_steps.curve(adaptive)
    assert curve.extra(Deviation(1.0, 0.0)).factor == 1.0
    factors = [curve.extra(Deviation(progress, 0.2)) for progress in (1.0, 0.9, 0.5, 0.1, 0.0)]
    assert all(a.factor < b.factor for a, b in pairwise(factors))
    assert all(1 <= each.low <= each.factor <= each.high for each in factors)


class _Fit:
    """Least squares of two layers, with SGD."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def batch(self, step: int, rank: int, ranks: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(step * ranks + rank))

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch).squeeze(1) - batch.sum(1)).square().mean()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)


def test_dense_does_not_deviate_and_a_scheme_that_holds_back_does() -> None:
    job = PlainJob(_Fit())
    stream = from_record(record(job, 0, 2, 20, precision="float32"))
    before = stream.values.clone()
    dense, sparse = deviations(job, 0, stream, parse_schemes("dense,topk:density=0.05", 0.01), 20)
    assert dense.progress == pytest.approx(1.0, abs=1e-5)
    assert dense.scatter < 1e-3
    assert sparse.scatter > 0.1
    assert torch.equal(stream.values, before)
    assert not command.adaptive(job)
    with pytest.raises(ValueError, match="20 are the least"):
        deviations(job, 0, replace(stream, values=stream.values[:5]), parse_schemes("dense", 0.01), 20)


ONE_BUCKET = Backward("made", 0.001, 0.002, 0.0, (ReadyBucket(2000, 0.002),))


def test_the_command_prints_a_table_and_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "probe.toml"
    probe_file.write(replace(PROBE, backward=ONE_BUCKET), path)
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16,topk"])
    said = capsys.readouterr().out
    assert said.startswith("4 ranks, gloo, made; 2000 parameters in 1 bucket, 3 ms of computing a step\n")
    assert "not known" in said
    assert "~: the probe has no buckets of dense, bf16, topk" in said
    assert "guesses" not in said
    assert "is not known without --gradients" in said
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16", "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["label"] == "bf16"
    assert found["steps"]["dense"]["step_s"] > found["steps"]["bf16"]["step_s"]


def test_a_probe_of_the_slow_reference_kernels_gives_a_banner_and_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.toml"
    probe_file.write(replace(PROBE, backward=ONE_BUCKET, group=replace(PROBE.group, kernels="reference")), path)
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16,topk"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("!!! THE SLOW REFERENCE KERNELS RAN IN THE PROBE")
    assert said.endswith("The probe ran on the slow reference kernels, so it does not show which method to use.")
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["verdict"]["label"] == ""


def test_guesses_are_told_by_the_kind_of_operation_and_the_methods_that_use_it() -> None:
    """Dense sends 600 kB by all_reduce, bf16 half of it; the probe's all_reduce ends at 6 kB, its other operations at 6 MB."""
    choices = parse_schemes("dense,bf16,two_shot:density=1.0:values=int4", 0.01)
    backward = replace(TWO_BUCKETS, bucket=(ReadyBucket(100 * N, 1.0), ReadyBucket(10 * N, 2.0)))
    longer = tuple(replace(each, nbytes=1000 * each.nbytes) for each in PROBE.operation)
    mixed = tuple(a if a.kind == "all_reduce" else b for a, b in zip(PROBE.operation, longer, strict=True))

    def said(operation: tuple[Operation, ...]) -> str:
        probe = replace(PROBE, operation=operation)
        return " ".join(command.text(command.advise(probe, backward, choices), probe, backward, choices).split())

    assert (
        "all_reduce of up to 600000 bytes (dense, bf16) is far beyond the probe's, which ends at 6000: such times"
        in said(mixed)
    )
    assert said(mixed).count("guesses") == 1
    assert "guesses" not in said(longer)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--steps", "x"], "--steps: invalid int value: 'x'"),
        (["--option", "width=3"], "--option and --data are of a workload, and there is none; name one with --workload"),
        (["--schemes", "dense,bf16,dense"], "names one twice"),
        (["--schemes", "topk"], "needs dense and bf16"),
        (["--gradients", "g.pt"], "--gradients needs --workload"),
    ],
)
def test_wrong_arguments_are_said_so(
    more: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.toml"
    for probe, words, said in (
        (PROBE, [], "says nothing of a model"),
        (replace(PROBE, backward=TWO_BUCKETS), more, expected),
    ):
        probe_file.write(probe, path)
        with pytest.raises(SystemExit) as ended:
            main(["advise", "--probe", str(path), *words])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_probes_of_jobs_have_the_buckets_of_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def sparsync(*arguments: str) -> None:
        asked.append(arguments)
        Path(arguments[-1]).touch()

    monkeypatch.setattr(predictions, "_command", sparsync)
    predictions.probe_all(tmp_path)
    assert len(asked) == len(list(tmp_path.iterdir()))
    for arguments in asked:
        options = _parser().parse_args(arguments)
        assert options.bucket_mb == (None if options.workload is None else _parser().parse_args(["compare"]).bucket_mb)
    predictions.probe_all(tmp_path)
    assert len(asked) == len(list(tmp_path.iterdir()))  # all are there


def test_a_comparison_that_was_interrupted_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[str] = []

    def sparsync(command: str, *arguments: str) -> None:
        out = Path(arguments[-1])
        if command != "compare":
            out.touch()
            return
        out.mkdir(exist_ok=True)
        assert not list(out.iterdir())
        if not interrupted:
            (out / "half").touch()
            interrupted.append(str(out))
            raise KeyboardInterrupt
        (out / "whole").touch()

    monkeypatch.setattr(predictions, "_command", sparsync)
    with pytest.raises(KeyboardInterrupt):
        predictions.measure_all(tmp_path)
    predictions.measure_all(tmp_path)
    folders = [each for each in tmp_path.iterdir() if each.is_dir()]
    assert len(folders) == len(predictions.JOBS) * len(predictions.JOB_LINKS)
    assert all([each.name for each in folder.iterdir()] == ["whole"] for folder in folders)


def test_predictions_count_errors_pairs_in_order_and_what_the_chosen_method_loses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        predictions.PredictionRow(place, 4, label, predicted, measured)
        for place, slow in (("a", 1.0), ("b", 4.0))
        for label, predicted, measured in (("dense", 2.0, 2.0), ("bf16", 1.5, 1.0), ("topk", 0.5, 0.5 * slow))
    ]
    monkeypatch.setattr(predictions, "rows_of", lambda out: rows)
    said = predictions.page(Path("out"))
    assert "6 predictions in 2 places: 50 % within 25 %" in said
    assert "4 of 5 pairs are in the right order" in said
    assert "takes 50.0 % longer than the fastest, at most 100 %" in said
    assert "| `bf16` | 2 | 50.0 % | +50.0 % | +50 % |" in said
    assert "| all | 6 | 25.0 % | +4.2 % | -75 % |" in said
    monkeypatch.setattr(predictions, "rows_of", lambda out: [])
    with pytest.raises(SystemExit, match="out has nothing that was both probed and measured"):
        predictions.page(Path("out"))
