"""Hooks on the optimizers of local steps: one call before each optimizer step, and one after all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from sparsync.exchanges.training_loop import (
    Arguments,
    Hidden,
    closure_of,
    hide_gradients,
    put_back,
    step_whatever_is_found,
    supports_scaling,
    unscale_,
    with_closure,
)
from sparsync.runtime.findings import with_inner


class OwnOptimizers:
    """Calls `before` ahead of every optimizer step, and `after` once all `optimizers` have stepped, until `release`.

    An optimizer inside another one steps with it. A loss scaler (`scaled`) is made to call `step` also if it has found NaN or Inf on this
    rank: the weights stay, and the step counts, as it does on the other ranks.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], before: Callable[[], None], after: Callable[[], object], scaled: bool
    ) -> None:
        self._prepare, self._all_stepped = before, after
        members = [_with_hooks(each) for each in optimizers]
        self.unseen = [type(each).__name__ for each, own in zip(optimizers, members, strict=True) if not own]
        self._place = {id(each): place for place, own in enumerate(members) for each in own}
        self._running: list[list[Optimizer]] = [[] for _ in optimizers]  # the outer ones first
        self._stepped: set[int] = set()  # places, since `after` was called
        self._hidden: dict[int, Hidden] = {}
        self._told: dict[int, dict[str, Any]] = {}  # what a loss scaler has set on an optimizer, during its step
        # Any: torch types the result as a function of named arguments
        before_step: Any = torch.compiler.disable(self._before)
        after_step: Any = torch.compiler.disable(self._after)
        every = [each for own in members for each in own]
        self._hooks = [each.register_step_pre_hook(before_step) for each in every]
        self._hooks += [each.register_step_post_hook(after_step) for each in every]
        # Optimizers that do not divide their gradients by the loss scale: done here.
        self._scaled = [each for each in every if scaled and not supports_scaling(each)]
        self._scaling = step_whatever_is_found(self._scaled)

    def release(self) -> None:
        """Call nothing from here on."""
        for hook in self._hooks:
            hook.remove()
        self._scaling()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        running = self._running[self._place[id(optimizer)]]
        if optimizer in running:  # its last step has raised
            del running[running.index(optimizer) :]
        running.append(optimizer)
        self._prepare()
        if hasattr(optimizer, "found_inf") and optimizer in self._scaled:
            unscale_(optimizer)
            # Optimizers that do not divide by the scale refuse these attributes.
            told = {name: vars(optimizer).pop(name) for name in ("found_inf", "grad_scale")}
            self._told[id(optimizer)] = told
            if bool(told["found_inf"]):  # a host sync
                self._hidden[id(optimizer)] = hide_gradients(optimizer)
        closure = closure_of(args, kwargs)
        return (args, kwargs) if closure is None else with_closure(args, kwargs, lambda: self._evaluated(closure))

    def _evaluated(self, closure: Callable[[], Any]) -> Any:  # Any: the loss
        loss = closure()
        self._prepare()  # it may have evaluated the model
        return loss

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        put_back(self._hidden.pop(id(optimizer), []))
        vars(optimizer).update(self._told.pop(id(optimizer), {}))
        running = self._running[place := self._place[id(optimizer)]]
        del running[running.index(optimizer) :]
        if not running:
            self._stepped.add(place)
        if len(self._stepped) == len(self._running):
            self._stepped.clear()
            self._all_stepped()


def _with_hooks(optimizer: Optimizer) -> list[Optimizer]:
    """List the optimizers that run torch's step hooks, among this one and those inside it."""
    # Fabric's optimizer shares the hooks of the inner one, which steps.
    hooks = [(vars(each).get("_optimizer_step_pre_hooks"), each) for each in with_inner(optimizer)]
    return list({id(held): each for held, each in hooks if held is not None}.values())
