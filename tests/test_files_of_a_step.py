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
# An optimizer and a scheme, None for the recipe, and at most how many files a step visits; all of `kernels` counts as one.
MOST_FILES: dict[tuple[type[torch.optim.Optimizer], str | None], int] = {
    (torch.optim.SGD, TWO_SHOT): 22,
    (torch.optim.SGD, "exact_oktopk"): 24,
    (torch.optim.SGD, "skip_reduce"): 19,
    (torch.optim.AdamW, TWO_SHOT): 29,
    (torch.optim.AdamW, None): 26,
}
SETTLED = 9  # the first steps measure the ratio


def visited(kind: type[torch.optim.Optimizer], scheme: str | None) -> set[str]:
    """Return the files whose functions a settled step calls on this rank, in all threads."""
    files: set[str] = set()
    watching = False

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if watching and event == "call" and path.is_relative_to(ROOT):
            inner = path.relative_to(ROOT)
            files.add(inner.parts[0] if inner.parts[0] == "kernels" else str(inner))

    threading.setprofile(watch)  # for the threads that the handle starts
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = kind(model.parameters())  # pyright: ignore[reportCallIssue]  # with its own defaults
    steps = kind is torch.optim.AdamW
    trained = model if steps else DistributedDataParallel(model)
    made = None if scheme is None else sparsync.schemes.from_text(scheme)
    exchange = sparsync.Steps(keep=0.0) if steps and made is not None else None  # without own weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = sparsync.attach(trained, made, optimizer=optimizer, exchange=exchange)
    for number in range(SETTLED + 1):
        if number == SETTLED:
            watching = True
            sys.setprofile(watch)
        optimizer.zero_grad()
        trained(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    sys.setprofile(None)
    threading.setprofile(None)  # pyright: ignore[reportArgumentType]  # as Python's documentation has it
    handle.close()
    return files


def visited_by_all() -> list[set[str]]:
    return [visited(*each) for each in MOST_FILES]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_settled_step_visits_few_files() -> None:
    found = dict(zip(MOST_FILES, run(visited_by_all, 2, fresh=True)[0], strict=True))
    too_many = {each: sorted(files) for each, files in found.items() if len(files) > MOST_FILES[each]}
    assert not too_many, "\n".join(f"{key}: {len(files)} {files}" for key, files in too_many.items())
    # It has watched.
    assert all({"kernels", "core.py"} <= found[torch.optim.SGD, scheme] for scheme in (TWO_SHOT, "exact_oktopk"))
    default = found[torch.optim.AdamW, None]
    assert not default & {f"exchanges/{each}.py" for each in ("own_weights", "scheme_steps", "steps_state")}
    assert not any(each.startswith("selection/") for each in default)
