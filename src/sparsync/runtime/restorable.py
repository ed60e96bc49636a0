"""Saves and loads a handle's state, and moves it between ranks that go or come: the seam for elastic runs."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from sparsync.core import Comm
from sparsync.feedback import redistributed
from sparsync.recipes import Recipe
from sparsync.runtime.between_steps import Part, StepBoundary, held_in, with_held
from sparsync.runtime.findings import warn_of
from sparsync.runtime.parameters import named_parameters
from sparsync.runtime.rescaling import UsualShare
from sparsync.runtime.state_file import VERSION

SavedState = Mapping[str, Any]  # Any: as Restorable.state_dict

# The exchange, by integration. Their residuals have different units.
_SAVED_WITH = {
    "gradients": "exchange=Gradients()",
    "adamw_steps": "exchange=Steps()",
    "local_steps": "exchange=LocalSteps()",
}


class Snapshot(NamedTuple):
    """The state that `snapshot` copies and `restore` takes, on the same rank or on another one. Missing parts stay unchanged."""

    moved: Part | None = None  # the common weights, and what moves with them; None if gradients are exchanged
    shared: Part | None = None  # everything else that all ranks have in common
    # Updates that the other ranks lack, as vectors by parameter name: in "scheme" the residuals, also nested, and in "learnt" the changes
    # of local steps since the last exchange. They may be added to another rank's, or multiplied. "still" names the parameters that do not
    # move now.
    own: Part | None = None
    moves: Sequence[Part] = ()  # moves of the common weights; `restore` replays them first


class Restorable(StepBoundary):
    """A handle's state: saved and loaded on the same ranks, on another number of ranks, or passed to ranks that come."""

    recipe: Recipe | None = None  # taken by `attach`; None if it was given a scheme

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme.state_dict
        """Return this rank's state. Save the states of all ranks, between two steps. See sparsync.checkpoint.

        torch.distributed.checkpoint would keep only one rank's: give it sparsync.checkpoint.entries.
        Raises RuntimeError if an error has left a step applied in part, until a state is loaded.
        """
        if self._connection.partly_applied:
            raise RuntimeError(
                "an error left a step half applied on this rank, so its state cannot be saved; load an older one on all ranks"
            )
        self._settle()
        return {
            **self.fingerprint(),
            **self._place,
            "part": self.part,
            "step": self._step,
            "settings": self.state.settings,
            "recipe": "" if self.recipe is None else self.recipe.name,
            "rates": dict(self._rescaler.units.rates),
            "highest_rates": dict(self._rescaler.units.highest),
            "loss_scale": self._rescaler.units.scale,
            "clipping": [asdict(each) for each in self._rescaler.units.clipping],
            "scheme": self.state.state_dict(),
        }

    def note_saved(self) -> None:
        """Note that this rank has saved its state. All ranks raise in the next step unless all have saved theirs."""
        self._comparison.saved = True

    def load_state_dict(self, state: SavedState) -> None:
        """Continue from this rank's state. Call it on all ranks, with states of the same step.

        Settings of the scheme may have changed. A state saved under DDP also loads without a wrapper, and the other way round.
        Raises ValueError, and changes nothing, for a state of another integration, scheme, model, format, rank or number of ranks.
        """
        self._check(state)
        saved, name = state["recipe"], "" if self.recipe is None else self.recipe.name
        if saved and saved != name and state["settings"] != self.state.settings:
            here = f"this handle has {name or 'a scheme that was given'}"
            warn_of(f"this state was saved with {saved}, and {here}; attach with {saved} to go on as before")
        self._load(state)
        self._loads.note_handle()

    def fingerprint(self) -> dict[str, Any]:  # Any: as state_dict
        """Return the entries that a state must share with this handle to be loaded, for any rank and number of ranks."""
        return {
            "version": VERSION,
            "integration": self.integration,
            "scheme_name": _name_of(self.state.scheme),
            "layout": self.layout(),
        }

    def resized(self, states: Sequence[SavedState]) -> dict[str, Any]:  # Any: as state_dict
        """Make a state for this rank from the states of another number of ranks, in rank order. See `sparsync.checkpoint.load`."""
        rank, ranks = self.place
        schemes = [each["scheme"] for each in states]
        kinds = dict.fromkeys(kind for each in schemes for kind in held_in(each))
        held = {kind: redistributed([each.get(kind, {}) for each in schemes], ranks)[rank] for kind in kinds}
        return {**states[0], **self._place, "scheme": with_held(schemes[0], None) | held}

    @property
    def done(self) -> int | None:
        """The number of applied steps. With gradients None if the optimizer is not known: pass it to `attach`."""
        return self._rescaler.done

    @property
    def lost(self) -> bool:
        """True if the last step failed because another rank has failed, or is gone."""
        return self._connection.lost

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        """Copy this rank's state between two steps; without `shared`, only the updates that the others lack.

        After `regroup` a failed step counts as not taken: its residuals are restored.
        """
        with suppress(RuntimeError):  # from a thread that has ended
            self._flush()
        self._rescaler.settle()
        self._rescaler.take_back(self._residual_sizes())
        if not shared:
            self._settle()
            return Snapshot(own={**self._own(self.state.state_dict()), "still": sorted(self._still())})
        state = self.state_dict()
        own = self._own(state["scheme"])
        return Snapshot(None, {**state, "scheme": with_held(state["scheme"], None), "done": self.done}, own)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of this rank, or from parts of a snapshot of another rank in the same group.

        A rank that has taken steps keeps moments that differ between ranks. Raises ValueError as `load_state_dict`.
        """
        if snapshot.shared is not None:
            joined = self._joined(snapshot, self.state_dict())
            done = joined.pop("done")
            self.load_state_dict(joined)
            self._rescaler.count(done)
        elif snapshot.own is not None:
            self._settle()
            self._rescaler.applied()  # the scheme loses the copy for taking a step back
            self.state.load_state_dict(with_held(self.state.state_dict(), snapshot.own["scheme"]))

    def on_move(self, callback: Callable[[Part | None], None]) -> Callable[[], None]:
        """Call `callback` with every move of the common weights, for `Snapshot.moves`, or with None if anything else has changed them.

        The tensors of a move are valid only during the call. Returns a function that ends this. With gradients `callback` is never called,
        because optimizers move the weights.
        """
        return lambda: None

    def regroup(self, comm: Comm, *, step: int | None = None) -> None:
        """Exchange with the ranks of `comm` from the next step on, after ranks have gone or come. Collective over these ranks.

        The model, the optimizer and this rank's residuals stay. `step` is the last applied step, the same on all ranks; None: this
        handle's. The next step compares the weights. From then on residuals are copied before every step, which doubles their memory, so
        that `snapshot` can take back a failed step. Raises RuntimeError if an error has left a step applied in part.
        """
        self._check_attached()
        if self._connection.partly_applied:
            raise RuntimeError("an error left a step half applied on this rank; load a checkpoint on all ranks")
        with suppress(RuntimeError):  # from a thread that has ended
            self._flush()
        self._rescaler.settle()
        self._rescaler.forget()  # the scheme loses the copy for weighing the step under way
        self._rescaler.takes_back = True
        self._step = self._step if step is None else step
        self._connection.regroup(comm, self._step)
        self._comparison.saved = False  # ranks that have just come have saved nothing
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._regrouped(comm)

    def _own(self, scheme: Part) -> dict[str, Any]:  # Any: as Snapshot.own
        """Take the updates that the others lack from the state of the scheme."""
        return {"scheme": held_in(scheme)}

    def _joined(self, snapshot: Snapshot, mine: Part) -> dict[str, Any]:  # Any: as state_dict
        """Join the state of a snapshot with the parts that only this rank has, from its state `mine`."""
        # Residuals are in the units of this rank's last step.
        units = {key: mine[key] for key in ("rates", "highest_rates", "loss_scale", "clipping") if mine["step"] >= 0}
        theirs, own = snapshot.shared or {}, snapshot.own or {}
        held = own["scheme"] if "scheme" in own else held_in(mine["scheme"])
        alone = {key: mine["scheme"][key] for key in ("own",) if key in mine["scheme"]}
        return {**theirs, **self._place, **units, "scheme": {**with_held(theirs["scheme"], held), **alone}}

    def _regrouped(self, comm: Comm) -> None:
        """Adapt to the ranks of `comm`."""

    def _still(self) -> Collection[str]:
        """Name the parameters that do not move now."""
        module = self.module
        return () if module is None else {name for name, each in named_parameters(module) if not each.requires_grad}

    def _residual_sizes(self) -> dict[str, int]:
        """Count the elements of each parameter in this rank's state, by name, as far as known."""
        return {name: math.prod(shape) for name, shape in self.layout().items()}

    def _check(self, state: SavedState) -> None:
        """Raise ValueError for a state that this handle cannot continue from, before anything is loaded from it."""
        check_fingerprint(state, self.fingerprint())
        place = {key: state[key] for key in self._place}
        if place != self._place or state["part"] != self.part:
            raise ValueError(
                f"this is the state of {_described(place, state['part'])}, and this is {_described(self._place, self.part)}; "
                "load each rank's own. sparsync.checkpoint.load finds it, and redistributes residuals to another number of ranks; "
                "in a torch.distributed.checkpoint, save sparsync.checkpoint.entries(handle), not the handle"
            )

    def _load(self, state: SavedState) -> None:
        """Continue from a checked state."""
        self._flush()
        self.state.load_state_dict(state["scheme"])
        self._step = state["step"]
        self._connection.continue_after(state["step"])
        units = self._rescaler.units
        units.rates, units.highest = dict(state["rates"]), dict(state["highest_rates"])
        units.scale = state["loss_scale"]
        units.clipping = [UsualShare(**each) for each in state["clipping"]]
        self._rescaler.forget()


def check_fingerprint(state: SavedState, own: SavedState) -> None:
    """Raise ValueError unless `state` has the format, integration, scheme and model of `own`, a `Restorable.fingerprint`.

    The content of such a state is trusted and not checked again.
    """
    if state.get("version") != VERSION:
        raise ValueError(
            f"this state has format version {state.get('version')}, and this sparsync reads version {VERSION}; load it with the sparsync "
            "that saved it, or start without"
        )
    if difference := _difference(state, own):
        raise ValueError(
            f"this is the state of another model or scheme: {difference}; load the state of the same model and scheme"
        )


def _difference(state: SavedState, own: SavedState) -> str:
    """Describe the first difference in integration, scheme and model between `state` and `own`; "" if there is none."""
    if state["integration"] != own["integration"]:
        named, here = (_SAVED_WITH.get(each["integration"], repr(each["integration"])) for each in (state, own))
        return f"it was saved with {named}, whose residuals are in other units than those of {here}"
    if state["scheme_name"] != own.get("scheme_name", state["scheme_name"]):
        return f"its scheme is {state['scheme_name']!r}, and this one is {own['scheme_name']!r}"
    saved, layout = state["layout"], own["layout"]
    if not saved or not layout:  # the layout is not known
        return ""
    if more := [name for name in saved if name not in layout]:
        return f"it has a parameter {more[0]!r}, which this model lacks"
    for name, shape in layout.items():
        if name not in saved:
            return f"it has no parameter {name!r}, which this model has"
        if list(saved[name]) != list(shape):
            return f"its parameter {name!r} has the shape {tuple(saved[name])}, and here {tuple(shape)}"
    return ""


def _name_of(scheme: Any) -> str:  # Any: a Scheme or its reduce-scatter form
    """Build the name of a scheme, with the names of inner schemes that have a residual."""
    inner = [_name_of(each) for each in scheme.inner.values() if each.has_residual]
    return f"{scheme.name}({', '.join(inner)})" if inner else scheme.name


def _described(place: Mapping[str, int], part: str) -> str:
    return f"rank {place['rank']} of {place['ranks']}" + (f" of {part}" if part else "")
