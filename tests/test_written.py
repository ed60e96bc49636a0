"""Which parameters somebody else has written to."""

import pytest
import torch
from torch import nn

from sparsync.exchanges.weights import LastWritten

MANY = 3 * 2 * 2039  # elements whose bits are summed, in words of any size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, 5), (7, MANY)])
@pytest.mark.parametrize("start", [0, 1])
def test_an_element_that_changes_and_elements_that_change_places_or_signs_are_found(
    dtype: torch.dtype, shape: tuple[int, int], start: int
) -> None:
    # From an odd place in memory on, too, where words of 64 bits do not fit.
    bits = torch.randn(shape[0] * shape[1] + start, generator=torch.Generator().manual_seed(0)).to(dtype)[start:]
    weight = nn.Parameter(bits.view(shape), requires_grad=False)
    empty = nn.Parameter(torch.empty(0, 3))
    before, written = weight.data.clone(), LastWritten({"empty": empty, "weight": weight})
    assert written.changed() == []
    one = before.clone()
    one[1, 3] = -one[1, 3].float()
    two = one.clone()
    two[1, 1] = -two[1, 1].float()
    swapped = before.clone()
    swapped[0, 0], swapped[1, 4] = before[1, 4], before[0, 0]
    changes = [one, two, -before.float(), before.view(torch.uint8).flip(0).view(dtype), swapped, before.roll(1)]
    for change in changes:
        weight.data.copy_(change)
        assert written.changed() == ["weight"]
        weight.data.copy_(before)
        assert written.changed() == []


def test_what_is_loaded_counts_as_written_also_where_it_has_the_bits_that_were_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    written = LastWritten(dict(model.named_parameters()))
    state = {name: each.clone() for name, each in model[0].state_dict().items()}
    model[0].load_state_dict(state)
    assert written.changed() == []  # weights that are swapped and put back are those that were there
    state["bias"] += 1
    model[0].load_state_dict(state)
    assert written.changed() == ["0.weight", "0.bias"]
    written.note()
    assert written.changed() == []
