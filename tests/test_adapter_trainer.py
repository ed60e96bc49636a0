"""A training by the Trainer of transformers: reduced by a scheme, saved at a checkpoint and taken up again."""
# pyright: reportMissingImports=false

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.adapter_training import DENSITY, AdapterResult, Collected, as_torchrun, check
from helpers.distributed import run
from sparsync import Gradients, Options, Steps
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.schemes import ExactExDyna, TopK, TwoShot

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from sparsync.adapters.trainer import attach

pytestmark = pytest.mark.distributed
STEPS, TOKENS, WORDS, SPIKE = 6, 16, 64, 8


class Sentences(torch.utils.data.Dataset):
    """Made-up ones, the same each time."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(WORDS, (count, TOKENS), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


def trainer_of(folder: Path, kind: type[Trainer] = Trainer, steps: int = STEPS, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=32, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=True,  # buckets stay the same
        report_to=[],
        disable_tqdm=True,
    )
    return kind(model, arguments, train_dataset=Sentences(4 * steps), **more)


def trained(folder: Path, goes_on_from: Path | None = None, **how: Any) -> AdapterResult:
    trainer = trainer_of(folder)
    scheme = None if goes_on_from else ExactExDyna(density=DENSITY)  # None: of the environment, the same one
    callback = attach(trainer, scheme, exchange=Gradients(), options=Options(timeout_s=120, follow_rates=True), **how)
    trainer.train(resume_from_checkpoint=str(goes_on_from) if goes_on_from else None)
    assert callback.handle is not None
    return AdapterResult.of(trainer.model, callback.handle.reports())


def interrupted(folder: Path) -> list[AdapterResult]:
    as_torchrun()
    os.environ["SPARSYNC_SCHEME"] = f"exact_exdyna:density={DENSITY}"
    collected = Collected()
    whole = trained(folder / "here", recorder=collected)
    assert bool(collected.reports) != bool(whole.reports)  # the first rank's are recorded
    whole.reports += collected.reports
    again = trained(folder / "here", folder / "here" / "checkpoint-3")
    moved = folder / "here" / "checkpoint-3"
    with pytest.warns(UserWarning, match="if they are elsewhere, pass resume_from="):
        trained(folder / "bare", moved)
    return [whole, again, trained(folder / "there", moved, resume_from=moved)]


def test_a_training_by_the_trainer_sends_little_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    ranks = run(interrupted, 2, folder=tmp_path)
    check([whole for whole, *_ in ranks], STEPS)
    for whole, *resumed in ranks:
        for again in resumed:
            assert again.same_weights(whole)
            assert {report.step for report in again.reports} == set(range(3, STEPS))
    files = {path.name for path in (tmp_path / "here" / "checkpoint-6").glob("sparsync*")}
    assert files == {f"sparsync.step6.rank{rank}of2.pt" for rank in (0, 1)}


class SpikedTrainer(Trainer):
    """The loss of one step is 300 times as high."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return 300 * loss if self.state.global_step == SPIKE else loss


def spiked(folder: Path) -> list[float]:
    as_torchrun()
    trainer = trainer_of(folder, SpikedTrainer, steps=SPIKE + 4)
    attach(trainer, TopK(density=0.05), exchange=Gradients(), options=Options(timeout_s=20))
    trainer.train()  # max_grad_norm is 1 by default
    return [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]


def test_a_spike_that_the_trainer_clips_does_not_come_back(tmp_path: Path) -> None:
    """Its norm is that of the reduced gradient before clipping."""
    before, spike, after = (norms := run(spiked, 2, folder=tmp_path)[0])[:SPIKE], norms[SPIKE], norms[SPIKE + 1 :]
    assert spike > 50 * max(before)
    assert max(after) < 5 * max(before)


def stepped(folder: Path) -> list[list[Tensor]]:
    """Train with steps, in one go and from a checkpoint; return the saved weights, the evaluated loss and what was loaded again."""
    as_torchrun()
    found = []
    for goes_on_from in (None, folder / "checkpoint-3"):
        trainer = trainer_of(folder, eval_dataset=Sentences(4))
        callback = attach(trainer, TwoShot(density=0.1, values="sign"), options=Options(timeout_s=120))
        trainer.train(resume_from_checkpoint=str(goes_on_from) if goes_on_from else None)
        assert callback.handle is not None
        assert callback.handle.exchange == Steps()
        assert isinstance(callback.handle, AdamWSteps)
        assert callback.handle.stats()["drift"] > 0
        loss = torch.tensor(trainer.evaluate()["eval_loss"])
        own = [each.detach().clone() for each in trainer.model.parameters()]
        with callback.handle.averaged():
            common = [each.detach().clone() for each in trainer.model.parameters()]
        assert all(map(torch.equal, own, common))  # after an evaluation
        trainer.save_model(str(folder / "saved"))
        torch.distributed.barrier()
        saved = GPT2LMHeadModel.from_pretrained(folder / "saved")
        assert all(map(torch.equal, saved.parameters(), common))
        found.append([loss, *common])
    return found


def test_the_trainer_exchanges_steps_of_its_adamw_and_evaluates_saves_and_goes_on_with_common_weights(
    tmp_path: Path,
) -> None:
    first, second = run(stepped, 2, folder=tmp_path)
    for whole, again, other in zip(*first, second[0], strict=True):
        assert torch.equal(whole, again)
        assert torch.equal(whole, other)


def fine_tuned(folder: Path) -> list[dict[str, Tensor]]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    vocabulary = {f"w{number}": number for number in range(WORDS - 1)} | {"<end>": WORDS - 1}
    by_words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    by_words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_words, pad_token="<end>", eos_token="<end>")
    texts = [" ".join(f"w{int(word)}" for word in tokens if word < WORDS - 1) for tokens in Sentences(48).tokens]

    def weights(goes_on_from: Path | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=2 * TOKENS, n_embd=32, n_layer=1, n_head=2))
        arguments = SFTConfig(
            str(folder),
            max_steps=STEPS,
            save_steps=STEPS // 2,
            per_device_train_batch_size=2,
            max_length=TOKENS,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
        )
        callback = attach(trainer, TwoShot(density=0.1, values="sign"), options=Options(timeout_s=120))
        trainer.train(resume_from_checkpoint=None if goes_on_from is None else str(goes_on_from))
        assert callback.handle is not None
        assert callback.handle.exchange == Steps()
        return {name: each.clone() for name, each in model.state_dict().items()}

    as_torchrun()
    return [weights(), weights(folder / f"checkpoint-{STEPS // 2}")]


@pytest.mark.slow
def test_the_sft_trainer_of_trl_exchanges_steps_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    whole, *others = (each for rank in run(fine_tuned, 2, folder=tmp_path) for each in rank)
    for other in others:
        assert all(torch.equal(each, other[name]) for name, each in whole.items())
