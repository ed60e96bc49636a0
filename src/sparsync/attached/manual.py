"""The integration for any training loop: one call after the backward pass, without DDP, hooks or threads."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from sparsync.base.scheme import Scheme
from sparsync.core import Bucket, Report, laid_out
from sparsync.exchanges.choice import Optimizers, listed
from sparsync.runtime.between_steps import WeakHook
from sparsync.runtime.findings import sparse_embeddings, warn_or_raise
from sparsync.runtime.handle import Handle
from sparsync.runtime.options import GradientOptions, Options
from sparsync.runtime.parameters import check_undriven, named_parameters, trained


class GradientReducer(Handle):
    """The handle of a bare model: `reduce` reduces the model's gradients by `scheme`.

    `sparsync.attach(model, scheme, exchange=sparsync.Gradients())` checks the arguments and makes it, on every rank of `group`.
    """

    switches = True
    origin = "sparsync.GradientReducer"

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme,
        *,
        group: dist.ProcessGroup | None = None,
        optimizer: Optimizers | None = None,
        scaler: GradScaler | None = None,
        options: Options = Options(),
    ) -> None:
        driven = trained(model)
        check_undriven(driven)
        warn_or_raise(sparse_embeddings(model))
        names = {id(parameter): name for name, parameter in named_parameters(model)}
        given = GradientOptions(**vars(options), optimizers=listed(optimizer), scaler=scaler)
        self.model, self.group = model, group
        rescaler = given.rescaler(names)
        comparison = given.comparison(names, partial(trained, model))
        comm = given.connected(group, repr(scheme))
        super().__init__(scheme, comm, rescaler, comparison, module=model, driven=driven)
        refuse: Any = _Uncompiled(self, "_refuse_ddp")  # Any: torch types a hook as a function of named arguments
        self._model_hooks.append(model.register_forward_pre_hook(refuse))

    def reduce(self, step: int | None = None) -> list[Report]:
        """Replace the model's gradients by the scheme's estimate of their mean over ranks; return one report per bucket.

        Call it on every rank, after the backward pass and before the optimizer's step; with gradient accumulation, after the last
        backward pass only. With a loss scaler, call it before `scaler.unscale_` and `scaler.step`, which look for infinities on their
        rank only: after this call all ranks have the same ones.
        There is one bucket per type and device of gradients. A parameter without a gradient counts as zero and gets the mean; a frozen
        parameter, or one that shares another's storage, does not change. NaN or Inf in a rank's gradient reaches all ranks, and the loss
        scaler or the loop must skip the optimizer's step; residuals stay, and other buckets of the step are rolled back.
        If it fails on one rank, it raises on all, and the next call starts on fresh connections. A rank that had finished the step raises
        at its next call; then all ranks raise until a checkpoint is loaded on all of them, because their weights differ.

        Args:
            step: the number of the step, the same on all ranks, for schemes that draw by it. None: the next number.

        Raises:
            RanksDifferError: on all ranks, if they differ in step, model, scheme or shared state.
        """
        self._go_back(self._step)
        self._loads.forget()
        # A failed step counts, because it may have failed on some ranks only.
        self._step = self._step + 1 if step is None else step
        with self._connection.step():
            self._rescaler.rescale()
            reports = [self._reduced(key, parameters) for key, parameters in self._buckets().items()]
        self._reports += reports
        return reports

    def detach(self) -> None:
        """Stop reducing the model's gradients. Reports and state stay readable; the scheme cannot be changed any more."""
        self._detached = True
        self.close()

    def _buckets(self) -> dict[str, dict[str, nn.Parameter]]:
        """Group the trained parameters into buckets of one type on one device, the same on every rank."""
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        for name, parameter in trained(self.model):
            kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
        buckets: dict[str, dict[str, nn.Parameter]] = {}
        for (dtype, _), parameters in kinds.items():
            # No device in the key, because schemes draw by it: the draws are the same on a CPU and on a GPU.
            kind = str(dtype).removeprefix("torch.")
            others = sum(key.split("/")[0] == kind for key in buckets)  # on other devices
            buckets[f"{kind}/{others}" if others else kind] = parameters
        return buckets

    def _reduced(self, key: str, parameters: dict[str, nn.Parameter]) -> Report:
        layout = laid_out((name, parameter.shape) for name, parameter in parameters.items())
        with torch.no_grad():
            bucket = Bucket(key, torch.cat([_gradient(each) for each in parameters.values()]), self._step, layout)
            report = self._connection.reduce(bucket, self.state)
            for each, parameter in zip(layout, parameters.values(), strict=True):
                mean = each.span.of(bucket.grad).view(parameter.shape)
                if parameter.grad is None:
                    parameter.grad = mean.clone()
                else:
                    parameter.grad.copy_(mean)
        return report

    def _refuse_ddp(self, module: nn.Module, _: object) -> None:
        """Raise before a forward pass of DistributedDataParallel around the model."""
        # HACK: torch has no public name for this. Price: it may change with torch; a test wraps an attached model.
        outside = DistributedDataParallel._active_ddp_module
        if outside is not None and any(each is module for each in outside.modules()):
            raise RuntimeError(
                "DistributedDataParallel was put around a model that is attached bare, and would reduce its gradients densely too; "
                "wrap the model first, and attach the DistributedDataParallel model"
            )


class _Uncompiled(WeakHook):
    """Does nothing in a compiled function that calls the model, which keeps one graph so."""

    def __call__(self, *arguments: Any) -> None:  # Any: as torch calls its hooks
        if not torch.compiler.is_compiling():
            super().__call__(*arguments)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
