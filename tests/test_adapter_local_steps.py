"""Trainers with local steps: resumed trainings have the same bits, and what is evaluated or saved is common to all ranks."""
# pyright: reportMissingImports=false

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.adapter_training import as_torchrun, examples, lightning_module, network
from helpers.distributed import run
from sparsync import LocalSteps, Options, attach, checkpoint
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import TwoShot

pytestmark = pytest.mark.distributed
STEPS, HALF, ACCUMULATED = 10, 5, 2  # an exchange every two steps: saved between two
OPTIONS: dict[str, Any] = {"exchange": LocalSteps(every=2), "options": Options(timeout_s=120)}
Found = dict[str, Tensor]


def scheme() -> TwoShot:
    return TwoShot(density=0.1, values="int4")


def seen(model: nn.Module, handle: object) -> tuple[Found, Found]:
    """Return what is common to all ranks, saved weights and what the model says in evaluation mode, and this rank's own weights."""
    assert isinstance(handle, LocalTraining)
    model.train()
    own = {name: each.detach().clone() for name, each in model.named_parameters()}
    common = {name: each.clone() for name, each in model.state_dict().items()}
    assert not all(torch.equal(own[name], common[name]) for name in own)
    if isinstance(model, nn.Sequential):
        model.eval()
        with torch.no_grad():
            common["said"] = model(torch.ones(3, 20))
    return common, own


def same(one: Found, other: Found) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_accelerate(folder: Path) -> Any:
    from accelerate import Accelerator

    def trained(steps: range, save: bool = False, load: bool = False) -> tuple[Found, Found]:
        accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED), network()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        prepared, optimizer, loader = accelerator.prepare(model, adamw, examples(STEPS * ACCUMULATED))
        handle = attach(prepared, scheme(), optimizer=optimizer, **OPTIONS)
        if load:
            accelerator.load_state(str(folder))
            checkpoint.load(handle, folder)
        for number, (x, y) in enumerate(loader):
            if number // ACCUMULATED in steps:
                with accelerator.accumulate(prepared):
                    accelerator.backward(nn.functional.mse_loss(prepared(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        assert handle.reports()[-1].step == steps.stop // 2 * 2 - 1
        if save:
            accelerator.save_state(str(folder))
            checkpoint.save(handle, folder)
        if steps.stop % 2 == 0:
            optimizer.step()  # with gradients of nobody, so that own weights and common ones differ by what is unsent
        return seen(accelerator.unwrap_model(prepared), handle)

    as_torchrun()
    whole = trained(range(STEPS))
    trained(range(HALF), save=True)
    return whole, trained(range(HALF, STEPS), load=True)


def by_lightning(folder: Path) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from sparsync.adapters.lightning import Sparsync

    def trained(epochs: int, goes_on_from: Path | None = None) -> tuple[Found, Found]:
        callback, module = Sparsync(scheme(), **OPTIONS), lightning_module(HALF)
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
            callbacks=[callback],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, ckpt_path=goes_on_from)
        trainer.save_checkpoint(folder / f"{epochs}.ckpt")
        return seen(module, callback.handle)

    as_torchrun()
    whole = trained(2)
    trained(1)
    return whole, trained(2, folder / "1.ckpt")


def by_fabric(folder: Path) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    def trained(steps: range, save: bool = False, load: bool = False) -> tuple[Found, Found]:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        module = network()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        handle = attach(model, scheme(), optimizer=optimizer, **OPTIONS)
        if load:
            checkpoint.load(handle, folder)
        for number, (x, y) in enumerate(fabric.setup_dataloaders(examples(STEPS))):
            if number in steps:
                fabric.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        if save:
            checkpoint.save(handle, folder)
            fabric.barrier()
        return seen(module, handle)

    as_torchrun()
    whole = trained(range(STEPS))
    trained(range(HALF), save=True)
    return whole, trained(range(HALF, STEPS), load=True)


def by_transformers(folder: Path) -> Any:
    from sparsync.adapters.trainer import attach as attach_trainer
    from test_adapter_trainer import trainer_of

    def trained(where: Path, goes_on_from: str | None = None) -> tuple[Found, Found]:
        trainer = trainer_of(where)
        callback = attach_trainer(trainer, scheme(), resume_from=goes_on_from, **OPTIONS)
        trainer.train(resume_from_checkpoint=goes_on_from)
        assert trainer.model is not None
        return seen(trainer.model, callback.handle)

    as_torchrun()
    return trained(folder / "whole"), trained(folder / "again", str(folder / "whole" / "checkpoint-3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "train"),
    [
        ("accelerate", by_accelerate),
        ("lightning", by_lightning),
        ("lightning", by_fabric),
        ("transformers", by_transformers),
    ],
)
def test_a_trainer_exchanges_weight_changes_and_goes_on_to_the_same_bits(
    package: str, train: Callable[[Path], Any], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    ranks = run(train, 2, folder=tmp_path)
    for (common, own), (common_again, own_again) in ranks:
        assert same(common, ranks[0][0][0])
        assert same(common, common_again)
        assert same(own, own_again)
