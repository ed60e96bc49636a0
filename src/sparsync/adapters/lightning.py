"""Lightning: a callback that attaches a scheme when the model is wrapped, and adds its state to Lightning's checkpoints.

    trainer = Trainer(strategy="ddp", callbacks=[Sparsync()])

For Fabric call sparsync.attach.
"""
# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from sparsync.adapters.metrics import Recorder
from sparsync.adapters.wrapped import Attaching, ddp_inside
from sparsync.attached import checkpoint as states
from sparsync.base.scheme import Scheme
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import Exchange
from sparsync.recipes import Bits
from sparsync.runtime.findings import warn_of
from sparsync.runtime.handle import Handle
from sparsync.runtime.options import Options

KEY = "sparsync"  # of all ranks' states in a checkpoint


class Sparsync(Callback):
    """Attaches to the model of every `fit` with DDP; `handle` is the handle from `sparsync.attach` for the latest `fit`.

    At the end of a `fit` Lightning drops its DDP model, and the hook with it; residuals stay for the next `fit`. Residuals of gradients
    follow the loss scaler and the clipping, and with `Options(follow_rates=True)` the learning rates of the optimizers.
    `recorder` gets the reports of the first rank after every batch. A checkpoint has all ranks' residuals, and any number of ranks can
    continue from it; with one rank nothing is attached. The other arguments are as for `sparsync.attach`. `fit` raises as
    `sparsync.attach` does, and TypeError for strategies other than DDP's.
    A module with several optimizers, which usually step in turn, exchanges gradients, unless `bits` or `exchange` says otherwise.
    """

    def __init__(
        self,
        scheme: Scheme | None = None,
        *,
        bits: Bits | None = None,
        exchange: Exchange | None = None,
        recorder: Recorder | None = None,
        options: Options = Options(),
    ) -> None:
        self.recorder, self._attaching = recorder, Attaching(scheme, bits, exchange, options)
        self.handle: Handle | None = None
        self._group: Any = None  # the process group of the model. Any: torch's stubs do not export its type
        self._loaded: Sequence[Mapping[str, Any]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.strategy.model is not None
        ddp = ddp_inside(trainer.strategy.model, "Lightning", trainer.world_size)
        if ddp is None:
            return
        if self.handle is not None:
            self.handle.close()  # the DDP model of the last fit is gone
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of "16-mixed"
        self.handle = self._attaching.attach(ddp, trainer.optimizers, scaler, in_turn=len(trainer.optimizers) > 1)
        self._group = ddp.process_group
        if self._loaded is not None:
            states.restore(self.handle, self._loaded)
            self._loaded = None

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self.handle is not None and self.recorder is not None and trainer.is_global_zero:
            self.recorder.record(self.handle.take_reports())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_common()

    def _show_common(self) -> None:
        """Show common weights until the module is trained again: Lightning drops its DDP model, and users call networks inside."""
        if isinstance(self.handle, AdamWSteps):
            self.handle.show_common()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.handle is not None:  # Lightning calls this on every rank, and writes the first one's
            checkpoint[KEY] = states.gathered(self.handle, self._group)
            self._show_common()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self._loaded = checkpoint.get(KEY)
        if self._loaded is None:
            warn_of("this checkpoint has no residuals of sparsync, so they start at zero")
