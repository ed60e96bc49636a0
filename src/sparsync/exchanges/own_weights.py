"""A rank's own weights, in forms below 4 bits and in local steps: shows them in passes that train, and guards against mix-ups.

Not used with `Steps(keep=0.0)`: there the parameters are the common weights.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sparsync.base.state import State
from sparsync.core import Comm
from sparsync.exchanges.training_loop import Replica
from sparsync.exchanges.weights import WeightBucket, Weights
from sparsync.kernels import operations as kernels
from sparsync.runtime.between_steps import WeakHook
from sparsync.runtime.parameters import plain_name

WITHOUT = "attach with bits=4.6, or with exchange=sparsync.Steps(keep=0.0), with which all ranks train the same weights"
CURE = (
    "load the same weights on all ranks before the same step; compute what follows from the weights, such as their average (EMA), a "
    "momentum encoder or a merge, inside `with handle.averaged():`, because outside of it weights differ between ranks; or, if the loop "
    f"or the forward pass itself changes weights, {WITHOUT}, and change them in the same way on all ranks"
)


class ShownWeights:
    """Shows the `weights` of `replica`: own ones in a forward pass that trains, common ones in any other and in `state_dict()`.

    A forward pass trains if gradients are recorded, also in evaluation mode: some loops train in it to freeze BatchNorm.
    `set_outside` returns the names of weights that were set from outside, and `adopt` makes these the common ones. Weights set while the
    common ones are shown become both. `begins` is called before each pass that trains. Inside `averaged` nothing changes.
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
        self._set_outside, self._take_set, self._begins = set_outside, adopt, begins
        self._averaging = False  # `averaged` has the common weights in the model
        self._own: list[Tensor] | None = None  # put aside while the common ones are in the model
        # Any: torch does not type the result
        self.before_forward: Any = torch.compiler.disable(self._before_forward)
        self._hooks = [
            *(
                each.register_forward_pre_hook(WeakHook(self, "before_forward"), prepend=True)  # before FSDP2 gathers
                for each in replica.called
            ),
            *(each.register_forward_hook(WeakHook(self, "after_forward")) for each in replica.bodies),
            *(each.register_state_dict_post_hook(WeakHook(self, "put_common")) for each in replica.bodies),
        ]

    @property
    def common(self) -> bool:
        """True while the common weights are in the model."""
        return self._own is not None

    def check(self) -> None:
        """Put the own weights into the model. Raises RuntimeError inside `averaged`."""
        if self._averaging:
            raise RuntimeError(
                f"the common weights are in the model; leave `with handle.averaged()` first; or {WITHOUT}"
            )
        self.show(common=False)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the common weights into the model, and the own ones back afterwards, with the same bits. Call `check` before.

        Raises RuntimeError if the block has changed the weights: the changes would be lost.
        """
        self.show(common=True)
        self._averaging = True
        try:
            yield
            if changed := self._weights.last_written.changed():
                raise RuntimeError(
                    f"{', '.join(changed[:3])} got other values inside averaged(), which ends with a rank's own weights and would lose "
                    "them; load weights outside of it, or put the old ones back inside; call requires_grad_(False) before attach on "
                    f"untrained parameters, such as an average (EMA) of the weights, and they keep their values; or {WITHOUT}"
                )
        finally:
            self._averaging = False
            if self.common:  # not after `release` inside the block, which leaves the common weights
                self._put(common=False)

    def show(self, common: bool) -> None:
        """Put the common weights into the model, or the own ones."""
        if common != self.common and not self._averaging:
            self._take_set()
            self._put(common)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _put(self, common: bool) -> None:
        buckets = self._weights.buckets
        if common:
            self._own = [each.own() for each in buckets]
        own, self._own = self._own or [], self._own if common else None
        for bucket, weights in zip(buckets, own, strict=True):
            bucket.write(bucket.common if common else weights)
        self._replica.written()
        self._weights.note_written()

    def take(self, names: Collection[str]) -> None:
        """Copy these parameters, which were set from outside, into the own weights that are put aside."""
        if self._own is not None:
            for bucket, own in zip(self._weights.buckets, self._own, strict=True):
                bucket.copy_own_(own, names)

    def adopt(
        self, idle: Collection[str], take: Callable[[list[str]], object], write: Callable[[frozenset[str]], object]
    ) -> list[str]:
        """Make weights that were set from outside the common ones, by `take`, and return their names.

        If they are the common ones already, `write` writes the own weights again; it gets the names of the parameters to leave.
        """
        changed, own_shown = self._set_outside(), not self.common
        loaded = [name for name in changed if name not in idle and self._weights.shows_common(name)]
        others = [name for name in changed if name not in loaded]
        take(others)
        self.take(others)
        if loaded and own_shown:
            write(frozenset(self._weights.trained).difference(loaded))
        return others

    def without_own(self, names: Iterable[str]) -> list[str]:
        """Leave out the names of parameters that again hold the own weights that were put aside."""
        own = self._own
        return list(names) if own is None else [each for each in names if not self._weights.shows(each, own)]

    def _before_forward(self, module: nn.Module, _: object) -> None:
        """Show the weights for a forward pass of `module`, unless it is a copy of the model, whose weights are not ours."""
        if not any(module is each for each in self._replica.called):
            return
        if _records():
            if not self._averaging and self._weights.last_written.was_written():
                self._take_set()
            self.show(common=False)
            if not self._averaging:
                self._begins()
        # A loop that evaluates other values, such as an average of the weights, may put the old ones back.
        elif not self.common and not self._averaging and not self._set_outside():
            self.show(common=True)

    def after_forward(self, _: nn.Module, __: object, output: object) -> None:
        """Make the backward pass of `output` raise if the model has the common weights by then: checkpointing would use them."""
        if _records() and not self.common and not self._averaging:
            for each in _tensors(output):
                if each.grad_fn is not None:
                    each.register_hook(partial(_refuse_common, weakref.ref(self)))

    def put_common(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: object
    ) -> None:  # Any: as `state_dict` has it
        """Put the common weights into the result of `module.state_dict()`, in the types of the parameters."""
        if not any(module is each for each in self._replica.bodies) or self._averaging:
            return
        as_set = self._set_outside()
        names = {id(each): name for name, each in self._replica.owned.items()}
        common, values = dict(self._weights.common()), dict[int, Tensor]()
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            key = next((prefix + each for each in (full_name, plain_name(full_name)) if prefix + each in state), None)
            # With keep_vars=True the state has the model's parameters themselves.
            if key is None or id(parameter) not in names or isinstance(state[key], nn.Parameter):
                continue
            name = names[id(parameter)]
            if name in as_set:
                continue
            if id(parameter) not in values:  # tied names share one value
                values[id(parameter)] = self._replica.whole(name, common[name].to(parameter.dtype, copy=True))
            state[key] = values[id(parameter)]

    def release(self) -> None:
        """Leave the common weights in the model, for good."""
        self.show(common=True)
        self._own = None
        for hook in self._hooks:
            hook.remove()


def _records() -> bool:
    """Tell whether gradients are recorded now."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _refuse_common(shown: "weakref.ref[ShownWeights]", _: Tensor) -> None:
    """Raise RuntimeError if the model has the common weights in the backward pass of a forward pass with own ones."""
    if (weights := shown()) is not None and weights.common:
        raise RuntimeError(
            "another forward pass of the model, without gradients, came between a forward pass that trains and its backward pass, and uses "
            "the common weights; make it before the one that trains or after the backward pass, also inside "
            f"`with handle.averaged():`; or {WITHOUT}"
        )


def _tensors(output: object) -> Iterator[Tensor]:
    """Find the tensors in a module's output, also in mappings, sequences and dataclasses."""
    if isinstance(output, Tensor):
        yield output
        return
    held = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    for each in vars(output).values() if is_dataclass(output) and not held else held:
        yield from _tensors(each)


def write_own(
    bucket: WeightBucket, state: State, comm: Comm, keep: float, idle: Collection[str], left: Collection[str]
) -> Tensor | None:
    """Write the own weights, common weights - `keep` * unsent, except for the parameters `left`.

    `idle`: the parameters that the last reduction left out; a rank's region depends on them. Returns digests of all parameters, as in
    `LastWritten`, or None if it has not made them.
    """
    held = None if idle else state.unsent_in_rows(bucket.bucket(bucket.common, 0), comm)
    unsent, rows = (bucket.unsent(state, comm, idle), None) if held is None else held
    if unsent is None:
        bucket.write(bucket.common, left)
        return None
    taking = [entry for entry in bucket.layout if entry.name not in left] if left else bucket.layout
    parameters = [bucket.parameters[entry.name].detach() for entry in taking]
    starts = [entry.span.start for entry in taking]
    digests = kernels.write_own_(parameters, starts, bucket.common, unsent.to(bucket.dtype), rows, comm.size, keep)
    increment_version(parameters)  # a kernel does not
    torch.clear_autocast_cache()  # it holds copies of the old weights
    return None if left else digests


def compared(replica: Replica, weights: Weights) -> list[tuple[str, Tensor]]:
    """List the tensors that must be equal on all ranks, by name: common weights, frozen ones, and buffers that copy trained parameters.

    Such a buffer has the shape of a trained parameter, and its name ends like the parameter's: "target.weight" or "ema_weight" beside
    "encoder.weight". Other buffers, such as BatchNorm's running means, depend on a rank's data and may differ.
    """

    def copies_one(name: str, buffer: Tensor) -> bool:
        own_data = name.rpartition(".")[2].startswith("running_")
        return not own_data and any(name.endswith(end) and buffer.shape == shape for end, shape in shapes)

    shapes = {(name.rpartition(".")[2], each.shape) for name, each in replica.owned.items()}
    buffers = ((plain_name(name), each) for name, each in replica.module.named_buffers() if each.is_floating_point())
    return [*weights.common(), *replica.frozen(), *((name, each) for name, each in buffers if copies_one(name, each))]
