"""The benchmark of searches: its error rate."""

import pytest

from tools.bench.decode import error_rate


@pytest.mark.parametrize("references, hypotheses, rate", [
    (["hello world"], ["hello world"], 0),
    (["hello world"], ["hello there"], 50),
    (["a", "long word here"], ["", "long word"], 50),
])
def test_errors_are_counted_by_words(references: list[str], hypotheses: list[str], rate: float) -> None:
    assert error_rate(references, hypotheses) == rate
