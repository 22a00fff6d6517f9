"""`sbkit new`: what a starter holds, and that it writes over nothing."""

import re
from pathlib import Path

import pytest

from sbkit.cli import main
from sbkit.recipe import starter

ROOT = Path(__file__).parents[2]


def test_a_starter_holds_the_shipped_recipes_and_the_script_as_they_are(tmp_path, capsys):
    folder = tmp_path / "a" / "folder"
    assert main(["new", str(folder)]) == 0
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    rest = {path: path.read_text() for path in (ROOT / "recipes").rglob("*.yaml")}
    first = {path for path, recipe in rest.items() if "hparams/ctc.yaml\n" in recipe}
    then = {path for path, recipe in rest.items() if any(f"!include:{each.name}\n" in recipe and each.parent ==
                                                         path.parent for each in first)}
    recipes = {str(path.relative_to(ROOT)) for path in first | then}
    bases = {f"hparams/base/{name}.yaml" for name in ("training", "recogniser", "conformer")}
    assert written == {"README.md", "train.py", "hparams/ctc.yaml"} | bases | recipes and recipes
    for name in written - {"README.md"}:
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes(), name
    assert not any(path.is_symlink() for path in folder.rglob("*")), "it stands without the package"
    output = capsys.readouterr().out
    assert all(str(folder / name) in output for name in written) and "sbkit check hparams/ctc.yaml" in output


@pytest.mark.parametrize("task", starter.tasks())
def test_its_readme_names_files_that_it_has_and_the_recipe_of_its_task(tmp_path, task):
    starter.write(tmp_path, task)
    page = (tmp_path / "README.md").read_text()
    named = set(re.findall(r"hparams/\w+\.yaml", page))
    assert named == {f"hparams/{task}.yaml"} and (tmp_path / "hparams" / f"{task}.yaml").exists()
    assert "train.py" in page and (tmp_path / "train.py").exists()


@pytest.mark.parametrize("there", ["README.md", "hparams/ctc.yaml"])
def test_a_file_that_is_there_stays_and_nothing_is_written_beside_it(tmp_path, capsys, there):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert main(["new", str(tmp_path)]) == 2
    assert f"{tmp_path} has {there} already; nothing was written; name another folder" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / there).read_text() == "mine"


def test_other_files_in_the_folder_do_not_matter(tmp_path):
    (tmp_path / "LICENSE").write_text("mine")
    assert main(["new", str(tmp_path)]) == 0
    assert (tmp_path / "LICENSE").read_text() == "mine" and (tmp_path / "hparams/ctc.yaml").exists()


@pytest.mark.parametrize("task, expected", [
    ("cct", "did you mean ctc? tasks are codec, ctc, enhance, finetune, mine, speaker, streaming, transducer, tts"),
    ("../x", "tasks are codec, ctc, enhance, finetune, mine, speaker, streaming, transducer, tts")])
def test_an_unknown_task_lists_those_there_are(tmp_path, capsys, task, expected):
    assert main(["new", str(tmp_path / "x"), "--task", task]) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no task {task!r}; {expected} [")
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["new", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {tmp_path / 'file'}")


def test_a_task_gets_the_recipes_that_rest_on_its_flagship_alone(tmp_path, monkeypatch):
    home = tmp_path / "starter"
    up = "recipe: !include:../../../../../hparams"
    for name, text in {"hparams/ctc.yaml": "a: 1\n", "hparams/tts.yaml": "a: 1\n",
                       "recipes/Corpus/TTS/Tiny/hparams/en.yaml": "recipe: !include:base.yaml\n",
                       "recipes/Corpus/TTS/Tiny/hparams/base.yaml": f"{up}/tts.yaml\n",
                       "recipes/Corpus/TTS/hparams/one.yaml": "recipe: !include:../../../../hparams/tts.yaml\n",
                       "recipes/Corpus/ASR/CTC/hparams/en.yaml": f"{up}/ctc.yaml\n"}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    monkeypatch.setattr(starter, "HOME", home)
    assert starter.tasks() == ["ctc", "mine", "tts"]
    assert [str(place) for place in starter.files("tts")] == [
        "README.md", "train.py", "hparams/tts.yaml", "recipes/Corpus/TTS/Tiny/hparams/base.yaml",
        "recipes/Corpus/TTS/Tiny/hparams/en.yaml", "recipes/Corpus/TTS/hparams/one.yaml"]
