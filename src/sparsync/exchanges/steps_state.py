"""The state of AdamWSteps: saves and loads it, follows other ranks, shows own weights, and switches to chosen bits."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.base.state import innermost
from sparsync.core import Bucket, Comm, Report
from sparsync.exchanges import own_weights
from sparsync.exchanges.agreement import FirstRanks, Gathered
from sparsync.exchanges.auto_bits import STEPS, Choosing
from sparsync.exchanges.measured import Pending
from sparsync.exchanges.moments import Moments
from sparsync.exchanges.sender import COUNTS, VECTORS, Sender
from sparsync.exchanges.step_method import StepMethod
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.training_loop import GradientDivisor, TakenOptimizer
from sparsync.recipes import Recipe
from sparsync.runtime.findings import warn_of
from sparsync.runtime.restorable import Part, SavedState, Snapshot, check_fingerprint


class StepsState(StepMethod):
    """Saves, loads and moves the state of AdamWSteps."""

    optimizers: Sequence[Optimizer]
    _sender: Sender
    _moments: Moments
    _taken: TakenOptimizer
    _divisor: GradientDivisor
    _pending: Pending | None = None  # the last step, until the host knows whether it was skipped
    _choosing: Choosing | None = None  # until the bits are chosen
    chooses = False  # the first steps choose the recipe, or have chosen it
    _ahead = 0  # steps that the moments contain beyond those of this handle
    _of_mean = False  # squares that were loaded belong to the mean gradient
    _skipped = 0  # steps in a row
    _applied = -1  # the last step that was applied, or skipped
    _catching_up = False  # since `_start_from`: the common weights are ahead of the steps taken

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **options: Any
    ) -> Tensor:  # Any: as torch.nn.utils.clip_grad_norm_
        """Clip this rank's gradient by a norm of all ranks' gradients, and return that norm: the same number on all ranks.

        The norm is the root mean square of the ranks' norms. It estimates the norm of the mean gradient, because each gradient was divided
        by `clip_factor`. So a loop that skips a step with a large or non-finite norm skips it on all ranks. Call it on every rank, after
        the last backward pass of a step: it sends 8 bytes to every rank, and waits.
        Raises RanksDifferError, on all ranks, if one has thrown away a gradient that others have used; and RuntimeError, with
        `error_if_nonfinite`, for a norm that is NaN or Inf.
        """
        self._check_own()
        self._comparison.thrown_away = self._divisor.passes.thrown_away
        gradients = [each for each in self._replica.gradients() if each is not None]
        owned = [each.grad for each in self._replica.owned.values() if each.grad is not None]
        own: Any = nn.utils.get_total_norm(owned, norm_type, **options)  # Any: a DTensor, of an FSDP2 model
        own = own.full_tensor() if hasattr(own, "full_tensor") else own
        square = own.double().square().reshape(1).to(self._weights.buckets[0].device)
        norm = self._gathered("norm", square)[1].mean().sqrt()
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of the gradients of all ranks is {float(norm)}, and cannot be clipped at {max_norm}; skip the step"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
        for each in gradients:
            each.mul_(factor.to(each))
        return norm.to(torch.float32)

    def _gathered(self, key: str, own: Tensor) -> tuple[float, Tensor]:
        """Gather the numbers of all ranks, between two steps; return the seconds waited, and the numbers, [P, n]. Collective."""
        bucket = Bucket(key, own.to(self._weights.buckets[0].device), self._step + 1)
        report = self._connection.reduce_before_step(bucket, gathered := Gathered())
        self._count([report])
        return report.wait_s or 0.0, gathered.rows

    def stats(self) -> dict[str, int | float]:
        self._settle()
        common = self._shown is not None and self._shown.common
        counts = super().stats()
        if common:
            self.show_common()
        return {**counts, "exchanges": counts["steps"] - counts["skipped"]}

    def detach(self) -> None:
        """Undo `attach`: the model trains on from the common weights. Call it on all ranks, between two steps.

        The optimizers go on with the momentum, and with rank 0's squares; with new moments if a rank cannot be reached any more.
        """
        if any(self._sender.counts["applied"].values()) and not self.closed:
            try:
                self._share_squares()
            except RuntimeError as error:
                warn_of(
                    f"the optimizer begins with new moments, because the ranks could not make theirs the same: {error}"
                )
                for each in self.optimizers:
                    each.state.clear()
        super().detach()

    def _method_state(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        sender, trained = self._sender, self._weights.trained
        self._take_moments()
        return {
            **{key: self._weights.saved(vectors) for key, vectors in sender.vectors.items()},
            **deepcopy(sender.counts),
            "ratio": sender.ratios.state_dict(sender.keys),
            # Own weights that do not follow from the common ones and the residual.
            "own": {name: trained[name].detach().flatten().clone() for name in sorted(sender.idle | self._adopted)},
            "idle": dict.fromkeys(sorted(sender.idle), 1),
            "mean_squares": int(sender.common),
            "averaged": int(sender.ratios.averaged),
            "shares": int(sender.shares),
            "of_mean": int(self._of_mean),
            "measured": sender.ratios.measured,
            "measure_until": sender.ratios.measure_until,
            "skipped": self._skipped,
        }

    def resized(self, states: Sequence[SavedState]) -> dict[str, Any]:  # Any: as Handle
        """Make a state for this rank from the states of another number of ranks, with second moments and buffers of one of them.

        The ratio depends on the number of ranks, and is converted. Own weights follow from the common ones and from the residual.
        """
        own = states[self.place[0] % len(states)][self.integration]
        return {**super().resized(states), self.integration: {**own, "own": {}, "idle": {}, "ranks": len(states)}}

    def _load(self, state: SavedState) -> None:
        saved, sender, ratios = state[self.integration], self._sender, self._sender.ratios
        self._pending = None
        loaded = {key: self._weights.from_saved(saved[key]) for key in VECTORS}
        super()._load(state)
        self._applied, self._catching_up = self._step, False
        sender.shares, self._of_mean = bool(saved.get("shares")), bool(saved.get("of_mean"))
        for key, vectors in sender.vectors.items():
            for vector, values in zip(vectors, loaded[key], strict=True):
                vector.copy_(values)
        sender.load({key: dict(saved[key]) for key in COUNTS})
        self._note_ahead()
        self._moments.show()
        sender.groups.read()
        self._moments.follow_rates(restart=True)
        self._skipped, sender.idle = saved["skipped"], frozenset(saved["idle"])
        ratios.measured, ratios.measure_until = saved["measured"], saved["measure_until"]
        ratios.average(bool(saved.get("averaged")))
        ratios.load_state_dict(saved["ratio"], sender.keys, self._step + 1)
        before = saved.get("ranks", self._comm.size)
        self._take_form(sender.common, bool(saved["mean_squares"]), before)
        self._average()
        if before != self._comm.size:
            ratios.regrouped(self._step + 1, before, self._comm.size)
        self._divisor.next_step(self.clip_factor)
        own = saved["own"] if self._keep else {}
        for name, values in own.items():
            parameter = self._weights.trained[name].detach()
            parameter.copy_(values.view(parameter.shape))
        self._write_own(frozenset(own))

    @property
    def done(self) -> int:
        """The number of steps that were applied, or skipped on all ranks."""
        return self._applied + 1

    def _regrouped(self, comm: Comm) -> None:
        self._settle()
        before, sender = self._comm.size, self._sender
        super()._regrouped(comm)
        self._taken.forget_step()
        self._applied = self._step
        if not self._catching_up:
            # A failed step is taken again, and may have counted already.
            most = self.done + self._ahead
            sender.counts = {
                key: {name: min(t, most) for name, t in each.items()} for key, each in sender.counts.items()
            }
        sender.groups.recount()
        self._check_own()
        sender.ratios.regrouped(self._step + 1, before, comm.size)
        self._write_own()
        self._divisor.next_step(self.clip_factor)

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        taken = super().snapshot(shared=shared)  # a failed step counts as taken until `regroup`
        return taken if taken.shared is None else taken._replace(shared={**taken.shared, "step": self._applied})

    def _parts(self, state: SavedState) -> tuple[dict[str, Any], dict[str, Any]]:
        vectors = VECTORS if self._step >= 0 else ()  # before the first step they are zeros
        moved = {key: state[key] for key in ("common", *vectors, *COUNTS)}
        left_out = ("common", *VECTORS, "seen", "own", "idle")
        return moved, {key: value for key, value in state.items() if key not in left_out}

    def _still(self) -> Collection[str]:
        return {*super()._still(), *self._sender.idle}

    def _start_from(self, moved: SavedState) -> None:
        self._check_own()
        own = self._step >= 0 and self._sender.own_squares
        self._take_common(self._weights.from_saved(moved["common"]))
        for key in VECTORS:
            # A rank that has made steps keeps its own second moments.
            if not (own and key == "square"):
                for vector, values in zip(self._sender.vectors[key], self._weights.from_saved(moved[key]), strict=True):
                    vector.copy_(values)
        self._catching_up = True
        self._sender.load({key: dict(moved[key]) for key in COUNTS if not (own and key == "seen")})

    def _replay(self, move: Part) -> None:
        sender, place = self._sender, move["place"]
        self._take_settings(move["groups"])
        sender.groups.read()
        idle, sender.idle = sender.idle, frozenset(move["idle"])
        (mean,) = move["means"]
        sender.move(place, mean.to(self._weights.buckets[place].device))
        sender.idle = idle

    def _movers(self) -> Sequence[Optimizer]:
        return self.optimizers

    def _joined(self, snapshot: Snapshot, mine: SavedState) -> dict[str, Any]:  # Any: as Handle.state_dict
        joined, own = super()._joined(snapshot, mine), mine[self.integration]
        theirs = {**joined[self.integration], **(snapshot.moved or {})}
        kept = {key: own[key] for key in (*VECTORS, "common") if key not in theirs}
        if (mine["step"] >= 0 and self._sender.own_squares) or "seen" not in theirs:
            # This rank may have counted a step that the others did not take.
            seen = {name: min(t, joined["step"] + 1 + self._ahead) for name, t in own["seen"].items()}
            kept |= {"square": own["square"], "seen": seen}
        return {**joined, self.integration: {**theirs, "own": {}, "idle": {}, **kept}}

    def _waits(self) -> bool:
        return True

    def _drop_held(self, moments: bool) -> None:
        super()._drop_held(moments)
        self._note_other_move()
        self._write_own()

    def _note_ahead(self) -> None:
        self._ahead = max(0, max(self._sender.counts["applied"].values()) - self.done)

    @torch.no_grad()
    def _share_squares(self) -> None:
        """Copy the moments of rank 0 to all ranks, with squares scaled to the mean gradient, as other optimizers need them."""
        sender, squares, factor = self._sender, self._moment_buckets("square", self._step + 1), self._own_factor()
        for each in squares:
            each.grad.div_(factor**2)
        for each in [*squares, *self._moment_buckets("momentum", self._step + 1)]:
            self._connection.reduce_before_step(each, FirstRanks())
        sender.ratios.load_state_dict({}, sender.keys, self._step + 1)
        sender.counts["seen"] = dict(sender.counts["applied"])

    def _share_moments(self) -> list[Report]:
        """Copy the momentum of rank 0, and common squares, to all ranks: each rank has converted it by its squares, so bits differ."""
        shared = [each for key in VECTORS[: 1 + self._sender.common] for each in self._moment_buckets(key, self._step)]
        return [self._connection.reduce(each, FirstRanks()) for each in shared]

    def _moment_buckets(self, which: str, step: int) -> list[Bucket]:
        pairs = zip(self._sender.keys, self._sender.vectors[which], strict=True)
        return [Bucket(f"{which}/{key}", each, step) for key, each in pairs]

    def _forget(self, options: Steps) -> bool:
        """Make the residuals forget as `options` say; return whether any of them forgets."""
        takes = [each.forget(options.decay_for(each.scheme)) for each in innermost(self.state)]
        return any(takes)

    def _have_own_weights(self) -> None:
        """Show own weights from here on, if the options say so."""
        self._keep = self.exchange.keep_for(self.scheme, self._sender.has_muon)
        self._average()
        # If only rounding errors wait, a loop that goes back need not hear of them.
        self._told_of_loads = not self._keep and not self.scheme.leaves_out
        if self._keep and self._shown is None:
            if self._weights.hold_common() and "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # compiled code does not look for new hooks
            self._shown = own_weights.ShownWeights(self._replica, self._weights, self._set_outside, self._adopt)
            self._comparison.compare(partial(own_weights.compared, self._replica, self._weights), own_weights.CURE)

    def _average(self) -> None:
        self._sender.ratios.average(not self._sender.common and not self._sender.has_muon)

    def _own_factor(self) -> float:
        """Compute by how much the roots of the second moments exceed the mean gradient's."""
        return 1.0 if self._sender.common else self._sender.ratios.own_factor(self._comm.size)

    def show_common(self) -> None:
        """Show the common weights until the model is trained again, also to code that calls a part of it directly."""
        if self._shown is not None:
            self._shown.show(common=True)

    def choose_bits(self, recipes: Sequence[Recipe], method_of: Callable[[str], tuple[Scheme, Any]]) -> None:
        """Measure 20 steps by the present recipe, then choose one of `recipes` by their times; see `attach`.

        `method_of` makes the scheme and the Steps of a recipe's text. A loaded state that has chosen already keeps its recipe.
        """
        self._method_of, self.chooses = method_of, True
        if len(recipes) > 1:
            self._choosing = Choosing(recipes, self._gathered, self._take_recipe)

    def _take_recipe(self, recipe: Recipe) -> None:
        """Switch to another recipe from the next step on. The same on all ranks."""
        if recipe == self.recipe:
            return
        scheme, options = self._method_of(recipe.text)
        options = replace(options, check_weights_every=self.exchange.check_weights_every)
        self._take_form(options.common_for(scheme, self._sender.has_muon), self._sender.common)
        self._take_scheme(scheme)
        self._forget(options)
        self.recipe = recipe
        self.exchange = self._sender.options = options
        self._sender.ratios.every = options.measure_every
        self._have_own_weights()

    def _take_form(self, common: bool, before: bool | None = None, ranks: int | None = None) -> None:
        """Go on with common second moments or a rank's. If it was the other way `before`, residuals have other units, and are dropped.

        `ranks`: how many made the second moments, if not as many as now.
        """
        before = common if before is None else before
        self._sender.take_squares(common, before, ranks or self._comm.size)
        if common != before:
            self.state.rescale(dict.fromkeys(self._weights.trained, 0.0))

    def load_state_dict(self, state: SavedState) -> None:
        if self._choosing is not None:
            fingerprint = self.fingerprint()
            del fingerprint["scheme_name"]  # may be another recipe's, taken below
            check_fingerprint(state, fingerprint)
            if state["step"] + 1 >= STEPS:
                names = {each.name: each for each in self._choosing.recipes}
                self._choosing = None
                if (chosen := names.get(state["recipe"])) is not None:
                    self._take_recipe(chosen)
        super().load_state_dict(state)

    @abstractmethod
    def _take_moments(self) -> None:
        """Take moments that were loaded into the optimizers since the last step, unless a state of this handle was loaded."""

    @abstractmethod
    def _write_own(self, left: frozenset[str] | None = None) -> None:
        """Write this rank's weights into the model, except in the parameters `left`; None: except in the idle ones."""
