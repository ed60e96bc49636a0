"""The one way in: `attach` finds the integration for a model, wrapped by torch or bare, and for what it is to exchange."""

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from sparsync.attached import ddp
from sparsync.attached.doctor import doctor, has_replicas
from sparsync.attached.manual import GradientReducer, must_reduce
from sparsync.attached.parameter_format import ParameterFormat
from sparsync.attached.steps import attach as attach_steps
from sparsync.base.scheme import Scheme
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import Exchange, Optimizers, choose, listed
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime.dispatcher import AttachedHandle
from sparsync.runtime.findings import Axis, check_models, given_or_default, is_fsdp2, warn_or_raise
from sparsync.runtime.handle import Gradients, Options
from sparsync.runtime.optimizers import CHECK_WEIGHTS_EVERY
from sparsync.runtime.ownership import check_free
from sparsync.runtime.parameter_names import inside_wrappers
from sparsync.wire import Values


def attach(
    model: nn.Module | Sequence[nn.Module],
    scheme: Scheme | None = None,
    *,
    exchange: Exchange | None = None,
    group: dist.ProcessGroup | None = None,
    replicate: Axis | None = None,
    parameters: Values | ParameterFormat | None = None,
    optimizer: Optimizers | None = None,
    scaler: GradScaler | None = None,
    follow_rates: bool = True,
    timeout_s: float = 300.0,
    join_mb: float | None = None,
    dense_below: int | None = None,
    check_weights_every: int | None = None,
) -> AttachedHandle | AdamWSteps | LocalTraining | GradientReducer:
    """Make `model` exchange gradients, steps of its optimizer or weight changes with `scheme`; return the handle to reports and state.

    Call it on every rank that reduces, each with its own instance of the scheme and the same settings. An instance holds the residuals of
    one model: it serves one handle at a time, and after `handle.close()` or `handle.detach()` the same model only. `doctor` lists
    beforehand what this warns about and refuses.

    NaN or Inf on any rank: all ranks skip the step, and local steps drop the exchange. With gradients all ranks get it, as without
    sparsync, and a GradScaler or the loop must skip the optimizer's step; residuals stay, and what other buckets sent is rolled back.
    If a step fails on any rank, its backward pass raises on all ranks. The next step works, unless only some ranks had finished the failed
    one: then all ranks raise until a checkpoint is loaded on all of them.

    Args:
        model: wrapped by DistributedDataParallel or fully_shard, also with torch.compile or Lightning's Fabric around it; or bare. With a
            bare one gradients are reduced when `handle.reduce()` is called, before clipping and the optimizer's step; see GradientReducer.
            For steps and local steps also several, DistributedDataParallel's or bare, that the same optimizer trains together.
        scheme: how what is exchanged is reduced. None: the scheme that the environment variable SPARSYNC_SCHEME names, otherwise `Dense()`.
        exchange: `Gradients()`; `Steps()` of an Adam, AdamW or Muon; or `LocalSteps(every=...)`, weight changes every few steps; see there.
            The training loop is the same. None: steps, except under FSDP2 without replicas, where `optimizer` is one of these and the
            scheme sends fewer than 4 bits an element, gradients otherwise. `handle.exchange` says which.
        group: for a bare model, the ranks that train it. None: the default group. A wrapped model has its own.
        replicate: for FSDP2, the axis of a mesh, or the process group, over which every rank has the same shard.
        parameters: for FSDP2, how the shard axis exchanges parameters. None: FSDP2's own all-gather.
        optimizer: the one whose steps are exchanged, whose `step` does that until `close()`; or several, such as a Muon for matrices and an
            AdamW for the rest, of which the first that steps does it for all. Of local steps each has stepped when the step counts. With
            gradients it makes residuals follow the clipping of each optimizer; warns if one does not suit the scheme. Ranks compare their
            settings before each bucket.
        scaler: makes residuals of gradients follow its loss scale; with steps it learns of NaN and Inf on other ranks. Local steps need
            none: each rank's own scaler may skip a step.
        follow_rates: whether residuals also follow the learning rates of `optimizer`, down to a tenth of the highest one.
        timeout_s: seconds that a rank waits for the others.
        join_mb: for DistributedDataParallel, megabytes up to which successive buckets are joined if the scheme has a residual (4; 0: none
            are joined). A scheme takes as many exchanges and calls for a small bucket as for a large one. Dense joins up to 256 kB at most.
        dense_below: for DistributedDataParallel, elements below which a joined bucket is sent whole (1024; 0: never).
        check_weights_every: steps between two comparisons of the trained parameters (100; 0: never). On FSDP2's shard axis each rank has
            different ones, and none are compared.

    Returns:
        The handle. It reduces until `close()` or `detach()`.

    Raises:
        TypeError: for a model that torch's FullyShardedDataParallel wraps, a trained parameter that is not floating, and anything but a
            module, a Scheme, an optimizer or several.
        ValueError: for an argument that does not go with this kind of model, for steps of other parameters, for a model that
            another handle reduces, and for a scheme that another handle uses or that holds another model's residuals.
        RuntimeError: if the ranks have different schemes or, on a replicate axis, different parameters.

    Example:
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 32))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = sparsync.attach(model, sparsync.OkTopk(density=0.05), optimizer=optimizer)
    """
    scheme = given_or_default(scheme)
    check_models(model)
    if not isinstance(model, nn.Module):
        given = {"replicate": replicate, "parameters": parameters, "join_mb": join_mb, "dense_below": dense_below}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{wrong[0]} is for one model, got {len(model)}; leave it out here")
        return _attach_several(model, scheme, exchange, group, optimizer, scaler, timeout_s, check_weights_every)
    called = model
    model = inside_wrappers(model)
    fsdp, wrapped = is_fsdp2(model), isinstance(model, DistributedDataParallel)
    chosen = choose(exchange, scheme, optimizer, steps_possible=not fsdp or has_replicas(model, replicate))
    steps = not isinstance(chosen, Gradients)
    if (steps or not wrapped) and (join_mb is not None or dense_below is not None):
        raise ValueError(
            "join_mb and dense_below are about gradients in the buckets of DistributedDataParallel; leave them out here"
        )
    if (fsdp or wrapped) and group is not None:
        raise ValueError(
            "group is of a bare model; leave it out here, and give DistributedDataParallel process_group=, FSDP2 a mesh"
        )
    if not fsdp and replicate is not None:
        raise ValueError("replicate is an axis of an FSDP2 model; leave it out for others")
    if not fsdp and parameters is not None:
        raise ValueError("only FSDP2 gathers parameters; leave parameters= out")
    if steps and parameters is not None:
        raise ValueError(
            "parameters= goes with gradients on FSDP2's shard axis; leave it out, or pass exchange=sparsync.Gradients()"
        )
    if replicate is not None:  # a shard axis has another form of the scheme
        check_free(scheme, model)
    by_call = not (fsdp or wrapped or steps)  # what the reducer warns of by itself is left to it
    examined = None if by_call else optimizer
    warn_or_raise(
        doctor(model, scheme, exchange=exchange, replicate=replicate, parameters=parameters, optimizer=examined)
    )
    if not isinstance(chosen, Gradients):
        assert optimizer is not None  # as `choose` has checked
        if check_weights_every is not None:
            chosen = replace(chosen, check_weights_every=check_weights_every)
        return attach_steps([model], [called], scheme, optimizer, chosen, replicate, group, scaler, timeout_s)
    every = CHECK_WEIGHTS_EVERY if check_weights_every is None else check_weights_every
    options = Options(listed(optimizer), scaler, follow_rates, timeout_s, every)
    if isinstance(model, DistributedDataParallel):
        return ddp.attach(model, scheme, options, join_mb, dense_below)
    if by_call:
        return must_reduce(model, scheme, options, group)
    from sparsync.attached import fsdp2  # loads torch's FSDP

    return fsdp2.attach(model, scheme, options, replicate, parameters)


def _attach_several(
    models: Sequence[nn.Module],
    scheme: Scheme,
    exchange: Exchange | None,
    group: dist.ProcessGroup | None,
    optimizer: Optimizers | None,
    scaler: GradScaler | None,
    timeout_s: float,
    check_weights_every: int | None,
) -> AdamWSteps | LocalTraining:
    """Exchange the steps or weight changes of several models, which are one to the optimizer. See `attach`."""
    inside = [inside_wrappers(each) for each in models]
    if any(map(is_fsdp2, inside)):
        raise ValueError(
            "of several models only those of DistributedDataParallel and bare ones are attached together; make those of fully_shard "
            "parts of one module, and shard and attach that"
        )
    chosen = choose(exchange, scheme, optimizer, steps_possible=True)
    if isinstance(chosen, Gradients):
        raise ValueError(
            f"several models are attached together for steps and local steps, and here {type(scheme).__name__} sends gradients; attach "
            "each model by itself, with a scheme for each and the same optimizer: attach(model, scheme, exchange=sparsync.Gradients(), "
            "optimizer=optimizer); or pass exchange=sparsync.Steps()"
        )
    wrapped = [each for each in inside if isinstance(each, DistributedDataParallel)]
    if wrapped and (len(wrapped) < len(inside) or len({id(each.process_group) for each in wrapped}) > 1):
        raise ValueError(
            "models that are attached together have the same ranks; wrap all of them with the same process_group=, or none"
        )
    if wrapped and group is not None:
        raise ValueError("group is of bare models; leave it out here, and give DistributedDataParallel process_group=")
    warn_or_raise(doctor(models, scheme, exchange=exchange, optimizer=optimizer))
    assert optimizer is not None  # as `choose` has checked
    if check_weights_every is not None:
        chosen = replace(chosen, check_weights_every=check_weights_every)
    return attach_steps(inside, models, scheme, optimizer, chosen, None, group, scaler, timeout_s)
