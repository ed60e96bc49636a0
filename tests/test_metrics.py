"""What a training reports arrives in TensorBoard and wandb; and the profiler names phases with their buckets."""
# pyright: reportMissingImports=false

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile

import sparsync
from helpers.ddp_training import AttachedTraining
from helpers.distributed import run
from sparsync import Report
from sparsync.adapters.metrics import TensorBoard, Wandb, numbers, residual_norm
from sparsync.comm import Cost
from sparsync.schemes import ExactMiCRO, TopK

STEPS = [[100, 20], [60, 20]]  # bytes of two buckets in two steps
FOUND = {
    "density": 0.25,
    "union": 50.0,
    "elements": 200.0,
    "wait_seconds": 0.5,
    "select_seconds": 0.25,
    "messages": 2.0,
}


def reports() -> list[Report]:
    """Two steps of two buckets; the second step overflows in one of them."""
    return [
        Report(
            scheme="exact_micro",
            key=f"bucket{number}",
            step=step,
            elements=100,
            selected=10,
            union=25,
            cost=Cost(1, 1, nbytes),
            sent=Cost(1, 1, nbytes),
            seconds=0.5,
            wait_s=0.25,
            phases={"select": 0.125},
            details={"overflow": (step, number) == (1, 1)},
        )
        for step, buckets in enumerate(STEPS)
        for number, nbytes in enumerate(buckets)
    ]


def test_numbers_are_sums_over_buckets_and_density_is_that_of_all() -> None:
    found = numbers(reports()[2:])
    assert found == FOUND | {"bytes_sent": 80.0, "selected": 20.0, "seconds": 1.0, "overflows": 1.0}
    assert numbers([])["density"] == 1.0


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        TensorBoard(writer).record(reports(), residual_norm=3.0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()

    def values(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(f"sparsync/{name}")]

    assert values("bytes_sent") == [(0, 120.0), (1, 80.0)]
    assert values("overflows") == [(0, 0.0), (1, 1.0)]
    assert values("residual_norm") == [(1, 3.0)]
    for name, value in FOUND.items():
        assert values(name) == [(0, value), (1, value)]


BLOCK = 32768  # of a file of wandb's; a record is a header of 7 bytes (checksum, length, kind) and its content, never across blocks


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run's file."""
    content, position, parts = file.read_bytes(), 7, b""  # the file has a header of 7 bytes too
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_history(folder: Path) -> Iterator[dict[str, float]]:
    """What was logged, step by step."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]  # made when it is imported

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    for content in wandb_records(file):
        record = Record()
        record.ParseFromString(content)
        if record.HasField("history"):
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def test_an_offline_run_of_wandb_holds_what_was_recorded(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="tests") as run_of_wandb:
        recorder = Wandb(run_of_wandb)
        recorder.record(reports()[:2])
        recorder.record(reports()[2:], residual_norm=3.0)
    wandb.teardown()  # ends the process that writes: until then the file may lack the last records
    first, second = wandb_history(tmp_path)
    assert [first["sparsync/step"], second["sparsync/step"]] == [0, 1]
    assert [first["sparsync/bytes_sent"], second["sparsync/bytes_sent"]] == [120, 80]
    assert [first["sparsync/overflows"], second["sparsync/overflows"]] == [0, 1]
    assert second["sparsync/residual_norm"] == 3
    for name, value in FOUND.items():
        assert first[f"sparsync/{name}"] == value


def norms() -> None:
    training = AttachedTraining("topk-0.1")
    assert residual_norm(training.handle.state) == 0.0
    training.step()
    residual = torch.cat(list(training.handle.state.state_dict()["residual"].values()))
    assert residual_norm(training.handle.state) == pytest.approx(float(residual.norm()))
    assert residual_norm(sparsync.schemes.Dense().start()) == 0.0


@pytest.mark.distributed
def test_the_norm_of_the_residual_is_that_over_all_parameters() -> None:
    run(norms, 1)


def named(of_hook: bool) -> set[str]:
    """The ranges a profiler sees in one step: of the hook's thread if asked to look at all threads, else of this one."""
    every = _ExperimentalConfig(profile_all_threads=True)
    training = AttachedTraining(ExactMiCRO(density=0.1), buckets=2)
    training.step()
    model, scheme = nn.Linear(9, 9), TopK(0.5)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every if of_hook else None) as seen:
        if of_hook:
            training.step()
        else:
            model(torch.ones(9)).sum().backward()
            sparsync.GradientReducer(model, scheme).reduce()
    assert set(training.handle.reports()[-1].phases) >= {"select", "apply"}
    return {event.key for event in seen.key_averages() if event.key.startswith("sparsync::")}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_profiler_sees_each_phase_of_each_bucket() -> None:
    for found in run(named, 2, of_hook=True):
        phases = ("select", "encode", "decode", "apply")  # the pass that selects accumulates
        assert found == {f"sparsync::{phase} [bucket{number}]" for phase in phases for number in (0, 1)}
    for found in run(named, 2, of_hook=False):
        assert found == {f"sparsync::{phase} [float32]" for phase in ("select", "encode", "decode", "apply")}
