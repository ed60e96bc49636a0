"""What gradients are in terms of, and residuals have to follow."""

from collections.abc import Mapping

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


class Terms:
    """Each parameter's learning rate, and the loss scale.

    Rates are those of `optimizer`, the scale is that of `scaler`, a torch.amp.GradScaler; None: not followed.
    """

    def __init__(self, optimizer: Optimizer | None = None, scaler: GradScaler | None = None) -> None:
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"scaler takes a torch.amp.GradScaler, got {type(scaler).__name__}")
        self._optimizer = optimizer
        self._scaler = scaler
        self.rates: dict[str, float] = {}
        self.scale: float | None = None

    def factors(self, names: Mapping[int, str]) -> dict[str, float]:
        """What to multiply each parameter's residual by: old rate / new rate, so that rate * residual stays the same, and new scale / old.

        A rate of zero applies nothing, so it leaves the residual as it is until a rate comes that does.
        """
        changed = self._by_scale(names)
        for name, rate in self._rates_of(names):
            before = self.rates.get(name, rate)
            if before != rate:
                changed[name] = changed.get(name, 1.0) * before / rate
            self.rates[name] = rate
        return changed

    def _by_scale(self, names: Mapping[int, str]) -> dict[str, float]:
        if self._scaler is None:
            return {}
        scale = float(self._scaler.get_scale())  # a host sync on CUDA
        before, self.scale = self.scale or scale, scale
        return dict.fromkeys(names.values(), scale / before) if before != scale else {}

    def _rates_of(self, names: Mapping[int, str]) -> list[tuple[str, float]]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        named = ((names.get(id(each)), float(group["lr"])) for group in groups for each in group["params"])
        return [(name, rate) for name, rate in named if name is not None and rate != 0.0]
