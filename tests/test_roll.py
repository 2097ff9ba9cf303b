"""Rolled texts say the same as the texts they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.codegen.roll import Loop, affine, periodic, template

spans = st.tuples(st.integers(0, 20), st.integers(2, 6), st.booleans()).map(
    lambda t: list(range(t[0], t[0] + t[1]))[:: -1 if t[2] else 1]
)
linear = st.tuples(st.integers(-3, 3), st.integers(0, 90))


@given(linear, spans)
def test_an_affine_source_gives_the_numbers(line: tuple[int, int], places: list[int]) -> None:
    numbers = [line[0] * place + line[1] for place in places]
    source = affine(numbers, places, "i")
    assert source is not None
    assert [eval(source, {"i": place}) for place in places] == numbers


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5))
def test_numbers_on_no_line_have_no_source(numbers: list[int]) -> None:
    places = list(range(len(numbers)))
    source = affine(numbers, places, "i")
    on_a_line = all(n - numbers[0] == place * (numbers[1] - numbers[0]) for place, n in enumerate(numbers))
    assert (source is not None) == on_a_line


@given(linear, linear, spans)
def test_a_template_says_what_each_text_says(
    first: tuple[int, int], second: tuple[int, int], places: list[int]
) -> None:
    lines = [[a * place + 60 + b for a, b in (first, second)] for place in places]
    texts = [f'f("h.{a}.mlp.{b}", {b}, g("x"), each[{a}])' for a, b in lines]
    text = template(texts, places)
    assert text is not None
    names = {"f": lambda *args: args, "g": str.upper, "each": range(1000)}
    for written, place in zip(texts, places, strict=True):
        assert eval(text, {**names, "i": place}) == eval(written, dict(names))


@pytest.mark.parametrize("names", [("d_h_10", "d_h_11"), ("x1", "x2"), ("grads_9", "grads_10")])
def test_digits_of_a_name_are_no_number(names: tuple[str, str]) -> None:
    assert template(names, [0, 1]) is None


def test_texts_that_differ_in_more_than_numbers_have_no_template() -> None:
    assert template(['f("h.1")', 'g("h.2")'], [1, 2]) is None
    assert template(['f("h.1")', 'f("h.2", 2)'], [1, 2]) is None
    assert template(['f("h.1")', 'f("h.2")', 'f("h.4")'], [1, 2, 3]) is None


def unrolled(items: list[object]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for item in items:
        rounds = item.count if isinstance(item, Loop) else 1
        body = item.items if isinstance(item, Loop) else (item,)
        found += [(name, k + n * getattr(item, "stride", 1)) for n in range(rounds) for name, k in body]
    return found


def shift(item: tuple[str, int], later: tuple[str, int]) -> int | None:
    return later[1] - item[1] if item[0] == later[0] else None


@given(st.lists(st.tuples(st.sampled_from("FB"), st.integers(0, 3)), max_size=14))
def test_loops_unroll_to_the_sequence(row: list[tuple[str, int]]) -> None:
    assert unrolled(periodic(row, shift)) == row


def test_steady_rounds_are_a_loop() -> None:
    row = [("F", 0), ("B", 0), *(item for k in range(1, 5) for item in (("B", k), ("F", k))), ("B", 7)]
    assert periodic(row, shift) == [
        ("F", 0),
        Loop((("B", 0),), 2),
        Loop((("F", 1), ("B", 2)), 3),
        ("F", 4),
        ("B", 7),
    ]


def test_rounds_of_several_microbatches_are_a_loop() -> None:
    row = [(name, k) for first in (0, 2, 4) for name in "ab" for k in (first, first + 1)]
    assert periodic(row, shift) == [Loop((("a", 0), ("a", 1), ("b", 0), ("b", 1)), 3, 2)]
