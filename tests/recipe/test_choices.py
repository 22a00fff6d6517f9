"""The choices and bounds that the check tells are those of the SpeechBrain that is installed."""

import ast
import inspect
import itertools
import textwrap

import pytest
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.transformer.Transformer import TransformerInterface
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.linear import Linear

from sbkit.recipe import build
from sbkit.recipe.choices import ARGUMENTS, check_choices
from sbkit.recipe.overrides import from_python
from sbkit.recipe.source import Findings

CLASSES = {cls.__name__: cls for cls in (TransformerInterface, Linear, Fbank, torch.optim.Optimizer)}
DERIVED = {"TransformerInterface": TransformerASR, "Optimizer": torch.optim.AdamW}


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
        derived = DERIVED.get(name, CLASSES[name])
        taken = set(inspect.signature(CLASSES[name]).parameters) | set(inspect.signature(derived).parameters)
        assert arguments.keys() <= taken


def test_a_class_of_ones_own_may_know_more():
    class Mine(TransformerASR):
        pass

    for cls, expected in ((Mine, 0), (TransformerASR, 2)):
        assert len(findings_of({"attention_type": "mine", "d_ffn": 0}, cls)) == expected


def test_an_assertion_of_several_lines_is_shown_whole():
    with pytest.raises(AssertionError) as caught:
        TransformerASR(tgt_vocab=3, input_size=4, d_model=4, nhead=2, attention_type="RoPE", causal=False)
    message = build._reason_of(caught.value)
    assert message.startswith("assert attention_type in [") and message.endswith("'RoPEMHA']")


TINY = {"tgt_vocab": 7, "input_size": 6, "d_model": 8, "nhead": 2, "num_encoder_layers": 1, "d_ffn": 16, "dropout": 0.0,
        "kernel_size": 3, "csgu_linear_units": 16, "normalize_before": True}
WAYS = {"encoder_module": ARGUMENTS["TransformerInterface"]["encoder_module"],
        "attention_type": ARGUMENTS["TransformerInterface"]["attention_type"],
        "positional_encoding": ("fixed_abs_sine", None), "causal": (False, True), "num_decoder_layers": (0, 1)}


def findings_of(given: dict, cls: type = TransformerASR) -> list[tuple[str, str]]:
    findings, node = Findings(), from_python(given, "key")
    check_choices(cls, node.value, node, findings)
    return [(found.severity, found.key.removeprefix("key.")) for found in findings]


@torch.no_grad()
def tried(given: dict) -> tuple[bool, bool, bool]:
    """Whether SpeechBrain's encoder fails, its decoder fails, and a frame depends on those behind it."""
    net = TransformerASR(**given).eval()
    one = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[:, 6:] += 1
    try:
        heard = [net.encode(each)[:, :6] for each in (one, other)]
    except (AttributeError, UnboundLocalError, AssertionError, RuntimeError):
        return True, False, False
    try:
        if given["num_decoder_layers"]:
            net(one, torch.ones(2, 4, dtype=torch.long))
    except AttributeError:
        return False, True, False
    return False, False, not torch.allclose(*heard, atol=1e-5)


@pytest.mark.parametrize("values", [*itertools.product(*WAYS.values())], ids=str)
def test_arguments_that_clash_are_told_and_no_others(values):
    given = {**TINY, **dict(zip(WAYS, values, strict=True))}
    encoder_fails, decoder_fails, looks_ahead = tried(given)
    found = findings_of(given)
    assert encoder_fails == any(severity == "error" for severity, _ in found)
    assert decoder_fails == (("warning", "positional_encoding") in found)
    if not encoder_fails and not decoder_fails:
        assert (given["causal"] and looks_ahead) == (("warning", "causal") in found)


@pytest.mark.parametrize("key, given", [
    *(("kernel_size", {"encoder_module": module, "causal": causal, "kernel_size": size}) for module, causal, size in (
        ("conformer", False, 4), ("conformer", True, 4), ("transformer", False, 4), ("conformer", False, 5))),
    *(("nhead", {"attention_type": attention, "d_model": size, "causal": False}) for attention, size in (
        ("RoPEMHA", 6), ("RoPEMHA", 8), ("RelPosMHAXL", 6)))], ids=str)
def test_the_size_of_a_conformers_kernel_and_of_heads_with_rotary_positions(key, given):
    given = {**TINY, "num_decoder_layers": 0, **given}
    assert tried(given)[0] == (findings_of(given) == [("error", key)])


@pytest.mark.parametrize("size, heads", [(8, 3), (8, 4), (6, 3), (8, 16)])
@pytest.mark.parametrize("attention", ["RelPosMHAXL", "regularMHA"])
def test_heads_share_the_model_out_evenly(attention, size, heads):
    given = {**TINY, "attention_type": attention, "d_model": size, "nhead": heads, "num_decoder_layers": 0,
             "causal": False}
    try:
        TransformerASR(**given)
    except AssertionError:
        assert findings_of(given) == [("error", "nhead")]
    else:
        assert findings_of(given) == []


def test_a_size_that_is_no_whole_number_is_no_mistake_of_the_heads():
    assert findings_of({**TINY, "d_model": 8.5}) == []


@pytest.mark.parametrize("given, found", [
    ({}, []), ({"win_length": 400}, [("error", "win_length")]), ({"n_fft": 256}, [("error", "win_length")]),
    ({"win_length": 400, "hop_length": 160, "n_fft": 8192}, []), ({"sample_rate": 8000, "n_fft": 200}, []),
    ({"sample_rate": 16}, [("error", "sample_rate")]), ({"hop_length": 0}, [("error", "hop_length")]),
    ({"hop_length": 160}, [("warning", "hop_length")])], ids=str)
def test_windows_are_in_milliseconds_and_have_no_gaps(given, found):
    assert findings_of(given, Fbank) == found
    try:
        Fbank(**given)(torch.zeros(1, 16000))
    except (RuntimeError, ZeroDivisionError, ValueError):
        assert found
    else:
        assert found in ([], [("error", "sample_rate")], [("warning", "hop_length")])
