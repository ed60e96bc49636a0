"""The integration for any training loop: one call after the backward pass. No DDP, no hook, no thread."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.core import Bucket, Report, laid_out
from sparsync.exchanges.choice import Optimizers, choose, listed, optimizer_findings
from sparsync.exchanges.taken_optimizer import closure_of
from sparsync.runtime.driven import check_undriven
from sparsync.runtime.findings import (
    check_model,
    innermost,
    not_floating,
    reducing_wrappers,
    sparse_embeddings,
    steps_in_backward,
    unrelated,
    warn_or_raise,
)
from sparsync.runtime.handle import Gradients, Handle
from sparsync.runtime.options import GradientOptions, Options
from sparsync.runtime.parameter_names import named_parameters, trained
from sparsync.schemes.dense import Dense

_SPARSE = "sparse/"  # starts the key of a bucket that is one sparse gradient
_MOST = 2**31 - 1  # elements of a bucket: positions in it are int32


class GradientReducer(Handle):
    """Reduces the gradients of a bare model with `scheme` whenever `reduce` is called.

    For models that neither DistributedDataParallel nor FSDP2 wraps; `sparsync.attach` makes it too. Save it with `sparsync.checkpoint`,
    or by `state_dict` on each rank.
    Collective over the ranks of `group`: make it on all of them, with the same settings.

    Args:
        model: the model whose gradients are reduced.
        scheme: as for `sparsync.attach`, like all arguments after `group`.
        group: the ranks. None: the default group.

    Raises:
        TypeError: for a model that DDP reduces already, for a trained parameter that is not floating, and for anything but a module, a
            Scheme and an optimizer.
        ValueError: for a model that another handle drives.
        RuntimeError: if a rank is missing or has another scheme, and for an optimizer that steps during the backward pass.
    """

    switches = True
    origin = "sparsync.GradientReducer"
    _undo: Sequence[Callable[[], object]] = ()  # what `close` calls

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        optimizer: Optimizers | None = None,
        scaler: GradScaler | None = None,
        options: Options = Options(),
    ) -> None:
        chosen = choose(scheme, None, Gradients(), optimizer)
        scheme, self.recipe = chosen.scheme, chosen.recipe
        check_model(model)
        if isinstance(model, reducing_wrappers()):
            raise TypeError(
                f"{type(model).__name__} already reduces this model's gradients; use sparsync.attach, or pass the bare module"
            )
        driven = trained(model)
        check_undriven(driven)
        if steps_in_backward(model):
            raise RuntimeError(
                "an optimizer steps during the backward pass, with gradients that are not reduced yet; step it after they are reduced"
            )
        found = [*optimizer_findings(optimizer, scheme), *unrelated(optimizer, {id(each) for _, each in driven})]
        warn_or_raise([*not_floating(driven), *found])
        names = {id(parameter): name for name, parameter in named_parameters(model)}
        given = GradientOptions(**vars(options), optimizers=listed(optimizer), scaler=scaler)
        self.model, self.group = model, group
        rescaler = given.rescaler(names)
        comparison = given.comparison(names, partial(trained, model))
        comm = given.connected(group, repr(scheme))
        super().__init__(scheme, comm, rescaler, comparison, module=model, driven=driven)
        self._stepped: set[int] | None = (
            None  # ids of the optimizers that have since `reduce`; None: nothing is reduced
        )

    def reduce(self, step: int | None = None) -> list[Report]:
        """Replace the model's gradients by the scheme's estimate of their mean over ranks, and return a report for each bucket.

        Call it on every rank, after the backward pass and before the optimizer's step; when you accumulate gradients, after the last
        backward pass only. With a loss scaler, call it before `scaler.unscale_` and `scaler.step`, which look for infinities on their
        own rank only: after this call all ranks find the same ones.
        There is one bucket for each type and device of gradients, and more from 2^31 elements on. A parameter without a gradient counts as
        zero and gets the mean; a frozen parameter, or one that shares another's storage, does not change. Each sparse gradient of an
        embedding is reduced in full. NaN or Inf in a rank's gradient comes to all ranks, and the loss scaler or the loop must skip the
        optimizer's step; residuals stay, and what other buckets sent is rolled back.
        If it fails on one rank, it raises on all, and the next call starts on fresh connections. A rank that had finished the step raises
        at its next call; then all ranks raise until a checkpoint is loaded on all of them, because their weights differ.

        Args:
            step: the number of the step, the same on all ranks, for schemes that draw by it. None: one more than last time.

        Raises:
            RanksDifferError: on all ranks, if they have another step, model, scheme or shared state.
            ValueError: for a parameter of 2^31 elements or more.
        """
        self._go_back(self._step)
        self._loads.forget()
        # A failed step counts, for it may have failed on some ranks only.
        self._step = self._step + 1 if step is None else step
        with self._connection.step():
            self._rescaler.rescale()
            reports = [self._reduced(key, parameters) for key, parameters in self._buckets().items()]
        self._reports += reports
        self._stepped = set()
        return reports

    def guard(self, optimizers: Sequence[Optimizer]) -> None:
        """Have these optimizers raise where they would step with gradients that were not reduced, until `close`."""
        self._undo = [innermost(each).register_step_pre_hook(self._refuse_unreduced).remove for each in optimizers]

    def _refuse_unreduced(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:  # Any: as `step` has them
        own = {id(each) for _, each in trained(self.model)}
        given = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        if closure_of(args, kwargs) is not None or not any(id(each) in own for each in given):  # a closure reduces
            return
        if self._stepped is None or id(optimizer) in self._stepped:
            self._stepped = None
            raise RuntimeError(
                f"{type(optimizer).__name__} would step with this rank's own gradients: call handle.reduce() after the backward pass, "
                "before clipping; or wrap the model by DistributedDataParallel before attach, which then reduces by itself"
            )
        self._stepped.add(id(optimizer))

    def close(self) -> None:
        """Close connections, and let the optimizer step; see Handle."""
        super().close()
        for undo in self._undo:
            undo()

    def detach(self) -> None:
        """Leave the model's gradients alone from here on. Reports and state stay readable; the scheme cannot be changed any more."""
        self._detached = True
        self.close()

    def _buckets(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the trained parameters by bucket: of one type, on one device, at most 2^31 - 1 elements, the same on every rank."""
        buckets: dict[str, dict[str, nn.Parameter]] = {}
        # By type and device: the last bucket's key, and its elements.
        filled: dict[tuple[str, torch.device], tuple[str, int]] = {}
        made: Counter[str] = Counter()  # buckets by type
        sparse = {id(module.weight) for _, module in sparse_embeddings(self.model)}
        for name, parameter in trained(self.model):
            if parameter.numel() > _MOST:
                raise ValueError(
                    f"a parameter is reduced with at most {_MOST} elements, {name!r} has {parameter.numel()}; shard it, or split it "
                    "into several parameters"
                )
            if id(parameter) in sparse:
                buckets[f"{_SPARSE}{name}"] = {name: parameter}
                continue
            kind = str(parameter.dtype).removeprefix("torch.")
            key, elements = filled.get((kind, parameter.device), ("", _MOST + 1))
            if elements + parameter.numel() > _MOST:
                # No device in the key, by which schemes draw: the same model draws the same on a CPU and on a GPU.
                key, elements = f"{kind}/{made[kind]}" if made[kind] else kind, 0
                made[kind] += 1
            filled[kind, parameter.device] = key, elements + parameter.numel()
            buckets.setdefault(key, {})[name] = parameter
        return buckets

    def _reduced(self, key: str, parameters: dict[str, nn.Parameter]) -> Report:
        layout = laid_out((name, parameter.shape) for name, parameter in parameters.items())
        with torch.no_grad():
            bucket = Bucket(key, torch.cat([_gradient(each) for each in parameters.values()]), self._step, layout)
            report = self._connection.reduce(bucket, Dense().start() if key.startswith(_SPARSE) else self.state)
            for each, parameter in zip(layout, parameters.values(), strict=True):
                mean = each.span.of(bucket.grad).view(parameter.shape)
                _write(parameter, mean.to_sparse(1) if key.startswith(_SPARSE) else mean)
        return report


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.to_dense().flatten()


def _write(parameter: nn.Parameter, mean: Tensor) -> None:
    if parameter.grad is None or mean.is_sparse or parameter.grad.is_sparse:
        parameter.grad = mean.clone()
    else:
        parameter.grad.copy_(mean)
