"""Has an optimizer's `step` do what a step method does, so that a training loop need not change.

The optimizer stays what the loop, its schedules and its loss scaler know. In front of its own `step` the gradients of all ranks become
one step of the weights; then it finds no gradient, and does nothing. Afterwards the gradients are there again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

_SUPPORTS_SCALING = (
    "_step_supports_amp_scaling"  # torch's name: a scaler then calls `step` also where it found NaN or Inf
)


class TakenOptimizer:
    """Calls `take_step` in place of `optimizer.step`, until `release`. `take_step` returns whether all ranks skipped the step.

    `scaler` is the one that scales the loss, where there is one: it learns what other ranks found.
    """

    def __init__(self, optimizer: Optimizer, take_step: Callable[[], bool], scaler: GradScaler | None = None) -> None:
        self._optimizer, self._take_step, self._scaler = optimizer, take_step, scaler
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        before: Any = torch.compiler.disable(
            self._before
        )  # Any: torch types what it returns as a function of named arguments
        after: Any = torch.compiler.disable(self._after)
        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        setattr(optimizer, _SUPPORTS_SCALING, True)

    def release(self) -> None:
        """Let the optimizer take its own steps from here on."""
        for hook in self._hooks:
            hook.remove()
        vars(self._optimizer).pop(_SUPPORTS_SCALING, None)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # Any: as torch's hooks have them
        args, kwargs = _with_closure_called(args, kwargs)
        self._unscale()
        skipped = self._take_step()
        if skipped and self._scaler is not None:
            self._tell_scaler(self._scaler)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None
        return args, kwargs

    def _after(self, *_: object) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _unscale(self) -> None:
        """Divide the gradients by the loss scale, where a scaler leaves that to the optimizer."""
        if not hasattr(self._optimizer, "found_inf"):
            return
        if self._scaler is None:
            raise RuntimeError(
                "a GradScaler calls this optimizer, and each rank's has found its own NaN and Inf; pass it, so that they agree: "
                "sparsync.attach(..., scaler=scaler)"
            )
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is None:
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale.double().reciprocal().to(parameter.grad))

    def _tell_scaler(self, scaler: GradScaler) -> None:
        """Have the scaler lower its scale on all ranks, also where this rank's gradient was finite."""
        # HACK: torch has no public function for this. Price: a name that may change with torch; tests call it with NaN on one rank.
        for found in scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"].values():
            found.fill_(1.0)


def _with_closure_called(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # Any: those of `optimizer.step`
    """Call the closure among the arguments of `step`, which makes the gradients, and put one that returns its loss in its place."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}
