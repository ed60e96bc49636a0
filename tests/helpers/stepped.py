"""A handle that is stepped by hand in a LocalWorld, to test checkpoints without processes or a training model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsync import Bucket
from sparsync.base.scheme import Scheme
from sparsync.core import Comm, generator, laid_out
from sparsync.runtime.comparison import Comparison
from sparsync.runtime.handle import Handle
from sparsync.runtime.rescaling import ResidualRescaler
from sparsync.schemes import TopK

SHAPES = {"weight": (4, 5), "bias": (5,)}


class Stepped(Handle):
    """The handle of a model of some parameters, whose steps reduce gradients of small whole numbers."""

    def __init__(self, comm: Comm, scheme: Scheme | None = None, shapes: Mapping[str, Any] = SHAPES) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
        scheme = TopK(0.1) if scheme is None else scheme
        names = {id(each): name for name, each in self._named()}
        super().__init__(scheme, comm, ResidualRescaler(names), Comparison([], names, None, every=0))

    def step(self, count: int = 1) -> "Stepped":
        rank, _ = self.place
        for _ in range(count):
            self._step += 1
            layout = laid_out((name, each.shape) for name, each in self._named())
            drawn = generator(rank, "gradient", self._step)
            grad = torch.randint(-8, 9, (layout[-1].span.stop,), generator=drawn).float()
            self._connection.reduce(Bucket("all", grad, self._step, layout), self.state)
            self._connection.end_step()
        return self

    @property
    def residual(self) -> Tensor:
        """This rank's whole residual; zero if there is none."""
        held = self.state_dict()["scheme"]["residual"]
        return torch.cat([held.get(name, torch.zeros(each.numel())) for name, each in self._named()])

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())
