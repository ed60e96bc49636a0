"""Trainers that exchange steps or weight changes: resumed trainings have the same bits, and what is evaluated or saved is common."""
# pyright: reportMissingImports=false

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.adapter_training import as_torchrun, examples, lightning_module, network
from helpers.distributed import run
from sparsync import LocalSteps, Options, Scheme, attach, checkpoint
from sparsync.exchanges.step_method import StepMethod
from sparsync.schemes import TwoShot

pytestmark = pytest.mark.distributed
STEPS, HALF, ACCUMULATED = 10, 5, 2  # local steps are exchanged every two steps: saved between two
Found = tuple[dict[str, Tensor], dict[str, Tensor]]
EXCHANGED: dict[str, tuple[Scheme, Any]] = {
    "steps": (TwoShot(density=0.1, values="sign"), None),
    "weight changes": (TwoShot(density=0.1, values="int4"), LocalSteps(every=2)),
}


def given(what: str) -> dict[str, Any]:
    scheme, exchange = EXCHANGED[what]
    return {"scheme": scheme, "exchange": exchange, "options": Options(timeout_s=120)}


def seen(model: nn.Module, handle: object) -> Found:
    """Return what is common to all ranks, saved weights and what the model says in evaluation mode, and this rank's own weights."""
    assert isinstance(handle, StepMethod) and handle.stats()["steps"] > 0
    model.train()
    own = {name: each.detach().clone() for name, each in model.named_parameters()}
    common = {name: each.clone() for name, each in model.state_dict().items()}
    if isinstance(model, nn.Sequential):
        model.eval()
        with torch.no_grad():
            common["said"] = model(torch.ones(3, 20))
        model.train()
    return common, own


def by_accelerate(folder: Path, what: str) -> tuple[Found, Found]:
    from accelerate import Accelerator

    def trained(steps: range, save: bool = False, load: bool = False) -> Found:
        accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED), network()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        prepared, optimizer, loader = accelerator.prepare(model, adamw, examples(STEPS * ACCUMULATED))
        handle = attach(prepared, optimizer=optimizer, **given(what))
        if load:
            accelerator.load_state(str(folder))
            checkpoint.load(handle, folder)
        for number, (x, y) in enumerate(loader):
            if number // ACCUMULATED in steps:
                with accelerator.accumulate(prepared):
                    accelerator.backward(nn.functional.mse_loss(prepared(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(parameters=prepared.parameters(), max_norm=0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        if save:
            accelerator.save_state(str(folder))
            checkpoint.save(handle, folder)
        return seen(accelerator.unwrap_model(prepared), handle)

    whole = trained(range(STEPS))
    trained(range(HALF), save=True)
    return whole, trained(range(HALF, STEPS), load=True)


def by_lightning(folder: Path, what: str, precision: Any = "32-true") -> tuple[Found, Found]:  # Any: Lightning's text
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from sparsync.adapters.lightning import Sparsync

    def trained(epochs: int, goes_on_from: Path | None = None) -> Found:
        callback, module = Sparsync(**given(what)), lightning_module(HALF)
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=2,
            precision=precision,
            strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
            callbacks=[callback],
            gradient_clip_val=0.5,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, ckpt_path=goes_on_from)
        trainer.save_checkpoint(folder / f"{epochs}.ckpt")
        return seen(module, callback.handle)

    whole = trained(2)
    trained(1)
    return whole, trained(2, folder / "1.ckpt")


def by_fabric(folder: Path, what: str, precision: Any = "32-true") -> tuple[Found, Found]:  # Any: Fabric's text
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    def trained(steps: range, save: bool = False, load: bool = False) -> Found:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
        fabric = Fabric(accelerator="cpu", devices=2, precision=precision, strategy=strategy)
        fabric.launch()
        module = network()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        if load:
            module.load_state_dict(torch.load(folder / "model.pt"))
        handle = attach(model, optimizer=optimizer, **given(what))
        if load:
            checkpoint.load(handle, folder)
            optimizer.load_state_dict(torch.load(folder / f"optimizer{os.environ['RANK']}.pt"))
        for number, (x, y) in enumerate(fabric.setup_dataloaders(examples(STEPS))):
            if number in steps:
                fabric.backward(nn.functional.mse_loss(model(x), y))
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        if save:
            checkpoint.save(handle, folder)
            torch.save(optimizer.state_dict(), folder / f"optimizer{os.environ['RANK']}.pt")
            if os.environ["RANK"] == "0":
                torch.save(module.state_dict(), folder / "model.pt")
            fabric.barrier()
        return seen(module, handle)

    whole = trained(range(STEPS))
    trained(range(HALF), save=True)
    return whole, trained(range(HALF, STEPS), load=True)


def by_transformers(folder: Path, what: str) -> tuple[Found, Found]:
    from sparsync.adapters.trainer import attach as attach_trainer
    from test_adapter_trainer import trainer_of

    def trained(where: Path, goes_on_from: str | None = None) -> Found:
        trainer = trainer_of(where)
        callback = attach_trainer(trainer, resume_from=goes_on_from, **given(what))
        trainer.train(resume_from_checkpoint=goes_on_from)
        assert trainer.model is not None
        return seen(trainer.model, callback.handle)

    return trained(folder / "whole"), trained(folder / "again", str(folder / "whole" / "checkpoint-3"))


def under_torchrun(train: Callable[..., tuple[Found, Found]], folder: Path, what: str) -> tuple[Found, Found]:
    as_torchrun()
    return train(folder, what)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "train", "what"),
    [
        ("accelerate", by_accelerate, "steps"),
        ("lightning", by_lightning, "steps"),
        ("lightning", by_fabric, "steps"),
        # Trainers clip in these 16 bits only if there is no loss scaler.
        ("lightning", partial(by_lightning, precision="bf16-mixed"), "steps"),
        ("lightning", partial(by_fabric, precision="bf16-mixed"), "steps"),
        ("accelerate", by_accelerate, "weight changes"),
        ("lightning", by_lightning, "weight changes"),
        ("lightning", by_fabric, "weight changes"),
        ("transformers", by_transformers, "weight changes"),
    ],
)
def test_a_trainer_goes_on_to_the_same_bits(package: str, train: Callable[..., Any], what: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    ranks = run(under_torchrun, 2, train=train, folder=tmp_path, what=what)
    for (common, own), (common_again, own_again) in ranks:
        for one, other in ((common, ranks[0][0][0]), (common, common_again), (own, own_again)):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
