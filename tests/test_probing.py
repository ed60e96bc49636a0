"""Measuring: the probe of two ranks, and the timeline of a model. Nothing here asserts how long anything takes."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.distributed import run
from sparsync.comm import GroupComm
from sparsync.schemes import TopK
from sparsync_lab.predict import backward, probing
from sparsync_lab.predict.backward import timeline
from sparsync_lab.predict.probe_file import KERNELS, KINDS, Backward, Probe, ProbedGroup

GROUP = ProbedGroup(2, "gloo", 1, "made", "cpu", 2, "", "")


def measure_quickly() -> tuple[Probe, list[str]]:
    probing.LARGEST, probing.KERNEL_N, probing.SELECTED_N, probing.KERNEL_S = 32_000, 1 << 14, 1 << 12, 0.005
    probing.REPEATS, probing.SCHEME_N, probing.SCHEME_ROUNDS = (2, 4), (1 << 11, 1 << 12), (1, 2, 3)
    told: list[str] = []
    comm = GroupComm.private(timeout_s=30.0)
    cpu = torch.device("cpu")
    found = probing.measure(comm, GROUP, cpu, 1.0, {"topk": TopK()}, lambda text, done: told.append(text))
    comm.close()
    return found, told


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_find_the_same_figures_for_every_operation_and_kernel() -> None:
    (found, told), (other, _) = run(measure_quickly, 2)
    assert found == other
    assert [each.kind for each in found.operation] == [kind for kind in KINDS for _ in range(5)]
    for kind in KINDS:
        sizes = [each.nbytes for each in found.operation if each.kind == kind]
        assert sizes[0] == 1000
        assert sizes == sorted(set(sizes))
        assert 16_000 <= sizes[-1] <= 32_000
    assert all(0 < each.p20_s <= each.seconds <= each.p80_s for each in found.operation)
    assert found.latency.announce_s >= 0
    assert [each.kind for each in found.kernel] == list(KERNELS)
    assert [each.scheme for each in found.scheme] == ["topk"]
    assert [bucket.elements for bucket in found.scheme[0].bucket] == [1 << 11, 1 << 12]
    assert all(bucket.seconds >= found.scheme[0].fixed_s > 0 for bucket in found.scheme[0].bucket)
    assert told[0] == "announcements"


def trained(
    model: nn.Module, steps: int, bucket_mb: float | None = None, micro_batches: int = 1, width: int = 64
) -> Backward:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with timeline(model, bucket_mb) as recorded:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                model(torch.ones(2, width)).square().mean().backward()
            optimizer.step()
    return recorded.backward("layers")


def layers(width: int = 64) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))  # 16640 bytes each, 361200 for a width of 300


@pytest.fixture
def group_of_one() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield None
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("width", "cap_mb", "buckets"),
    [(64, 0.03, 3), (64, None, 1), (300, None, 2), (300, 25.0, 1)],  # by default, and only then, the first has 1 MB
)
def test_the_buckets_of_a_timeline_are_those_of_ddp(width: int, cap_mb: float | None, buckets: int) -> None:
    model = DistributedDataParallel(layers(width), bucket_cap_mb=cap_mb)  # pyright: ignore[reportArgumentType]
    seen: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore
        seen.append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    found = trained(model, 3, width=width)
    assert [bucket.elements for bucket in found.bucket] == seen[-len(found.bucket) :]
    assert len(found.bucket) == buckets
    bare = trained(layers(width), 3, cap_mb, width=width)
    assert [bucket.elements for bucket in bare.bucket] == [bucket.elements for bucket in found.bucket]


@pytest.mark.parametrize(("micro_batches", "forward_s"), [(1, 1), (2, 1 + 10 + 1)])
def test_times_end_with_the_last_backward_pass(
    micro_batches: int, forward_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes a second: at begin and end of a forward pass, and at each of 10 gradients."""
    clock = count()
    monkeypatch.setattr(backward, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = trained(layers(), 2, 0.03, micro_batches)
    assert (found.forward_s, found.backward_s, found.optimizer_s) == (forward_s, 10, 1)
    assert [bucket.ready_s for bucket in found.bucket] == [4, 8, 10]
    assert sum(bucket.elements for bucket in found.bucket) == 5 * 64 * 65
