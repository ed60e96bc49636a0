"""Hugging Face Trainer: a callback that attaches a scheme when training begins, and saves its state with every checkpoint.

trainer = Trainer(...)
callback = sparsync.adapters.trainer.attach(trainer)
trainer.train()
"""
# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from sparsync.adapters.metrics import Recorder
from sparsync.adapters.wrapped import Attaching, ddp_inside
from sparsync.attached import checkpoint
from sparsync.base.scheme import Scheme
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import Exchange
from sparsync.recipes import Bits
from sparsync.runtime.findings import warn_of
from sparsync.runtime.handle import Handle
from sparsync.runtime.options import Options


def attach(
    trainer: Trainer,
    scheme: Scheme | None = None,
    *,
    bits: Bits | None = None,
    exchange: Exchange | None = None,
    recorder: Recorder | None = None,
    resume_from: str | Path | None = None,
    options: Options = Options(),
) -> "Sparsync":
    """Add a callback to `trainer` and return it; its `handle` is the handle from `sparsync.attach` once training has begun.

    Residuals of gradients follow the loss scaler and the clipping at `max_grad_norm`, and with `Options(follow_rates=True)` the learning
    rate, which the Trainer changes at every step by default.
    `recorder` gets the reports of the first rank after every step. Every checkpoint folder gets the residuals of all ranks; training that
    continues from one, with any number of ranks, loads them from there, or from `resume_from` if the folder was moved.
    The other arguments are as for `sparsync.attach`. `train` raises as `sparsync.attach` does, and TypeError if it does not use DDP.
    """
    callback = Sparsync(trainer, Attaching(scheme, bits, exchange, options), recorder, resume_from)
    trainer.add_callback(callback)
    return callback


class Sparsync(TrainerCallback):
    """See `attach`. The Trainer passes the bare model to callbacks, so this one takes the wrapped model from the Trainer."""

    def __init__(
        self, trainer: Trainer, attaching: Attaching, recorder: Recorder | None, resume_from: str | Path | None
    ) -> None:
        self.recorder, self.resume_from, self._attaching = recorder, resume_from, attaching
        self.handle: Handle | None = None
        self._trainer = trainer
        self._model: Any = None  # the DDP model of the handle

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer
        assert trainer.model_wrapped is not None
        ddp = ddp_inside(trainer.model_wrapped, "Trainer", args.world_size)
        if ddp is None:
            return
        if self._model is not ddp:  # a second train() uses the model of the first
            if self.handle is not None:
                self.handle.close()  # its DDP model is no longer trained
            optimizer, scaler = kwargs["optimizer"], trainer.accelerator.scaler
            self.handle = self._attaching.attach(ddp, optimizer, scaler)
            self._model = ddp
        if state.global_step:
            self._resume(Path(self.resume_from or _folder(args, state)))

    def _resume(self, folder: Path) -> None:
        assert self.handle is not None
        if self.resume_from is not None or checkpoint.holds_states(folder):
            checkpoint.load(self.handle, folder)
        else:
            warn_of(
                f"{folder} has no residuals of sparsync, so they start at zero; if they are elsewhere, pass resume_from="
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if self.handle is not None and self.recorder is not None and state.is_world_process_zero:
            self.recorder.record(self.handle.take_reports())

    def on_train_end(self, *_: object, **__: object) -> None:
        if isinstance(self.handle, AdamWSteps):
            self.handle.show_common()  # for callers of a part of the model

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if self.handle is not None:
            checkpoint.save(self.handle, _folder(args, state))


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
