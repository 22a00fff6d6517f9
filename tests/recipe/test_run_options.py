"""SpeechBrain's run options are written down in sbkit, so that a word can be refused before SpeechBrain is imported."""

from speechbrain.utils.run_opts import RunOptions

from sbkit.recipe import arguments
from sbkit.recipe.run_options import RUN_OPTIONS


def test_they_are_those_of_the_installed_speechbrain():
    assert set(RUN_OPTIONS) == {*RunOptions.__dataclass_fields__} - {"overridden_args"}


def test_the_parser_of_the_installed_speechbrain_gives_only_what_is_on_the_command_line():
    parser, precisions = arguments._run_options_parser()
    assert vars(parser.parse_args(["ctc.yaml"])) == {"param_file": "ctc.yaml"}
    read = parser.parse_args(["ctc.yaml", "--optimizer_step_limit", "5", "--precision", "fp8", "--no-check"])
    assert vars(read) == {"param_file": "ctc.yaml", "optimizer_step_limit": 5, "precision": "fp8", "no_check": True}
    assert set(precisions) == {"precision", "eval_precision"}
    assert all({"auto", "fp32", "fp16", "bf16"} <= set(choices) for choices in precisions.values())
