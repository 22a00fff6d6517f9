import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.recipe.speed import peak_of_card
from sbkit.rehearsal.cards import CARDS, MAX_CARDS, parse_cards, runs_on

NAMES = st.sampled_from(sorted(CARDS))


@given(NAMES, st.integers(1, MAX_CARDS), st.sampled_from(["x", "X", " x ", "*"]), st.booleans())
def test_a_number_of_cards_and_their_name_are_read_in_any_writing(name, count, times, lower):
    written = name.lower() if lower else name.replace(" ", "-")
    assert parse_cards(f"{count}{times}{written}") == (count, CARDS[name])
    assert parse_cards(name.replace(" ", "")) == (1, CARDS[name])


@pytest.mark.parametrize("texts, code", [
    (["", "8", "8x", "x", "H1000", "8xxH100", "-1xH100", "1.5xH100", "H100,H200", "2xH10"], "unknown-gpu"),
    (["0xH100", f"{MAX_CARDS + 1}xL4"], "bad-value")], ids=["names", "numbers"])
def test_unknown_cards_and_numbers_are_errors_that_list_the_known_ones(texts, code):
    for text in texts:
        with refused(code, value=text):
            parse_cards(text)


@given(NAMES)
def test_each_card_is_described_in_the_same_units(name):
    card = CARDS[name]
    assert all(value for value in dataclasses.astuple(card))
    assert 8 << 30 < card.memory < 512 << 30 and card.shared_memory >= 48 << 10 and card.threads in (1024, 1536, 2048)
    half, single = (peak_of_card(card.name, precision)[0] for precision in ("bf16", "fp32"))
    assert 1e12 < single < half


NUMBERS = st.tuples(st.integers(5, 12), st.integers(0, 9))


@given(NUMBERS, NUMBERS)
def test_kernels_run_on_later_cards_of_the_same_major_version_and_ptx_on_all_later_ones(built, card):
    number = "".join(map(str, built))
    assert runs_on([f"sm_{number}"], card) == (built[0] == card[0] and built[1] <= card[1])
    assert runs_on([f"sm_{number}", f"compute_{number}"], card) == (built <= card)
    assert runs_on([f"sm_{number}f"], card) == runs_on([f"sm_{number}"], card) and not runs_on([], card)
    assert runs_on([f"sm_{number}a"], card) == runs_on([f"compute_{number}a"], card) == (built == card)
