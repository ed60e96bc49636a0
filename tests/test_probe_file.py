"""The file of a probe: it comes back as it was written, and says where it is wrong. And the network that is read from it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync_lab.predict import probe_file
from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.probe_file import (
    Backward,
    Kernel,
    Latency,
    Memory,
    Operation,
    Probe,
    ProbedGroup,
    ProbedNetwork,
    ReadyBucket,
    ReducedBucket,
    SchemeTimes,
)
from sparsync_lab.probe import command

GROUP = ProbedGroup(4, "gloo", 2, "10 Gbit/s", "cpu", 8, "2.13.0", "2026-11-22T15:00:00+00:00")
PROBE = Probe(
    GROUP,
    (
        Operation("all_gather", 1000, 0.25, 0.125, 0.5),
        Operation("all_gather", 9000, 2.25, 2.0, 3.0),
        Operation("all_gather", 5000, 0.5, 0.5, 0.5),
        Operation("all_reduce", 6000, 3.0, 3.0, 3.0),
        Operation("all_reduce", 7000, 4.0, 4.0, 4.0),
        Operation("send_recv", 100, 1.0, 1.0, 1.0),
        Operation("send_recv", 200, 2.0, 2.0, 2.0),
    ),
    Latency(3e-5),
    Memory(1.5e10),
    (Kernel("select", 1e9, 2e-6),),
    (SchemeTimes("topk:density=0.1", 0.001, "TopK(...)", (ReducedBucket(10, 0.5), ReducedBucket(90, 0.75))),),
    Backward("gpt", 0.5, 1.0, 0.25, (ReadyBucket(10, 0.5), ReadyBucket(20, 1.0))),
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
positive = st.floats(min_value=0, max_value=1e18, exclude_min=True, allow_subnormal=False)
counts = st.integers(min_value=1, max_value=2**62)


@given(texts, texts, counts, positive, st.sampled_from(probe_file.KERNELS), st.booleans())
def test_what_is_written_is_read_again(
    link: str, label: str, nbytes: int, figure: float, kind: str, whole: bool
) -> None:
    probe = replace(
        PROBE,
        group=replace(GROUP, link=link),
        operation=tuple(Operation("all_to_all", nbytes + more, figure, 0.0, figure) for more in (0, 1)),
        kernel=(Kernel(kind, figure, figure),),
        scheme=(SchemeTimes(label, figure),) if whole else (),
        backward=Backward(label, figure, figure, figure, (ReadyBucket(nbytes, figure),)) if whole else None,
    )
    assert probe_file.parse(probe_file.text(probe)) == probe


def test_a_file_keeps_a_probe(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "probe.toml"
    probe_file.write(PROBE, path)
    assert probe_file.read(path) == PROBE
    path.write_text(path.read_text().replace("seconds = 0.25", "seconds = 4"))  # by a person, without a point
    assert probe_file.read(path).operation[0].seconds == 4.0


def test_a_file_of_an_earlier_version_serves(tmp_path: Path) -> None:
    path = tmp_path / "probe.toml"
    older = probe_file.text(PROBE).replace("[latency]\n", "[latency]\nround_trip_s = 1e-4\n")
    more = '[link]\nbits_per_s = 1e8\n\n[[kernel]]\nkind = "multiply"\nelements_per_s = 1e9\nfixed_s = 0.0\n\n'
    path.write_text(older.replace("[[kernel]]", f"{more}[[kernel]]", 1))
    found = probe_file.read(path)
    assert replace(found, kernel=found.kernel[1:]) == PROBE


def test_what_was_measured_is_in_its_file_before_a_table_of_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "show", lambda *_: pytest.fail("shown"))
    with pytest.raises(pytest.fail.Exception):
        command._finish(probe_file.text(PROBE), tmp_path / "probe.toml")
    assert probe_file.read(tmp_path / "probe.toml") == PROBE


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("format = 1", "format = 2", r"probe\.toml: format must be 1, got 2; edit it"),
        ("ranks = 4", "ranks = 1", r"group\.ranks: .* got 1"),
        ("seconds = 0.5", "seconds = nan", r"operation\[2\]\.seconds: .* got nan"),
        ("[memory]", "[memorie]", r"memory: .*required"),
    ],
)
def test_a_wrong_file_says_where_it_is_wrong(tmp_path: Path, before: str, after: str, said: str) -> None:
    path = tmp_path / "probe.toml"
    content = probe_file.text(PROBE)
    assert before in content
    path.write_text(content.replace(before, after, 1))
    with pytest.raises(ValueError, match=said):
        probe_file.read(path)


def exchange(kind: str, nbytes: float, rounds: float = 1.0, received: float = 0.0) -> Exchange:
    return Exchange(kind, nbytes, 3.0, rounds, received)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(0.0, 0.25), (1000.0, 0.25), (3000.0, 0.375), (5000.0, 0.5), (7000.0, 1.375), (9000.0, 2.25), (13000.0, 4.0)],
)
def test_times_are_exact_at_measured_sizes_and_linear_between_and_above(nbytes: float, seconds: float) -> None:
    network = ProbedNetwork(PROBE)
    assert network.seconds(exchange("all_gather", nbytes), 4) == seconds
    assert network.seconds(exchange("all_gather", 0.0, received=nbytes), 4) == seconds  # the busier direction


def test_dependent_rounds_take_the_time_of_as_many_operations_and_far_is_32_times_the_largest() -> None:
    network = ProbedNetwork(PROBE)
    assert network.seconds(exchange("send_recv", 450.0, rounds=3.0), 4) == 3 * 1.5
    assert network.seconds(exchange("all_reduce", 6000.0, rounds=6.0), 4) == 3.0  # its rounds were measured with it
    for nbytes, far in ((3 * 32 * 200, False), (3 * 32 * 200 + 3, True)):
        assert network.is_far(exchange("send_recv", nbytes, rounds=3.0), 4) == far
        assert network.is_far(exchange("send_recv", 1.0, rounds=3.0, received=nbytes), 4) == far


def test_other_groups_and_unmeasured_kinds_are_refused() -> None:
    network = ProbedNetwork(PROBE)
    assert network.seconds(exchange("all_gather", 1e9), 1) == 0.0
    with pytest.raises(ValueError, match=r"has 4 ranks and does not predict 8; run `sparsync probe` with 8 ranks"):
        network.seconds(exchange("all_gather", 1.0), 8)
    with pytest.raises(ValueError, match=r"no .*operation.* of kind 'all_to_all'"):
        network.seconds(exchange("all_to_all", 1.0), 4)


def test_an_exchange_is_never_slower_than_one_of_more_bytes() -> None:
    """A first measurement that was disturbed takes 8 s for 10 bytes; 100 bytes take 1 s, and 1000 take 2 s."""
    measured = tuple(
        Operation("send_recv", nbytes, seconds, seconds, seconds)
        for nbytes, seconds in ((10, 8.0), (100, 1.0), (1000, 2.0))
    )
    network = ProbedNetwork(replace(PROBE, operation=measured))
    for nbytes, seconds in ((1, 1.0), (10, 1.0), (50, 1.0), (100, 1.0), (550, 1.5), (1000, 2.0)):
        assert network.seconds(Exchange("send_recv", nbytes, 1, 1, nbytes), 4) == pytest.approx(seconds)
