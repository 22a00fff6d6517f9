"""What the pages tell a user to type is understood: targets, commands, recipes and their keys; links lead somewhere."""

import contextlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import test_source

from sbkit import cli
from sbkit.explanations import all_explanations
from sbkit.recipe import arguments, load
from sbkit.recipe.check import check
from sbkit.rehearsal.cards import parse_cards

ROOT = Path(__file__).parents[1]
HOME = ["README.md", "AGENTS.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "sbkit/starter/README.md",
        "tools/README.md",
        *(f"recipes/CommonVoice/ASR/CTC/{name}.md"
          for name in ("README", "RESULTS", "results/people", "results/demo", "results/speed")),
        "recipes/LJSpeech/TTS/README.md", "recipes/VoxCeleb/SpeakerRec/README.md"]
PAGES = [*HOME, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
#: Commands of the first four run in folders of their own, by tests/integration/test_extend.py and test_tutorials.py;
#: examples of findings are wrong on purpose.
ELSEWHERE = {"docs/how-to/extend.md",
             *(f"docs/tutorials/{name}.md" for name in ("own-task", "speechbrain", "from-speechbrain")),
             "docs/reference/findings.md"}
FLAGS = {"--json", "--measure", "--no-run", "--fresh"}


def prose(page):
    return (ROOT / page).read_text(encoding="utf-8")


def commands(page):
    """Commands in indented blocks and in back quotes, continued lines joined, comments left out."""
    text = prose(page).replace("\\\n", " ")
    found = re.findall(r"^ {4}((?:make|sbkit|torchrun|python) .*)$", text, re.MULTILINE)
    found += re.findall(r"`((?:make|sbkit|torchrun|python|tools/launch_local.sh) [^`]+)`", text)
    return [shlex.split(line, comments=True) for line in found if "..." not in line]


COMMANDS = [pytest.param(words, id=f"{page}: {' '.join(words)}")
            for page in PAGES if page not in ELSEWHERE for words in commands(page)]


def test_there_are_commands():
    assert len(COMMANDS) > 80


def test_every_command_of_sbkit_is_on_a_page():
    told = {words[1] for page in PAGES for words in commands(page) if words[0] == "sbkit"}
    assert {*cli.COMMANDS} <= told


@pytest.mark.slow
def test_the_list_of_what_runs_code_has_every_command_and_is_true(capsys):
    """A command can run code only if it reaches what builds a recipe; then its help says so."""
    section = prose("docs/explanation/what-runs-code.md")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    listed = [(name, answer[:3] == "yes") for names, _, answer in rows[2:] for name in re.findall(r"`(.*?)`", names)]
    assert sorted(name for name, _ in listed) == sorted(cli.COMMANDS)
    assert all(answer.startswith(("yes", "no")) for _, _, answer in rows[2:])
    for name, runs_code in listed:
        reached = test_source.reached([f"sbkit.commands.{name.replace('-', '_')}"])
        assert ("sbkit.recipe.build" in reached) == runs_code or name == "new", "that one reads sbkit's own recipes"
        with contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
        help_text = " ".join(capsys.readouterr().out.split())
        assert bool(re.search(r"\bis code\b", help_text)) == runs_code, f"sbkit {name} --help"


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_understood(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "python":
        assert all(Path(word).exists() for word in words[1:] if word.endswith(".py")), "a script or a test"
        assert words[1] != "-m" or importlib.util.find_spec(words[2]), "a module"
        return
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1:]
    if words[0] == "sbkit" and not (words[1] in cli.COMMANDS and cli.takes_recipe(words[1])):
        if len(words) == 2 and words[1] != "doctor":  # its name alone
            assert words[1] in (*cli.COMMANDS, "COMMAND", "--help", "--version")
        elif words[1:] != ["COMMAND", "--help"] and words[-1] != "--help":
            cli.parser_for(words[1:]).parse_args(words[1:])
        return
    recipe = next((i for i, word in enumerate(words) if word.endswith(".yaml")), None)
    if recipe is None:
        assert words[2:] in ([], ["--help"]) or words[2] == "RECIPE", "a command without a recipe of its own"
        return
    if words[recipe].endswith("/hyperparams.yaml"):  # a run's, which has the keys of the recipe that it was made of
        words[recipe] = "hparams/ctc.yaml"
    given = [word for word in words[recipe:] if word not in FLAGS]
    if "--memory" in given:
        at = given.index("--memory")
        assert float(given[at + 1]) > 0 and words[1] == "tune"
        del given[at:at + 2]
    for option in {"--as", "--html", "--folds", "--ignore", "--price"} & {*given}:
        at = given.index(option)
        if option == "--folds":
            assert words[1] == "clean" and int(given[at + 1]) > 1
        elif option == "--ignore":
            assert words[1] == "check" and set(given[at + 1].split(",")) <= all_explanations().keys()
        elif option == "--price":
            assert words[1] == "check" and float(given[at + 1]) >= 0
        else:
            assert words[1] == "check" and (option == "--html" or parse_cards(given[at + 1]))
        del given[at:at + 2]
    request = arguments.parse(given)
    load.check_overrides(request.path, request.overrides)


@pytest.mark.parametrize("page", ["README.md", *(page for page in PAGES if page.startswith("docs/"))])
def test_a_page_exports_to_nothing_that_make_demo_has_made(page):
    makefile = (ROOT / "Makefile").read_text()
    [folder] = re.findall(r"^OUT +\?= (.*)$", makefile, re.MULTILINE)
    assert "sbkit export $(OUT) --to $(OUT)/bundle" in makefile
    exports = [words for words in commands(page) if words[:2] == ["sbkit", "export"] and "--force" not in words]
    assert not [words for words in exports if f"{folder}/bundle" in words], "it is refused: the bundle exists"


@pytest.mark.slow
def test_the_worked_example_builds(tmp_path, monkeypatch):
    """The Branchformer, put in the Conformer's place from the command line as the page about models shows it."""
    [words] = [words for words in commands("docs/how-to/models.md") if "branchformer" in words]
    monkeypatch.chdir(ROOT)
    request = arguments.parse(words[words.index("hparams/ctc.yaml"):])
    report = check(request.path, {**request.overrides, "num_encoder_layers": 1, "output_folder": str(tmp_path)})
    assert [str(error) for error in report.errors] == []
    assert report.sections["shapes"].values["ctc_lin"]


@pytest.mark.slow
def test_the_mixture_on_the_page_about_data_builds(tmp_path):
    blocks = re.findall(r"(?:^ {4}.*\n)+", prose("docs/how-to/data.md"), re.M)
    [block] = [block for block in blocks if "mixture.Mixture" in block]
    recipe = tmp_path / "mixture.yaml"
    recipe.write_text(re.sub("^ {4}", "", block, flags=re.M).replace("hparams/", f"{ROOT}/hparams/"))
    report = check(recipe, {"output_folder": str(tmp_path / "run"), "num_encoder_layers": 1})
    assert [each.code for each in report.errors] == []
    assert [each.code for each in report.warnings] == ["no-such-path"] * 2, "both parts are on another machine"


@pytest.mark.slow
def test_the_recipe_whose_encoder_has_weights_builds(tmp_path):
    """As the page about models shows it, resting on this checkout's flagship."""
    blocks = re.findall(r"(?:^ {4}.*\n)+", prose("docs/how-to/models.md"), re.M)
    [block] = [block for block in blocks if "Pretrainer" in block]
    recipe = tmp_path / "finetune.yaml"
    (tmp_path / "encoder.ckpt").touch()
    text = re.sub("^ {4}", "", block, flags=re.M).replace("../hparams", str(ROOT / "hparams"))
    recipe.write_text(text.replace("/models/encoder.ckpt", str(tmp_path / "encoder.ckpt")))
    keys = {"output_folder": str(tmp_path), "d_model": 64, "num_encoder_layers": 1, "data_folder": None}
    report = check(recipe, keys)
    assert [str(error) for error in report.errors] == []


def anchors(page):
    """The headings of a page as links name them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", prose(page), flags=re.MULTILINE | re.DOTALL),
                       re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_a_link_leads_to_a_file_and_to_a_heading_in_it(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", link):
            continue
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{link}: there is no {target}"
        assert not heading or heading in anchors(target), f"{link}: {target.name} has no such heading"


def test_a_page_that_code_or_a_recipe_names_is_there():
    named = {(str(path.relative_to(ROOT)), *found) for folder in ("sbkit", "hparams", "recipes", "tools", "docker")
             for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in (".py", ".yaml", ".html", "")
             for found in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [each for each in named if not (ROOT / each[1]).is_file() or (each[2] and each[2] not in anchors(each[1]))
            ] == []


def test_every_page_is_linked_to():
    linked = {(ROOT / page).parent.joinpath(link.partition("#")[0]).resolve()
              for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link}
    assert [page for page in PAGES if page.startswith("docs/") and (ROOT / page).resolve() not in linked] == []


def test_symptoms_are_quoted_as_they_are_said():
    """What the page about trouble quotes stands in some message, if with other capitals and names in place of dots."""
    said = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "sbkit").rglob("*.py")))
    said = re.sub(r'"\s*\n\s*f?"', "", said).lower()  # a text over two lines
    symptoms = "".join(re.findall(r"^\|([^|]*)\|", prose("docs/how-to/troubleshooting.md"), re.MULTILINE))
    quoted = [either or other for either, other in re.findall(r'`([^`]+)`|"([^"]+)"', symptoms)]
    assert len(quoted) > 8
    assert not [text for text in quoted if not text.startswith("--")  # which is typed
                and not all(part.strip().lower() in said for part in text.split("..."))]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"`((?:sbkit|tests|tools|hparams|recipes)/[\w./-]+)`", prose(page))
    homes = ROOT, (ROOT / page).parent
    missing = [name for name in named if not any((home / name).exists() for home in homes)]
    assert missing == []
