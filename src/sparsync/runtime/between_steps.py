"""What a loop does between two steps: it throws the gradients of a pass away, or loads a state into the model and its optimizers."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync.kernels import operations as kernels
from sparsync.runtime.findings import with_inner
from sparsync.runtime.parameter_names import plain_name

_ROW = 3  # steps one after the other with such a pass before each: the loop uses these gradients, as where each loss has a pass
_MOST = 16  # such passes without a step: other optimizers step


def current_pass() -> int:
    """Return the number of the backward pass that runs in this thread, or -1."""
    # HACK: torch has no public function for this. Price: it may change with torch; tests skip steps and accumulate.
    return torch._C._current_graph_task_id()


class BackwardPasses:
    """Counts the backward passes since the last step whose gradients were thrown away: where the next pass finds none, or zeros.

    Gradients that are kept accumulate, also zeros, where `begins` was told so of the pass. `gradients` returns what the parameters have.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor | None]]) -> None:
        self._gradients = gradients
        self._task = -1  # of autograd, the last one
        self._came, self.thrown_away = False, 0
        self._nonzero: Tensor | None = None  # whether the first gradient of the pass was; None: not known
        self._row: int | None = None  # steps with such a pass before them, up to the last step; None: no step was seen

    @property
    def skips(self) -> bool:
        """Whether such a pass is a step that the loop has skipped, and not what it does always."""
        return self._row is not None and self._row < _ROW and self.thrown_away <= _MOST

    def stepped(self) -> None:
        """Begin again: a step was taken, or has failed."""
        self._row = (self._row or 0) + 1 if self.thrown_away else 0
        self._came, self.thrown_away = False, 0

    def came(self, kept: bool = True) -> None:
        """Note that there are gradients that may be thrown away; not `kept`: nothing is to be done about it."""
        self._came = kept

    def begins(self, gradient: Tensor | None = None) -> bool:
        """Note that `gradient` is about to be accumulated; return whether a pass begins, and those of the last one were thrown away."""
        task = current_pass()
        if task in (self._task, -1):
            return False
        self._task = task
        thrown_away = self.gone()
        self._nonzero = None if gradient is None else _values(gradient).any()  # no host sync here
        return thrown_away

    def gone(self) -> bool:
        """Return whether the gradients of the last pass were thrown away since the last call. Not inside a pass."""
        thrown_away = self._came and not self._kept()
        self.thrown_away += thrown_away
        self._came = self._came and not thrown_away
        return thrown_away

    def _kept(self) -> bool:
        """Return whether any gradient is there and not zero, or as it came. A host sync for each zero, and for the first other one."""
        gradients = [_values(each) for each in self._gradients() if each is not None]
        if gradients and self._nonzero is not None and not bool(self._nonzero):
            return True  # as of a batch without any loss
        return any(bool(each.any()) for each in gradients)


class Loads:
    """Notes what `load_state_dict` of `modules` and of `optimizers` has loaded since the last `forget`.

    A model counts as loaded where its state has all its trained parameters, and `weights()` has other bits afterwards: weights that are put
    aside and restored do not. An optimizer counts with a model, or by itself where it has other moments afterwards: a state that is loaded
    again for another rate has the same. Where a state of the handle itself was loaded too, nothing counts. Is referred to weakly.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], weights: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._weights = weights
        self.forget()
        # Any: torch's handles of hooks
        self._hooks: list[Any] = [each.register_load_state_dict_pre_hook(_BeforeLoad(self)) for each in modules]
        for each in (inner for given in optimizers for inner in with_inner(given)):
            if "_optimizer_load_state_dict_post_hooks" in vars(each):  # not where a wrapper passes on to the one inside
                self._hooks.append(each.register_load_state_dict_pre_hook(_BeforeOptimizerLoad(self)))
                self._hooks.append(each.register_load_state_dict_post_hook(_AfterLoad(self)))

    def forget(self) -> None:
        """Begin again: a step was taken."""
        self._before: Tensor | None = None  # digests of the weights ahead of the first load
        self._moments = list[tuple[weakref.ref[Optimizer], list[object]]]()
        self._optimizer = self._handle = self._new = False

    @property
    def of_handle(self) -> bool:
        """Whether a state of the handle itself was loaded."""
        return self._handle

    def take_new(self) -> bool:
        """Return whether anything was loaded since the last call that may count."""
        new, self._new = self._new, False
        return new and not self._handle

    def found(self) -> list[str]:
        """Return what was loaded: "model", "optimizer", both or neither."""
        if self._handle:
            return []
        # A host sync, after a load only.
        model = self._before is not None and not self._before.equal(self._digests())
        others = any((each := known()) is not None and _moments_of(each) != before for known, before in self._moments)
        optimizer = self._optimizer and (model or others)
        return ["model"] * model + ["optimizer"] * optimizer

    def note_model(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Note that `state` is about to be loaded into the model."""
        owned, known = set[int](), set[int]()
        for name, each in module.named_parameters(remove_duplicate=False):
            if each.requires_grad:
                owned.add(id(each))
                # Of names that share a parameter, one is enough.
                if prefix + name in state or prefix + plain_name(name) in state:
                    known.add(id(each))
        if owned == known:
            self._before, self._new = self._digests() if self._before is None else self._before, True

    def note_moments(self, optimizer: Optimizer) -> None:
        """Note that a state is about to be loaded into an optimizer."""
        if not any(known() is optimizer for known, _ in self._moments):
            self._moments.append((weakref.ref(optimizer), _moments_of(optimizer)))

    def note_optimizer(self) -> None:
        """Note that a state of an optimizer was loaded."""
        self._optimizer = self._new = True

    def note_handle(self) -> None:
        """Note that a state of the handle was loaded, with what waited when it was saved."""
        self._handle = True

    def close(self) -> None:
        """Note nothing from here on. Safe to call again."""
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def _digests(self) -> Tensor:
        weights = list(self._weights())
        return kernels.digests(weights) if weights else torch.empty(0)


def _moments_of(optimizer: Optimizer) -> list[object]:
    """Return what the optimizer keeps of each parameter: numbers, digests of tensors, and of anything else which object it is."""
    found = list[object]()
    for each in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for value in optimizer.state[each].values() if each in optimizer.state else ():
            local = value.to_local() if hasattr(value, "to_local") else value
            plain = local if isinstance(local, (int, float, str)) else id(local)
            found.append(kernels.digests([local]).item() if type(local) is Tensor else plain)
    return found


class _Hook:
    """Refers to its `loads` weakly. A copy, by `copy` or `pickle` of a model, does nothing."""

    def __init__(self, loads: Loads | None = None) -> None:
        self._loads: Callable[[], Loads | None] = (lambda: None) if loads is None else weakref.ref(loads)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class _BeforeLoad(_Hook):
    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
        if (loads := self._loads()) is not None:
            loads.note_model(module, state, prefix)


class _BeforeOptimizerLoad(_Hook):
    def __call__(self, optimizer: Optimizer, _: object) -> None:
        if (loads := self._loads()) is not None:
            loads.note_moments(optimizer)


class _AfterLoad(_Hook):
    def __call__(self, _: Optimizer) -> None:
        if (loads := self._loads()) is not None:
            loads.note_optimizer()


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
