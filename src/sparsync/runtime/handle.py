"""The handle of a model whose gradients a scheme reduces: reports, and the state to save. Every integration returns one."""

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from sparsync.base.scheme import ReduceScatterScheme, Scheme
from sparsync.core import Comm, Report
from sparsync.feedback import redistributed
from sparsync.recipes import Recipe
from sparsync.runtime.between_steps import BackwardPasses, Loads, current_pass
from sparsync.runtime.connection import Connection
from sparsync.runtime.driven import drive
from sparsync.runtime.findings import Finding, check_scheme, warn_of
from sparsync.runtime.optimizers import Comparison, ResidualRescaler, UsualShare
from sparsync.runtime.parameter_names import named_parameters, trained
from sparsync.runtime.snapshot import Part, Snapshot, held_in, with_held
from sparsync.runtime.state_checks import check_fingerprint
from sparsync.runtime.state_file import VERSION
from sparsync.runtime.summary import Hidden, ReportLog, Summary

Residual = Literal["carry", "drop"]
_Vectors = Mapping[str, Tensor]  # by parameter name


@dataclass(frozen=True)
class Gradients:
    """Exchange gradients: what `sparsync.attach(..., exchange=Gradients())` takes. For every optimizer."""


class Handle:
    """The reports and the state of `scheme` on one model and one rank.

    `part` names the part of the model that this rank's worker group has, such as "shard0of2"; "" is all of it. States of different parts
    do not fit each other. `module` is the model, if known, and `driven` its parameters that this handle trains, on an `axis` of FSDP2.
    A copy, by `copy` or `pickle`, is a `DetachedHandle`.
    """

    switches = False  # whether this integration can change its scheme between two steps
    origin = "sparsync.attach"  # what the user called for this handle
    integration = "gradients"  # what residuals are of: it gives the units of a state
    exchange: Any = Gradients()  # Any: what is exchanged, with its options, such as Steps
    recipe: Recipe | None = None  # that `attach` has taken; None where it was given a scheme

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
        exchanges_gradients = self.integration == "gradients"  # whose users see what is not finite without us
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
        self._pass_hooks: list[Any] = []  # Any: torch's handles of hooks
        if len(rescaler.clippings) == 1 and module is not None:
            rescaler.clippings[0].passes = BackwardPasses(partial(_gradients_of, weakref.ref(module)))
            begins = partial(_note_pass, weakref.ref(self))
            self._pass_hooks = [each.register_hook(begins) for _, each in driven]
            weakref.finalize(self, _remove, self._pass_hooks).atexit = False
        self._loads, self._told_of_loads = self._loads_of(module, comparison.optimizers), False
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._step = -1
        self._detached = False
        self._reports = ReportLog()
        # When nothing refers to the handle any more. Not at exit, where torch may have ended before.
        weakref.finalize(self, self._connection.shut).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:  # Any: as object.__reduce__
        settings, (rank, ranks) = self.state.settings, self.place
        return DetachedHandle, (settings, rank, ranks, self.part, self._step, tuple(self._reports))

    @property
    def module(self) -> nn.Module | None:
        """The model; None where it is not known, or gone."""
        return self._module and self._module()

    @property
    def scheme(self) -> Any:  # Any: a Scheme, or its reduce-scatter form on a shard axis
        """The scheme that reduces the gradients. Assigning another one is `switch`, which carries the residual over."""
        return self.state.scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        self.switch(scheme)

    def switch(self, scheme: Scheme, *, residual: Residual = "carry") -> None:
        """Reduce with another scheme from the next step on. Call it on all ranks, between two steps, with the same settings.

        A scheme of the same class goes on with all that this handle remembers. One of another class takes the residual, by parameter
        name, if it has plain error feedback for all parameters. Otherwise train one step with TopK(density=1.0), which
        sends all that is held back, and pass `residual="drop"`, which forgets what is left.
        The next step compares the settings of all ranks, and raises RanksDifferError on all of them where they differ.
        Raises RuntimeError after `detach`, inside a backward pass and for handles that cannot switch (steps, local steps, a shard
        axis), TypeError for anything but a Scheme, and ValueError where the residual cannot be carried over.
        """
        check_scheme(scheme)
        self._check_attached()
        if not self.switches:
            raise RuntimeError(
                "this handle keeps the scheme that it was made with; save a checkpoint, call detach(), and attach with another scheme or "
                "other settings"
            )
        # HACK: torch has no public function for this. Price: it may change with torch; tests/test_attached_model.py calls it.
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the scheme cannot change inside a backward pass, where buckets of one step would differ; change it between two steps"
            )
        if residual not in ("carry", "drop"):
            raise ValueError(f"residual must be 'carry' or 'drop', got {residual!r}")
        if scheme is not self.scheme:
            self._take_scheme(scheme, residual)

    def _take_scheme(self, scheme: Scheme, residual: Residual = "carry") -> None:
        """Reduce with another scheme from the next step on, which gets what the present one holds back, unless that is dropped."""
        self._settle()
        self.state = self.state.followed_by(scheme) if residual == "carry" else scheme.start()
        self._use(scheme)
        self._rescaler.use(self.state)
        self._connection.use(self.state)

    def set(self, **settings: Any) -> None:  # Any: of a field of the scheme
        """Change settings of the scheme from the next step on, such as `handle.set(density=0.02)`; state and residual stay. See `switch`.

        For schedules: call it between steps with a value that depends on the step only, the same on all ranks. A state says which
        settings it was saved with (`state_dict()["settings"]`); loading it changes none. Raises ValueError for a setting that the scheme
        does not have, and RuntimeError after `detach`.
        """
        self._check_attached()
        scheme = self.scheme
        known = [each.name for each in fields(scheme) if each.init] if is_dataclass(scheme) else []
        if unknown := sorted(settings.keys() - set(known)):
            raise ValueError(f"{self.scheme.name} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
        if any(getattr(scheme, key) != value for key, value in settings.items()):
            self.switch(replace(scheme, **settings))  # pyright: ignore[reportArgumentType]  # a dataclass

    def _check_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this handle is detached; attach again, with sparsync.attach(model, scheme)")

    def _use(self, scheme: Scheme) -> None:
        """Take what the integration itself keeps of its scheme from another one."""

    @property
    def closed(self) -> bool:
        """Whether the handle was closed or detached, so that another one may drive its model."""
        return self._detached or self._connection.closed

    def summary(self) -> Summary:
        """Return what was reduced on this rank so far, to be printed at any time; nothing is sent.

        By scheme and bucket and in all: steps, bytes sent, density, exchanges, seconds by phase, and how much the backward pass hid.
        """
        module = self.module or vars(self).get("model")
        named = [] if module is None else named_parameters(module)
        frozen = {name for name, each in named if not each.requires_grad}
        parameters = sum(math.prod(shape) for name, shape in self.layout().items() if name not in frozen)
        return Summary(*self.place, self._reports.steps, parameters, dict(self._reports.totals), self._hidden())

    def _hidden(self) -> Hidden | None:
        """Return how much of the reduction the backward pass hid; None where it comes afterwards."""
        return None

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:  # Any: those of torch's function of this name
        """Clip the gradients of the model at `max_norm`, and return their norm before, the same number on all ranks.

        For every handle, so that a loop can skip a step by it on all ranks or on none. The gradients that are reduced are common, so here
        it does what `torch.nn.utils.clip_grad_norm_` does with the trained parameters of the model, FSDP2's too. Call it when they are
        reduced, before the optimizer's step. Raises RuntimeError where the model is gone.
        """
        module = self.module
        if module is None:
            raise RuntimeError(
                "the model of this handle is gone; keep a reference to it, or call torch.nn.utils.clip_grad_norm_ yourself"
            )
        norm: Any = nn.utils.clip_grad_norm_([each for _, each in trained(module)], max_norm, **options)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of an FSDP2 model

    def close(self) -> None:
        """Close connections and threads. Reducing then raises RuntimeError; reports and state stay readable.

        For processes that train one model after the other: `with sparsync.attach(...) as handle`. Ranks that wait for this one get an
        error. A handle without references closes itself.
        """
        self._connection.shut()
        self._end_watching()

    def _end_watching(self) -> None:
        """Watch neither model nor optimizer any more. Safe to call again."""
        self._rescaler.close()
        self._loads.close()
        _remove(self._pass_hooks)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._place["rank"], self._place["ranks"]

    def reports(self) -> list[Report]:
        """Return one report for each bucket and step so far, oldest first: the newest 10 000."""
        return list(self._reports)

    def take_reports(self) -> list[Report]:
        """Return the reports since the last call, and forget them."""
        return self._reports.take()

    def layout(self) -> dict[str, list[int]]:
        """Return the shape of each parameter of the model by name; {} where the model is not known."""
        model = vars(self).get("model")
        return {} if model is None else {name: list(each.shape) for name, each in named_parameters(model)}

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme.state_dict
        """Return this rank's state. Save that of each rank, between two steps. See sparsync.checkpoint.

        torch.distributed.checkpoint would keep that of one rank only: give it sparsync.checkpoint.entries.
        Raises RuntimeError where an error has left a step applied in part, until a state was loaded.
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
        """Note that this rank has saved its state: in the next step all ranks raise unless all have."""
        self._comparison.saved = True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank. Call it on all ranks, with states of the same step.

        Settings of the scheme may have changed. A state saved under DDP also loads without a wrapper, and the other way round.
        Raises ValueError, and changes nothing, for a state of another integration, scheme, model, format, rank or number of ranks.
        """
        self._check(state)
        self._warn_of_recipe(state)
        self._load(state)
        self._loads.note_handle()

    def _warn_of_recipe(self, state: Mapping[str, Any]) -> None:
        """Warn where `state` was saved with another recipe, which then has other settings."""
        saved, own = state["recipe"], "" if self.recipe is None else self.recipe.name
        if saved and saved != own and state["settings"] != self.state.settings:
            here = f"this handle has {own or 'a scheme that was given'}"
            warn_of(f"this state was saved with {saved}, and {here}; attach with {saved} to go on as before")

    def fingerprint(self) -> dict[str, Any]:  # Any: as state_dict
        """Return what must be the same in a state that this handle continues from, whatever its rank and number of ranks."""
        return {
            "version": VERSION,
            "integration": self.integration,
            "scheme_name": _name_of(self.scheme),
            "layout": self.layout(),
        }

    def resized(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:  # Any: as state_dict
        """Return a state for this rank, made from those of all ranks of another number, in rank order. See `sparsync.checkpoint.load`."""
        rank, ranks = self.place
        scheme = _merged([each["scheme"] for each in states], lambda vectors: redistributed(vectors, ranks)[rank])
        return {**states[0], **self._place, "scheme": scheme}

    @property
    def done(self) -> int | None:
        """The number of steps that were applied. With gradients None where the optimizer is not known: pass it to `attach`."""
        return self._rescaler.done

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        """Return copies of this rank's state between two steps; without `shared`, of what it has for the others.

        After `regroup` a step that has failed counts as not taken: what this rank holds back is from then on what it was before.
        """
        with suppress(RuntimeError):  # of a thread that has ended
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
        """Continue from a snapshot of this rank, or from parts of one of another rank of the same group.

        Moments that each rank has alone stay this rank's, once it has taken steps. Raises ValueError as `load_state_dict`.
        """
        if snapshot.shared is not None:
            joined = self._joined(snapshot, self.state_dict())
            done = joined.pop("done")
            self.load_state_dict(joined)
            self._rescaler.count(done)
        elif snapshot.own is not None:
            self._settle()
            self._rescaler.applied()  # the scheme loses the copy that a step would be taken back to
            self.state.load_state_dict(with_held(self.state.state_dict(), snapshot.own["scheme"]))

    def _own(self, scheme: Part) -> dict[str, Any]:  # Any: as Snapshot.own
        """Return what this rank has for the others, of which `scheme` is the state of the scheme."""
        return {"scheme": held_in(scheme)}

    def _joined(self, snapshot: Snapshot, mine: Part) -> dict[str, Any]:  # Any: as state_dict
        """Return the state of a snapshot with what is this rank's own, of which `mine` is the state."""
        # What is held back is in the units of this rank's last step.
        units = {key: mine[key] for key in ("rates", "highest_rates", "loss_scale", "clipping") if mine["step"] >= 0}
        theirs, own = snapshot.shared or {}, snapshot.own or {}
        held = own["scheme"] if "scheme" in own else held_in(mine["scheme"])
        alone = {key: mine["scheme"][key] for key in ("own",) if key in mine["scheme"]}
        return {**theirs, **self._place, **units, "scheme": {**with_held(theirs["scheme"], held), **alone}}

    def on_move(self, callback: Callable[[Part | None], None]) -> Callable[[], None]:
        """Call `callback` with each move of the common weights, for `Snapshot.moves`, or with None where anything else has changed them.

        Tensors of a move are good during the call. Returns what ends this. With gradients nothing calls it: optimizers move the weights.
        """
        return lambda: None

    def regroup(self, comm: Comm, *, step: int | None = None) -> None:
        """Exchange with the ranks of `comm` from the next step on, after ranks have gone or come. Collective over them.

        The model, the optimizer and what this rank holds back stay. `step` is the last one that was applied, the same on all ranks; None:
        that of this handle. What differs in the weights shows in the next step. From then on what this rank holds back is copied before
        each step, which takes as much memory, so that `snapshot` can take back one that has failed.
        Raises RuntimeError where an error has left a step applied in part.
        """
        self._check_attached()
        if self._connection.partly_applied:
            raise RuntimeError("an error left a step half applied on this rank; load a checkpoint on all ranks")
        with suppress(RuntimeError):  # of a thread that has ended
            self._flush()
        self._rescaler.settle()
        self._rescaler.forget()  # the scheme loses the copy that a step under way would be weighed by
        self._rescaler.takes_back = True
        self._step = self._step if step is None else step
        self._connection.regroup(comm, self._step)
        self._comparison.saved = False  # ranks that have come now saved nothing
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._regrouped(comm)

    def _regrouped(self, comm: Comm) -> None:
        """Take what depends on the ranks from `comm`."""

    def _still(self) -> Collection[str]:
        """Return the parameters that do not move now."""
        module = self.module
        return () if module is None else {name for name, each in named_parameters(module) if not each.requires_grad}

    @property
    def lost(self) -> bool:
        """Whether the last step failed because another rank has failed, or is gone."""
        return self._connection.lost

    def _residual_sizes(self) -> dict[str, int]:
        """Return how many elements of each parameter this rank's state has, by name, where that is known."""
        return {name: math.prod(shape) for name, shape in self.layout().items()}

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state that this handle cannot continue from, before anything is loaded from it."""
        check_fingerprint(state, self.fingerprint())
        place = {key: state[key] for key in self._place}
        if place != self._place or state["part"] != self.part:
            raise ValueError(
                f"this is the state of {_described(place, state['part'])}, and this is {_described(self._place, self.part)}; "
                "load each rank's own. sparsync.checkpoint.load finds it, and redistributes residuals to another number of ranks; in a "
                "torch.distributed.checkpoint, save sparsync.checkpoint.entries(handle), not the handle"
            )

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that was checked."""
        self._flush()
        self.state.load_state_dict(state["scheme"])
        self._step = state["step"]
        self._connection.continue_after(state["step"])
        units = self._rescaler.units
        units.rates, units.highest = dict(state["rates"]), dict(state["highest_rates"])
        units.scale = state["loss_scale"]
        units.clipping = [UsualShare(**each) for each in state["clipping"]]
        self._rescaler.forget()

    def _pass_begins(self) -> None:
        """Note that a backward pass is about to add to the gradients, before it does; it is called for each of them."""
        if (task := current_pass()) != self._pass:
            self._pass = task
            self._connection.settle()  # not later: buckets of this pass may be on their way
        self._rescaler.pass_begins(self._connection.failed)

    def _loads_of(self, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> Loads:
        """Return what notes the states that are loaded into the model and its optimizers."""
        if module is None:
            return Loads([], optimizers, list)
        inside = [module.get_submodule("_orig_mod")] if hasattr(module, "_orig_mod") else []  # of torch.compile
        return Loads([module, *inside], optimizers, partial(_trained_of, weakref.ref(module)))

    def _go_back(self, last: int) -> list[str]:
        """Drop what waits where the model or an optimizer, and not this handle, was given another state since the step `last`.

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
        """Forget what waits, as if no step had been taken; `moments` too, where this handle has those of the optimizer."""
        self._settle()
        self._forget_residual()

    def _forget_residual(self) -> None:
        self.state.load_state_dict(with_held(self.state.state_dict(), None))
        self._rescaler.restart()

    def _settle(self) -> None:
        """Make the scheme's state that of a whole step, as far as the optimizer has applied it."""
        self._flush()
        self._rescaler.settle()
        self._rescaler.undo(self._connection.failed)

    def _flush(self) -> None:
        """Wait until the last step is reduced, and end it."""
        self._connection.end_step()
        self._connection.settle()


@dataclass(frozen=True)
class DetachedHandle:
    """A copy of a handle, also after `pickle`: its settings and reports. It reduces nothing and has no state."""

    settings: str  # of the scheme
    rank: int
    ranks: int
    part: str
    step: int  # the last one that was reduced, -1 for none
    kept_reports: tuple[Report, ...]

    def reports(self) -> list[Report]:
        """Return the reports that the handle had when it was copied."""
        return list(self.kept_reports)

    def __getattr__(self, name: str) -> Any:  # Any: there is none
        raise AttributeError(
            f"this is a copy of a handle, which has reports() only and no {name!r}: connections and state stay with the original; "
            "call sparsync.attach on the copied model"
        )


def _merged(
    states: Sequence[Mapping[str, Any]], merge: Callable[[Sequence[_Vectors]], _Vectors]
) -> dict[str, Any]:  # Any: as state_dict
    """Return the state of a scheme, made from those of several ranks, of which `merge` makes what each rank has alone."""
    kinds = dict.fromkeys(kind for each in states for kind in held_in(each))
    return with_held(states[0], None) | {kind: merge([each.get(kind, {}) for each in states]) for kind in kinds}


def _remove(hooks: Sequence[Any]) -> None:  # Any: torch's handles of hooks
    for each in hooks:
        each.remove()


def _note_pass(handle: "weakref.ref[Handle]", _: Tensor) -> None:
    if (found := handle()) is not None:
        found._pass_begins()


def _gradients_of(module: Callable[[], nn.Module | None]) -> Iterator[Tensor | None]:
    """Return what this rank holds of the gradients of a module."""
    found = module()
    # Any: a DTensor may be among them.
    gradients: Any = () if found is None else (each.grad for _, each in trained(found))
    return (each.to_local() if hasattr(each, "to_local") else each for each in gradients)


def _trained_of(module: Callable[[], nn.Module | None]) -> list[Tensor]:
    """Return what this rank holds of the trained parameters of a module."""
    found = module()
    # Any: a DTensor may be among them.
    values: list[Any] = [each.detach() for _, each in trained(found)] if found is not None else []
    return [each.to_local() if hasattr(each, "to_local") else each for each in values]


def _name_of(scheme: Any) -> str:  # Any: a Scheme or its reduce-scatter form
    """Return the name of a scheme, with those of the schemes inside it that hold something back."""
    inner = [_name_of(each) for each in scheme.inner.values() if each.has_residual]
    return f"{scheme.name}({', '.join(inner)})" if inner else scheme.name


def _described(place: Mapping[str, int], part: str) -> str:
    return f"rank {place['rank']} of {place['ranks']}" + (f" of {part}" if part else "")
