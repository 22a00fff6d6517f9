"""SpeechBrain's run options are written down in sbkit, so that a word can be refused before SpeechBrain is imported."""

from speechbrain.utils.run_opts import RunOptions

from sbkit.recipe.run_options import RUN_OPTIONS


def test_they_are_those_of_the_installed_speechbrain():
    assert set(RUN_OPTIONS) == {*RunOptions.__dataclass_fields__} - {"overridden_args"}
