"""What trainers' own packages do with weights, with the default recipe: averages, references and ratios are as in plain DDP."""
# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.adapter_training import as_torchrun, examples, lightning_module, network
from helpers.distributed import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORDS, TOKENS, STEPS = 32, 12, 4


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(WORDS - 1)} | {"<end>": WORDS - 1}
    by_words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    by_words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=by_words, pad_token="<end>", eos_token="<end>")


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": WORDS - 1, "eos_token_id": WORDS - 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=4 * TOKENS, **size, **ends))


def texts(count: int) -> list[str]:
    drawn = torch.randint(WORDS - 1, (count, 4), generator=torch.Generator().manual_seed(1))
    return [" ".join(f"w{int(word)}" for word in row) for row in drawn]


def weights_of(trainer: Any) -> list[Tensor]:
    """Train with the default recipe; return the weights."""
    from sparsync.adapters.trainer import attach

    callback = attach(trainer, options=sparsync.Options(timeout_s=120))
    trainer.train()
    assert callback.handle is not None and callback.handle.recipe is not None
    return [each.detach().clone() for each in trainer.model.parameters()]


def common(folder: Path) -> dict[str, Any]:
    more = {
        "max_steps": STEPS,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
    }
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        **more,
    }


def by_dpo(folder: Path) -> list[Tensor]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    as_torchrun()
    rows = {"prompt": texts(16), "chosen": texts(32)[16:], "rejected": texts(48)[32:]}
    arguments = DPOConfig(**common(folder), gradient_checkpointing=False, max_length=2 * TOKENS)
    return weights_of(
        DPOTrainer(gpt(), gpt(), args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer())
    )


def by_grpo(folder: Path) -> list[Tensor]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    as_torchrun()
    # Two updates for each batch of answers: the ratio of the first is 1.
    arguments = GRPOConfig(
        **common(folder), gradient_checkpointing=False, num_generations=2, max_completion_length=4, num_iterations=2
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    dataset = Dataset.from_dict({"prompt": texts(16)})
    trainer = GRPOTrainer(gpt(), reward, args=arguments, train_dataset=dataset, processing_class=tokenizer())
    weights = weights_of(trainer)
    logged = [each for each in trainer.state.log_history if "clip_ratio/region_mean" in each]
    assert logged and logged[0]["clip_ratio/region_mean"] == 0.0
    return weights


@pytest.mark.parametrize("train", [by_dpo, by_grpo])
def test_a_trainer_of_trl_with_references_and_ratios_trains_by_the_default_recipe(train: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    first, second = run(train, 2, folder=tmp_path)
    assert all(map(torch.equal, first, second))
    torch.manual_seed(0)
    assert not all(map(torch.equal, first, gpt().parameters()))


def by_lightning(folder: Path) -> list[Tensor]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from sparsync.adapters.lightning import Sparsync

    found: list[Tensor] = []
    as_torchrun()
    for callback in (WeightAveraging(), StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1)):
        torch.manual_seed(0)
        attached, module = Sparsync(options=sparsync.Options(timeout_s=120)), lightning_module(3)
        Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
            callbacks=[attached, callback],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        ).fit(module, examples(3), examples(2))
        assert attached.handle is not None and attached.handle.recipe is not None
        found += [each.detach().clone() for each in module.parameters()]
    return found


def test_lightnings_averages_of_weights_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    first, second = run(by_lightning, 2, folder=tmp_path)
    assert all(map(torch.equal, first, second))


def by_torch_ema() -> list[Tensor]:
    from torch_ema import ExponentialMovingAverage

    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = sparsync.attach(model, optimizer=optimizer)
    average, found = ExponentialMovingAverage(model.parameters(), decay=0.9), list[Tensor]()
    for step in range(6):
        x = torch.randn(3, 20, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update()
        with average.average_parameters(), torch.no_grad():
            found.append(model(torch.ones(3, 20)))
    found += [each.detach().clone() for each in model.parameters()]
    handle.close()
    return found


def test_the_average_of_torch_ema_is_swapped_in_and_out(tmp_path: Path) -> None:
    pytest.importorskip("torch_ema")
    first, second = run(by_torch_ema, 2, fresh=True)
    assert all(map(torch.equal, first, second))
