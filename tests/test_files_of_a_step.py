"""How many files of the library a reader has to open to follow one settled step, from the hook to the wire and back."""

import sys
import threading
import warnings
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import run

ROOT = Path(sparsync.__file__).parent
TWO_SHOT = "two_shot:density=0.05:values=int4"
DEFAULT = "two_shot:density=1.0:values=int3"
# What trains, and at most how many files a step visits; all of `kernels` counts as one.
MOST_FILES = {
    ("attach", TWO_SHOT): 21,
    ("attach", "exact_oktopk"): 23,
    ("attach", "skip_reduce"): 18,
    ("AdamWSteps", TWO_SHOT): 27,
    ("AdamWSteps", DEFAULT): 27,
}


def visited(how: str, scheme: str) -> set[str]:
    """Return the files whose functions the sixth step calls on this rank, in all threads."""
    files: set[str] = set()
    watching = False

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if watching and event == "call" and path.is_relative_to(ROOT):
            inner = path.relative_to(ROOT)
            files.add(inner.parts[0] if inner.parts[0] == "kernels" else str(inner))

    threading.setprofile(watch)  # for the threads that the handle starts
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters()) if how == "AdamWSteps" else torch.optim.SGD(model.parameters())
    trained, made = model, sparsync.schemes.from_text(scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(optimizer, torch.optim.AdamW):
            handle = sparsync.AdamWSteps(model, optimizer, made, keep=0.0)  # without own weights
            step = handle.step
        else:
            trained = DistributedDataParallel(model)
            handle = sparsync.attach(trained, made, optimizer=optimizer)
            step = optimizer.step
    for number in range(6):
        if number == 5:
            watching = True
            sys.setprofile(watch)
        optimizer.zero_grad()
        trained(torch.randn(8, 64)).square().mean().backward()
        step()
    sys.setprofile(None)
    threading.setprofile(None)  # pyright: ignore[reportArgumentType]  # as Python's documentation has it
    handle.close()
    return files


def visited_by_all() -> list[set[str]]:
    return [visited(how, scheme) for how, scheme in MOST_FILES]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_settled_step_visits_few_files() -> None:
    found = dict(zip(MOST_FILES, run(visited_by_all, 2, fresh=True)[0], strict=True))
    too_many = {each: sorted(files) for each, files in found.items() if len(files) > MOST_FILES[each]}
    assert not too_many
    assert all(
        {"kernels", "core.py"} <= found["attach", scheme] for scheme in (TWO_SHOT, "exact_oktopk")
    )  # it has watched
    assert "exchanges/own_weights.py" not in found["AdamWSteps", DEFAULT]
