import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.action import Action, Kind

small = st.integers(0, 300)
single = st.builds(
    Action,
    st.sampled_from([kind for kind in Kind if kind is not Kind.PAIR]),
    small,
    st.integers(-1, 300),
    small,
    small,
    st.integers(-1, 300),
    st.from_regex(r"([A-Za-z_][A-Za-z_0-9.]*)?", fullmatch=True),
)
actions = single | st.builds(Action.pair, single, single)


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
        ("2OPT5", Action(Kind.OPT, 2, 5)),
        ("(0F3;3B1s2)&", Action.pair(Action(Kind.F, 0, 3), Action(Kind.B, 3, 1, 2))),
    ],
)
def test_text_form(text, action):
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


@pytest.mark.parametrize(
    "text", ["", "F0", "0X1", "0F", "0F1>", "0f1", "0F1 0F2", "0PAIR1", "(0F1)&", "(0F1;0B0)", "(0F1;;0B0)&"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


def test_only_a_pair_has_members():
    forward, backward = Action(Kind.F, 0, 3), Action(Kind.B, 3, 1)
    pair = Action.pair(forward, backward)
    assert (pair.kind, pair.stage, pair.microbatch, pair.parts) == (Kind.PAIR, 0, 3, (forward, backward))
    assert forward.parts == (forward,)
    for wrong in ({"kind": Kind.F, "members": (forward, backward)}, {"kind": Kind.PAIR, "members": ()}):
        with pytest.raises(ValueError, match="a PAIR has two"):
            Action(stage=0, microbatch=0, **wrong)
