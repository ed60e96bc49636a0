"""Keeps residuals right between two steps, when the training loop skips a step, loads an earlier state, or saves one.

`Restorable` adds saving and loading, and `Handle` what a user calls.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync.base.scheme import ReduceScatterScheme, Scheme
from sparsync.base.state import TABLES
from sparsync.core import Comm
from sparsync.kernels import operations as kernels
from sparsync.runtime.comparison import Comparison
from sparsync.runtime.connection import Connection
from sparsync.runtime.findings import Finding, warn_of, with_inner
from sparsync.runtime.parameters import drive, named_parameters, plain_name, trained
from sparsync.runtime.rescaling import BackwardPasses, ResidualRescaler, current_pass
from sparsync.runtime.summary import ReportLog

Part = Mapping[str, Any]  # of a state. Any: tensors, numbers and text, nested


class Loads:
    """Notes which states `modules` and `optimizers` have loaded since the last `forget`. The hooks refer to it weakly.

    A model counts if the state has all its trained parameters and `weights()` has other bits afterwards: not if weights are put aside and
    restored. An optimizer counts together with a model, or alone if it has other moments afterwards: not if its state is loaded again for
    another rate. If a state of the handle itself was loaded too, nothing counts.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], weights: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._weights = weights
        self.forget()
        # Any: torch's handles of hooks
        note = WeakHook(self, "note_model")
        self._hooks: list[Any] = [each.register_load_state_dict_pre_hook(note) for each in modules]
        for each in (inner for given in optimizers for inner in with_inner(given)):
            if "_optimizer_load_state_dict_post_hooks" in vars(each):  # not if a wrapper passes on to another
                self._hooks.append(each.register_load_state_dict_pre_hook(WeakHook(self, "note_moments")))
                self._hooks.append(each.register_load_state_dict_post_hook(WeakHook(self, "note_optimizer")))

    def forget(self) -> None:
        """Begin again: a step was taken."""
        self._before: Tensor | None = None  # digests of the weights ahead of the first load
        self._moments = list[tuple[weakref.ref[Optimizer], list[object]]]()
        self._optimizer = self._new = False
        self.of_handle = False  # True after a state of the handle itself was loaded

    def take_new(self) -> bool:
        """Tell whether anything that may count was loaded since the last call."""
        new, self._new = self._new, False
        return new and not self.of_handle

    def found(self) -> list[str]:
        """List what was loaded: "model", "optimizer", both or neither."""
        if self.of_handle:
            return []
        # A host sync, after a load only.
        model = self._before is not None and not self._before.equal(self._digests())
        others = any((each := known()) is not None and _moments_of(each) != before for known, before in self._moments)
        optimizer = self._optimizer and (model or others)
        return ["model"] * model + ["optimizer"] * optimizer

    def note_model(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
        """Note that `state` is about to be loaded into the model."""
        owned, known = set[int](), set[int]()
        for name, each in module.named_parameters(remove_duplicate=False):
            if each.requires_grad:
                owned.add(id(each))
                # One of several tied names is enough.
                if prefix + name in state or prefix + plain_name(name) in state:
                    known.add(id(each))
        if owned == known:
            self._before, self._new = self._digests() if self._before is None else self._before, True

    def note_moments(self, optimizer: Optimizer, *_: object) -> None:
        """Note that a state is about to be loaded into an optimizer."""
        if not any(known() is optimizer for known, _ in self._moments):
            self._moments.append((weakref.ref(optimizer), _moments_of(optimizer)))

    def note_optimizer(self, *_: object) -> None:
        """Note that a state of an optimizer was loaded."""
        self._optimizer = self._new = True

    def note_handle(self) -> None:
        """Note that a state of the handle was loaded, with its residuals."""
        self.of_handle = True

    def close(self) -> None:
        """Stop watching. Safe to call again."""
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def _digests(self) -> Tensor:
        weights = list(self._weights())
        return kernels.digests(weights) if weights else torch.empty(0)


class StepBoundary:
    """The state of `scheme` on one model and rank, and the connection that reduces with it.

    `part` names the part of the model that this rank's worker group has, such as "shard0of2"; "" is the whole model. `module` is the model,
    if known, and `driven` its parameters that this handle trains, on an `axis` of FSDP2.
    """

    origin = "sparsync.attach"  # the function that the user has called
    integration = "gradients"  # names what is exchanged, and so the units of residuals

    def __init__(
        self,
        scheme: Scheme | ReduceScatterScheme,
        comm: Comm,
        rescaler: ResidualRescaler,
        comparison: Comparison,
        part: str = "",
        module: nn.Module | None = None,
        driven: Sequence[tuple[str, nn.Parameter]] = (),
        axis: str = "",
    ) -> None:
        drive(driven, self, axis)
        self._module = None if module is None else weakref.ref(module)
        self.state = scheme.start()
        rescaler.use(self.state)
        self.part = part
        self._rescaler = rescaler
        exchanges_gradients = self.integration == "gradients"  # the others learn of non-finite steps from the handle
        self._connection = Connection(
            self.state,
            comm,
            on_written=rescaler.written,
            on_rolled_back=rescaler.rolled_back if exchanges_gradients else None,
        )
        self._connection.scaled = rescaler.scaler is not None
        self._comparison = comparison
        self._connection.compare(comparison)
        self._pass = -1  # the last backward pass
        self._model_hooks: list[Any] = []  # Any: torch's handles of hooks
        if len(rescaler.clippings) == 1 and module is not None:
            rescaler.clippings[0].passes = BackwardPasses(partial(_of_trained, weakref.ref(module), "grad"))
            begins = partial(_note_pass, weakref.ref(self))
            self._model_hooks += [each.register_hook(begins) for _, each in driven]
        weakref.finalize(self, _remove, self._model_hooks).atexit = False
        self._loads, self._told_of_loads = self._loads_of(module, comparison.optimizers), False
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._step = -1
        self._detached = False
        self._reports = ReportLog()
        # For a handle without references. Not at exit, when torch may have ended already.
        weakref.finalize(self, self._connection.shut).atexit = False

    @property
    def module(self) -> nn.Module | None:
        """The model; None if it is not known, or gone."""
        return self._module and self._module()

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._place["rank"], self._place["ranks"]

    @property
    def closed(self) -> bool:
        """True once the handle was closed or detached, so that another one may drive its model."""
        return self._detached or self._connection.closed

    def layout(self) -> dict[str, list[int]]:
        """List the shape of each parameter of the model by name; {} if the model is not known."""
        model = vars(self).get("model")
        return {} if model is None else {name: list(each.shape) for name, each in named_parameters(model)}

    def _check_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this handle is detached; attach again, with sparsync.attach(model, scheme)")

    def _end_watching(self) -> None:
        """Stop watching model and optimizers. Safe to call again."""
        self._rescaler.close()
        self._loads.close()
        _remove(self._model_hooks)

    def _settle(self) -> None:
        """Bring the scheme's state to the end of a step, as far as the optimizer has applied it."""
        self._flush()
        self._rescaler.settle()
        self._rescaler.undo(self._connection.failed)

    def _flush(self) -> None:
        """Wait until the last step is reduced, and end it."""
        self._connection.end_step()
        self._connection.settle()

    def _pass_begins(self) -> None:
        """Note that a backward pass is about to add to a gradient."""
        if (task := current_pass()) != self._pass:
            self._pass = task
            self._connection.settle()  # not later: buckets of this pass may be in flight
        self._rescaler.pass_begins(self._connection.failed)

    def _loads_of(self, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> Loads:
        """Watch for states loaded into the model and its optimizers."""
        if module is None:
            return Loads([], optimizers, list)
        inside = [module.get_submodule("_orig_mod")] if hasattr(module, "_orig_mod") else []  # of torch.compile
        return Loads([module, *inside], optimizers, partial(_of_trained, weakref.ref(module), "data"))

    def _go_back(self, last: int) -> list[str]:
        """Drop residuals if the model or an optimizer, and not this handle, has loaded another state since the step `last`.

        Call it on all ranks before anything of the next step is sent. Returns what was loaded, if residuals were dropped.
        """
        loaded = self._loads.found() if last >= 0 and self._waits() else []
        if not loaded:
            return []
        self._drop_held("optimizer" in loaded)
        if self._told_of_loads:
            return loaded
        self._told_of_loads = True
        warn_of(
            Finding(
                f"a state of the {' and of the '.join(loaded)} was loaded after step {last}, and none of the handle: what this rank "
                "held back for later steps belongs to other weights, and was dropped",
                "if the loop resumes, load the handle's state too, by sparsync.checkpoint.load or handle.load_state_dict; if it starts "
                "again from earlier weights, all is well",
            )
        )
        return loaded

    def _waits(self) -> bool:
        """Tell whether this handle holds anything from earlier steps. The same on all ranks."""
        return self.state.has_residual

    def _drop_held(self, moments: bool) -> None:
        """Drop the residuals, as if no step had been taken; `moments`: also the optimizer's moments, if this handle has them."""
        self._settle()
        self.state.load_state_dict(with_held(self.state.state_dict(), None))
        self._rescaler.restart()


def held_in(state: Part) -> dict[str, Any]:
    """Take the held-back vectors from a scheme's state, by kind and parameter name."""
    return {key: each for key, each in state.items() if key not in TABLES}


def with_held(state: Part, held: Part | None) -> dict[str, Any]:
    """Replace the held-back vectors in a scheme's state by `held`, from the same scheme; None: drop all that only this rank has."""
    tables = {key: each for key, each in state.items() if key in TABLES}
    return {**tables, **held} if held is not None else _without_own(tables)


def _without_own(state: Part) -> dict[str, Any]:
    inner = {key: _without_own(each) for key, each in state.get("schemes", {}).items()}
    rest = {key: each for key, each in state.items() if key != "own"}
    return {**rest, "schemes": inner} if inner else rest


def _remove(hooks: Sequence[Any]) -> None:  # Any: torch's handles of hooks
    for each in hooks:
        each.remove()


def _note_pass(handle: "weakref.ref[StepBoundary]", _: Tensor) -> None:
    if (boundary := handle()) is not None:
        boundary._pass_begins()


def _of_trained(module: Callable[[], nn.Module | None], field: str) -> list[Any]:  # Any: tensors, DTensors or None
    """List this rank's part of "grad" or "data" of the trained parameters of a module."""
    model = module()
    values = [] if model is None else [getattr(each, field) for _, each in trained(model)]
    return [each.to_local() if hasattr(each, "to_local") else each for each in values]


def _moments_of(optimizer: Optimizer) -> list[object]:
    """Describe the optimizer's state: numbers, digests of tensors, and the identity of anything else."""
    values = list[object]()
    for each in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for value in optimizer.state[each].values() if each in optimizer.state else ():
            local = value.to_local() if hasattr(value, "to_local") else value
            plain = local if isinstance(local, (int, float, str)) else id(local)
            values.append(kernels.digests([local]).item() if type(local) is Tensor else plain)
    return values


class WeakHook:
    """Calls a method of `owner`, to which it refers weakly. In a copied or pickled model it does nothing."""

    def __init__(self, owner: object = None, method: str = "") -> None:
        self._owner: Callable[[], object] = (lambda: None) if owner is None else weakref.ref(owner)
        self._method = method

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def __call__(self, *arguments: Any) -> None:  # Any: as torch calls its hooks
        if (owner := self._owner()) is not None:
            getattr(owner, self._method)(*arguments)
