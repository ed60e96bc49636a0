"""What gradients are in terms of, and residuals have to follow."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


@dataclass
class At:
    """What the residuals of one scheme were last put in terms of."""

    rates: dict[str, float] = field(default_factory=dict)  # by parameter name
    scale: float | None = None  # None: nothing is kept back yet


class Terms:
    """Each parameter's learning rate, and the loss scale.

    Rates are those of `optimizer`; without one they are not followed. The scale is that of `scaler`, a torch.amp.GradScaler, and 1 without.
    """

    def __init__(self, optimizer: Optimizer | None = None, scaler: GradScaler | None = None) -> None:
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"scaler takes a torch.amp.GradScaler, got {type(scaler).__name__}")
        self._optimizer = optimizer
        self._scaler = scaler
        self.at = At()

    def go_on(self, scheme: object) -> None:
        """From now on these are the terms of `scheme`, as another handle, of another model or trainer, may have left them."""
        key = id(scheme)
        if key not in _OF_SCHEMES:
            _OF_SCHEMES[key] = self.at
            weakref.finalize(scheme, _OF_SCHEMES.pop, key)
        self.at = _OF_SCHEMES[key]

    def factors(self, names: Mapping[int, str]) -> dict[str, float]:
        """What to multiply each parameter's residual by: old rate / new rate, so that rate * residual stays the same, and new scale / old.

        A rate of zero applies nothing, so it leaves the residual as it is until a rate comes that does.
        """
        changed = self._by_scale(names)
        for name, rate in self._rates_of(names):
            before = self.at.rates.get(name, rate)
            if before != rate:
                changed[name] = changed.get(name, 1.0) * before / rate
            self.at.rates[name] = rate
        return changed

    def _by_scale(self, names: Mapping[int, str]) -> dict[str, float]:
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())  # a host sync on CUDA
        before, self.at.scale = self.at.scale or scale, scale
        return dict.fromkeys(names.values(), scale / before) if before != scale else {}

    def _rates_of(self, names: Mapping[int, str]) -> list[tuple[str, float]]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        named = ((names.get(id(each)), float(group["lr"])) for group in groups for each in group["params"])
        return [(name, rate) for name, rate in named if name is not None and rate != 0.0]


_OF_SCHEMES: dict[int, At] = {}  # by id, until the scheme is gone: equal schemes are not the same one
