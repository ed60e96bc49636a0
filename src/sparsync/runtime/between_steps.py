"""Between two steps of a handle, the training loop may skip a step, load an earlier state, or save one: what follows for the residuals.

`Handle` adds what a user calls, and `Restorable` what is saved.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Notes what `load_state_dict` of `modules` and of `optimizers` has loaded since the last `forget`. The hooks refer to it weakly.

    A model counts if the state has all its trained parameters and `weights()` has other bits afterwards, which excludes weights that are
    put aside and restored. An optimizer counts with a model, or alone if it has other moments afterwards, which excludes a state that is
    loaded again for another rate. If a state of the handle itself was loaded too, nothing counts.
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
        """Return whether anything that may count was loaded since the last call."""
        new, self._new = self._new, False
        return new and not self._handle

    def found(self) -> list[str]:
        """Return which were loaded: "model", "optimizer", both or neither."""
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
        """Note that a state of the handle was loaded, with its residuals."""
        self._handle = True

    def close(self) -> None:
        """Note nothing from here on. Safe to call again."""
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def _digests(self) -> Tensor:
        weights = list(self._weights())
        return kernels.digests(weights) if weights else torch.empty(0)


class StepBoundary:
    """The state of `scheme` on one model and rank, and the connection that reduces with it.

    `part` names the part of the model that this rank's worker group has, such as "shard0of2"; "" is all of it. `module` is the model, if
    known, and `driven` its parameters that this handle trains, on an `axis` of FSDP2.
    """

    origin = "sparsync.attach"  # what the user called for this handle
    integration = "gradients"  # what is exchanged, which gives residuals their units

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
        exchanges_gradients = self.integration == "gradients"  # other users learn of what is not finite from the handle
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
            rescaler.clippings[0].passes = BackwardPasses(partial(_gradients_of, weakref.ref(module)))
            begins = partial(_note_pass, weakref.ref(self))
            self._model_hooks += [each.register_hook(begins) for _, each in driven]
        weakref.finalize(self, _remove, self._model_hooks).atexit = False
        self._loads, self._told_of_loads = self._loads_of(module, comparison.optimizers), False
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._step = -1
        self._detached = False
        self._reports = ReportLog()
        # When nothing refers to the handle any more. Not at exit, where torch may have ended before.
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
        """Whether the handle was closed or detached, so that another one may drive its model."""
        return self._detached or self._connection.closed

    def layout(self) -> dict[str, list[int]]:
        """Return the shape of each parameter of the model by name; {} if the model is not known."""
        model = vars(self).get("model")
        return {} if model is None else {name: list(each.shape) for name, each in named_parameters(model)}

    def _check_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this handle is detached; attach again, with sparsync.attach(model, scheme)")

    def _end_watching(self) -> None:
        """Watch neither model nor optimizer any more. Safe to call again."""
        self._rescaler.close()
        self._loads.close()
        _remove(self._model_hooks)

    def _settle(self) -> None:
        """Make the scheme's state that of a whole step, as far as the optimizer has applied it."""
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
            self._connection.settle()  # not later: buckets of this pass may be on their way
        self._rescaler.pass_begins(self._connection.failed)

    def _loads_of(self, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> Loads:
        """Watch the states that are loaded into the model and its optimizers."""
        if module is None:
            return Loads([], optimizers, list)
        inside = [module.get_submodule("_orig_mod")] if hasattr(module, "_orig_mod") else []  # of torch.compile
        return Loads([module, *inside], optimizers, partial(_trained_of, weakref.ref(module)))

    def _go_back(self, last: int) -> list[str]:
        """Drop residuals if the model or an optimizer, and not this handle, was given another state since the step `last`.

        Call it on all ranks before anything of the next step is sent. Returns what was loaded, if anything was dropped.
        """
        found = self._loads.found() if last >= 0 and self._waits() else []
        if not found:
            return []
        self._drop_held("optimizer" in found)
        if self._told_of_loads:
            return found
        self._told_of_loads = True
        warn_of(
            Finding(
                f"a state of the {' and of the '.join(found)} was loaded after step {last}, and none of the handle: what this rank "
                "held back for later steps is of other weights, and was dropped",
                "where the loop resumes, load the handle's state too, by sparsync.checkpoint.load or handle.load_state_dict; where it "
                "starts again from earlier weights, all is well",
            )
        )
        return found

    def _waits(self) -> bool:
        """Return whether this handle has anything that belongs to the steps before. The same on all ranks."""
        return self.state.has_residual

    def _drop_held(self, moments: bool) -> None:
        """Forget what waits, as if no step had been taken, and with `moments` also those of the optimizer, if this handle has them."""
        self._settle()
        self.state.load_state_dict(with_held(self.state.state_dict(), None))
        self._rescaler.restart()


def held_in(state: Part) -> dict[str, Any]:
    """Return what a scheme's state holds back: vectors by kind and parameter name."""
    return {key: each for key, each in state.items() if key not in TABLES}


def with_held(state: Part, held: Part | None) -> dict[str, Any]:
    """Return the state of a scheme with what is `held` back, of the same scheme; None: with nothing that a rank has alone."""
    found = {key: each for key, each in state.items() if key in TABLES}
    return {**found, **held} if held is not None else _without_own(found)


def _without_own(state: Part) -> dict[str, Any]:
    inner = {key: _without_own(each) for key, each in state.get("schemes", {}).items()}
    found = {key: each for key, each in state.items() if key != "own"}
    return {**found, "schemes": inner} if inner else found


def _remove(hooks: Sequence[Any]) -> None:  # Any: torch's handles of hooks
    for each in hooks:
        each.remove()


def _note_pass(handle: "weakref.ref[StepBoundary]", _: Tensor) -> None:
    if (found := handle()) is not None:
        found._pass_begins()


def _gradients_of(module: Callable[[], nn.Module | None]) -> Iterator[Tensor | None]:
    """Return this rank's part of the gradients of a module."""
    found = module()
    # Any: a DTensor may be among them.
    gradients: Any = () if found is None else (each.grad for _, each in trained(found))
    return (each.to_local() if hasattr(each, "to_local") else each for each in gradients)


def _trained_of(module: Callable[[], nn.Module | None]) -> list[Tensor]:
    """Return this rank's part of the trained parameters of a module."""
    found = module()
    # Any: a DTensor may be among them.
    values: list[Any] = [each.detach() for _, each in trained(found)] if found is not None else []
    return [each.to_local() if hasattr(each, "to_local") else each for each in values]


def _moments_of(optimizer: Optimizer) -> list[object]:
    """Return the optimizer's state of each parameter: numbers, digests of tensors, and the identity of anything else."""
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
