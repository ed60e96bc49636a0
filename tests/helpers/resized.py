"""Check the residuals that ranks hold after loading a checkpoint of another number of ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_resized(old: Sequence[Tensor], new: Sequence[Tensor | None], what: str) -> None:
    """Check that the residuals `new` were dealt out from `old`, one per rank, with the same mean; None: no residual."""
    for rank, found in enumerate(new):
        held = sum(old[rank :: len(new)], torch.zeros_like(old[0])) * len(new) / len(old)
        assert torch.equal(torch.zeros_like(held) if found is None else found, held), f"{what}, rank {rank}"
