"""Objects of another class than a key declares are told with their line, and those that SpeechBrain has work."""

import pytest
from refusals import refused
from speechbrain.nnet import schedulers
from written import BASED, changed, write

from sbkit.recipe import load
from sbkit.recipe.check import check

pytestmark = pytest.mark.usefixtures("without_cost")


@pytest.mark.parametrize(("key", "instead", "message"), [
    ("batching: !new:sbkit.data.plan.Batching", "batching:", "it is a mapping, and must be a sbkit.data.plan.Batching"),
    ("batching: !new:sbkit.data.plan.Batching\n    max_batch_seconds: 40", "batching: [40]",
     "it is [40], and must be a sbkit.data.plan.Batching"),
    ("batching: !new:sbkit.data.plan.Batching", "batching: !name:sbkit.data.plan.Batching",
     "it is only named, not built, and must be a sbkit.data.plan.Batching"),
    ("tokenizer: !new:sbkit.data.tokens.Tokenizer\n    folder: !ref <output_folder>/save\n    vocab_size: "
     "!ref <output_neurons>", "tokenizer: !new:sentencepiece.SentencePieceProcessor",
     "it is of sentencepiece.SentencePieceProcessor, and must be a sbkit.data.tokens.Tokenizer"),
    ("tokenizer: !new:sbkit.data.tokens.Tokenizer\n    folder: !ref <output_folder>/save\n    vocab_size: "
     "!ref <output_neurons>", "tokenizer: !name:speechbrain.tokenizers.SentencePiece.SentencePiece",
     "it is of speechbrain.tokenizers.SentencePiece.SentencePiece, and must be a sbkit.data.tokens.Tokenizer"),
    ("checkpointer: !new:sbkit.train.checkpoint.Checkpointer",
     "checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer",
     "it is of speechbrain.utils.checkpoints.Checkpointer, and must be a sbkit.train.checkpoint.Checkpointer"),
    ("ctc_weight: 0.3", "ctc_weight: 0.3\nschedule: !new:torch.nn.Identity",
     "it is of torch.nn.modules.linear.Identity, and must be a sbkit.train.schedule.Schedule"),
    ("ctc_weight: 0.3", "ctc_weight: 0.3\ndecoder: !new:torch.nn.Identity",
     "it is of Identity; a search has a method decode and a tokenizer"),
    ("ctc_weight: 0.3", "ctc_weight: 0.3\ndecoder: !name:sbkit.decode.beam.BeamSearch",
     "it is only the name of BeamSearch; a search has a method decode and a tokenizer"),
], ids=["a mapping", "a list", "a name", "a tokenizer", "another's name", "a checkpointer", "a schedule",
        "a decoder", "a named decoder"])
def test_an_object_of_another_class_is_one_error_with_its_line(tmp_path, key, instead, message):
    path = changed(tmp_path, {key: instead})
    name = instead.splitlines()[-1 if "ctc_weight" in instead else 0].partition(":")[0]
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(f"{name}:"))
    report = check(path)
    (error,) = report.errors
    assert (error.key, error.line) == (name, line) and message in error.message
    assert not any("leave it out" in str(warning) for warning in report.warnings)
    with refused(error.code, key=name) as raised:  # a run that isn't checked
        load.open_recipe(path, {"output_folder": str(tmp_path)})
    assert f"recipe.yaml:{line}" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    {"class": "NoamScheduler", "lr_initial": 0.001, "n_warmup_steps": 10},
    {"class": "NewBobScheduler", "initial_value": 0.001},
    {"class": "TriStageLRSchedule", "lr": 0.001, "warmup_steps": 10, "hold_steps": 10, "decay_steps": 10,
     "total_steps": 30},
])
def test_a_scheduler_of_speechbrain_is_taken(tmp_path, arguments):
    assert hasattr(schedulers, arguments["class"])
    lines = [f"        {name}: {value}\n" for name, value in arguments.items() if name != "class"]
    report = check(write(tmp_path, f"{BASED}    schedule: !new:speechbrain.nnet.schedulers.{arguments['class']}\n"
                                   + "".join(lines)))
    assert not report.errors and not report.warnings


@pytest.mark.slow
def test_a_number_beside_an_object_that_has_its_own_is_not_called_useless(tmp_path):
    report = check(changed(tmp_path, {"batching: !new": "max_batch_seconds: 40\nbatching: !new"}))
    (warning,) = report.warnings
    assert "batching has a max_batch_seconds of its own: write `max_batch_seconds: !ref <" in str(warning)


def test_speechbrains_default_normalisation_is_checked_to_the_end(tmp_path):
    report = check(changed(tmp_path, {"norm_type: sentence": "norm_type: global"}))
    assert "shapes" in report.sections and not report.partly and not report.errors and not report.warnings


SCRIPT = """# The form of SpeechBrain's own recipes: no task, a script trains it.
data_folder: !PLACEHOLDER
noise_folder: null
noise_annotation: !ref <noise_folder>/noise.csv
save_folder: results/save
compute_features: !new:speechbrain.lobes.features.Fbank
    n_mels: 40
speed_perturb: !new:speechbrain.augment.time_domain.SpeedPerturb
    orig_freq: 16000
    speeds: [90, 100, 110]
encoder: !new:speechbrain.nnet.linear.Linear
    input_size: 40
    n_neurons: 8
lm_model: !new:speechbrain.nnet.linear.Linear
    input_size: 8
    n_neurons: 8
modules:
    encoder: !ref <encoder>
    lm_model: !ref <lm_model>
lr_annealing: !new:speechbrain.nnet.schedulers.NewBobScheduler
    initial_value: 0.1
opt_class: !name:torch.optim.AdamW
    lr: 0.1
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables:
        lm: !ref <lm_model>
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: !ref <save_folder>
    recoverables:
        model: !ref <encoder>
        scheduler: !ref <lr_annealing>
"""


def test_a_recipe_of_speechbrains_form_gets_no_false_finding_and_is_told_of_the_brain(tmp_path):
    report = check(write(tmp_path, SCRIPT), {"data_folder": "/somewhere"})
    assert not report.errors and not report.warnings
    assert any("replace sb.Brain by sbkit.Brain" in note for note in report.notes)
    with refused("missing-key"):
        load.open_recipe(tmp_path / "recipe.yaml", {"data_folder": "/somewhere"})


def test_what_a_recipe_of_that_form_saves_nowhere_is_told(tmp_path):
    text = SCRIPT.replace("scheduler: !ref <lr_annealing>", "").replace("model: !ref <encoder>", "lm: !ref <lm_model>")
    report = check(write(tmp_path, text), {"data_folder": "/somewhere"})
    assert {each.key for each in [*report.errors, *report.warnings]} >= {"lr_annealing", "checkpointer.recoverables"}


def test_a_pretrainers_file_that_is_not_there_is_told_before_the_run(tmp_path):
    (tmp_path / "there.ckpt").touch()
    text = ("pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer\n"
            "    loadables: {there: !ref <seq_lin>, gone: !ref <ctc_lin>, hub: !ref <ctc_lin>}\n"
            f"    paths: {{there: {tmp_path}/there.ckpt, gone: {tmp_path}/gone.ckpt, hub: owner/model/file.ckpt}}\n")
    report = check(write(tmp_path, text + changed(tmp_path, {}).read_text()))
    assert [(each.key, each.message) for each in report.errors] == [
        ("pretrainer.paths.gone", f"there is no file {tmp_path}/gone.ckpt")]


def test_a_layer_may_be_named_under_modules_beside_the_list_that_has_it(tmp_path):
    assert not check(changed(tmp_path, {"modules:\n": "modules:\n    CNN: !ref <CNN>\n"})).errors
