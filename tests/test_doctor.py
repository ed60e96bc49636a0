"""What cannot work together is named before training starts, with its cure."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import sparsync
from helpers.distributed import run
from sparsync import Dense, MiCRO, PerParameter, SkipReduce

pytestmark = pytest.mark.distributed


def named(words: str, model: DistributedDataParallel, scheme: sparsync.Scheme, error: type[Exception]) -> None:
    """The doctor finds it, and attach refuses it with the same words."""
    (finding,) = sparsync.doctor(model, scheme)
    assert finding.refused is error
    assert words in str(finding)
    with pytest.raises(error, match=words):
        sparsync.attach(model, scheme)


def refused() -> None:
    layer = nn.Linear(3, 3)
    named(
        "use torch.autocast", DistributedDataParallel(layer, mixed_precision=_MixedPrecision()), Dense(), RuntimeError
    )
    stepping = nn.Linear(3, 3)
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    named("step the optimizer after", DistributedDataParallel(stepping), Dense(), RuntimeError)
    torch._dynamo.config.optimize_ddp = "python_reducer"
    compiled = DistributedDataParallel(nn.Linear(3, 3))
    torch._dynamo.config.optimize_ddp = True
    named("ddp_optimizer", compiled, Dense(), RuntimeError)


def warned() -> None:
    plain = DistributedDataParallel(nn.Linear(3, 3))
    assert sparsync.doctor(plain, MiCRO()) == []  # its own patterns need not match
    for scheme, word in (
        (SkipReduce(protect=("*.bais",)), "protect='*.bais' matches no parameter; parameters are called weight, bias"),
        (MiCRO(dense=("norm.*",)), "dense='norm.*' matches no parameter"),
        (PerParameter(Dense(), {"head.*": Dense()}), "patterns='head.*' matches no parameter"),
    ):
        (finding,) = sparsync.doctor(plain, scheme)
        assert finding.refused is None
        assert word in str(finding)
    with pytest.warns(UserWarning, match="matches no parameter"):
        sparsync.attach(plain, MiCRO(dense=("norm.*",)))
    with pytest.warns(UserWarning, match="leave static_graph out if you use no_sync"):
        sparsync.attach(DistributedDataParallel(nn.Linear(3, 3), static_graph=True), Dense())
    words = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True)})
    with pytest.warns(UserWarning, match="'words' has sparse=True, and its gradient is reduced in full"):
        sparsync.attach(DistributedDataParallel(words), Dense())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsync.attach(DistributedDataParallel(nn.Linear(3, 3)), SkipReduce(protect=("bias",)))


def examined() -> None:
    refused()
    warned()


def test_what_cannot_work_is_refused_with_its_cure_and_what_may_surprise_is_warned_of() -> None:
    run(examined, 1)
