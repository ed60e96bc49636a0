"""A training by Accelerate: gradients accumulated, reduced by a scheme, saved and taken up again."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.adapter_training import DENSITY, MICRO, AdapterResult, as_torchrun, check, examples, network
from helpers.distributed import run
from sparsync import MiCRO, Options, TwoShot, ddp_comm_hook

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from sparsync.adapters.accelerate import attach

pytestmark = pytest.mark.distributed
STEPS, ACCUMULATED = 6, 2


def trained(folder: Path, steps: range, save: bool = False, load: bool = False, scaled: bool = False) -> AdapterResult:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATED,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],  # buckets stay the same
    )
    if scaled:  # as for float16 on a GPU
        accelerator.scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, examples(STEPS * ACCUMULATED))
    scheme = None if load else MiCRO(density=DENSITY)  # None: of the environment, the same one
    handle = attach(accelerator, prepared, scheme, options=Options(timeout_s=120))
    assert handle is not None
    if load:
        accelerator.load_state(str(folder))
    for number, (x, y) in enumerate(loader):
        if number // ACCUMULATED not in steps:
            continue
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.mse_loss(prepared(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if save:
        accelerator.save_state(str(folder))
    assert (accelerator.scaler is not None) == scaled
    return AdapterResult.of(model, handle.reports())


def interrupted(folder: Path, scaled: bool) -> tuple[AdapterResult, AdapterResult]:
    as_torchrun()
    os.environ["SPARSYNC_SCHEME"] = MICRO
    whole = trained(folder, range(STEPS), scaled=scaled)
    trained(folder, range(3), save=True, scaled=scaled)
    return whole, trained(folder, range(3, STEPS), load=True, scaled=scaled)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_a_training_by_accelerate_sends_little_and_goes_on_to_the_same_bits(scaled: bool, tmp_path: Path) -> None:
    ranks = run(interrupted, 2, folder=tmp_path, scaled=scaled)
    check([whole for whole, _ in ranks], STEPS)
    for whole, resumed in ranks:
        assert resumed.same_weights(whole)
        assert {report.step for report in resumed.reports} == set(range(3, STEPS))
    assert {path.name for path in tmp_path.glob("sparsync*")} == {f"sparsync.step3.rank{rank}of2.pt" for rank in (0, 1)}


def hooked() -> AdapterResult:
    as_torchrun()
    model, scheme = network(), MiCRO(density=DENSITY)
    state, hook = ddp_comm_hook(scheme, model, options=Options(timeout_s=120))
    # Not by comm_hook= of the keyword arguments: Accelerate looks it up in a table of its own four, and leaves out any other in silence.
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, examples(STEPS))
    prepared.register_comm_hook(state, hook)
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(prepared(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return AdapterResult.of(model, state.handle.reports())


def test_a_model_that_accelerate_prepared_takes_the_hook() -> None:
    check(run(hooked, 2), STEPS)


def ignored() -> None:
    as_torchrun()
    model = network()
    state, hook = ddp_comm_hook(MiCRO(density=DENSITY), model)
    keywords: Any = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option={"state": state})  # pyright: ignore[reportArgumentType]
    prepared = Accelerator(cpu=True, kwargs_handlers=[keywords]).prepare(model)
    prepared(torch.ones(1, 20)).sum().backward()
    assert state.handle is None
    keywords = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[keywords])
    with pytest.raises(RuntimeError, match="under Accelerate leave comm_hook= out of DistributedDataParallelKwargs"):
        attach(accelerator, accelerator.prepare(network()), MiCRO(density=DENSITY))


def test_accelerates_own_option_leaves_the_hook_out_in_silence_as_the_docs_say_and_with_torchs_attach_names_it() -> (
    None
):
    run(ignored, 2)


def two_models() -> None:
    as_torchrun()
    accelerator = Accelerator(cpu=True)
    models = [network(), network()]
    both = torch.optim.AdamW([each for model in models for each in model.parameters()])
    *prepared, both = accelerator.prepare(*models, both)
    handle = attach(accelerator, prepared, TwoShot(density=1.0, values="sign"), optimizer=both)
    accelerator.backward(sum(model(torch.ones(1, 20)).sum() for model in prepared))
    both.step()
    assert handle is not None and handle.summary().steps == 1
    assert handle.summary().parameters == sum(each.numel() for model in models for each in model.parameters())


def test_two_models_are_attached_together() -> None:
    run(two_models, 2)


def alone() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    with pytest.warns(UserWarning, match="Accelerate trains in one process"):
        assert attach(accelerator, model, MiCRO(density=DENSITY)) is None


def test_one_process_has_nothing_to_send_and_is_told() -> None:
    run(alone, 1)
