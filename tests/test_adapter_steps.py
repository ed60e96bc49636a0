"""Trainers whose AdamW steps are exchanged: resumed trainings have the same bits, and what is evaluated or saved is common to all ranks."""
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
from sparsync import Options, Steps, attach, checkpoint
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.schemes import TwoShot

pytestmark = pytest.mark.distributed
STEPS, HALF, ACCUMULATED = 6, 3, 2
Found = dict[str, Tensor]


def scheme() -> TwoShot:
    return TwoShot(density=0.1, values="sign")


def seen(model: nn.Module, handle: object) -> Found:
    """Return the saved weights and what the model says in evaluation mode, as a rank sees them when the steps were exchanged."""
    assert isinstance(handle, AdamWSteps)
    assert handle.exchange == Steps()
    assert handle.stats()["drift"] > 0
    assert handle.stats()["bits"] < 6  # with 600 elements in a bucket, most of it are headers
    saved = {name: each.clone() for name, each in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        saved["said"] = model(torch.ones(3, 20))
    model.train()
    return saved


def same(one: Found, other: Found) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_accelerate(folder: Path) -> tuple[Found, Found]:
    from accelerate import Accelerator

    def trained(steps: range, save: bool = False, load: bool = False) -> Found:
        accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED), network()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        prepared, optimizer, loader = accelerator.prepare(model, adamw, examples(STEPS * ACCUMULATED))
        handle = attach(prepared, scheme(), optimizer=optimizer, options=Options(timeout_s=120))
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

    as_torchrun()
    whole = trained(range(STEPS))
    trained(range(HALF), save=True)
    return whole, trained(range(HALF, STEPS), load=True)


def by_lightning(folder: Path, precision: Any = "32-true") -> tuple[Found, Found]:  # Any: a text that Lightning knows
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from sparsync.adapters.lightning import Sparsync

    def trained(epochs: int, goes_on_from: Path | None = None) -> Found:
        callback, module = Sparsync(scheme(), options=Options(timeout_s=120)), lightning_module(HALF)
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
        found = seen(module, callback.handle)
        assert all(torch.equal(each, found[f"network.{name}"]) for name, each in module.network.state_dict().items())
        return found

    as_torchrun()
    whole = trained(2)
    trained(1)
    return whole, trained(2, folder / "1.ckpt")


def by_fabric(folder: Path, precision: Any = "32-true") -> tuple[Found, Found]:  # Any: a text that Fabric knows
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    def trained(steps: range, save: bool = False, load: bool = False) -> Found:
        fabric = Fabric(
            accelerator="cpu",
            devices=2,
            precision=precision,
            strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
        )
        fabric.launch()
        module = network()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        if load:
            module.load_state_dict(torch.load(folder / "model.pt"))
        handle = attach(model, scheme(), optimizer=optimizer, options=Options(timeout_s=120))
        if load:
            checkpoint.load(handle, folder)
        for number, (x, y) in enumerate(fabric.setup_dataloaders(examples(STEPS))):
            if number in steps:
                fabric.backward(nn.functional.mse_loss(model(x), y))
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        if save:
            checkpoint.save(handle, folder)
            if os.environ["RANK"] == "0":
                torch.save(module.state_dict(), folder / "model.pt")
            fabric.barrier()
        return seen(module, handle)

    as_torchrun()
    whole = trained(range(STEPS))
    trained(range(HALF), save=True)
    return whole, trained(range(HALF, STEPS), load=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "train"),
    [
        ("accelerate", by_accelerate),
        ("lightning", by_lightning),
        ("lightning", by_fabric),
        # Trainers clip in these 16 bits only where no loss scaler is thought of.
        ("lightning", partial(by_lightning, precision="bf16-mixed")),
        ("lightning", partial(by_fabric, precision="bf16-mixed")),
    ],
)
def test_a_trainer_exchanges_the_steps_of_adamw_and_goes_on_to_the_same_bits(
    package: str, train: Callable[[Path], tuple[Found, Found]], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    (whole, again), (other, other_again) = run(train, 2, folder=tmp_path)
    assert same(whole, other)
    assert same(again, other_again)
    assert same(whole, again)
