"""Every shipped recipe passes the check, fits on a screen, and builds with plain HyperPyYAML as `show` prints it."""

import json
import re
import textwrap
from pathlib import Path

import encoders
import pytest
import run_folders
import torch
from hyperpyyaml import load_hyperpyyaml
from run_folders import sound
from safetensors.torch import save_file
from written import described

from sbkit.cli import main
from sbkit.export import layout
from sbkit.nn.codec.coder import definition
from sbkit.recipe import files, load
from sbkit.recipe.build import build
from sbkit.recipe.check import check
from sbkit.recipe.reading import read
from sbkit.recipe.resolve import flatten
from sbkit.recipe.source import Findings

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("hparams/*.yaml"), *ROOT.glob("recipes/**/*.yaml")])


def stand_ins(name: str, folder: Path) -> dict:
    """What a user of the recipe must give."""
    given = {"output_folder": str(folder / "run")}
    texts = [path.read_text() for path, _ in load.chain(ROOT / name)]
    if any("data_folder: !PLACEHOLDER" in text for text in texts):
        given |= {"data_folder": str(folder / "data"), "language": "fr"}
        if any("sbkit.tasks.enhance" in text for text in texts):
            for name in ("noisy_testset_wav", "noisy_trainset_28spk_wav"):  # VoiceBank-DEMAND's layout
                (folder / "data" / name).mkdir(parents=True, exist_ok=True)
        else:
            run_folders.corpus(folder / "data", 1.0, train=2, dev=1, test=1)
    if any("encoder_source: null" in text for text in texts):
        large = {"hidden_size": 256, "intermediate_size": 512}
        given |= {"encoder_source": str(encoders.make(folder / "encoder", "wav2vec2-layer", **large))}
    if any("sbkit.tasks.tts" in text for text in texts):
        given |= dict.fromkeys(["codec", "recogniser"], str(codec_of(name, folder)))
    if any("trials: !PLACEHOLDER" in text for text in texts):
        given |= {"trials": str(folder / "trials.txt")} | dict.fromkeys(
            ["data_folder", "noise_folder", "rir_folder"], str(folder))
        for name in ("id10001/a/1.wav", "id10002/a/1.wav", "id10003/a/1.wav", "id10270/a/1.wav"):
            sound(folder / name)
    return given


def codec_of(name: str, folder: Path) -> Path:
    """A bundle of the codec that a voice's recipe says it speaks through, with its weights alone, all of them 0."""
    beside = (ROOT / name).with_name("codec.yaml")
    with torch.device("meta"):
        hparams = load.load(beside, stand_ins(str(beside.relative_to(ROOT)), folder / "of_the_codec"))
    bundle = folder / "codec"
    bundle.mkdir()
    (bundle / layout.CONFIG).write_text(json.dumps({"format": layout.FORMAT}))
    defined = {part: definition(hparams[part]) for part in ("quantiser", "decoder", "head")}
    save_file({f"{part}.{key}": torch.zeros(value.shape, dtype=torch.float16) for part in ("decoder", "head")
               for key, value in hparams[part].state_dict().items()}, bundle / layout.WEIGHTS,
              {"definition": json.dumps(defined)})
    return bundle


#: The last layer of recipes whose name has a mark; of others it is ``ctc_lin``.
LAST = [("codec", "head"), ("tts", "code_head"), ("speaker", "classifier"), ("enhance", "enhancer"),
        ("large", "seq_lin")]


def test_there_are_recipes_to_check():
    assert "hparams/ctc.yaml" in SHIPPED and len(SHIPPED) > 1


def few_layers(name: str) -> dict:
    """One layer in each place, as those above it are the same, and few channels of an encoder of speakers, which are a
    loop over groups of them; the flagship is checked with all of its layers."""
    every = [level.value for _, level in files.levels(load.chain(ROOT / name))] if name != "hparams/ctc.yaml" else []
    below = {key: value.value for level in every for key, value in level.items()}
    few = {key: 1 for key, value in below.items() if key.endswith("layers") and value not in (None, "null", 0, "0")}
    return few | {"channels": 32} if "speaker" in name.lower() else few


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] * (not name.startswith("hparams/"))) for name in SHIPPED])
def test_a_shipped_recipe_passes_the_check(name, tmp_path, request):
    """What those under recipes/ cost is counted as for those under hparams/, whose kinds they are of."""
    if not (counted := name.startswith("hparams/")):
        request.getfixturevalue("without_cost")
    report = check(ROOT / name, stand_ins(name, tmp_path) | few_layers(name))
    assert [str(error) for error in report.errors] == []
    assert report.sections["shapes"].values[next((last for mark, last in LAST if mark in name.lower()), "ctc_lin")]
    assert {row[4] for row in report.sections["devices"].rows} <= {"moved", "no tensors"}
    assert not counted or report.sections["cost"].values["parameters"] > 1e5
    assert not (tmp_path / "run").exists(), "a check leaves no trace"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_has_no_key_without_effect(name):
    read(ROOT / name, {}, findings := Findings())
    assert [finding.key for finding in findings if finding.code == "unread-key"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_show_prints_a_shipped_recipe_whole_for_plain_hyperpyyaml(name, tmp_path, capsys):
    """With the file and line of each value; the recipe and its bases can't be read by HyperPyYAML, which resolves
    references of a file without those that it includes."""
    given = stand_ins(name, tmp_path)
    assert main(["show", str(ROOT / name), *(f"--{key}={value}" for key, value in given.items())]) == 0
    text = capsys.readouterr().out
    written = [(path.name, path.read_text().splitlines()) for path, _ in load.chain(ROOT / name)]
    told = re.findall(r"^(\w+): .*[#,] (?:(\w+\.yaml):(\d+)|command line|default)$", text, re.M)
    assert len(told) > 50 and {file for _, file, _ in told} >= {"", *dict(written)}
    for key, file, line in told:
        there = [lines[int(line) - 1] for name, lines in written if name == file and len(lines) >= int(line)]
        assert not file or any(f"{key}:" in each for each in there), f"{file}:{line} has no {key}"
    with torch.device("meta"):  # weights without memory
        hparams = load_hyperpyyaml(text)
    assert all(isinstance(module, torch.nn.Module) for module in hparams["modules"].values())
    assert sum(p.numel() for p in hparams["model"].parameters()) > 1e6
    (mine := tmp_path / "mine.yaml").write_text(text)
    other = {"output_folder": "elsewhere", "seed": 7, **({"output_neurons": 31} if "output_neurons" in hparams else {})}
    values, own = (flatten(load.resolved(path, {**given, **other})).texts()
                   for path in (ROOT / name, mine))
    assert own | values == own, "as a recipe, it follows the same keys"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_run_and_its_check_build_what_hyperpyyaml_builds(name, tmp_path):
    """The same classes, values, initial weights to the bit, and objects that are the same one."""
    given = stand_ins(name, tmp_path) | few_layers(name) | ({"num_encoder_layers": 1} if "ctc.yaml" in name else {})
    found = []
    for builds in (lambda: load.load(ROOT / name, given), lambda: load_hyperpyyaml(load.merged(ROOT / name, given))):
        torch.manual_seed(0)
        hparams = builds()
        found.append(described(hparams, {}))
    ours, theirs = found
    at = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), 0)
    assert ours == theirs, f"{ours[max(at - 200, 0):at + 100]}, by HyperPyYAML {theirs[max(at - 200, 0):at + 100]}"
    assert ours.count("torch.float32") > 2
    with build(read(ROOT / name, given, Findings()), Findings()) as built:
        assert built.missing == set() and list(built.hparams) == list(hparams)
        for key, value in hparams.items():
            assert type(built.hparams[key]) is type(value), key
            if isinstance(value, torch.nn.Module):
                assert {at: p.shape for at, p in built.hparams[key].named_parameters()} == {
                    at: p.shape for at, p in value.named_parameters()}
        assert all(module is built.hparams.get(key, module) for key, module in built.hparams["modules"].items())


SSL = "hparams/finetune.yaml"


@pytest.mark.parametrize("key, given, at, expected, mend", [
    ("ctc_weight", 0.3, "command line", "an attention decoder trains, but encoder has none", "write ctc_weight: 1.0"),
    ("intermediate_ctc", 0.3, "command line", "Encoder has no list of layers", "write intermediate_ctc: 0"),
    ("sample_rate", 8000, str(ROOT / SSL), "takes 16000 samples per second", "write sample_rate: 16000")])
def test_what_a_pretrained_encoder_has_no_part_for_or_was_not_trained_at_is_refused(tmp_path, key, given, at, expected,
                                                                                    mend):
    (error,) = check(ROOT / SSL, stand_ins(SSL, tmp_path) | {key: given}).errors
    assert (error.code, error.key, error.file) == (
        ("sample-rate", "encoder", at) if key == "sample_rate" else ("forward", key, at))
    assert expected in error.message and error.suggestion.startswith(mend)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_a_pretrained_encoder_that_trains_is_in_a_checkpoint(tmp_path):
    path = tmp_path / "head_alone.yaml"
    path.write_text(f"recipe: !include:{ROOT / SSL}\n    checkpointer:\n        recoverables:\n"
                    "            model: !ref <ctc_lin>\n")
    given = stand_ins(SSL, tmp_path)
    (error,) = check(path, given).errors
    assert error.code == "not-saved" and "freeze: {encoder: true}" in error.suggestion
    assert check(path, given | {"freeze": {"encoder": True}}).errors == []


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_the_recipe_with_houlsbys_adapters_on_the_page_passes_the_check(tmp_path):
    page = (ROOT / "docs" / "how-to" / "finetune.md").read_text(encoding="utf-8")
    [block] = [block for block in page.split("\n\n") if "Houlsby\n" in block]
    path = tmp_path / "houlsby.yaml"
    path.write_text(textwrap.dedent(block).replace("!include:", f"!include:{ROOT}/"))
    run_folders.corpus(tmp_path / "data", 1.0, train=2, dev=1, test=1)
    report = check(path, stand_ins(SSL, tmp_path) | {"data_folder": str(tmp_path / "data"), "language": "ga"})
    assert [str(finding) for finding in report.findings] == []
    [encoder] = [row for row in report.sections["devices"].rows if row[0] == "encoder"]
    assert encoder[3] != "0%" and encoder[3] != "100%" and encoder[6] == "model"
