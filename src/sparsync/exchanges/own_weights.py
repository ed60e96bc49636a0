"""A rank's own weights, of forms below 4 bits and of local steps: which weights a pass uses, and what goes wrong with them.

With `Steps(keep=0.0)` nothing here is called: parameters are the common weights.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.exchanges.training_loop import Replica
from sparsync.exchanges.weights import Weights
from sparsync.runtime.parameter_names import plain_name

WITHOUT = "attach with bits=4.6, or with exchange=sparsync.Steps(keep=0.0), with which all ranks train the same weights"
CURE_OF_SET = (
    "load the same weights on all ranks before the same step; compute what follows from the weights, such as their average (EMA), inside "
    "`with handle.averaged():`, for outside of it these are a rank's own; or, where the loop itself changes them after each step, as by "
    f"clamp_, {WITHOUT}, and change them in the same way on all ranks"
)
CURE_OF_UNEXCHANGED = (
    "where the loop computes it from the weights, as an average (EMA), a momentum encoder or a merge does, it has used a rank's own: do "
    f"that inside `with handle.averaged():`; or, where the forward pass does it, {WITHOUT}"
)


class ShownWeights:
    """Shows the `weights` of `replica`: own ones in a forward pass that trains, common ones in any other, and in `state_dict()`.

    A forward pass trains where gradients are recorded, also in evaluation mode: some loops train in it, for BatchNorm to stay as it is.
    `set_outside` has the names of weights that were set from outside, and `adopt` takes those for the common ones; weights that are set
    while the common ones are shown become both. `begins` is called before each pass that trains. Inside `averaged` nothing changes.
    """

    def __init__(
        self,
        replica: Replica,
        weights: Weights,
        set_outside: Callable[[], Collection[str]],
        adopt: Callable[[], object],
        begins: Callable[[], object] = lambda: None,
    ) -> None:
        self._replica, self._weights = replica, weights
        self._set_outside, self._adopt, self._begins = set_outside, adopt, begins
        self._averaging = False  # `averaged` has the common weights in the model
        self._own: list[Tensor] | None = None  # put aside while the common ones are in the model
        # Any: torch has not typed what it returns
        self.before_forward: Any = torch.compiler.disable(self._before_forward)
        self.after_forward: Any = torch.compiler.disable(self._after_forward)
        self._hooks = [
            *(
                each.register_forward_pre_hook(_BeforeForward(self), prepend=True)  # before FSDP2 gathers
                for each in replica.called
            ),
            *(each.register_forward_hook(_AfterForward(self)) for each in replica.bodies),
            *(each.register_state_dict_post_hook(_AfterStateDict(self)) for each in replica.bodies),
        ]
        self._left = weakref.finalize(self, _leave_common, weights)  # where the handle is dropped, and not closed
        self._left.atexit = False

    @property
    def common(self) -> bool:
        """Whether the common weights are in the model."""
        return self._own is not None

    def check(self) -> None:
        """Have the own weights in the model. Raises RuntimeError inside `averaged`."""
        if self._averaging:
            raise RuntimeError(
                f"the common weights are in the model; leave `with handle.averaged()` first; or {WITHOUT}"
            )
        self.show(common=False)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the common weights into the model, and the own ones back afterwards."""
        self._averaging = True
        try:
            with _common_in_model(self._weights):
                yield
        finally:
            self._averaging = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self, common: bool) -> None:
        """Have the common weights in the model, or the own ones."""
        if common == self.common or self._averaging:
            return
        self._adopt()
        buckets = self._weights.buckets
        if common:
            self._own = [each.own() for each in buckets]
        own, self._own = self._own or [], self._own if common else None
        for bucket, weights in zip(buckets, own, strict=True):
            bucket.write(bucket.common if common else weights)
        self._replica.written()
        self._weights.note_written()

    def take(self, names: Collection[str]) -> None:
        """Take what is in the model of these parameters, which were set from outside, for the own weights that are put aside."""
        if self._own is not None:
            for bucket, own in zip(self._weights.buckets, self._own, strict=True):
                bucket.copy_own_(own, names)

    def without_own(self, names: Iterable[str]) -> list[str]:
        """Return the names without those of parameters that have the own weights again, which are put aside."""
        own = self._own
        return list(names) if own is None else [each for each in names if not self._weights.shows(each, own)]

    def _before_forward(self, module: nn.Module) -> None:
        """Show what a forward pass of `module` is to use; a copy of the model has weights that nothing is known of."""
        if not any(module is each for each in self._replica.called):
            return
        if _records():
            self._check_unwrapped()
            if not self._averaging and self._weights.was_written():
                self._adopt()
            self.show(common=False)
            if not self._averaging:
                self._begins()
        # What the loop evaluates in the place of the weights, such as their average, it may put back to what was there.
        elif not self.common and not self._averaging and not self._set_outside():
            self.show(common=True)

    def _after_forward(self, output: object) -> None:
        """Look at the beginning of the backward pass whether the own weights are in the model, if this pass has used them."""
        if _records() and not self.common and not self._averaging:
            for each in _tensors(output):
                if each.grad_fn is not None:
                    each.register_hook(partial(_refuse_common, weakref.ref(self)))

    def _check_unwrapped(self) -> None:
        """Raise RuntimeError where DDP reduces the gradients of a model that was attached without it."""
        # HACK: torch has no public function for this. Price: a name that may change with torch; a test wraps an attached model.
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or any(wrapper is each for each in self._replica.called):
            return
        ignored = wrapper.parameters_to_ignore
        reduced = {
            id(each) for name, each in wrapper.module.named_parameters() if each.requires_grad and name not in ignored
        }
        if any(id(each) in reduced for each in self._replica.owned.values()):
            raise RuntimeError(
                "DistributedDataParallel wraps a model that was attached without it, and reduces all gradients whole besides; call "
                "detach() on the handle, and attach the wrapped model: sparsync.attach(DistributedDataParallel(model), ...)"
            )

    def put_common(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:  # Any: as `state_dict` has it
        """Put the common weights into what `module.state_dict()` returned, in the types of the parameters."""
        if not any(module is each for each in self._replica.bodies) or self._averaging:
            return
        as_set = self._set_outside()
        names = {id(each): name for name, each in self._replica.owned.items()}
        common, values = dict(self._weights.common()), dict[int, Tensor]()
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            key = next((prefix + each for each in (full_name, plain_name(full_name)) if prefix + each in state), None)
            # Those of keep_vars=True are the model's.
            if key is None or id(parameter) not in names or isinstance(state[key], nn.Parameter):
                continue
            name = names[id(parameter)]
            if name in as_set:
                continue
            if id(parameter) not in values:  # names that share a parameter share its value
                values[id(parameter)] = self._replica.whole(name, common[name].to(parameter.dtype, copy=True))
            state[key] = values[id(parameter)]

    def release(self) -> None:
        """Leave the common weights in the model, for good."""
        self.show(common=True)
        self._own = None
        self._left.detach()
        for hook in self._hooks:
            hook.remove()


def _records() -> bool:
    """Return whether gradients are recorded now."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _leave_common(weights: Weights) -> None:
    """Leave the common weights in a model that nothing trains any more."""
    with torch.no_grad():
        for bucket in weights.buckets:
            bucket.write(bucket.common)


def _refuse_common(shown: "weakref.ref[ShownWeights]", _: Tensor) -> None:
    """Raise RuntimeError where a backward pass of own weights finds the common ones in the model."""
    if (found := shown()) is not None and found.common:
        raise RuntimeError(
            "between a forward pass that trains and its backward pass came another forward pass of the model, without gradients, such as "
            "that of a reference or a target, which uses the weights that all ranks have in common; make that one before, or after the "
            f"backward pass, also inside `with handle.averaged():`; or {WITHOUT}"
        )


def _tensors(output: object) -> Iterator[Tensor]:
    """Find the tensors in what a module returns, also in mappings, sequences and dataclasses."""
    if isinstance(output, Tensor):
        yield output
        return
    held = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    if is_dataclass(output) and not held:
        held = vars(output).values()
    for each in held:
        yield from _tensors(each)


class _Hook:
    """Refers to its `shown` weakly. A copy, by `copy` or `pickle` of a model, does nothing."""

    def __init__(self, shown: ShownWeights | None = None) -> None:
        self._shown: Callable[[], ShownWeights | None] = (lambda: None) if shown is None else weakref.ref(shown)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class _BeforeForward(_Hook):
    def __call__(self, module: nn.Module, _: object) -> None:
        if (shown := self._shown()) is not None:
            shown.before_forward(module)


class _AfterForward(_Hook):
    def __call__(self, _: nn.Module, __: object, output: object) -> None:
        if (shown := self._shown()) is not None:
            shown.after_forward(output)


class _AfterStateDict(_Hook):
    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: object
    ) -> None:  # Any: as `state_dict` has it
        if (shown := self._shown()) is not None:
            shown.put_common(module, state, prefix)


def frozen_and_copies(replica: Replica) -> list[tuple[str, Tensor]]:
    """Return what `Replica.frozen` does, and the buffers that copy trained parameters, such as their average, with their names.

    These have the shape of a trained parameter, and a name that ends in that one's: "target.weight" or "ema_weight" beside
    "encoder.weight". Others, such as BatchNorm's running means, follow from a rank's own data and may differ.
    """

    def copies_one(name: str, buffer: Tensor) -> bool:
        own_data = name.rpartition(".")[2].startswith("running_")
        return not own_data and any(name.endswith(own) and buffer.shape == shape for own, shape in shapes)

    shapes = {(name.rpartition(".")[2], each.shape) for name, each in replica.owned.items()}
    buffers = ((plain_name(name), each) for name, each in replica.module.named_buffers() if each.is_floating_point())
    copies = [(name, each) for name, each in buffers if copies_one(name, each)]
    return [*replica.frozen(), *copies]


@contextmanager
def _common_in_model(weights: Weights) -> Iterator[None]:
    """Put the common weights into the model, and the own ones back afterwards, with the same bits.

    Raises RuntimeError where the block has changed the weights, which would be lost.
    """
    own = [each.own() for each in weights.buckets]
    try:
        for bucket in weights.buckets:
            bucket.write(bucket.common)
        weights.note_written()
        yield
        if changed := weights.changed():
            raise RuntimeError(
                f"{', '.join(changed[:3])} got other values inside averaged(), which ends with a rank's own weights and would lose "
                "them; load weights outside of it, or put the old ones back inside; call requires_grad_(False) before attach on what "
                f"is not trained, such as an average (EMA) of the weights, and it keeps its values; or {WITHOUT}"
            )
    finally:
        for bucket, held in zip(weights.buckets, own, strict=True):
            bucket.write(held)
        weights.note_written()
