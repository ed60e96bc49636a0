"""The demo: its halves can be run."""

from pathlib import Path

from sparsync_lab import cli, demo
from sparsync_lab.scheme_choice import SchemeChoice, check_labels


def chosen(arguments: list[str]) -> tuple[SchemeChoice, ...]:
    settings = cli._settings(cli._parser().parse_args(arguments))
    assert settings.rate_bits_per_s == 100e6
    assert settings.ranks == 4
    return settings.schemes


def test_the_methods_of_both_halves_can_be_made_beside_dense_and_bf16() -> None:
    for arguments in demo.commands(Path("demo")):
        schemes = chosen(arguments)
        check_labels(schemes)
        assert [scheme.label for scheme in schemes[:2]] == ["dense", "bf16"]
        for scheme in schemes:
            scheme.make()
