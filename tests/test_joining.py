"""Buckets that are joined: once as many bytes wait, at the end of a step and between types; every bucket gets its part, or its error."""

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import run
from sparsync.attached.joining import Joining
from sparsync.core import Bucket, Comm, Report
from sparsync.schemes import State


class Submitted:
    """What Joining submits; each future is completed by `complete`, with twice the gradient."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Bucket, Future]] = []
        self.prepared = 0

    def submit(self, bucket: Bucket, prepare: object) -> Future:
        self.prepared += prepare is not None
        self.submitted.append((bucket, Future()))
        return self.submitted[-1][1]

    def complete(self) -> None:
        for bucket, done in self.submitted:
            done.set_result(bucket.grad * 2)


def bucket(key: str, n: int, dtype: torch.dtype = torch.float32) -> Bucket:
    return Bucket(key, torch.arange(n, dtype=dtype), 3)


def test_joins_until_there_are_enough_bytes_and_at_the_end_of_a_step() -> None:
    recorded = Submitted()
    joining = Joining(recorded.submit, 100)
    joining.begin_step(lambda: None)
    joining.submit(bucket("of a failed step", 3), last=False)
    joining.begin_step(lambda: None)
    given = [bucket(str(i), n) for i, n in enumerate((10, 10, 10, 30, 5, 6))]
    futures = [joining.submit(each, last=each is given[-1]) for each in given]
    assert [(each.key, each.grad.numel()) for each, _ in recorded.submitted] == [("0-2", 30), ("3", 30), ("4-5", 11)]
    assert [entry.name for entry in recorded.submitted[0][0].layout] == ["0", "1", "2"]
    assert recorded.prepared == 1
    recorded.complete()
    for each, future in zip(given, futures, strict=True):
        assert torch.equal(future.wait(), 2 * torch.arange(each.grad.numel()).float())


def test_an_error_reaches_every_bucket_and_types_are_not_mixed() -> None:
    waiting = Joining(Submitted().submit, 1000)
    future = waiting.submit(bucket("a", 3), last=False)
    waiting.abandon(ValueError("the last bucket is complex"))
    with pytest.raises(RuntimeError, match="the last bucket is complex"):
        future.wait()
    typed = Submitted()
    joining = Joining(typed.submit, 1000)
    for each in (bucket("a", 3), bucket("b", 4, torch.float64), bucket("c", 4, torch.float64)):
        joining.submit(each, last=each.key == "c")
    assert [each.key for each, _ in typed.submitted] == ["a", "b-c"]
    recorded = Submitted()
    joining = Joining(recorded.submit, 1000)
    futures = [joining.submit(bucket(key, 3), last=key == "b") for key in "ab"]
    recorded.submitted[0][1].set_exception(RuntimeError("the link is down"))
    for future in futures:
        with pytest.raises(RuntimeError, match="the link is down"):
            future.wait()


def train(join_mb: float) -> tuple[list[str], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
    handle = sparsync.attach(
        ddp, sparsync.schemes.TopK(1.0), options=sparsync.Options(join_mb=join_mb, dense_below=0, timeout_s=120)
    )
    for step in range(3):
        ddp(torch.full((4, 32), 1.0 + step + torch.distributed.get_rank())).square().mean().backward()
    keys = [report.key for report in handle.reports() if report.step == 2]
    return keys, torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.distributed
def test_under_ddp_joined_buckets_give_the_same_mean_in_one_reduction() -> None:
    for (single, apart), (joined, together) in zip(*(run(train, 2, join_mb=each) for each in (0.0, 4.0)), strict=True):
        assert len(single) > 2
        assert joined == [f"bucket0-bucket{len(single) - 1}"]
        assert torch.equal(apart, together)


def train_small(dense_below: int) -> tuple[list[bool], Tensor, Tensor]:
    """Train with almost nothing sent, then with everything."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    scheme = sparsync.schemes.TopK(0.01)
    handle = sparsync.attach(ddp, scheme, options=sparsync.Options(dense_below=dense_below, timeout_s=120))
    ddp(torch.full((4, 8), 1.0 + torch.distributed.get_rank())).square().mean().backward()
    grads = torch.cat([each.grad.flatten() for each in ddp.module.parameters() if each.grad is not None])
    residual = torch.cat(list(handle.state.state_dict()["residual"].values()))
    return [bool(report.details.get("dense")) for report in handle.reports()], grads, residual


@pytest.mark.distributed
def test_a_bucket_of_few_elements_is_sent_whole_and_leaves_no_residual() -> None:
    ranks = zip(*(run(train_small, 2, dense_below=each) for each in (1024, 0)), strict=True)
    for (dense, whole, nothing), (sparse, selected, rest) in ranks:
        assert (dense, sparse) == ([True], [False])
        assert int(whole.count_nonzero()) > 2 >= int(selected.count_nonzero())
        assert not nothing.any()
        assert rest.any()


class OwnReduce(sparsync.schemes.TopK):
    """Notes the buckets that it is called for, as a class that logs does."""

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        noted.append(bucket.key)
        return super().reduce(state, bucket, comm)


noted: list[str] = []  # on this rank; a setting of the class would be compared between ranks


def reduced_by_its_own() -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    sparsync.attach(ddp, OwnReduce(0.5), options=sparsync.Options(dense_below=1024, timeout_s=120))
    ddp(torch.ones(4, 8)).square().mean().backward()
    return noted


@pytest.mark.distributed
def test_a_class_with_its_own_reduce_has_it_called_for_small_buckets_too() -> None:
    assert run(reduced_by_its_own, 2, fresh=True) == [["bucket0"]] * 2
