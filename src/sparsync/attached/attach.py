"""`attach` picks the integration for a model, wrapped by torch or bare, and for what its ranks exchange.

`doctor.examine` finds what does not work and `exchanges.choice` the recipe; then one of `steps`, `ddp`, `fsdp2` and `manual` attaches.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from sparsync.attached import ddp
from sparsync.attached.doctor import Examined, examine
from sparsync.attached.manual import GradientReducer
from sparsync.attached.steps import attach as attach_steps
from sparsync.base.scheme import Scheme
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import Choice, Exchange, Optimizers, listed, method_of
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.exchanges.steps_options import Steps
from sparsync.recipes import Bits
from sparsync.runtime.findings import is_fsdp2, warn_or_raise
from sparsync.runtime.handle import AttachedHandle, Gradients
from sparsync.runtime.options import GradientOptions, Options

_LOG = logging.getLogger("sparsync")
Attached = AttachedHandle | AdamWSteps | LocalTraining | GradientReducer


def attach(
    model: nn.Module | Sequence[nn.Module],
    scheme: Scheme | None = None,
    *,
    bits: Bits | None = None,
    optimizer: Optimizers | None = None,
    exchange: Exchange | None = None,
    group: dist.ProcessGroup | None = None,
    scaler: GradScaler | None = None,
    options: Options = Options(),
) -> Attached:
    """Compress what the ranks that train `model` exchange; return the handle to reports and state.

    Call it on every rank, with the same settings. Without a scheme it takes a recipe for the optimizer: `attach(model,
    optimizer=optimizer)`. A scheme is settings, which several models may share: residuals are in `handle.state`. `doctor` lists beforehand
    what this function warns about and refuses.

    NaN or Inf on any rank: with steps all ranks skip the step, and local steps drop the exchange. With gradients all ranks get it, as
    without sparsync, and a GradScaler or the loop must skip the optimizer's step; residuals stay, and what other buckets sent is rolled
    back. If a step fails on any rank, it raises on all ranks: in the backward pass with gradients, in `optimizer.step()` with steps. The
    next step works, unless only some ranks had finished the failed one: then all ranks raise until a checkpoint is loaded on all of them.

    Args:
        model: wrapped by DistributedDataParallel or fully_shard, also inside torch.compile or Lightning's Fabric; or bare. Gradients of a
            bare model are reduced by `handle.reduce()`, before clipping and the optimizer's step; see GradientReducer. With steps and
            local steps also several models, under DistributedDataParallel or bare, that the same optimizer trains together.
        scheme: reduces what is exchanged. None: the recipe, or what the environment variable SPARSYNC_SCHEME says: "bits=0.8", a
            scheme, or one with steps around it.
        bits: the most bits that a rank may send per parameter per step, counted with 4 ranks (P ranks send (P-1)/P / 0.75 of it). Takes the
            recipe with the most bits up to this. None: the default recipe. "auto": time 20 steps of the default recipe, then take the most
            bits with which a step waits at most a tenth of its time, or is at most a tenth longer than with the fewest bits; never fewer
            bits than the default, or than 0.8 with ("auto", 0.8).
            Steps below 4 bits train slightly different weights on every rank. `handle.recipe` is the recipe taken.
        optimizer: the one that trains the model, or several, such as a Muon for matrices and an AdamW for the rest. With steps its `step`
            exchanges them until `close()`; of several, the first to step does it for all. With local steps a step counts when all have
            stepped. With gradients residuals follow the clipping of each optimizer, and ranks compare their settings before each bucket.
        exchange: with a scheme: `Gradients()`; `Steps()` of an Adam, AdamW or Muon; or `LocalSteps(every=...)`, weight changes every few
            steps; see there. The training loop is the same. None: steps if `optimizer` is one of these, the scheme sends fewer than 4 bits
            per element, and each rank has the whole model or FSDP2 has replicas; else gradients. `Gradients()` without a scheme takes a
            recipe for gradients. `handle.exchange` says which.
        group: for a bare model, the ranks that train it. None: the default group. A wrapped model has a group already.
        scaler: makes residuals of gradients follow its loss scale; with steps it learns of NaN and Inf on other ranks; with local
            steps, a step that it skips on one rank alone counts there too.
        options: the rest, see Options.

    Returns:
        The handle. It reduces until `close()` or `detach()`.

    Raises:
        TypeError: if FullyShardedDataParallel wraps the model, a trained parameter is not floating, or an argument has a wrong type.
        ValueError: if an argument does not go with this kind of model, the optimizer trains other parameters, another handle has the model,
            or no recipe has so few bits.
        RuntimeError: if the ranks have different schemes or, on a replicate axis, different parameters.

    Example:
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 32))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        >>> handle = sparsync.attach(model, optimizer=optimizer)
    """
    examined = examine(model, scheme, bits, optimizer, exchange, group, options)
    warn_or_raise(examined.findings)
    handle = _attached(examined, optimizer, group, scaler)
    choice = examined.choice
    if choice.recipe is not None:
        handle.recipe = choice.recipe
        _tell(choice, examined.ranks, examined.parameters)
    if choice.candidates:
        assert isinstance(handle, AdamWSteps)  # checked by `choose`
        handle.choose_bits(choice.candidates, method_of)
    return handle


def _attached(
    found: Examined, optimizer: Optimizers | None, group: dist.ProcessGroup | None, scaler: GradScaler | None
) -> Attached:
    """Make the handle of the integration for these models."""
    scheme, exchange, model, options = found.choice.scheme, found.choice.exchange, found.models[0], found.options
    if not isinstance(exchange, Gradients):
        assert optimizer is not None  # checked by `choose`
        if options.check_weights_every is not None:
            exchange = replace(exchange, check_weights_every=options.check_weights_every)
        return attach_steps(found.models, found.called, scheme, optimizer, exchange, group, scaler, options)
    given = GradientOptions(**vars(options), optimizers=listed(optimizer), scaler=scaler)
    if isinstance(model, DistributedDataParallel):
        return ddp.attach(model, scheme, given)
    if is_fsdp2(model):
        from sparsync.attached import fsdp2  # loads torch's FSDP

        return fsdp2.attach(model, scheme, given)
    return GradientReducer(model, scheme, group=group, optimizer=optimizer, scaler=scaler, options=options)


def _tell(choice: Choice, ranks: int, parameters: int) -> None:
    """Log which recipe was taken, its bits and its quality."""
    assert choice.recipe is not None
    recipe, bits = choice.recipe, choice.recipe.bits_with(ranks)
    _LOG.info(
        "%s; a rank sends %.3g bits per parameter per step with %d ranks; on the page 'Quality and bits': %s",
        recipe, bits, ranks, recipe.quality_at(parameters),
    )  # fmt: skip
    if isinstance(choice.exchange, Steps) and choice.exchange.keep_for(choice.scheme):
        _LOG.info(
            "with %s every rank trains its own weights, which differ slightly from the common ones: see the page 'Own weights'; "
            "evaluate and average weights inside `with handle.averaged():`, or attach with bits=4.6",
            recipe.name,
        )
