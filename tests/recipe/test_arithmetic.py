"""References are computed as HyperPyYAML does, and none of them takes for ever or all of the memory."""

import pytest
from hyperpyyaml.core import parse_arithmetic
from written import write

from sbkit.recipe.check import check
from sbkit.recipe.resolve import compute


@pytest.mark.parametrize("text", [
    "2 * 6", "7 // 2 + 0.5", "2 ** 60 + 1 - 2 ** 60", "2 ** 0.5", "7 % 4", "-5", "a/b/c", "some words", "3 * 'x",
    "'a' + 'b'", "results/ctc/fr/1234", "1 / data", "(-8) ** 0.5"])
def test_what_is_computed_is_what_hyperpyyaml_computes(text):
    assert compute(text) == parse_arithmetic(text)


@pytest.mark.parametrize("text", [
    "9 ** 9 ** 9", "9 ** 9 ** 9 / data", "'x' * 9 ** 12", "('x' + 'y') * 9 ** 12", "'%999999999999d' % 1", "1 / 0",
    "-" * 9000 + "1", " + ".join("1" * 4000)], ids=lambda text: text[:20])
def test_what_would_take_for_ever_is_an_error(text):
    with pytest.raises((ArithmeticError, ValueError)):
        compute(text)


DOUBLING = [f"a{i}: !ref <a{i - 1}><a{i - 1}>" for i in range(1, 40)]


@pytest.mark.parametrize(("lines", "line", "message"), [
    (["a: 9", "b: !ref <a> ** <a> ** <a>"], 2, "9 ** 9 ** 9 can't be computed: the number is too large"),
    (["a0: xxxxxxxxxx", *DOUBLING], 11, "with its references resolved, this text has more than 10000 characters"),
    ([*reversed(DOUBLING), "a0: !ref <a39>"], 1, "this reference is circular: a39 -> a38 -> "),
], ids=["a tower of powers", "texts that double", "a circle with many ways around"])
def test_a_recipe_that_takes_for_ever_to_compute_is_one_error(tmp_path, lines, line, message):
    path = write(tmp_path, "\n".join(lines))
    finding, = check(path, run=False).findings
    assert finding.line == line and finding.message.startswith(message)
