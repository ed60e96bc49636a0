"""What epoch follows from the one before and from the notes of those who meet."""

from dataclasses import replace

import pytest

from sparsync_elastic import Epoch
from sparsync_elastic.epochs import Note, proposed


def note(
    position: int = 3, whole: bool = True, leaves: bool = False, step: int | None = None, source: str = ""
) -> Note:
    return Note([position], position if step is None else step, whole, leaves, source)


LOST, NEW, LEAVES = note(whole=False), note(-1), note(leaves=True)
NONE_YET = note(-1, False, step=0)
SOURCE_B, SOURCE_GONE = note(-1, source="b"), note(-1, source="gone")
# The members before, the notes of those who come, who asks to be let in; the members, who gets the state from whom, who leaves to whom.
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
    "several that join get the state from several": (
        ("ab", {"a": note(), "b": note(), "x": note(0), "y": note(0), "z": note(0)}, "xyz"),
        ("abxyz", {"x": "a", "y": "b", "z": "a"}, {}),
    ),
    "a rank leaves to an heir": (("abc", {"a": LEAVES, "b": note(), "c": note()}, ""), ("bc", {}, {"a": "b"})),
    "not where connections have failed": (("abc", {"a": LEAVES, "b": note(), "c": LOST}, ""), ("abc", {}, {})),
    "not where somebody is lost": (("abc", {"a": LEAVES, "b": note()}, ""), ("ab", {}, {})),
    "who leaves is no source": (
        ("ab", {"a": note(4, leaves=True), "b": note(4), "x": note(0)}, "x"),
        ("bx", {"x": "b"}, {"a": "b"}),
    ),
    "the last one has nobody to leave to": (("a", {"a": LEAVES}, ""), ("a", {}, {})),
    "who asks twice is let in once": (
        ("ab", {"a": note(), "b": note(), "x": note(0)}, "xxb"),
        ("abx", {"x": "a"}, {}),
    ),
    "who has no state yet gets it from one that has": (
        ("abc", {"a": NONE_YET, "b": note(0, False), "c": NONE_YET}, ""),
        ("abc", {"a": "b", "c": "b"}, {}),
    ),
    "or all from the first": (
        ("abc", {"a": NONE_YET, "b": NONE_YET, "c": NONE_YET}, ""),
        ("abc", {"b": "a", "c": "a"}, {}),
    ),
    "one that has got most from a source gets the rest from it": (
        ("ab", {"a": note(), "b": note(), "x": SOURCE_B, "y": SOURCE_GONE, "z": NEW}, "xyz"),
        ("abxyz", {"x": "b", "y": "b", "z": "a"}, {}),
    ),
    "not from one that is behind": (
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
