"""What cannot work together is named before training starts, with its cure."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import sparsync
from helpers.distributed import in_turn, run
from integrations.attach import stepping, with_mixed_precision, with_stepping_optimizer
from sparsync import AdamWSteps, Gradients, Steps
from sparsync.schemes import Dense, ExactMiCRO, ExactOkTopk, InTurn, PerParameter, Quantized, SkipReduce, TopK, TwoShot
from sparsync_lab.rivals.demo import DeMo
from sparsync_lab.rivals.dgc import DGC
from sparsync_lab.rivals.onebit_adam import OneBitAdam

pytestmark = pytest.mark.distributed


def named(words: str, model: nn.Module, scheme: sparsync.Scheme, error: type[Exception]) -> None:
    """The doctor finds it, and attach refuses it with the same words."""
    (finding,) = sparsync.doctor(model, scheme, exchange=Gradients())
    assert finding.refused is error
    assert words in str(finding)
    with pytest.raises(error, match=words):
        sparsync.attach(model, scheme, exchange=Gradients())


def refused() -> None:
    named("without mixed_precision=", with_mixed_precision(), Dense(), RuntimeError)
    named("steps in the backward pass", with_stepping_optimizer(), Dense(), RuntimeError)
    named("an optimizer steps during the backward pass", stepping(nn.Linear(3, 3)), Dense(), RuntimeError)
    words = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True)})
    named("'words' has sparse=True", words, Dense(), ValueError)
    with pytest.raises(TypeError, match="pass the bare module"):
        sparsync.doctor(nn.Sequential(DistributedDataParallel(nn.Linear(3, 3))), Dense())


def warned() -> None:
    plain = DistributedDataParallel(nn.Linear(3, 3))
    assert sparsync.doctor(plain, SkipReduce()) == []
    for scheme, word in (
        (SkipReduce(protect=("*.bais",)), "protect='*.bais' matches no parameter; parameters are called weight, bias"),
        (PerParameter(Dense(), {"head.*": Dense()}), "patterns='head.*' matches no parameter"),
    ):
        (finding,) = sparsync.doctor(plain, scheme)
        assert finding.refused is None
        assert word in str(finding)
    with pytest.warns(UserWarning, match="matches no parameter"):
        sparsync.attach(plain, SkipReduce(protect=("norm.*",)))


def optimizers() -> None:
    model = nn.Linear(3, 3)
    ddp, parameters = DistributedDataParallel(model), model.parameters
    sgd, momentum = SGD(parameters(), lr=0.1), SGD(parameters(), lr=0.1, momentum=0.9)
    adamw = AdamW(parameters(), lr=0.1)

    def said(scheme: sparsync.Scheme, optimizer: Optimizer | None, exchange: Gradients | None = None) -> str:
        return "".join(str(finding) for finding in sparsync.doctor(ddp, scheme, optimizer=optimizer, exchange=exchange))

    sparse = (
        TopK(0.01),
        ExactMiCRO(0.01),
        ExactOkTopk(0.01),
        TwoShot(0.05),
        InTurn(),
        PerParameter(Dense(), {"bias": TopK(0.1)}),
    )
    for scheme in sparse:
        assert said(scheme, adamw) == ""  # steps are exchanged
        words = said(scheme, adamw, Gradients())
        assert "second moments or signs, which are wrong where means are sparse" in words
        assert words.endswith("or use TwoShot(density=1.0, values='int4')")
        assert all(said(scheme, each) == "" for each in (None, sgd, momentum))
    for optimizer, reason in (
        (AdamW(parameters(), amsgrad=True), "exchanged steps support neither amsgrad nor maximize"),
        (torch.optim.Adam(parameters(), weight_decay=0.1), "this Adam decays gradients"),
    ):
        assert "leave the scheme out, attach(model, optimizer=optimizer)" in said(TopK(0.01), optimizer)
        for make in (
            partial(sparsync.attach, ddp, Dense(), exchange=Steps()),
            partial(AdamWSteps, model, scheme=Dense()),
        ):
            with pytest.raises((TypeError, ValueError), match=reason):
                make(optimizer=optimizer)
    lion = type("Lion", (Optimizer,), {})(parameters(), {"lr": 0.1})  # as another package has one
    assert "and Lion is no SGD" in said(TopK(0.01), lion)
    assert said(Dense(), lion) == ""
    lbfgs = torch.optim.LBFGS(parameters())
    for scheme in (TopK(0.01), TwoShot(density=1.0)):
        assert said(scheme, lbfgs).startswith("LBFGS compares the gradients of several evaluations in a step")
    assert said(Dense(), lbfgs) == ""
    assert said(TopK(0.01), InnerOptimizer(adamw)) == ""  # the steps of the one inside are exchanged
    assert said(TwoShot(density=1.0), adamw) == said(Quantized("int4"), adamw) == said(SkipReduce(), adamw) == ""
    for scheme in (OneBitAdam(), DGC(), DeMo()):
        name = type(scheme).__name__
        assert said(scheme, sgd) == said(scheme, InnerOptimizer(sgd)) == said(scheme, None) == ""
        for optimizer, own in ((momentum, r"SGD(momentum=0.9)"), (adamw, "AdamW")):
            words = f"{name} has the momentum itself, and {own} adds its own; use torch.optim.SGD without momentum"
            assert said(scheme, optimizer) == words
    assert said(DGC(momentum=0.0), momentum) == ""


class InnerOptimizer(Optimizer):
    """Has the optimizer inside, as Accelerate's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def twice() -> None:
    """What the error for a second scheme names can be done with the handle of the first."""
    for kind, switches in ((SGD, True), (AdamW, False)):
        model = DistributedDataParallel(nn.Linear(3, 3))
        optimizer = kind(model.parameters(), lr=0.1)
        handle: Any = sparsync.attach(model, TopK(0.1), optimizer=optimizer)  # Any: of either exchange
        with pytest.raises(
            RuntimeError, match=r"only one communication hook; .*call handle\.detach\(\) first"
        ) as error:
            sparsync.attach(model, TopK(0.2), optimizer=optimizer)
        assert ("handle.scheme = ..." in str(error.value)) == switches
        with nullcontext() if switches else pytest.raises(RuntimeError, match="keeps the scheme"):
            handle.scheme = TopK(0.2)
        handle.detach()
        sparsync.attach(model, TopK(0.2), optimizer=optimizer).close()


def test_what_cannot_work_is_refused_with_its_cure_and_what_may_surprise_is_warned_of() -> None:
    run(in_turn, 1, parts=(twice, refused, warned, optimizers))
