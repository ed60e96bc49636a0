"""The bench of reductions runs all its cases, and checks their means."""

import json
from pathlib import Path

from studies.bench.reductions import HOOK, main


def test_each_scheme_and_the_hook_have_a_row_for_each_number_of_ranks(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    main(["--n", "3000", "--ranks", "1,3", "--rounds", "1", "--json", str(found)])
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    for ranks in (1, 3):
        cases = [row["case"] for row in rows if row["ranks"] == ranks]
        assert {HOOK, "bf16", "quantized:values=sign"} <= set(cases)
        assert len(cases) == len(set(cases)) == 8
    assert all(row["passes"] > 0 for row in rows)
