"""The choices and bounds that the check tells are those of the SpeechBrain that is installed."""

import ast
import inspect
import textwrap

import pytest
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.transformer.Transformer import TransformerInterface
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.linear import Linear

from sbkit.recipe import build
from sbkit.recipe.choices import ARGUMENTS, check_choices
from sbkit.recipe.source import Findings, from_python

CLASSES = {cls.__name__: cls for cls in (TransformerInterface, Linear, Fbank)}


def compared_with(cls: type, name: str) -> set[str]:
    """Texts that a constructor compares its argument with."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    return {text.value for node in ast.walk(tree) if isinstance(node, ast.Compare)
            and getattr(node.left, "id", "") == name for text in ast.walk(node)
            if isinstance(text, ast.Constant) and isinstance(text.value, str)}


@pytest.mark.parametrize("name", ["encoder_module", "attention_type"])
def test_the_choices_are_the_installed_classs(name):
    assert set(ARGUMENTS["TransformerInterface"][name]) == compared_with(TransformerInterface, name)


def test_every_argument_of_the_table_is_one_of_its_class():
    assert ARGUMENTS.keys() == CLASSES.keys()
    for name, arguments in ARGUMENTS.items():
        derived = {"TransformerInterface": TransformerASR}.get(name, CLASSES[name])
        taken = set(inspect.signature(CLASSES[name]).parameters) | set(inspect.signature(derived).parameters)
        assert arguments.keys() <= taken


def test_a_class_of_ones_own_may_know_more():
    class Mine(TransformerASR):
        pass

    node = from_python({"attention_type": "mine", "d_ffn": 0}, "Transformer")
    for cls, told in ((Mine, 0), (TransformerASR, 2)):
        findings = Findings()
        check_choices(cls, node.value, node, findings)
        assert len(findings) == told


def test_an_assertion_of_several_lines_is_shown_whole():
    with pytest.raises(AssertionError) as caught:
        TransformerASR(tgt_vocab=3, input_size=4, d_model=4, nhead=2, attention_type="RoPE", causal=False)
    said = build._first(caught.value)
    assert said.startswith("assert attention_type in [") and said.endswith("'RoPEMHA']")
