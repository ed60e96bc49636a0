"""Schemes as a command names them: "topk", "oktopk:density=0.001", "package.module:Class:key=value", "path/to/file.py:Class"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparsync import schemes
from sparsync.base.scheme import Scheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket, Report

TRIAL_ELEMENTS = 64  # of the bucket that every scheme reduces once before processes are started
LISTS = ("protect", "dense")  # settings that are lists even when one value is given

_SETTING = re.compile(r":(?=[A-Za-z_]\w*=)")  # the colon before a key=value; other colons belong to the name


@dataclass(frozen=True)
class SchemeChoice:
    """One scheme: its label in tables, its name as `sparsync.schemes.get` takes it, and its settings."""

    label: str
    name: str
    config: dict[str, Any] = field(default_factory=dict)  # Any: the fields of the scheme's own config

    def make(self) -> Scheme:
        """Return a new scheme; every rank and every run makes its own."""
        return schemes.get(self.name, **self.config)


def parse_schemes(text: str, density: float, skip: int | float | None = None) -> tuple[SchemeChoice, ...]:
    """Return the schemes of "dense,topk,skip_reduce:skip=2:form=direct".

    `density` and `skip` go to those schemes that take them and do not set them. Lists are joined by "+": "protect=*.bias+norm.*".
    Raises ValueError for an unknown scheme or setting, suggesting the nearest.
    """
    return tuple(_parse_scheme(item.strip(), density, skip) for item in text.split(",") if item.strip())


def check_labels(choices: Sequence[SchemeChoice]) -> None:
    """Raise ValueError where two schemes would have the same label in tables."""
    labels = [choice.label for choice in choices]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--schemes names one twice: {', '.join(labels)}; give each scheme once, or other settings")


def try_out(choice: SchemeChoice, ranks: int) -> None:
    """Reduce one small bucket on `ranks` ranks in this process, so that a setting that cannot work is found now."""

    def reduce(comm: LocalComm) -> None:
        report = choice.make().reduce(Bucket("trial", torch.zeros(TRIAL_ELEMENTS), 0), comm)
        if not isinstance(report, Report):
            raise TypeError(f"reduce must return a sparsync.Report, such as self.report(bucket), got {report!r}")

    try:
        LocalWorld(ranks).run(reduce)
    except Exception as error:
        raise ValueError(
            f"scheme {choice.label!r} cannot run on {ranks} ranks: {type(error).__name__}: {error}"
        ) from error


def _parse_scheme(text: str, density: float, skip: int | float | None) -> SchemeChoice:
    name, *settings = _SETTING.split(text)
    config = dict(_parse_setting(setting) for setting in settings)
    known = schemes.settings(name)
    for key, value in (("density", density), ("skip", skip)):
        if value is not None and key not in config and key in known:
            config[key] = value
    choice = SchemeChoice(text, name, config)
    try:
        choice.make()
    except TypeError as error:
        raise ValueError(f"scheme {text!r} cannot be made: {error}; see `sparsync schemes {name}`") from error
    return choice


def _parse_setting(setting: str) -> tuple[str, Any]:  # Any: as `_parse_value`
    key, _, text = setting.partition("=")
    value = _parse_value(text)
    return key, [value] if key in LISTS and isinstance(value, str) else value


def _parse_value(text: str) -> Any:  # Any: a list, bool, int, float or str, by its form
    if "+" in text:
        return [item for item in text.split("+") if item]
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
