"""What the READMEs tell a user to type is understood: targets, commands, recipes, and keys of those recipes."""

import re
import shlex
from pathlib import Path

import pytest

from sbkit import cli
from sbkit.recipe import arguments, load
from sbkit.recipe.check import check

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "tools/README.md", *(f"recipes/CommonVoice/ASR/CTC/{name}.md" for name in ("README", "RESULTS"))]


def commands(page):
    """Commands in indented blocks and in back quotes, continued lines joined, comments left out."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    found = re.findall(r"^ {4}((?:make|sbkit|torchrun|python) .*)$", text, re.MULTILINE)
    found += re.findall(r"`((?:make|sbkit|torchrun|tools/launch_local.sh) [^`]+)`", text)
    return [shlex.split(line, comments=True) for line in found if "..." not in line]


COMMANDS = [pytest.param(words, id=f"{page}: {' '.join(words)}") for page in PAGES for words in commands(page)]


def test_there_are_commands():
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_understood(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1:]
    if words[0] == "sbkit" and words[1] not in cli.RECIPE_COMMANDS:
        if len(words) == 2:  # its name alone
            assert words[1] in cli._parser([]).format_help()
        else:
            cli._parser(words[1:]).parse_args(words[1:])
        return
    recipe = next((i for i, word in enumerate(words) if word.endswith(".yaml")), None)
    if recipe is None:
        assert words[:3] == ["sbkit", words[1], "RECIPE"], "a command without a recipe of its own"
        return
    request = arguments.parse([word for word in words[recipe:] if word not in ("--json", "--measure", "--fresh")])
    load.check_overrides(request.path, request.overrides)


def test_the_worked_example_builds(tmp_path, monkeypatch):
    """The Branchformer, put in the Conformer's place from the command line as the README shows it."""
    [words] = [words for words in commands("README.md") if "branchformer" in words]
    monkeypatch.chdir(ROOT)
    request = arguments.parse(words[words.index("hparams/ctc.yaml"):])
    report = check(request.path, {**request.overrides, "output_folder": str(tmp_path)})
    assert [str(error) for error in report.errors] == []
    assert report.sections["shapes"].values["ctc_lin"]
