"""A small GPT-2 whose AdamW steps are exchanged by each trainer: with less than a bit it learns as it does with plain DDP."""
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset

from helpers.adapter_training import as_torchrun
from helpers.distributed import run
from sparsync import Steps, TwoShot, attach, checkpoint
from sparsync.exchanges.adamw_steps import AdamWSteps

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

pytestmark = pytest.mark.distributed
STEPS, HALF, BATCH, P = 300, 150, 8, 2
TOKENS, WORDS = 32, 64
RATE, WARM_UP, NORM = 4e-3, 20, 1.0
SEEDS = range(3)


class Chain(Dataset):
    """Sentences of a Markov chain, of which a model can learn something."""

    def __init__(self, count: int, seed: int) -> None:
        likely = (2.5 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7))).softmax(1)
        source = torch.Generator().manual_seed(seed)
        words = [torch.randint(WORDS, (count, 1), generator=source)]
        for _ in range(TOKENS - 1):
            words.append(torch.multinomial(likely[words[-1][:, 0]], 1, generator=source))
        self.tokens = torch.cat(words, dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


def sentences(seed: int) -> Chain:
    """Return what all ranks learn from in one pass: the same sentences in each step of every trainer, which share them out."""
    return Chain(P * BATCH * STEPS, seed)


def gpt2(seed: int) -> tuple[GPT2LMHeadModel, AdamW, LambdaLR]:
    torch.manual_seed(seed)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=2, **none)  # pyright: ignore
    )
    optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    return model, optimizer, get_cosine_schedule_with_warmup(optimizer, WARM_UP, STEPS)


def scheme() -> TwoShot:
    return TwoShot(density=0.07, values="sign")


@dataclass
class Learnt:
    """What a rank ended with."""

    loss: float  # of sentences that it has not seen
    weights: list[Tensor]  # the common ones
    bits: float = 32.0  # for each parameter and step

    @classmethod
    def of(cls, model: GPT2LMHeadModel, handle: object = None) -> "Learnt":
        model.eval()
        tokens = Chain(512, 999).tokens
        with torch.no_grad():
            loss = float(model(input_ids=tokens, labels=tokens).loss)
        weights = [each.clone() for each in model.state_dict().values()]
        if handle is None:
            return cls(loss, weights)
        assert isinstance(handle, AdamWSteps)
        assert handle.exchange == Steps()
        return cls(loss, weights, handle.stats()["bits"])

    def same_weights(self, other: "Learnt") -> bool:
        return all(map(torch.equal, self.weights, other.weights))


Train = Callable[[Path, int, bool], Learnt]  # (folder, seed, from the checkpoint that the folder has of half of it)


def by_plain_torch() -> list[float]:
    losses = []
    for seed in SEEDS:
        model, optimizer, schedule = gpt2(seed)
        ddp = DistributedDataParallel(model)
        rank = torch.distributed.get_rank()
        for batch in DataLoader(sentences(seed), batch_size=P * BATCH):
            optimizer.zero_grad()
            ddp(**{key: each[rank::P] for key, each in batch.items()}).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
        losses.append(Learnt.of(model).loss)
    return losses


@cache
def dense_loss() -> float:
    """Return the mean loss of plain DDP over the seeds."""
    return sum(run(by_plain_torch, P)[0]) / len(SEEDS)


def by_trainer(folder: Path, seed: int, resumes: bool) -> Learnt:
    from transformers import Trainer, TrainingArguments

    from sparsync.adapters.trainer import attach as attach_to_trainer

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            assert self.train_dataset is not None
            return SequentialSampler(self.train_dataset)  # pyright: ignore[reportArgumentType]

    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=WARM_UP,
        max_grad_norm=NORM,
        save_strategy="no" if resumes else "steps",
        save_steps=HALF,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    model, *_ = gpt2(seed)
    trainer = InOrder(model, arguments, train_dataset=sentences(seed))
    callback = attach_to_trainer(trainer, scheme())
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resumes else None)
    return Learnt.of(model, callback.handle)


def by_accelerate(folder: Path, seed: int, resumes: bool) -> Learnt:
    from accelerate import Accelerator

    from sparsync.adapters.accelerate import attach as attach_prepared

    accelerator, (model, adamw, schedule) = Accelerator(cpu=True, step_scheduler_with_optimizer=False), gpt2(seed)
    loader = DataLoader(sentences(seed), batch_size=BATCH)
    prepared, optimizer, loader, schedule = accelerator.prepare(model, adamw, loader, schedule)
    handle = attach_prepared(accelerator, prepared, scheme(), optimizer=optimizer)
    if resumes:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, HALF)
    for number, batch in enumerate(loader, HALF * resumes):
        if number == HALF and not resumes:
            accelerator.save_state(str(folder))
        accelerator.backward(prepared(**batch).loss)
        accelerator.clip_grad_norm_(prepared.parameters(), NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Learnt.of(accelerator.unwrap_model(prepared), handle)


def by_lightning(folder: Path, seed: int, resumes: bool) -> Learnt:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from sparsync.adapters.lightning import Sparsync

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt2, self.optimizer, self.schedule = gpt2(seed)

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return self.gpt2(**batch).loss

        def configure_optimizers(self) -> Any:
            return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]

        def train_dataloader(self) -> DataLoader:
            size, first = P * BATCH * HALF, self.trainer.current_epoch
            return DataLoader(Subset(sentences(seed), range(size * first, size * (first + 1))), batch_size=BATCH)

    callback, module = Sparsync(scheme()), Module()
    saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    Trainer(
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        accelerator="cpu",
        devices=P,
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
        callbacks=[callback] if resumes else [callback, saver],
        gradient_clip_val=NORM,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=not resumes,
    ).fit(module, ckpt_path=folder / "epoch=0.ckpt" if resumes else None)
    return Learnt.of(module.gpt2, callback.handle)


def by_fabric(folder: Path, seed: int, resumes: bool) -> Learnt:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
    fabric, (module, adamw, schedule) = Fabric(accelerator="cpu", devices=P, strategy=strategy), gpt2(seed)
    fabric.launch()
    model, optimizer = fabric.setup(module, adamw)
    handle = attach(model, scheme(), optimizer=optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if resumes:
        fabric.load(folder / "state.ckpt", state)
        checkpoint.load(handle, folder)
    for number, batch in enumerate(fabric.setup_dataloaders(DataLoader(sentences(seed), batch_size=BATCH))):
        if number < HALF and resumes:
            continue
        if number == HALF and not resumes:
            fabric.save(folder / "state.ckpt", state)
            checkpoint.save(handle, folder)
        fabric.backward(model(**batch).loss)
        fabric.clip_gradients(model, optimizer, max_norm=NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Learnt.of(module, handle)


def learned(train: Train, folder: Path) -> tuple[list[Learnt], Learnt]:
    """Train with each seed, and with the first one again from the checkpoint of half of it."""
    as_torchrun()
    whole = [train(folder / str(seed), seed, False) for seed in SEEDS]
    torch.distributed.barrier()
    return whole, train(folder / "0", 0, True)


@pytest.mark.parametrize(
    ("package", "train"),
    [
        ("transformers", by_trainer),
        ("accelerate", by_accelerate),
        ("lightning", by_lightning),
        ("lightning", by_fabric),
    ],
)
def test_a_gpt_2_that_a_trainer_trains_with_less_than_a_bit_ends_within_2_percent_of_dense_also_after_a_resume(
    package: str, train: Train, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    (ours, again), (others, others_again) = run(learned, P, train=train, folder=tmp_path)
    for one, other in zip([*ours, again], [*others, others_again], strict=True):
        assert one.same_weights(other)
        assert one.bits <= 1
    assert again.same_weights(ours[0])
    loss = sum(each.loss for each in ours) / len(ours)
    assert loss <= 1.02 * dense_loss()
