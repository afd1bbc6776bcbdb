"""Functions by turns: in one order, whatever they take, and with the errors of each."""

from __future__ import annotations

import time
from functools import partial

import pytest

from hybridpar.turns import Turns


def test_the_next_one_goes_on_where_one_waits() -> None:
    turns = Turns(3)
    said = list[str]()

    def function(me: str, waits: int, seconds: float) -> str:
        for i in range(waits):
            time.sleep(seconds)
            said.append(f"{me}{i}")
            turns.give_way()
        return me

    for _ in range(2):  # with the same threads
        said.clear()
        turns.give_way()  # nobody else is there
        functions = [
            partial(function, *each) for each in (("a", 1, 3e-3), ("b", 3, 0.0), ("c", 2, 1e-3))
        ]
        assert turns.run(functions) == ["a", "b", "c"]
        assert said == ["a0", "b0", "c0", "b1", "c1", "b2"]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_ends_all(wrong: int) -> None:
    turns = Turns(3)
    done = list[int]()

    def function(me: int) -> None:
        turns.give_way()
        if me == wrong:
            raise ValueError(str(me))
        turns.give_way()
        done.append(me)

    with pytest.raises(ValueError, match=str(wrong)):
        turns.run([partial(function, i) for i in range(3)])
    assert not done
    assert turns.run([lambda: 1] * 3) == [1, 1, 1]
