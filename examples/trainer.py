"""The Trainer of transformers: one call between making it and `train`.

Run: torchrun --nproc-per-node 2 examples/trainer.py (needs pip install transformers accelerate)
"""
# pyright: reportMissingImports=false

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import sparsync
import sparsync.adapters.trainer


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    tokens = torch.randint(64, (64, 16))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=5, per_device_train_batch_size=4, use_cpu=True, ddp_backend="gloo",
        report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": each, "labels": each} for each in tokens])
    callback = sparsync.adapters.trainer.attach(trainer)
    trainer.train()
    assert callback.handle is not None
    report = callback.handle.reports()[-1]
    if trainer.is_world_process_zero():
        print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")


if __name__ == "__main__":
    main()
