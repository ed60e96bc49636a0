"""`python -m studies bench collectives`: what it says of ratios out of their bounds, and the precision of what benchmarks write."""

import json

import pytest

from studies.bench import collectives
from studies.bench.output import write

STEP = {"case": "step", "seconds": 1.25, "share_of_link": 0.5, "bits": 48.0, "ratio": 1.0, "ratio_to": "step"}
HOOK = STEP | {"case": "hook", "ratio": 1.26, "bound": (0.0, 1.05), "within_bound": False}
SKIP = STEP | {"case": "skip", "ratio": 0.62, "bound": (0.775, 0.891), "within_bound": False}


def test_a_ratio_out_of_its_bounds_is_an_error_with_case_bounds_and_distance() -> None:
    collectives._check_bounds([STEP, HOOK | {"ratio": 1.05, "within_bound": True}])
    with pytest.raises(RuntimeError) as error:
        collectives._check_bounds([STEP, HOOK, SKIP])
    hook, skip = str(error.value).split(". The")[0].split("; ")
    assert hook == "'hook' takes 1.260 times as long as 'step', 20.0 % more than allowed (0.000 to 1.050)"
    assert skip == "'skip' takes 0.620 times as long as 'step', 20.0 % less than allowed (0.775 to 0.891)"


def test_the_table_has_a_line_for_each_case() -> None:
    lines = collectives._table([STEP, HOOK]).splitlines()
    step, hook = (next(line for line in lines if line.split()[:1] == [case]) for case in ("step", "hook"))
    assert step.split() == ["step", "1.25", "s", "0.500", "48.0", "1.000", "step"]
    assert hook.split() == ["hook", "1.25", "s", "0.500", "48.0", "1.260", "0.000..1.050", "step"]


def test_numbers_are_written_with_six_digits(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        [
            {
                "seconds": 0.123456789,
                "ratios": [1 / 3, 2.0],
                "n": 123456789,
                "p50": {"low": 1234567.8, "bytes": 1234567.0},
            }
        ],
        "-",
    )
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "seconds": 0.123457,
        "ratios": [0.333333, 2.0],
        "n": 123456789,
        "p50": {"low": 1234570.0, "bytes": 1234567.0},
    }
