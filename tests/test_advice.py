"""Advice from a probe: times worked out by hand, and verdicts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsync import Bucket
from sparsync.attached.joining import Joining
from sparsync.schemes import Dense, TopK
from sparsync_lab import advise
from sparsync_lab.cli import main
from sparsync_lab.predict import advice, probe_file
from sparsync_lab.predict.advice import PredictedStep
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
from sparsync_lab.scheme_choice import parse_schemes
from studies import predictions
from test_joining import Submitted

N = 1000
SENT = 6000  # bytes of a dense all-reduce of N elements in float32 on 4 ranks: 2 x 3/4 x 4 N
PROBE = Probe(
    ProbedGroup(4, "gloo", 4, "made", "cpu", 8, "2.13.0", "2026-01-01T00:00:00+00:00"),
    tuple(
        Operation(kind, nbytes, seconds, seconds, seconds)
        for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv")
        for nbytes, seconds in ((SENT // 2, 0.25), (SENT, 0.5))
    ),
    Latency(0.0625),
    Memory(1e9),
    tuple(Kernel(kind, 1e9, 0.0) for kind in probe_file.KERNELS),
)
TWO_BUCKETS = Backward("made", 1.0, 2.0, 0.125, (ReadyBucket(N, 1.0), ReadyBucket(N, 2.0)))


def test_a_dense_step_is_the_backward_pass_and_what_the_last_bucket_adds() -> None:
    """Forward 1 s, backward 2 s; each reduction takes 0.5 s and 0.0625 s of announcement; the first is hidden; the optimizer 0.125 s."""
    found, half = (advice.step("dense", each, PROBE, TWO_BUCKETS) for each in (Dense(), Dense.bf16()))
    assert found.step_s == pytest.approx(3 + 0.5625 + 0.125, rel=1e-4)  # and what dividing takes
    assert found.hidden == pytest.approx(0.5, rel=1e-3)
    assert found.bits(2 * N) == 8 * (2 * SENT + 2 * 3 * 32) / (2 * N)  # announcements are 32 bytes to each other rank
    assert found.reduce_s - half.reduce_s == pytest.approx(0.5, rel=1e-3)


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
    times = SchemeTimes("topk:values=int8:density=0.05", 0.0, repr(scheme), (ReducedBucket(N, 9.0),))
    probe = replace(PROBE, scheme=(times,))
    assert advice.measured_times("topk:density=0.05:values=int8", scheme, probe) == times
    assert advice.measured_times("topk:values=int8:density=0.05", TopK(density=0.5, values="int8"), probe) is None


def test_a_measured_bucket_counts_no_longer_than_a_larger_one_and_half_of_the_prediction_stays() -> None:
    buckets = (ReducedBucket(N, 8.0), ReducedBucket(2 * N, 1e-6))
    reduction = advice.ReductionTime(Dense(), PROBE, SchemeTimes("dense", 0.0, "", buckets))
    for n in (N, 2 * N, 3 * N):
        assert reduction.seconds(n) == reduction.expected_s(n) / 2


# A dense bucket of n >= 500 elements is n / 2000 s on the way, its announcement takes 0.0625 s, and its thread 3 s however small it is.
SLOW_THREAD = replace(
    PROBE, scheme=(SchemeTimes("dense", 3.0, repr(Dense()), (ReducedBucket(N, 0.5 + 0.0625 + 3.0),)),)
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
    found = advise.step(choice, SLOW_THREAD, TWO_BUCKETS)
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
    [choice] = parse_schemes(f"steps(measure_every={measure_every})/dense", 0.01)
    found = advise.step(choice, probe, TWO_BUCKETS)
    assert found.reduce_s == pytest.approx(1 + 0.0625 + fixed_s + 0.3125 / measure_every, rel=1e-5)
    assert found.step_s == 3.125 + found.reduce_s
    assert found.hidden == 0


@pytest.mark.parametrize("sizes", [[10], [300_000, 10, 2_000_000, 5, 5], [1_048_576, 1, 1_048_575, 7], [0, 3, 0]])
def test_buckets_are_joined_as_the_integration_joins_them(sizes: list[int]) -> None:
    recorded = Submitted()
    joining = Joining(recorded.submit, 4 * 2**20)
    joining.begin_step(lambda: None)
    for place, size in enumerate(sizes):
        joining.submit(Bucket(f"bucket{place}", torch.zeros(size), 0), place == len(sizes) - 1)
    seen = [joined.grad.numel() for joined, _ in recorded.submitted]
    assert [sum(sizes[place] for place in group) for group in advice.joined(sizes, 4, 4.0)] == seen


def _steps(**seconds: float) -> dict[str, PredictedStep]:
    return {label: PredictedStep(label, step_s, 1.0, 0.0, 1.0, 0.0, True) for label, step_s in seconds.items()}


SENDS = {"dense": 8.0, "bf16": 4.0, "bits=4.6": 2.0, "bits=0.8": 1.0}


@pytest.mark.parametrize(
    ("seconds", "label", "said"),
    [
        (
            (4.0, 2.0, 1.0, 0.95),
            "bits=4.6",
            "its step is 2.0 times as fast as that of dense bf16.* Its quality: 1 % ahead",
        ),
        ((4.0, 2.0, 1.0, 0.5), "bits=0.8", "its step is 4.0 times as fast"),
        (
            (4.0, 2.0, 1.95, 1.9),
            "bf16",
            "Use dense bf16: no method of known quality makes a step more than a tenth shorter",
        ),
        ((2.0, 3.0, 1.95, 1.9), "dense", "Use dense float32"),
    ],
)
def test_of_methods_within_a_tenth_of_the_fastest_the_one_with_the_most_bits_is_advised(
    seconds: tuple[float, ...], label: str, said: str
) -> None:
    made = _steps(**dict(zip(SENDS, seconds, strict=True)))
    steps = {name: replace(each, sent_nbytes=SENDS[name]) for name, each in made.items()}
    best, why = advice.verdict(steps, dict.fromkeys(SENDS, "1 % ahead"))
    assert best == label
    assert re.search(said, why)


ONE_BUCKET = Backward("made", 0.001, 0.002, 0.0, (ReadyBucket(2000, 0.002),))


def test_the_command_prints_a_table_with_what_is_known_of_quality_and_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.toml"
    probe_file.write(replace(PROBE, backward=ONE_BUCKET), path)
    main(["advise", "--probe", str(path)])
    said = capsys.readouterr().out
    assert said.startswith("4 ranks, gloo, made; 2000 parameters in 1 bucket, 3 ms of computing a step\n")
    for row, quality in (("default", "0.7 % ahead.*"), ("bf16", "as dense"), ("exact_oktopk.*", "-")):
        assert re.search(rf"^ {row} .*  {quality} *$", said, re.MULTILINE)
    assert "~: the probe has no buckets of dense, bf16, default" in said
    assert said.rstrip().endswith("Use dense bf16: no method of known quality makes a step more than a tenth shorter.")


def test_a_probe_of_the_slow_reference_kernels_gives_a_banner_and_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.toml"
    probe_file.write(replace(PROBE, backward=ONE_BUCKET, group=replace(PROBE.group, kernels="reference")), path)
    main(["advise", "--probe", str(path), "--schemes", "dense,bf16,topk"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("!!! THE SLOW REFERENCE KERNELS RAN IN THE PROBE")
    assert said.endswith("The probe ran on the slow reference kernels, so it does not show which method to use.")


def test_a_prediction_far_beyond_the_probe_is_said_to_be_a_guess() -> None:
    """Dense sends 600 kB by all_reduce, bf16 half of it; the probe's all_reduce ends at 6 kB, its other operations at 6 MB."""
    choices = parse_schemes("dense,bf16,two_shot:density=1.0:values=int4", 0.01)
    backward = replace(TWO_BUCKETS, bucket=(ReadyBucket(100 * N, 1.0), ReadyBucket(10 * N, 2.0)))
    longer = tuple(replace(each, nbytes=1000 * each.nbytes) for each in PROBE.operation)
    mixed = tuple(a if a.kind == "all_reduce" else b for a, b in zip(PROBE.operation, longer, strict=True))
    for operation, far in ((longer, []), (mixed, ["dense", "bf16"])):
        probe = replace(PROBE, operation=operation)
        found = advise.advise(probe, backward, choices)
        assert [label for label, each in found.steps.items() if each.far] == far
        said = " ".join(advise.text(found, probe, backward).split())
        assert ("dense, bf16: far beyond the probe's largest exchange" in said) == bool(far)


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
