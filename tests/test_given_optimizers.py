"""What is passed as a model and as an optimizer is examined before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import sparsync
from helpers.distributed import case, run
from sparsync import AdamWSteps, Dense, Gradients, LocalSteps, Steps
from sparsync.exchanges.local_steps import LocalTraining

pytestmark = pytest.mark.distributed

Makers = dict[str, Callable[..., Any]]  # of what takes a model, a scheme and an optimizer
ATTACH: Makers = {"doctor": sparsync.doctor, "attach": sparsync.attach}
EXCHANGES = (Gradients(), Steps(), LocalSteps(every=2))
DIRECT: Makers = {
    "GradientReducer": sparsync.GradientReducer,
    "ddp_comm_hook": lambda model, scheme, optimizer: sparsync.ddp_comm_hook(scheme, model, optimizer=optimizer),
    "AdamWSteps": lambda model, scheme, optimizer: AdamWSteps(model, optimizer, scheme),
    "LocalTraining": lambda model, scheme, optimizer: LocalTraining(model, optimizer, scheme, every=2),
}


def wrong_types() -> None:
    """Here, because ranks run without the checks of annotations that tests have."""
    dist.destroy_process_group()  # so that sending would be another error
    model = nn.Linear(2, 2)
    adamw = AdamW(model.parameters())
    attached: Makers = {
        f"{name} {how}": lambda *given, make=make, how=how, **more: make(*given, exchange=how, **more)
        for name, make in ATTACH.items()
        for how in (None, *EXCHANGES)
    }
    for name, make in {**attached, **DIRECT}.items():
        for given, got in (
            (torch.optim.lr_scheduler.ConstantLR(adamw), "ConstantLR"),
            ("adamw", "'adamw'"),
            (adamw.state_dict(), "dict"),
            (model.parameters(), "generator"),
            (AdamW, "the class AdamW"),
            ([adamw, None], "list of None"),
            ([], "an empty list"),
        ):
            with case(f"{name} {got}"):
                words = rf"^optimizer must be a torch\.optim\.Optimizer or a list of them, got {got}; pass"
                with pytest.raises(TypeError, match=words):
                    make(model, Dense(), optimizer=given)
        for given, got in ((adamw, "AdamW"), ([model], "list"), (nn.Linear, "the class Linear")):
            with (
                case(f"{name} {got}"),
                pytest.raises(TypeError, match=rf"^model must be a torch\.nn\.Module, got {got};"),
            ):
                make(given, Dense(), optimizer=adamw)


def test_only_modules_and_optimizers_are_taken_and_the_error_names_what_was_given() -> None:
    run(wrong_types, 1)
