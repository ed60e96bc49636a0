"""What is measured on a GPU: methods by their texts, the model that they train, and the steps they take."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import sparsync
from sparsync.core import generator
from sparsync.recipes import bits_of
from sparsync_lab.workloads.gpt import Decoder

ADAMW, DDP = "fused AdamW", "DDP"
INT4 = "two_shot:density=1.0:values=int4"
SPARSE = "two_shot:density=0.05:values=int4"
STEP = (ADAMW, "default", "bits=0.8", INT4, "skip_reduce", "exact_micro", "exact_exdyna", "exact_oktopk", SPARSE)
WHOLE = (DDP, "bf16 hook", "powersgd 8", "powersgd 16", "default", "bits=0.8", INT4)
VECTORS = 12  # bytes per parameter of weights, gradients, and those that are given
MOMENTS = 8  # bytes per parameter of AdamW's state


@dataclass(frozen=True)
class Shape:
    """The model, and where it is."""

    device: str
    layers: int
    width: int
    vocabulary: int
    context: int

    @classmethod
    def on(cls, device: str, layers: int, width: int) -> "Shape":
        """Return GPT-2 with so many layers of that width; on a CPU, with few words and short sequences."""
        return cls(device, layers, width, *((50304, 1024) if device == "cuda" else (1000, 64)))

    def model(self) -> Decoder:
        """Return the model, whose heads have 64 elements."""
        torch.manual_seed(0)
        return Decoder(self.vocabulary, self.context, self.width, self.layers, max(1, self.width // 64)).to(self.device)

    @cached_property
    def parameters(self) -> int:
        with torch.device("meta"):
            model = Decoder(self.vocabulary, self.context, self.width, self.layers, max(1, self.width // 64))
        return sum(each.numel() for each in model.parameters())


@dataclass
class Steps:
    """A method that can take steps: `prepare` what a step needs, then `take` it.

    `beside`: bytes per parameter of what is there besides what the method keeps; None: not known.
    """

    prepare: Callable[[], object]
    take: Callable[[], object]
    handle: Any  # Any: of sparsync.attach; None without it
    beside: int | None = None


def given_gradients(text: str, shape: Shape, batch: int) -> Steps:
    """Return the exchange, and the optimizer's step if that is exchanged, of a bare model with gradients that are the same in each step."""
    model = shape.model()
    optimizer = _adamw(model)
    handle = None if text == ADAMW else attached(text, model, optimizer)
    drawn, parameters = generator(0, "gpu", 0), list(model.parameters())

    def rows(like: torch.Tensor) -> torch.Tensor:
        """Return a gradient whose rows have different lengths."""
        lengths = torch.randn(len(like), *[1] * (like.dim() - 1), generator=drawn).exp()
        return (1e-3 * torch.randn(like.shape, generator=drawn) * lengths).to(like)

    given = [rows(each) for each in parameters]

    def prepare() -> None:
        for parameter, each in zip(parameters, given, strict=True):
            parameter.grad = each.clone()

    reduce = getattr(handle, "reduce", None)  # of gradients
    return Steps(prepare, reduce or optimizer.step, handle, VECTORS + MOMENTS * (reduce is None))


def training(text: str, shape: Shape, batch: int) -> Steps:
    """Return whole training steps of a model in DistributedDataParallel; on a GPU with compiled blocks and bfloat16 autocast."""
    cuda = shape.device == "cuda"
    model = shape.model()
    for block in model.blocks if cuda else ():
        block.compile()
    wrapped = DistributedDataParallel(model)
    optimizer = _adamw(model)
    handle = None
    if text == "bf16 hook":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif text.startswith("powersgd "):
        state = powerSGD_hook.PowerSGDState(None, int(text.split()[1]), start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif text != DDP:
        handle = attached(text, wrapped, optimizer)
    drawn = generator(0, "gpu", 0)
    words = torch.randint(shape.vocabulary, (batch, shape.context + 1), generator=drawn).to(shape.device)

    def take() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            loss = cross_entropy(wrapped(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return Steps(lambda: None, take, handle)


def attached(text: str, model: nn.Module, optimizer: AdamW) -> Any:  # Any: a handle
    """Attach "default", "bits=0.8", or the gradients that a scheme reduces."""
    if text == "default" or text.startswith("bits="):
        return sparsync.attach(model, bits=bits_of(text), optimizer=optimizer)
    return sparsync.attach(model, sparsync.schemes.from_text(text), exchange=sparsync.Gradients())


def _adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
