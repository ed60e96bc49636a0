"""Loops that throw a gradient away and take no step, because its norm is too large: on all ranks or on none, and nothing of it stays."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import sparsync
from helpers.distributed import case, run
from helpers.replicas import behind, local, on_all_ranks, perceptron
from sparsync import Gradients, Steps
from sparsync.core import generator

MOST = 20.0  # norm of a gradient that is used
SPIKE = 4  # the number of the batch


class Training:
    def __init__(self, scheme: str, exchange: Any, wrapper: str = "ddp", **options: Any) -> None:
        self.bare = perceptron()
        self.model, given = behind(wrapper, self.bare)
        kind = AdamW if isinstance(exchange, Steps) else SGD
        self.optimizer: Optimizer = kind(self.model.parameters(), lr=0.0625)
        options = {"optimizer": self.optimizer, **given, **options}
        self.handle: Any = sparsync.attach(self.model, sparsync.schemes.from_text(scheme), exchange=exchange, **options)
        self.skipped: list[int] = []
        self.norms: list[float] = []

    def backward(self, number: int) -> None:
        x = torch.randn(4, 8, generator=generator(dist.get_rank(), "data", number))
        spiked = number == SPIKE and dist.get_rank() == 1
        (self.model(x).square().mean() * (2.0**12 if spiked else 1.0)).backward()

    def reduce(self) -> None:
        if isinstance(self.handle, sparsync.GradientReducer):
            self.handle.reduce()

    def step(self, number: int, own_norm: bool = False, to_none: bool = True) -> None:
        """Do as OLMo and timm do."""
        self.backward(number)
        self.reduce()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0) if own_norm else self.handle.clip_grad_norm_(1.0)
        self.norms.append(float(norm))
        if not norm.isfinite() or norm > MOST:
            self.skipped.append(number)
            self.optimizer.zero_grad(set_to_none=to_none)
            return
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)

    def held(self) -> Tensor:
        state = self.handle.state_dict()["scheme"]["residual"]
        return torch.cat([state[name] for name in sorted(state)])

    def weights(self) -> Tensor:
        return torch.cat([local(each.detach()).flatten() for each in self.model.parameters()])


def same(one: Training, other: Training) -> bool:
    return torch.equal(one.weights(), other.weights()) and torch.equal(one.held(), other.held())


def steps() -> None:
    for wrapper in ("ddp", "bare", "fsdp"):
        with case(f"{wrapper}: by the common norm"):
            training = Training("two_shot:density=0.1:values=sign", Steps(), wrapper)
            for number in range(8):
                training.step(number, to_none=number % 2 == 0)
            assert on_all_ranks(torch.tensor(training.norms))
            assert training.skipped == [SPIKE]
            assert training.handle.stats()["steps"] == 7
        with case(f"{wrapper}: by a rank's own norm"):
            training, to_none = Training("two_shot:density=0.1:values=sign", Steps(), wrapper), wrapper != "bare"
            for number in range(SPIKE):
                training.step(number, own_norm=True, to_none=to_none)
            if dist.get_rank() == 1:
                training.step(SPIKE, own_norm=True, to_none=to_none)
                assert training.skipped == [SPIKE]
            with pytest.raises(
                sparsync.RanksDifferError,
                match=r"rank 1 has 1 backward pass before step 4 whose gradients were thrown away.*clip_grad_norm_",
            ):
                training.step(SPIKE + 1, own_norm=True)
    with case("accumulation, of other lengths"):
        training = Training("two_shot:density=0.1:values=sign", Steps(), "ddp")
        for number in range(4):
            for part in range(2 + dist.get_rank()):
                training.backward(10 * number + part + 5)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=number % 2 == 0)


def test_a_loop_that_exchanges_steps_skips_one_on_all_ranks_or_fails_at_once() -> None:
    run(steps, 2)


def no_skips() -> None:
    def made(wrapper: str = "ddp") -> Training:
        training = Training("two_shot:density=0.1:values=sign", Steps(), wrapper)
        training.step(0)
        return training

    for wrapper in ("ddp", "fsdp"):
        with case(f"{wrapper}: a batch that has no loss, on one rank"):
            training = made(wrapper)
            for number in range(1, 4):
                for part in range(2):
                    x = torch.randn(4, 8, generator=generator(dist.get_rank(), "data", 10 * number + part))
                    (training.model(x).square().mean() * (1 - (part == 0) * dist.get_rank())).backward()
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=number == 2)
    with case("gradients for a log, on one rank"):
        training = made()
        if dist.get_rank() == 0:
            torch.autograd.grad(training.bare(torch.ones(4, 8)).square().mean(), list(training.bare.parameters()))
        training.step(1)
    with case("attacks in evaluation mode, more on one rank"):
        training = made("bare")
        training.model.eval()
        for number in range(2 + dist.get_rank()):
            training.backward(5 + number)
            training.optimizer.zero_grad()
        training.model.train()
        training.step(1)
    with case("sparse gradients that accumulate"):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Embedding(6, 4, sparse=True))
        optimizer = AdamW(model.parameters())
        sparsync.attach(model, sparsync.schemes.from_text("topk:density=0.5"), optimizer=optimizer, exchange=Steps())
        for number in range(4):
            model(torch.tensor([number, 5])).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def test_gradients_that_are_no_skipped_step_are_not_taken_for_one() -> None:
    run(no_skips, 2)


GRADIENTS = {
    "topk:density=0.05": ("ddp", "fsdp"),
    "two_shot:density=1.0:values=int4": ("bare", "shards"),
    "exact_micro:density=0.05": ("bare",),
}


def gradients() -> None:
    for scheme, wrappers in GRADIENTS.items():
        for wrapper in wrappers:
            with case((scheme, wrapper)):
                training = Training(scheme, Gradients(), wrapper)
                for number in range(7):
                    training.step(number, to_none=number % 2 == 0)
                assert training.skipped == [SPIKE]  # the spike is not sent later
                if scheme.startswith("exact_micro"):  # whose thresholds have seen the spike
                    continue
                # What is held from then on, or from the start, is there again: as if the next spike had not been.
                for holds in (False, True):
                    spiked, never = (Training(scheme, Gradients(), wrapper) for _ in range(2))
                    for each in (spiked, never):
                        if holds:
                            each.handle._rescaler.takes_back = True
                        for number in (0, 1, *([] if holds else [SPIKE]), 2):
                            each.step(number)
                    for number in (SPIKE, SPIKE, 6, 7):
                        spiked.step(number, to_none=number % 2 == 0)
                        if number != SPIKE:
                            never.step(number)
                    assert spiked.skipped[-2:] == [SPIKE, SPIKE]
                    assert same(spiked, never)


def saved() -> None:
    for wrapper in ("ddp", "shards"):
        scheme = "two_shot:density=1.0:values=int4" if wrapper == "shards" else "topk:density=0.05"
        with case(wrapper):
            training, resumed, unsaved = (Training(scheme, Gradients(), wrapper) for _ in range(3))
            for each in (training, unsaved):
                for number in (0, 1, SPIKE, 2, SPIKE):
                    each.step(number)
            for name in ("model", "optimizer", "handle"):
                getattr(resumed, name).load_state_dict(deepcopy(getattr(training, name).state_dict()))
            for each in (training, resumed, unsaved):
                each.step(6)
            assert same(training, unsaved)
            assert same(resumed, unsaved)


def test_a_state_that_is_saved_after_a_skipped_step_has_nothing_of_its_gradient() -> None:
    run(saved, 2)


def test_a_skipped_step_leaves_nothing_of_its_gradient_behind() -> None:
    run(gradients, 2)


def failing(*_: object) -> None:
    raise RuntimeError("failed")


def accumulated() -> None:
    for wrapper in ("ddp", "bare"):
        for syncs in (True, False) if wrapper == "ddp" else (True,):
            with case((wrapper, syncs)):
                watched = Training("topk:density=0.05", Gradients(), wrapper)
                alone = Training("topk:density=0.05", Gradients(), wrapper, optimizer=None)
                for training in (watched, alone):
                    for number in range(6):
                        for part in range(3):
                            with nullcontext() if syncs or part == 2 else training.model.no_sync():  # pyright: ignore
                                training.backward(100 + 10 * number + part)
                            training.reduce()
                        training.optimizer.step()
                        training.optimizer.zero_grad(set_to_none=number % 2 == 0)
                assert same(watched, alone)
    with case("a pass for each loss"):
        # Taken for skipped steps at first, until each step has had them.
        training = Training("topk:density=0.05", Gradients(), "bare")
        undone = []
        for number in range(6):
            for part in range(2):
                training.optimizer.zero_grad()
                training.backward(100 + 10 * number + part)
                training.reduce()
                undone.append(training.handle._rescaler.clippings[0].passes.skips)
            training.optimizer.step()
        assert undone[:2] == [False, False]  # no step was seen
        assert undone[-4:] == [False] * 4
    with case("a step that fails"):
        watched = Training("topk:density=0.05", Gradients(), "bare")
        alone = Training("topk:density=0.05", Gradients(), "bare", optimizer=None)
        for training in (watched, alone):
            for number in range(6):
                training.backward(number + 5)
                if number == 3 and dist.get_rank() == 1:
                    vars(training.handle.scheme)["step"] = failing
                if number == 3:
                    with pytest.raises(RuntimeError):
                        training.handle.reduce()
                    vars(training.handle.scheme).pop("step", None)
                else:
                    training.handle.reduce()
                    training.optimizer.step()
                training.optimizer.zero_grad()
        assert same(watched, alone)


def test_gradients_that_accumulate_or_are_used_otherwise_leave_residuals_alone() -> None:
    run(accumulated, 2)


def settled_in_passes() -> list[int]:
    """Return how often a handle asks for the end of the last step during each of three backward passes."""
    training, found, asked = Training("topk:density=0.5", Gradients(), wrapper="bare"), list[int](), list[int]()
    training.handle._connection.settle = lambda: asked.append(1)
    for number in range(3):
        asked.clear()
        training.backward(number)
        found.append(len(asked))
        training.reduce()
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.handle.close()
    return found


@pytest.mark.distributed
def test_a_pass_asks_once_for_the_end_of_the_last_step_because_its_own_buckets_may_be_on_their_way() -> None:
    assert run(settled_in_passes, 1) == [[1, 1, 1]]
