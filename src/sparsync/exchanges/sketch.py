"""The ratio of the lengths of local and mean gradient, measured with a few numbers from each rank.

A sketch of a vector is sums of its elements with random signs. It is linear, and its expected square norm is that of the vector (AMS
sketches, Alon, Matias and Szegedy 1996). So the mean of all ranks' sketches tells the norm of the mean gradient, which no rank has seen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsync.core import generator

LENGTH = 64  # one sketch is off by sqrt(2 / 64) = 18 % of the square norm
_MEMORY = 0.9  # weight of older measurements, from exchange to exchange


def sketch(parameters: Mapping[str, nn.Parameter], number: int) -> Tensor:
    """Return the sketch, [64] in float64, of the gradients of all parameters; `number` gives the signs, the same on all ranks."""
    total = torch.zeros(LENGTH, dtype=torch.float64)
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        flat = parameter.grad.detach().to_dense().flatten()
        rows = -(-flat.numel() // LENGTH)
        signs = torch.randint(0, 2, (rows,), generator=generator(0, f"sketch/{name}", number)).to(flat.dtype) * 2 - 1
        signs = signs.to(flat.device)
        whole = flat.numel() // LENGTH
        total += (signs[:whole] @ flat[: whole * LENGTH].view(whole, LENGTH)).double().cpu()
        rest = flat[whole * LENGTH :].double().cpu()
        total[: rest.numel()] += rest * (float(signs[-1]) if rest.numel() else 0.0)
    return total


@dataclass
class ClipFactor:
    """The root of the mean square norm of the ranks' own gradients over the square norm of their mean; in [1, sqrt(P)]."""

    P: int
    own: float = 0.0  # square norms, older ones with less weight
    mean: float = 0.0

    def observe(self, sketches: Iterable[Tensor]) -> None:
        """Add a measurement: the sketches of all ranks. A rank without a gradient sends zeros, which do not count."""
        found = [each for each in sketches if bool(each.isfinite().all()) and bool(each.any())]
        if not found:
            return
        together = torch.stack(found)
        self.own = _MEMORY * self.own + float(together.square().sum(1).mean())
        self.mean = _MEMORY * self.mean + float(together.mean(0).square().sum())

    @property
    def value(self) -> float:
        """The factor; sqrt(P), as for pure noise, before the first measurement."""
        most = self.P**0.5
        return most if self.own >= self.mean * self.P else max(1.0, (self.own / self.mean) ** 0.5)
