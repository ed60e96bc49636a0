"""Advice from a probe: times that are computed by hand, verdicts, and the curve of extra steps."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.futures import Future

from sparsync import Bucket, Dense, TopK
from sparsync.integrations.joining import Joining
from sparsync.lab import workloads
from sparsync.lab.advise import command, extra_steps
from sparsync.lab.advise.extra_steps import Training
from sparsync.lab.advise.replay import Deviation, deviations
from sparsync.lab.cli import _parser, main
from sparsync.lab.scheme_choice import parse_schemes
from sparsync.lab.traffic.record import record
from sparsync.lab.traffic.stream import from_record
from sparsync.lab.workloads.plain import PlainJob
from sparsync.predict import advice, probe_file
from sparsync.predict.advice import Extra, Step
from sparsync.predict.probe_file import (
    Backward,
    Group,
    Kernel,
    Latency,
    Memory,
    Operation,
    Probe,
    ReadyBucket,
    ReducedBucket,
    SchemeTimes,
)
from sparsync.predict.probed import ProbedNetwork

SCRIPT = Path(__file__).parent.parent / "runs" / "predictions.py"
N = 1000
SENT = 6000  # bytes of a dense all-reduce of N elements in float32 on 4 ranks: 2 x 3/4 x 4 N
PROBE = Probe(
    Group(4, "gloo", 4, "made", "cpu", 8, "2.13.0", "2026-01-01T00:00:00+00:00"),
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
    assert found.rounds == 12


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
    reduction = advice.Reduction(Dense(), PROBE, ProbedNetwork(PROBE), SchemeTimes("dense", 0.0, "", buckets))
    for n in (N, 2 * N, 3 * N):
        assert reduction.seconds(n) == reduction.expected_s(n) / 2


def test_steps_around_a_scheme_take_the_buckets_of_that_scheme() -> None:
    [plain] = parse_schemes("local_steps(every=4)/dense", 0.01)
    long = SchemeTimes("dense", 0.0, Dense().config_fingerprint(), (ReducedBucket(2 * N, 100.0),))
    before, after = (command.step(plain, each, TWO_BUCKETS) for each in (PROBE, replace(PROBE, scheme=(long,))))
    assert (before.probed, after.probed) == (False, True)
    expected = advice.Reduction(Dense(), PROBE, ProbedNetwork(PROBE), long).beyond_s(2 * N)
    assert after.reduce_s == pytest.approx(before.reduce_s + expected / 4)


def test_a_probe_of_another_model_than_the_job_is_refused(tmp_path: Path) -> None:
    workload = workloads.get("gpt-tiny", width="32")
    workload.prepare()
    path = tmp_path / "gradients.pt"
    torch.save(record(workload, 0, 2, 2), path)
    with pytest.raises(ValueError, match="the model of the times has 2000 parameters, the job of --workload has"):
        command.advise(PROBE, TWO_BUCKETS, parse_schemes("dense,bf16", 0.01), workload, path)


@pytest.mark.parametrize("sizes", [[10], [300_000, 10, 2_000_000, 5, 5], [1_048_576, 1, 1_048_575, 7], [0, 3, 0]])
def test_buckets_are_joined_as_the_integration_joins_them(sizes: list[int]) -> None:
    seen: list[int] = []

    def submit(bucket: Bucket, prepare: object) -> Future:
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


def test_the_verdict_is_bf16_unless_the_gain_is_sure() -> None:
    def step(label: str, step_s: float) -> Step:
        return Step(label, step_s, 1.0, 0.0, 1.0, 1.0, 0.0)

    steps = {each.label: each for each in (step("dense", 4.0), step("bf16", 2.0), step("topk", 1.0))}
    assert advice.verdict(steps, {}).label == "topk"
    assert "2.0 times as fast as dense bf16 (2.0 at the least)" in advice.verdict(steps, {}).why
    assert advice.verdict(steps, {"topk": Extra(1.5, 1.2, 1.75)}).label == "topk"
    unsure = advice.verdict(steps, {"topk": Extra(1.5, 1.2, 1.9)})
    assert unsure.label == "bf16"
    assert "topk comes nearest, 1.33 times as fast, 1.05 at the least" in unsure.why
    assert advice.verdict(steps, {"topk": Extra(2.5, 2.0, 3.0)}).label == "bf16"
    with pytest.raises(ValueError, match="bf16"):
        advice.verdict({"dense": steps["dense"]}, {})


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


def test_the_command_prints_a_table_and_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "probe.toml"
    probe_file.write(PROBE, path)
    model = ["--parameters", "2000", "--forward-ms", "1", "--backward-ms", "2"]
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16,topk", *model])
    said = capsys.readouterr().out
    assert said.startswith("4 ranks, gloo, made; 2000 parameters in 1 bucket, 3 ms of computing a step\n")
    assert "not known" in said
    assert "~: the probe has no buckets of dense, bf16, topk" in said
    assert "guesses" not in said
    assert "is not known without --gradients" in said
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16", *model, "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["label"] == "bf16"
    assert found["steps"]["dense"]["step_s"] > found["steps"]["bf16"]["step_s"]


def test_guesses_are_told_by_the_kind_of_operation_and_the_methods_that_use_it() -> None:
    """Dense sends 600 kB by all_reduce, bf16 half of it; the probe's all_reduce ends at 6 kB, its other operations at 6 MB."""
    choices = parse_schemes("dense,bf16,two_shot:density=1.0:values=int4", 0.01)
    backward = replace(TWO_BUCKETS, bucket=(ReadyBucket(100 * N, 1.0), ReadyBucket(10 * N, 2.0)))
    longer = tuple(replace(each, nbytes=1000 * each.nbytes) for each in PROBE.operation)
    mixed = tuple(a if a.kind == "all_reduce" else b for a, b in zip(PROBE.operation, longer, strict=True))

    def said(operation: tuple[Operation, ...]) -> str:
        probe = replace(PROBE, operation=operation)
        return command.text(command.advise(probe, backward, choices), probe, backward, choices)

    assert (
        "all_reduce of up to 600000 bytes (dense, bf16) is far beyond the probe's, which ends at 6000: such times"
        in said(mixed)
    )
    assert said(mixed).count("guesses") == 1
    assert "guesses" not in said(longer)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--bucket-mb", "1"], "--bucket-mb 1.0 changes nothing: the model in "),
        (["--optimizer-ms", "5000"], "--optimizer-ms 5000.0 changes nothing: the model in "),
        (
            ["--seed", "0"],
            "--seed 0 changes nothing: it is of the training whose gradients are replayed; leave it out, or",
        ),
        (
            ["--steps", "9"],
            "--steps 9 changes nothing: it is of the training whose gradients are replayed; leave it out, or",
        ),
        (
            ["--option", "width=3"],
            "--option width=3 changes nothing: it is of a workload, and there is none; leave it out, or",
        ),
        (["--data", "here"], "--data here changes nothing: it is of a workload, and there is none; leave it out, or"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.toml"
    probe_file.write(replace(PROBE, backward=TWO_BUCKETS), path)
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16"])
    assert "2000 parameters in 2 buckets" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["advise", "--probe", str(path), "--schemes", "dense,bf16", *more])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "says nothing of a model"),
        (["--steps", "0"], "--steps: takes a whole number above 0, got '0'"),
        (
            ["--parameters", "9", "--forward-ms", "1", "--backward-ms", "1", "--schemes", "dense,bf16,dense"],
            "names one twice",
        ),
        (["--parameters", "10"], "says nothing of a model"),
        (["--parameters", "0", "--forward-ms", "1", "--backward-ms", "1"], "--parameters must be at least 1"),
        (["--parameters", "9", "--forward-ms", "nan"], "--forward-ms: takes a finite number of 0 or more, got 'nan'"),
        (["--parameters", "9", "--optimizer-ms", "-1"], "--optimizer-ms: takes a finite number of 0 or more, got '-1'"),
        (["--parameters", "9", "--forward-ms", "1", "--backward-ms", "1", "--schemes", "topk"], "needs dense and bf16"),
        (
            ["--parameters", "9", "--forward-ms", "1", "--backward-ms", "1", "--gradients", "g.pt"],
            "--gradients needs --workload",
        ),
    ],
)
def test_wrong_arguments_are_said_so(
    more: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.toml"
    probe_file.write(PROBE, path)
    with pytest.raises(SystemExit) as ended:
        main(["advise", "--probe", str(path), *more])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_a_model_has_times_that_are_finite_and_not_negative(wrong: float) -> None:
    right = (10, 25.0, 0.0, 0.0, 0.0)
    command.even_backward(*right)
    for place, name in enumerate(("--bucket-mb", "--forward-ms", "--backward-ms", "--optimizer-ms"), start=1):
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            command.even_backward(right[0], *(wrong if at == place else each for at, each in enumerate(right) if at))


@pytest.fixture
def predictions() -> ModuleType:
    """The script runs/predictions.py."""
    spec = importlib.util.spec_from_file_location("predictions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_probes_of_jobs_have_the_buckets_of_compare(
    predictions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def sparsync(*arguments: str) -> None:
        asked.append(arguments)
        Path(arguments[-1]).touch()

    monkeypatch.setattr(predictions, "_sparsync", sparsync)
    predictions.probe_all(tmp_path)
    assert len(asked) == len(list(tmp_path.iterdir()))
    for arguments in asked:
        options = _parser().parse_args(arguments)
        assert options.bucket_mb == (None if options.workload is None else _parser().parse_args(["compare"]).bucket_mb)
    predictions.probe_all(tmp_path)
    assert len(asked) == len(list(tmp_path.iterdir()))  # all are there


def test_a_comparison_that_was_interrupted_is_measured_again(
    predictions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    monkeypatch.setattr(predictions, "_sparsync", sparsync)
    with pytest.raises(KeyboardInterrupt):
        predictions.measure_all(tmp_path)
    predictions.measure_all(tmp_path)
    folders = [each for each in tmp_path.iterdir() if each.is_dir()]
    assert len(folders) == len(predictions.JOBS) * len(predictions.JOB_LINKS)
    assert all([each.name for each in folder.iterdir()] == ["whole"] for folder in folders)


def test_two_sets_of_probes_are_compared_in_the_places_that_both_have(
    predictions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(places: str, factor: float) -> list[object]:
        return [
            predictions.Row(place, 4, label, factor * predicted, 1.0)
            for place in places
            for label, predicted in (("dense", 2.0), ("bf16", 1.0), ("topk", 0.5))
        ]

    found = {"out": rows("abc", 1.0), "again": rows("bcd", 3.0), "empty": [], "all": rows("abc", 3.0)}
    monkeypatch.setattr(predictions, "rows_of", lambda out, probes: found[probes.name])

    def summaries(again: str | None) -> list[list[str]]:
        lines = predictions.page(Path("out"), again and Path(again)).splitlines()
        assert any("2 of 3 places that both sets of probes have" in line for line in lines) == (again == "again")
        return [line.split(" | ")[1:3] for line in lines if line.startswith(("| of another", "| right before"))]

    assert summaries(None) == [["9", "3"]]
    assert summaries("again") == [["6", "2"], ["6", "2"]]
    assert summaries("all") == [["9", "3"], ["9", "3"]]
    with pytest.raises(SystemExit, match="empty has no probe of any of the 3 places of out; run `probe --out empty`"):
        summaries("empty")
