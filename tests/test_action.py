import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.action import Action, Kind

small = st.integers(0, 300)
actions = st.builds(
    Action,
    st.sampled_from(Kind),
    small,
    st.integers(-1, 300),
    small,
    small,
    st.integers(-1, 300),
    st.from_regex(r"([A-Za-z_][A-Za-z_0-9.]*)?", fullmatch=True),
)


@given(actions)
def test_text_round_trips(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action(Kind.F, 0, 3)),
        ("12W7s2p1", Action(Kind.W, 12, 7, 2, 1)),
        ("1SEND2>0", Action(Kind.SEND, 1, 2, peer=0)),
        ("0GATHER-1@h.3", Action(Kind.GATHER, 0, -1, unit="h.3")),
    ],
)
def test_text_form(text, action):
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "0F1>", "0f1", "0F1 0F2"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)
