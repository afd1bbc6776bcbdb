import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import Action, Kind, parse_action, parse_actions

ACTIONS = st.builds(
    Action,
    st.sampled_from(Kind),
    st.integers(0, 99),
    st.integers(0, 10**6),
    st.integers(-1, 999),
    st.integers(0, 99),
)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.F, 1, 12, 3), "F12@1v3"),
        (Action(Kind.F, 1, 12, 3, 2), "F12@1.2v3"),
        (Action(Kind.B, 0, 7, 0), "B7@0v0"),
        (Action(Kind.SEND_F, 1, 12), "SEND_F12@1"),
        (Action(Kind.RECV_B, 1, 12), "RECV_B12@1"),
        (Action(Kind.REDUCE, 1, 4), "REDUCE4@1"),
        (Action(Kind.UPDATE, 1, 4, 5), "UPDATE4@1"),  # makes W(5): said by its number
        (Action(Kind.UPDATE, 1, 4, 5, 3), "UPDATE4@1.3"),
        (Action(Kind.FETCH, 0, 17), "FETCH17@0"),
        (Action(Kind.UPDATE, 1, 4, 4), "UPDATE4@1v4"),  # wrong, but it must be possible to say so
    ],
)
def test_text(action, text):
    assert str(action) == text
    assert parse_action(text) == action


@given(st.lists(ACTIONS))
def test_text_round_trip(actions):
    assert parse_actions(" ".join(map(str, actions))) == tuple(actions)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "F12",
        "F12@",
        "G12@1",
        "F12@1v",
        "F-1@0",
        "F 12@1",
        "F12@1v3x",
        "F12@1.v3",
        "F12@1.-2",
        "F12@.2",
        "F12@1v3.2",
        "f12@1v3",
    ],
)
def test_bad_text(text):
    with pytest.raises(ConfigError, match="F12@1v3") as error:
        parse_action(text)
    assert error.value.problems[0].value == text


def test_kind_is_its_name():
    assert {Kind.F: 1}["F"] == 1
    assert f"{Kind.SEND_F}" == "SEND_F"
