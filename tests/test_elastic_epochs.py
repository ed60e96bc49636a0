"""The epoch that follows from the last one and from the notes of a meeting, and the factors of what ranks hold back."""

from dataclasses import replace

import pytest

from sparsync_elastic import Epoch
from sparsync_elastic.epochs import LAST_TRIES, TRIES, Note, proposed
from sparsync_elastic.world import brief, waited_for


def note(
    position: int = 3, whole: bool = True, leaves: bool = False, step: int | None = None, source: str = ""
) -> Note:
    return Note([position], position if step is None else step, whole, leaves, source)


LOST, NEW, LEAVES = note(whole=False), note(-1), note(leaves=True)
NONE_YET = note(-1, False, step=0)
SOURCE_B, SOURCE_GONE = note(-1, source="b"), note(-1, source="gone")
# The last members, the notes, who asks to join; and the next members, who gets the state from whom, who leaves to whom.
MADE = {
    "the first meeting takes the state of the first that came": (
        ("", {"b": note(0), "a": note(0), "c": note(0)}, "bac"),
        ("bac", {"a": "b", "c": "b"}, {}),
    ),
    "ranks that are left keep their order": (("abcd", {"d": LOST, "a": LOST, "c": LOST}, ""), ("acd", {}, {})),
    "the step that anybody has applied counts": (
        ("abc", {"a": LOST, "b": note(4, False), "c": LOST}, ""),
        ("abc", {"a": "b", "c": "b"}, {}),
    ),
    "several ranks that join get the state from several": (
        ("ab", {"a": note(), "b": note(), "x": note(0), "y": note(0), "z": note(0)}, "xyz"),
        ("abxyz", {"x": "a", "y": "b", "z": "a"}, {}),
    ),
    "a rank leaves to an heir": (("abc", {"a": LEAVES, "b": note(), "c": note()}, ""), ("bc", {}, {"a": "b"})),
    "not where connections have failed": (("abc", {"a": LEAVES, "b": note(), "c": LOST}, ""), ("abc", {}, {})),
    "not where somebody is lost": (("abc", {"a": LEAVES, "b": note()}, ""), ("ab", {}, {})),
    "a leaving rank sends no state": (
        ("ab", {"a": note(4, leaves=True), "b": note(4), "x": note(0)}, "x"),
        ("bx", {"x": "b"}, {"a": "b"}),
    ),
    "the last rank cannot leave": (("a", {"a": LEAVES}, ""), ("a", {}, {})),
    "a process that asks twice joins once": (
        ("ab", {"a": note(), "b": note(), "x": note(0)}, "xxb"),
        ("abx", {"x": "a"}, {}),
    ),
    "a rank without the state gets it from one that has it": (
        ("abc", {"a": NONE_YET, "b": note(0, False), "c": NONE_YET}, ""),
        ("abc", {"a": "b", "c": "b"}, {}),
    ),
    "without any state, all get that of the first": (
        ("abc", {"a": NONE_YET, "b": NONE_YET, "c": NONE_YET}, ""),
        ("abc", {"b": "a", "c": "a"}, {}),
    ),
    "a rank with most of the state of a source gets the rest from it": (
        ("ab", {"a": note(), "b": note(), "x": SOURCE_B, "y": SOURCE_GONE, "z": NEW}, "xyz"),
        ("abxyz", {"x": "b", "y": "b", "z": "a"}, {}),
    ),
    "not if the source is behind": (
        ("ab", {"a": note(), "b": note(2), "x": SOURCE_B, "y": NEW}, "xy"),
        ("abxy", {"b": "a", "x": "a", "y": "a"}, {}),
    ),
}


@pytest.mark.parametrize("case", MADE)
def test_the_next_epoch(case: str) -> None:
    (last, notes, asking), (members, behind, leaving) = MADE[case]
    made = proposed(Epoch(4, tuple(last), step=3), notes, list(asking))
    assert (made.number, "".join(made.members), made.behind, made.leaving) == (5, members, behind, leaving)
    assert made.gone == tuple(each for each in last if each not in notes)
    assert made.ahead == (("x",) if behind.get("x") == notes.get("x", NEW).source else ())
    assert made.step == max(notes[each].step for each in (members if not behind else behind.values()))
    assert Epoch.read(made.text) == made


def test_what_is_held_back_moves_the_weights_as_it_would_have_among_the_ranks_before() -> None:
    four = Epoch(1, tuple("abcd"), step=500, since=dict.fromkeys("abcd", 0))

    def after(last: Epoch, members: str, leaving: str = "", **since: int) -> Epoch:
        kept = {each: last.since.get(each, 500) for each in members + leaving} | since
        return Epoch(last.number + 1, tuple(members), leaving=dict.fromkeys(leaving, "a"), step=500, since=kept)

    def factors(after: Epoch, last: Epoch) -> tuple[float, ...]:
        return after.factors_after(last, full_after=100)

    # Of a lost rank the others have as much, in the mean, but not of what does not move.
    without = after(four, "abc")
    assert factors(without, four) == (1.0, 3 / 4, 1.0)
    joined = after(without, "abcx")
    assert factors(joined, without) == (4 / 3, 4 / 3, 4 / 3)
    assert factors(joined, four) == (1.0 * 4 / 3, 1.0, 4 / 3)
    # In and out again at once nothing grows. Later the one that joined has as much as the others.
    soon = replace(after(joined, "abc"), step=520)
    assert factors(soon, joined) == (pytest.approx(3 / 4 * 320 / 300), 3 / 4, 1.0)
    later = replace(after(joined, "abc"), step=600)
    assert factors(later, joined) == (1.0, 3 / 4, 1.0)
    # What a leaving rank has handed over is there, and so is what one has that comes back.
    assert factors(after(four, "abc", leaving="d"), four) == (3 / 4, 3 / 4, 3 / 4)
    assert factors(after(without, "abcd", d=0), without) == (1.0, 4 / 3, 1.0)
    # Nobody holds back anything yet.
    begun = Epoch(1, ("a", "b"), step=500, since={"a": 500, "b": 500})
    assert factors(after(begun, "abx"), begun) == (3 / 2, 3 / 2, 3 / 2)


LAST = Epoch(4, ("a", "b", "c"), step=7)


def failed(*, waited_for: str = "", times: int = TRIES, position: int = 7) -> Note:
    note = Note([position], max(position, 0), False, failures=times, error="RuntimeError: Timed out")
    return replace(note, waited_for=waited_for)


WELL, AWAITS_B, STATELESS = Note([9], 9, True), failed(waited_for="b"), failed(position=-1)
# The notes of a, b, c and maybe of x, which asks to join; who is refused, and a part of the message.
REFUSED = {
    "the rank for which the others wait": ([AWAITS_B, failed(), AWAITS_B], "b", "others waited for b (a says: RuntimeError: Timed out"),
    "not before three failures": ([replace(AWAITS_B, failures=TRIES - 1)] * 3, "", ""),
    "the slow rank, if another one is waited for too": (
        [failed(), replace(failed(), error="Connection closed", lasted_s=15), failed(waited_for="a")], "b", "waited for b (a says: Run",
    ),
    "nobody, if nobody has waited": ([replace(failed(), error="Connection closed", lasted_s=each) for each in (0, 1, 2)], "", ""),
    "not a rank that finds closed connections at once": (
        [failed(), replace(failed(), error="Connection closed", lasted_s=0.1), failed(waited_for="a")], "a", "waited for a (b says: Conn",
    ),
    "nobody, if two wait for each other": ([AWAITS_B, failed(waited_for="a"), failed()], "", ""),
    "a rank that never gets the weights, for it cannot connect": ([failed(), failed(), STATELESS], "c", "others went on without c"),
    "nobody, if all began at once": ([STATELESS] * 3, "", ""),
    "a rank that joins and never takes a step": ([WELL, WELL, WELL, failed()], "x", "went on without x (x says: RuntimeErr"),
    "all after six failures without a known cause": ([failed(times=LAST_TRIES)] * 3, "abc", "failed 6 times to take a step after step 7"),
    "not after five": ([failed(times=LAST_TRIES - 1)] * 3, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_cause_of_failures_in_a_row_is_refused(case: str) -> None:
    notes, refused, said = REFUSED[case]
    made = proposed(LAST, dict(zip("abcx", notes, strict=False)), ["x"] if len(notes) == 4 else [])
    assert "".join(made.refused) == refused and all(said in each for each in made.refused.values())
    assert made.members == tuple(each for each in "abcx"[: len(notes)] if each not in refused) or refused == "abc"
    assert Epoch.read(made.text) == made


def test_all_are_refused_if_fewer_than_the_least_would_be_left() -> None:
    made = proposed(LAST, dict(zip("abc", [AWAITS_B, failed(), AWAITS_B], strict=True)), [], least=3)
    assert list(made.refused) == ["a", "b", "c"]
    assert made.refused["a"].endswith("; 2 ranks would be left, and at least 3 are to go on (least=3)")


def test_an_error_tells_for_which_rank_this_one_waited_until_the_timeout() -> None:
    text = (
        "rank 0 of 3: comparison failed: waiting for rank 2: [/gloo/unbound_buffer.cc:78] Timed out waiting 1ms\nAt: x"
    )
    assert waited_for(RuntimeError(text)) == 2
    assert waited_for(RuntimeError("waiting for rank 2: [/gloo/pair.cc:553] Connection closed by peer")) is None
    assert brief(RuntimeError(text)) == f"RuntimeError: {text.partition(chr(10))[0]}"
