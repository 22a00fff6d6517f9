"""What a bench can't measure is refused in a line before anything runs."""

import importlib
import sys

import pytest

#: Options that a bench doesn't go without.
GIVEN = {"clean": "", "labels": "", "learning": "--corpora en:1", "real": "--corpora cs={here}",
         "replay": "--source {here} --corpora es={here}:3", "speaker": "", "telephone": ""}
CASES = [
    ("clean", "--lr_ 3", "did you mean --lr?"), ("clean", "plan", "cannot read"),
    ("clean", "--spec_augment.rump null", "did you mean ramp?"),
    ("learning", "--minutes 0", "--minutes: invalid minutes value: '0'"),
    ("learning", "--epochs two", "--epochs: invalid whole_numbers value: 'two'"),
    ("real", "--ways parrot", "there is no way parrot"),
    ("real", "--ways nothing,demo", "--source RUN, which is missing"),
    ("real", "--ways whisper --encoder .", "with a config.json, which is ."),
    ("real", "--ways nemo --nemo .", "is no environment"),
    ("real", "--minutes nan", "--minutes: invalid positive value: 'nan'"),
    ("real", "--seeds 1,x", "--seeds: invalid whole_numbers value: '1,x'"),
    ("real", "--corpora cs=nowhere", "no such folder or archive"),
    ("real", "--corpora cs=", "cannot read the corpus 'cs='"),
    ("replay", "--corpora es={here}/nowhere:3", "no such folder, or no number of epochs"),
    ("replay", "--corpora es={here}:many", "no such folder, or no number of epochs"),
    ("telephone", "--ways parrot", "there is no way parrot"),
    *((name, "--list 1", "has no key list") for name in GIVEN),
]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """What a bench says of words that it doesn't take; nothing has started."""
    def run(name, words):
        line = f"{name} --out {tmp_path}/out {GIVEN[name]} {words}".format(here=tmp_path)
        monkeypatch.setattr(sys, "argv", line.split())
        try:
            assert importlib.import_module(f"tools.bench.{name}").main() == 2
        except SystemExit as end:
            assert end.code == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(("name", "words", "told"), CASES)
def test_words_that_no_run_understands_start_none(refused, name, words, told):
    assert told in refused(name, words)


@pytest.mark.parametrize("name", GIVEN)
def test_a_key_that_the_bench_sets_is_refused(refused, name):
    key = importlib.import_module(f"tools.bench.{name}").OWN[0]
    assert f"--{key} is set by this program" in refused(name, f"--{key} 2")
