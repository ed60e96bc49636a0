"""The library on a GPU: one rank, two and four by NCCL; two and three that share the GPU, by gloo; the same bits and bytes as on the CPU.

NCCL takes two ranks on one GPU if each takes itself for another machine; they talk over sockets then.
Without a GPU all is on the CPU, to test the tests.
"""

from collections.abc import Mapping, Sequence

import pytest
import torch

from helpers.distributed import run
from helpers.on_devices import (
    Record,
    cases_between_nodes,
    cases_of_closing,
    cases_of_means,
    cases_of_overlap,
    cases_of_scaling,
    cases_of_training,
    refused_shards,
)
from sparsync.core import exact_divisor

GPU = torch.cuda.is_available()
DEVICE, NCCL = ("cuda", "nccl") if GPU else ("cpu", "gloo")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120), *([] if GPU else [pytest.mark.slow])]
WITHIN_S = 60.0

GRADIENTS = ("dense", "topk", "topk bfloat16", "exact_oktopk", "exact_micro", "skip_reduce", "two_shot int4")
WRAPPERS = (
    "ddp",
    "reducer",
    "steps",
    "ddp steps",
    "local",
    "local, in the background",
    "fsdp2 replicas",
    "fsdp2 steps",
)
EXCHANGED = ("dense", "topk", "two_shot sign")  # of steps and local steps
Found = dict[str, Record | str]


def schemes_of(wrapper: str) -> Sequence[str]:
    if wrapper == "fsdp2 shards":
        return ("dense", "exact_oktopk", "skip_reduce", "two_shot int4")
    return GRADIENTS if wrapper in ("ddp", "reducer") else EXCHANGED


def differences(name: str, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Say of each tensor that differs how many elements do, and by how much."""
    found = [f"{name}: one lacks {key}" for key in sorted(one.keys() ^ other.keys())]
    for key in one.keys() & other.keys():
        here, there = one[key], other[key]
        if here.shape != there.shape:
            found.append(f"{name}: {key} has shapes {list(here.shape)} and {list(there.shape)}")
        elif not torch.equal(here, there):
            apart = (here.double() - there.double()).abs()
            count = int((here != there).sum())
            found.append(f"{name}: {key} differs in {count} of {here.numel()} elements, by {float(apart.max()):g}")
    return sorted(found)


def raised(ranks: Sequence[Found]) -> list[str]:
    return [
        f"{name} on rank {rank} raised:\n{each}"
        for rank, found in enumerate(ranks)
        for name, each in found.items()
        if isinstance(each, str)
    ]


def records(ranks: Sequence[Found], name: str) -> list[Record]:
    """Return the records of a case; none where it raised on any rank."""
    found = [each for ranks_found in ranks if isinstance(each := ranks_found[name], Record)]
    return found if len(found) == len(ranks) else []


def check(wrong: Sequence[str]) -> None:
    assert not wrong, "\n".join(wrong)


def problems_of_training(ranks: Sequence[Found], names: Sequence[str]) -> list[str]:
    wrong = raised(ranks)
    for name in names:
        found = records(ranks, name)
        for rank, each in enumerate(found):
            before, after = each.losses
            if not after < 0.95 * before:
                wrong.append(f"{name}: the loss of rank {rank} went from {before:g} to {after:g}")
            if not all(bool(tensor.isfinite().all()) for tensor in each.tensors.values()):
                wrong.append(f"{name}: weights of rank {rank} are not finite")
            if any(sent != stated for _, sent, _, stated, _, _ in each.costs):
                wrong.append(f"{name}: rank {rank} sent other bytes than stated")
            for which in ("own", "common"):
                whole, continued = (each.tensors[f"{which} weights{end}"] for end in ("", ", continued"))
                label = f"{name}, rank {rank}, continued from a saved state"
                wrong += differences(label, {which: whole}, {which: continued})
            common = [{key: t for key, t in one.tensors.items() if "common" in key} for one in (each, found[0])]
            wrong += differences(f"{name}, rank {rank} and rank 0", *common)
    return wrong


def problems_of_devices(ranks: Sequence[Found], schemes: Sequence[str]) -> list[str]:
    """Say where the CPU and the device have not the same, or ranks where they must."""
    wrong = raised(ranks)
    for name in schemes:
        on_cpu, on_device = (records(ranks, f"{name} on {where}") for where in ("cpu", DEVICE))
        for rank, (one, other) in enumerate(zip(on_cpu, on_device, strict=False)):
            wrong += differences(f"{name}, rank {rank}, cpu and {DEVICE}", one.tensors, other.tensors)
            for what in ("costs", "losses", "seen"):
                if getattr(one, what) != getattr(other, what):
                    pairs = zip(getattr(one, what), getattr(other, what), strict=False)
                    first = next((pair for pair in pairs if pair[0] != pair[1]), "their number")
                    wrong.append(f"{name}, rank {rank}: {what} differ between cpu and {DEVICE}: {first}")
        for where, found in (("cpu", on_cpu), (DEVICE, on_device)):
            for rank, each in enumerate(found):
                replicated = [
                    {key: t for key, t in one.tensors.items() if "residual" not in key} for one in (each, found[0])
                ]
                wrong += differences(f"{name} on {where}, rank {rank} and rank 0", *replicated)
    return wrong


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_rank_trains_by_nccl_and_goes_on_from_a_saved_state(wrapper: str) -> None:
    names = schemes_of(wrapper)
    ranks = run(cases_of_training, 1, within_s=WITHIN_S, device=DEVICE, wrapper=wrapper, schemes=names, backend=NCCL)
    check(problems_of_training(ranks, names))


def test_a_shard_axis_of_one_rank_is_refused() -> None:
    assert "the shard axis has 1 rank" in run(refused_shards, 1, within_s=WITHIN_S, device=DEVICE)[0]


@pytest.mark.parametrize("wrapper", ["ddp", "reducer"])
@pytest.mark.parametrize("P", [2, 3])  # a third is rounded
def test_ranks_on_one_gpu_get_the_bits_and_send_the_bytes_of_the_cpu(wrapper: str, P: int) -> None:
    names = (*GRADIENTS, "dense ring", "two_shot sign")
    ranks = run(cases_of_means, P, within_s=WITHIN_S, device=DEVICE, wrapper=wrapper, schemes=names)
    check(problems_of_devices(ranks, names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_quotients_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_device = x.to(DEVICE)
    for divisor in (1, 2, 3, 7, 14, 26, 256):
        assert torch.equal((on_device / exact_divisor(on_device, divisor)).cpu(), x / divisor)


def test_two_ranks_on_one_gpu_skip_a_step_as_on_the_cpu() -> None:
    names = ("topk", "exact_oktopk", "exact_micro", "skip_reduce", "two_shot int4")
    ranks = run(cases_of_scaling, 2, within_s=WITHIN_S, device=DEVICE, schemes=names)
    check(problems_of_devices(ranks, names))
    for name in names:
        for each in records(ranks, f"{name} on {DEVICE}"):
            assert each.losses == [64, 64, 64, 128, 64, 64], name
            assert each.seen, name


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp2 shards"])
def test_two_ranks_on_one_gpu_train_the_same_weights_and_go_on_from_a_saved_state(wrapper: str) -> None:
    names = schemes_of(wrapper)
    ranks = run(cases_of_training, 2, within_s=WITHIN_S, device=DEVICE, wrapper=wrapper, schemes=names)
    check(problems_of_training(ranks, names))


@pytest.mark.parametrize("wrapper", ["ddp", "reducer", "ddp steps", "local", "fsdp2 replicas", "fsdp2 shards"])
def test_two_ranks_on_one_gpu_train_the_same_weights_by_nccl(wrapper: str) -> None:
    names = schemes_of(wrapper)
    options = {"device": DEVICE, "wrapper": wrapper, "schemes": names, "backend": NCCL}
    check(problems_of_training(run(cases_between_nodes, 2, within_s=WITHIN_S, fresh=True, **options), names))


@pytest.mark.parametrize("P", [2, 4])
def test_ranks_on_one_gpu_take_the_same_steps_by_nccl_and_lose_none_where_they_close_at_once(P: int) -> None:
    ranks = run(cases_of_closing, P, within_s=WITHIN_S, fresh=True, device=DEVICE, backend=NCCL)
    wrong = raised(ranks)
    settled = records(ranks, "settled")
    for rank, (one, other) in enumerate(zip(settled, records(ranks, "at once"), strict=False)):
        common, first = ({"common": each.tensors["common weights"]} for each in (one, settled[0]))
        wrong += differences(f"rank {rank} and rank 0", common, first)
        own, closed = ({"own": each.tensors["own weights"]} for each in (one, other))
        wrong += differences(f"rank {rank}, closed at once", own, closed)
    check(wrong)


@pytest.mark.parametrize("scheme", ["dense", "topk", "two_shot int4"])
def test_buckets_reduced_during_the_backward_pass_have_the_bits_of_those_that_wait_for_the_gpu(scheme: str) -> None:
    ranks = run(cases_of_overlap, 2, within_s=WITHIN_S, device=DEVICE, scheme=scheme)
    wrong = raised(ranks)
    pairs = [("first", "again"), ("first", "settled"), ("joined", "joined, settled")]
    pairs += [("first", "reducer"), ("first", "joined")] if scheme == "dense" else []
    for one, other in pairs:
        for rank, (here, there) in enumerate(zip(records(ranks, one), records(ranks, other), strict=False)):
            wrong += differences(f"{scheme}, rank {rank}, {one!r} and {other!r}", here.tensors, there.tensors)
    for name in ranks[0]:
        for rank, each in enumerate(records(ranks, name)):
            wrong += differences(
                f"{scheme}, {name!r}, rank {rank} and rank 0", each.tensors, records(ranks, name)[0].tensors
            )
    check(wrong)
    assert all(each.seen == ["20 buckets"] for each in records(ranks, "first"))
