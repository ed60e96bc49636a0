"""The moments of exchanged steps in `optimizer.state`, where torch keeps an optimizer's moments, so that it saves and loads them.

During training `exp_avg` is a view of m, the momentum of steps, rate included, and `exp_avg_sq` a view of the squares. `state_dict` has
AdamW's units. It divides a rank's own squares by `clip_factor` squared, so that they are as large as the mean gradient's, and exp_avg is
m (sqrt(exp_avg_sq / (1 - beta2^t)) + eps) / rate, with the mean rate of the steps in m. Loading converts back, with the rate at that time.
So AdamW goes on with updates as long as these steps, and the other way round. Muon's momentum is converted in the same way, by the sender's
squares. Torch's own Muon saves no squares; its momentum then begins anew.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsync.exchanges.rules import AdamWRule
from sparsync.exchanges.sender import VECTORS, Sender
from sparsync.exchanges.training_loop import Replica
from sparsync.exchanges.weights import by_name

_LONGEST = 10.0  # the largest momentum over its rate; AdamW's stays below 8 with matching squares

Saved = dict[str, Any]  # Any: of one parameter, as torch's optimizers have it


class Moments:
    """Shows the vectors of `sender` in the state of its optimizers, until `leave`. `clip_factor()`: the handle's, or 1 for common squares.

    Before a state is saved, `take` takes what was loaded since the last step.
    """

    def __init__(
        self, replica: Replica, sender: Sender, clip_factor: Callable[[], float], take: Callable[[], object]
    ) -> None:
        self._replica, self._sender, self._groups = replica, sender, (groups := sender.groups)
        momentum, square = (by_name(sender.weights.buckets, sender.vectors[key]) for key in VECTORS)
        self._momentum, self._square, self._clip_factor, self._take_new = momentum, square, clip_factor, take
        self._rates = dict[int, float]()  # the mean rate of the steps in the momentum, by group
        self._steps = torch.zeros(len(replica.owned))
        by_group = [each for each in groups.optimizers for _ in each.param_groups]
        self._shown: dict[str, tuple[Optimizer, dict[str, Tensor]]] = {
            name: (
                by_group[groups.number[name]],
                {
                    "step": self._steps[place],
                    self._key(name): replica.whole(name, momentum[name]),
                    "exp_avg_sq": replica.whole(name, square[name]),
                },
            )
            for place, name in enumerate(replica.owned)
        }
        # Before the loop's hooks, so that they see what is saved.
        self._hooks = [each.register_state_dict_post_hook(self._saved, prepend=True) for each in groups.optimizers]

    def show(self) -> None:
        """Put the vectors into the state of the optimizers."""
        for name, (optimizer, shown) in self._shown.items():
            optimizer.state[self._replica.owned[name]].update(shown)
        self.count()

    def count(self) -> None:
        """Show how many steps were applied."""
        applied = self._sender.counts["applied"]
        self._steps.copy_(torch.tensor([applied[name] for name in self._shown], dtype=self._steps.dtype))

    def follow_rates(self, restart: bool = False) -> None:
        """Note the rates of an applied step; `restart`: take them for the whole momentum."""
        for place, rule in enumerate(self._groups.rules):
            before = 0.0 if restart else self._rates.get(place, 0.0)
            memory = rule.beta1 if isinstance(rule, AdamWRule) else rule.momentum
            self._rates[place] = rule.rate + (memory * (before - rule.rate) if before else 0.0)

    @torch.no_grad()
    def take(self) -> bool:
        """Take what a loop has put in place of the vectors, show these again, and return whether they have changed."""
        known = {name: self._held(name) for name in self._shown}
        if all(known[name].get(key) is each for name, (_, shown) in self._shown.items() for key, each in shown.items()):
            return False
        given = {name: self._given(name, known[name]) for name in known}
        changed = not all(self._equal(name, each) for name, each in given.items())
        if changed:
            self._groups.read()
            for name, each in given.items():
                self._put(name, each)
            self._groups.recount()
            self.follow_rates(restart=True)
        self.show()
        return changed

    @torch.no_grad()
    def leave(self) -> None:
        """Leave copies in AdamW's units to the optimizers, which step by themselves from here on."""
        for hook in self._hooks:
            hook.remove()
        for name, (optimizer, shown) in self._shown.items():
            if (state := self._held(name)) and state.get(self._key(name)) is shown[self._key(name)]:
                owner, group = self._replica.owned[name], optimizer.param_groups[0]
                copies = {key: each.to(owner.dtype) for key, each in self._exported(name).items() if key != "step"}
                on = owner.device if group.get("fused") or group.get("capturable") else "cpu"
                state.update(copies, step=shown["step"].clone().to(on))
        self._shown = {}

    def _saved(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:  # Any: as `state_dict` has it
        """Put moments in AdamW's units into the result of `state_dict`."""
        self._take_new()
        names = {id(each): name for name, each in self._replica.owned.items()}
        for group, numbers in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for each, number in zip(group["params"], numbers["params"], strict=True):
                if (name := names.get(id(each))) is not None:
                    saved["state"][number] = {**optimizer.state[each], **self._exported(name)}

    def _held(self, name: str) -> Saved:
        return self._shown[name][0].state.get(self._replica.owned[name], {})

    def _key(self, name: str) -> str:
        return "exp_avg" if isinstance(self._rule(name), AdamWRule) else "momentum_buffer"

    def _rule(self, name: str) -> Any:  # Any: a Rule
        return self._groups.rules[self._groups.number[name]]

    def _given(self, name: str, state: Saved) -> dict[str, Tensor]:
        """Read the optimizer's moments of a parameter, in AdamW's units; zero if missing."""
        shown = self._shown[name][1]
        live = (key in state and _same_bits(torch.as_tensor(state[key]), each) for key, each in shown.items())
        mine = self._exported(name) if all(live) or any(state.get(key) is each for key, each in shown.items()) else {}
        moments: dict[str, Tensor] = {}
        for key, each in shown.items():
            given = torch.as_tensor(state.get(key, torch.zeros_like(each)))
            # A loop may have moved or copied our views.
            moments[key] = mine[key] if mine and (given is each or _same_bits(given, each)) else given
        return moments

    def _equal(self, name: str, given: Mapping[str, Tensor]) -> bool:
        mine = self._exported(name)
        return all(torch.equal(_local(mine[key]).to(_local(each)), _local(each)) for key, each in given.items())

    def _exported(self, name: str) -> dict[str, Tensor]:
        """Copy the moments of a parameter, in AdamW's units."""
        rule, like = self._rule(name), self._replica.trained[name].detach()
        applied, seen = (self._sender.counts[key][name] for key in ("applied", "seen"))
        beta2 = rule.remembers(self._sender.options.beta2)
        # Scaled to the mean gradient, without bias.
        squares = self._square[name] / ((1 - beta2**seen) * self._clip_factor() ** 2) if seen else self._square[name]
        momentum = self._momentum[name]
        # Elements with gradients only on other ranks get squares too, or AdamW divides by zero: a checkpoint may mix ranks' tensors.
        squares = torch.where((squares == 0) & (momentum != 0), squares.mean(), squares)
        rate = (
            rule.sent_rate(like.shape) * self._rates.get(self._groups.number[name], 0.0) / rule.rate
            if rule.rate
            else 0.0
        )
        momentum = momentum * ((squares.sqrt() + rule.eps) / rate) if rate else torch.zeros_like(momentum)
        squares = squares * (1 - (rule.beta2 if isinstance(rule, AdamWRule) else beta2) ** applied)

        def formed(flat: Tensor) -> Tensor:
            return self._replica.whole(name, torch.empty_like(like, dtype=flat.dtype).copy_(flat.view(like.shape)))

        step = torch.tensor(float(applied), device=self._shown[name][1]["step"].device)
        return {"step": step, self._key(name): formed(momentum), "exp_avg_sq": formed(squares)}

    def _put(self, name: str, given: Mapping[str, Tensor]) -> None:
        """Set the moments of a parameter from AdamW's units. Until a ratio is known, the squares belong to the mean gradient."""
        rule, step = self._rule(name), int(given["step"])
        momentum, square = (_local(given[key]).reshape(-1) for key in (self._key(name), "exp_avg_sq"))
        beta2 = rule.remembers(self._sender.options.beta2)
        theirs = rule.beta2 if isinstance(rule, AdamWRule) else beta2
        squares = self._square[name].copy_(square)
        squares.div_(1 - theirs**step) if step else squares
        normalised = momentum.to(squares) / (squares.sqrt() + rule.eps)
        rate = rule.sent_rate(self._replica.trained[name].shape)
        self._momentum[name].copy_(normalised.masked_fill_(normalised.abs() > _LONGEST, 0.0).mul_(rate))
        squares.mul_(1 - beta2**step)
        # Torch's Muon saves no squares.
        seen = step if bool(squares.any()) else 0
        self._sender.counts["applied"][name], self._sender.counts["seen"][name] = step, seen


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = _local(one), _local(other)
    return one.dtype == other.dtype and torch.equal(one.to(other.device), other)


def _local(tensor: Any) -> Tensor:  # Any: a DTensor, or a plain Tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
