"""Lightning: one callback.

Run: python examples/with_lightning.py (Lightning starts the second rank itself; needs pip install lightning)
"""
# pyright: reportMissingImports=false

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from sparsync.adapters.lightning import Sparsync


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))

    def training_step(self, x: Tensor, number: int) -> Tensor:
        return torch.nn.functional.mse_loss(self.network(x), x[:, :4])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    callback = Sparsync()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(torch.randn(64, 32), batch_size=8))  # pyright: ignore[reportArgumentType]
    assert callback.handle is not None
    report = callback.handle.reports()[-1]
    if trainer.is_global_zero:
        print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")


if __name__ == "__main__":
    main()
