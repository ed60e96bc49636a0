"""The demo: its halves can be run, and its summary puts quality beside every time."""

from pathlib import Path

import pytest

from sparsync_lab import cli, demo
from sparsync_lab.demo import Half
from sparsync_lab.scheme_choice import SchemeChoice, check_labels, try_out

THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"


def chosen(arguments: list[str]) -> tuple[SchemeChoice, ...]:
    settings = cli._settings(cli._parser().parse_args(arguments))
    assert settings.rate_bits_per_s == 100e6
    assert settings.ranks == 4
    return settings.schemes


def test_the_methods_of_both_halves_run_beside_dense_and_bf16() -> None:
    for arguments in demo.commands(Path("demo")):
        schemes = chosen(arguments)
        check_labels(schemes)
        assert [scheme.label for scheme in schemes[:2]] == ["dense", "bf16"]
        for scheme in schemes:
            try_out(scheme, 4)


@pytest.mark.slow
def test_the_summary_has_a_table_for_each_half_with_the_loss_of_quality_beside_the_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = f"--workload {THIRD_PARTY}:LineFit --option width=2000 --ranks 2 --link none --steps 2 --eval-every 1"
    halves = (Half("first", "One", f"{job} --schemes dense,bf16"), Half("second", "Two", f"{job} --schemes topk"))
    for arguments in demo.commands(tmp_path, halves=halves):
        cli.main(arguments)
    capsys.readouterr()
    page = demo.summary(tmp_path, halves).read_text()
    shown = capsys.readouterr().out
    for text in (shown, page):
        assert text.index("One") < text.index("bf16") < text.index("Two") < text.index("topk")
        assert "PROVE NOTHING" in text
    assert "| % behind dense |" in page
    assert f"sparsync compare {job} --schemes topk" in page
    assert "| `topk` |" in page
    assert page.count("| `bf16` |") == 1
    assert all(str(tmp_path / half.folder / "report.html") in shown for half in halves)


def test_between_the_halves_it_says_what_ended_what_comes_and_how_long_that_takes() -> None:
    first = demo.before(Path("demo"), 0, None, None).splitlines()
    assert [line.split(":")[0] for line in first] == ["Next, 1 of 2", "It takes two to three minutes on two cores."]
    ended, coming, long = demo.before(Path("demo"), 1, 125.0, 5).splitlines()
    assert ended.startswith("Ended, 1 of 2, after 2:05 min: ") and ended.endswith("Report: demo/lstm/report.html")
    assert coming.startswith("Next, 2 of 2: ") and coming.endswith("results go to demo/gpt.")
    assert long == "Each training takes 5 steps."
