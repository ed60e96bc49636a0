"""A training by Lightning: reduced by a scheme from the first step, saved by ModelCheckpoint and taken up again."""
# pyright: reportMissingImports=false

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.adapter_training import (
    DENSITY,
    MICRO,
    AdapterResult,
    Collected,
    as_torchrun,
    check,
    examples,
    lightning_module,
    network,
)
from helpers.distributed import run
from sparsync import Options, attach, doctor
from sparsync.schemes import ExactMiCRO, TopK, TwoShot

pytest.importorskip("lightning")
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from sparsync.adapters.lightning import Sparsync

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
EPOCHS, BATCHES = 2, 3


def regression() -> LightningModule:
    return lightning_module(BATCHES, torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(folder: Path, epochs: int, callback: Sparsync, goes_on_from: Path | None = None) -> AdapterResult:
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(
            find_unused_parameters=True,  # buckets stay the same
            cluster_environment=TorchElasticEnvironment(),
        ),
        callbacks=[callback, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = regression()
    trainer.fit(module, ckpt_path=goes_on_from)
    assert callback.handle is not None
    trainer.save_checkpoint(folder / "afterwards.ckpt")  # no longer wrapped in DDP, and still with all residuals
    return AdapterResult.of(module, callback.handle.reports())


def interrupted(folder: Path) -> tuple[AdapterResult, AdapterResult]:
    as_torchrun()
    collected = Collected()
    first = Sparsync(ExactMiCRO(density=DENSITY), options=Options(timeout_s=120), recorder=collected)
    whole = trained(folder / "whole", EPOCHS, first)
    assert bool(collected.reports) != bool(whole.reports)  # the first rank's are recorded
    whole.reports += collected.reports
    os.environ["SPARSYNC_SCHEME"] = MICRO
    again = Sparsync(options=Options(timeout_s=120, follow_rates=True))
    return whole, trained(folder / "again", EPOCHS, again, folder / "whole" / "epoch=0.ckpt")


def test_a_training_by_lightning_sends_little_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    ranks = run(interrupted, 2, folder=tmp_path)
    check([whole for whole, _ in ranks], EPOCHS * BATCHES)
    for whole, resumed in ranks:
        assert resumed.same_weights(whole)
        assert {report.step for report in resumed.reports} == set(range(BATCHES, EPOCHS * BATCHES))
    states = torch.load(tmp_path / "whole" / "afterwards.ckpt", weights_only=True)["sparsync"]
    assert [(state["rank"], state["ranks"], state["step"]) for state in states] == [(0, 2, 5), (1, 2, 5)]
    assert not torch.equal(*(state["scheme"]["residual"]["network.2.weight"] for state in states))


class TwoAdams(LightningModule):
    """Steps two Adams in turn, as a GAN; both have all gradients of each backward pass."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), network()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.first(x) + self.second(x), y))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (self.first, self.second)]

    def train_dataloader(self) -> DataLoader:
        return examples(BATCHES)


def by_two_adams() -> list[tuple[AdapterResult, str, list[str], list[int]]]:
    """Return of each callback what a rank ended with, the scheme, the warnings, and the learning rates that are followed."""
    as_torchrun()
    os.environ.pop("SPARSYNC_SCHEME", None)
    found = []
    for callback in (Sparsync(options=Options(follow_rates=True)), Sparsync(TwoShot(density=0.1, values="sign"))):
        module = TwoAdams()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            Trainer(
                max_epochs=1,
                accelerator="cpu",
                devices=2,
                strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
                callbacks=[callback],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(module)
        assert callback.handle is not None
        said = [str(each.message) for each in seen if "leaves elements out" in str(each.message)]
        rates = callback.handle.state_dict()["rates"]
        found.append(
            (AdapterResult.of(module, callback.handle.reports()), str(callback.handle.scheme), said, len(rates))
        )
    return found


def test_of_two_optimizers_lightning_exchanges_gradients_in_4_bits_or_warns_of_a_sparse_scheme() -> None:
    ranks = run(by_two_adams, 2)
    parameters = len(ranks[0][0][0].weights)
    for (usual, scheme, said, rates), (sparse, _, warned, none) in ranks:
        assert scheme == str(TwoShot(density=1.0, values="int4"))
        assert (said, rates, none) == ([], parameters, 0)
        assert len(warned) == 1
        assert "Adam is no SGD" in warned[0]
        assert "or use TwoShot(density=1.0" in warned[0]
        for mine, first in ((usual, ranks[0][0][0]), (sparse, ranks[0][1][0])):
            assert mine.same_weights(first)
            assert {report.step for report in mine.reports} == set(range(2 * BATCHES))


def by_fabric() -> AdapterResult:
    as_torchrun()
    strategy = FabricDDPStrategy(cluster_environment=TorchElasticEnvironment())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = network()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    assert doctor(model, ExactMiCRO(density=DENSITY)) == []
    handle = attach(model, ExactMiCRO(density=DENSITY), optimizer=optimizer, options=Options(timeout_s=120))
    assert list(handle.layout()) == [name for name, _ in module.named_parameters()]
    for x, y in fabric.setup_dataloaders(examples(BATCHES)):
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    return AdapterResult.of(module, handle.reports())


def test_a_model_that_fabric_set_up_can_be_attached_to() -> None:
    check(run(by_fabric, 2), BATCHES)


def alone(folder: Path) -> None:
    as_torchrun()
    callback, module = Sparsync(TopK()), regression()
    trainer = Trainer(max_steps=1, accelerator="cpu", devices=1, callbacks=[callback], logger=False)
    with pytest.warns(UserWarning, match="Lightning trains in one process"):
        trainer.fit(module)
    with pytest.warns(UserWarning, match="has no residuals of sparsync"):
        callback.on_load_checkpoint(trainer, module, {})


def test_one_process_has_nothing_to_send_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(alone, 1, folder=tmp_path)
