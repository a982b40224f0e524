"""Levels: coordinates, peers and which link lies between two ranks."""

import pytest

from hf_longctx.planning.layouts.levels import Levels


def test_coordinates_are_digits_and_peers_differ_in_one() -> None:
    levels = Levels.parse("2x2x3")
    assert levels.ranks == 12 and str(levels) == "2x2x3"
    assert [levels.coordinates(r) for r in (0, 2, 3, 11)] == [
        (0, 0, 0), (0, 0, 2), (0, 1, 0), (1, 1, 2),
    ]  # fmt: skip
    assert levels.peers(7, 0) == (1, 7)
    assert levels.peers(7, 1) == (7, 10)
    assert levels.peers(7, 2) == (6, 7, 8)
    assert [levels.crosses(0, r) for r in (0, 1, 3, 6)] == [3, 2, 1, 0]


@pytest.mark.parametrize("text", ["", "2x", "2*4", "-1", "two", "2x0"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2x4"):
        Levels.parse(text)
