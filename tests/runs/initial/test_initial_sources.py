"""A run starts from whatever has weights, by the names of their recipe; what has none, or is broken, is told."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import encoders
import pytest
import torch
from processes import results
from refusals import refused
from run_folders import run_with_model
from safetensors.torch import save_file
from speechbrain.dataio.encoder import CTCTextEncoder
from starts import spanish, started, state, target

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.runs import initial
from sbkit.runs.restore import load_run, read_run
from sbkit.score.weights import ChosenWeights, Mean
from sbkit.train.checkpoint.adapted import hash_of
from sbkit.train.distributed import ranks

pytestmark = pytest.mark.slow  # each takes a fraction of a second, and there are many


def begun(tmp_path, data, caplog, **keys):
    """The weights of a Brain before and after it took those of a source, and the table."""
    brain, before, table = started(tmp_path / "new", data, caplog, **keys)
    return before, state(brain), table


def saved(run, name):
    (path,) = run.glob(f"save/*{name}*/model.ckpt")
    return torch.load(path, weights_only=True)


def file_of(tmp_path, tensors, name="weights"):
    path = tmp_path / f"{name}.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def with_a_damaged(run, name, tmp_path):
    """A copy of a run, one of whose checkpoints was cut off."""
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    (path,) = copied.glob(f"save/*{name}*/model.ckpt")
    path.write_bytes(path.read_bytes()[:-100])
    return copied


def test_without_a_source_nothing_changes(english, tmp_path, caplog):
    before, after, table = begun(tmp_path, english, caplog)
    assert all(torch.equal(value, after[name]) for name, value in before.items()) and not table


@pytest.mark.parametrize("asked, name", [({}, "epoch2"), ({"init_checkpoint": "last"}, "within"),
                                         ({"init_checkpoint": "epoch3"}, "epoch3")])
def test_a_run_gives_the_checkpoint_that_is_asked_for(run, english, tmp_path, caplog, asked, name):
    _, after, table = begun(tmp_path, english, caplog, init_from=str(run), **asked)
    theirs = saved(run, name)
    assert all(torch.equal(value, after[f"model.{key}"]) for key, value in theirs.items())
    assert name in table and "reinitialised" not in table and "left there" not in table


def on_a_rank(run, data, folder):
    ranks.init(torch.device("cpu"))
    brain = target(folder, data, init_from=str(run))
    torch.manual_seed(ranks.rank())
    for parameter in brain.modules.parameters():
        torch.nn.init.normal_(parameter)
    initial.load(brain)
    return hash_of(brain.modules.state_dict())


def test_all_ranks_begin_with_the_same(run, english, tmp_path):
    target(tmp_path, english)  # its corpus and tokenizer are there
    first, second = results(on_a_rank, run, english, tmp_path)
    assert first == second


@pytest.mark.parametrize("count, best, said", [
    (2, (2, 3), "the mean of 2 checkpoints)"),
    (9, (1, 2, 3), "the mean of 3 checkpoints instead of 9: there are no more")])
def test_a_run_gives_the_mean_of_several_and_tells_their_true_number(run, english, tmp_path, caplog, count, best, said):
    _, after, table = begun(tmp_path, english, caplog, init_from=str(run), init_average=count)
    theirs = [saved(run, f"epoch{epoch}")["3.w.weight"] for epoch in best]
    assert torch.allclose(after["model.3.w.weight"], sum(theirs) / len(theirs)) and said in table


def test_a_damaged_checkpoint_is_not_counted_in_the_mean(run, english, tmp_path, caplog):
    copied = with_a_damaged(run, "epoch3", tmp_path)
    _, _, table = begun(tmp_path, english, caplog, init_from=str(copied), init_average=3)
    assert "the mean of 2 checkpoints instead of 3: there are no more" in table


def test_moving_averages_and_their_mean_take_the_place_of_the_weights(english, tmp_path, caplog):
    averaged = run_with_model(tmp_path / "averaged", english, rates=(70.0, 40.0), ema_decay=0.9)
    for epoch in (1, 2):
        (folder,) = averaged.glob(f"save/*epoch{epoch}*")
        kept = torch.load(folder / "ema.ckpt", weights_only=True)
        kept["updates"], kept["weights"] = 3, {
            name: value if name.endswith(".pe") else value + epoch for name, value in kept["weights"].items()}
        torch.save(kept, folder / "ema.ckpt")
        next(folder.glob("*sums.json")).unlink()
    (alone,) = averaged.glob("save/*epoch2*/ema.ckpt")
    for source in (averaged, alone):
        _, after, _ = begun(tmp_path, english, caplog, init_from=str(source))
        assert torch.equal(after["model.3.w.bias"], torch.load(alone, weights_only=True)["weights"]["3.w.bias"])
    _, after, _ = begun(tmp_path, english, caplog, init_from=str(averaged), init_average=2)
    _, brain = load_run(averaged, "cpu", weights=ChosenWeights(average=Mean(2)))
    assert all(torch.equal(value, after[name]) for name, value in state(brain).items())
    own = [torch.load(path, weights_only=True)["3.w.bias"] for path in averaged.glob("save/*epoch*/model.ckpt")]
    assert torch.allclose(after["model.3.w.bias"], (own[0] + own[1]) / 2 + 1.5)


@pytest.mark.parametrize("moved, named", [(".", "."), (".", "save"), (".", "save/CKPT+epoch2"),
                                          ("save/CKPT+epoch2", ".")])
def test_the_folders_of_a_run_will_do_wherever_it_was_moved(run, english, tmp_path, caplog, moved, named):
    """A checkpoint away from its run goes by its own names."""
    folder = shutil.copytree(run / moved, tmp_path / "elsewhere") / named
    _, after, table = begun(tmp_path, english, caplog, init_from=str(folder))
    assert torch.equal(after["model.3.w.weight"], saved(run, "epoch2")["3.w.weight"]) and "elsewhere" in table


def test_a_bundle_gives_all_but_the_decoder(run, bundle, english, tmp_path, caplog):
    before, after, table = begun(tmp_path, english, caplog, init_from=str(bundle))
    theirs = saved(run, "epoch2")
    for name in ("0.convblock_0.convs.conv_0.conv.weight", "1.encoder.layers.0.ffn_module1.1.ffn.0.weight",
                 "3.w.weight"):
        assert torch.equal(after[f"model.{name}"], theirs[name])
    decoder = [name for name in after if ".1.decoder." in name]
    assert decoder and all(torch.equal(before[name], after[name]) for name in decoder)
    lines = [line.split() for line in table.splitlines()]
    assert ["Transformer.decoder", "reinitialised"] in [line[:1] + line[2:3] for line in lines]
    assert len(lines) < 20


@pytest.mark.parametrize("name", ["model.safetensors", "model.ckpt"])
@pytest.mark.parametrize("lone", [False, True])
def test_a_bundles_file_is_the_bundle(run, bundle, english, tmp_path, caplog, name, lone):
    path = bundle / name
    if lone:
        path = Path(shutil.copy(path, tmp_path))
    before, after, table = begun(tmp_path, english, caplog, init_from=str(path))
    theirs = saved(run, "epoch2")
    assert all(torch.equal(after[f"model.{each}"], theirs[each]) for each in theirs
               if not each.startswith(("2.", "1.decoder.", "1.custom_tgt_module.")))
    assert torch.equal(before["model.2.w.weight"], after["model.2.w.weight"]) and "Starting from the file" in table
    assert ("the source has no tokenizer" in table) == lone


@pytest.mark.parametrize("order, numbers", [("012", "0, 1, 2"), ("1023", "0, 1, 2, 3")], ids=["fewer", "another order"])
def test_numbers_of_another_list_are_refused(run, english, tmp_path, caplog, order, numbers):
    theirs = {order[int(name[0])] + name[1:]: value for name, value in saved(run, "epoch2").items()
              if int(name[0]) < len(order)}
    path = file_of(tmp_path, theirs, "model")
    error = refusal("no-matching-weights", english, tmp_path, path)
    assert f"names its parts by numbers ({numbers}), and here 0 is CNN, 1 is Transformer, 2 is seq_lin, 3 is " \
        "ctc_lin: it is unknown which is which" in error.message


def test_speechbrains_folder_is_read_without_building_anything(bundle, english, tmp_path, caplog):
    folder = Path(shutil.copytree(bundle, tmp_path / "asr"))
    (folder / "config.json").unlink()
    text = (folder / "hyperparams.yaml").read_text()
    (folder / "hyperparams.yaml").write_text(f"ruin: !apply:os.mkdir [{tmp_path / 'made'}]\n{text}")
    _, _, table = begun(tmp_path, english, caplog, init_from=str(folder))
    assert "Starting from the folder" in table and not (tmp_path / "made").exists()


@pytest.mark.parametrize("naming, file", [("key", "a"), ("path", "a"), ("list", "model"), ("part", "Transformer")])
def test_a_file_calls_its_tensors_by_key_by_path_or_as_the_object_in_it(run, english, tmp_path, caplog, naming, file):
    theirs = saved(run, "epoch2")
    keys = {"0": "CNN", "1": "Transformer", "2": "seq_lin", "3": "ctc_lin"}
    names = {"key": lambda name: f"{keys[name[0]]}{name[1:]}", "path": lambda name: f"model.{name}",
             "list": lambda name: name, "part": lambda name: name[2:]}
    kept = {names[naming](name): value for name, value in theirs.items() if naming != "part" or name.startswith("1.")}
    before, after, _ = begun(tmp_path, english, caplog, init_from=str(file_of(tmp_path, kept, file)))
    taken = [name for name, value in theirs.items() if torch.equal(after[f"model.{name}"], value)]
    assert len(taken) == len(kept)
    if naming == "part":
        assert torch.equal(before["model.3.w.weight"], after["model.3.w.weight"])


def test_a_file_of_another_name_is_not_taken_for_a_part(run, english, tmp_path):
    part = {name[2:]: value for name, value in saved(run, "epoch2").items() if name.startswith("1.")}
    refusal("no-matching-weights", english, tmp_path, file_of(tmp_path, part))


def test_recipes_that_order_their_lists_otherwise_understand_each_other(run, english, tmp_path, caplog):
    other = run_with_model(tmp_path / "other", english, rates=(50.0,))
    text = (other / "hyperparams.yaml").read_text()
    (ckpt,) = other.glob("save/*epoch1*")
    theirs = torch.load(ckpt / "model.ckpt", weights_only=True)
    order = {"0": "3", "1": "2", "2": "1", "3": "0"}
    torch.save({order[name[0]] + name[1:]: value for name, value in theirs.items()}, ckpt / "model.ckpt")
    next(ckpt.glob("*sums.json")).unlink()
    from ruamel.yaml import YAML
    tree = YAML().load(text)
    tree["model"][0].reverse()
    with open(other / "hyperparams.yaml", "w") as out:
        YAML().dump(tree, out)
    for asked in ({"init_from": str(other), "init_checkpoint": "epoch1"}, {"init_from": str(ckpt / "model.ckpt")}):
        _, after, table = begun(tmp_path, english, caplog, **asked)
        assert all(torch.equal(value, after[f"model.{name}"]) for name, value in theirs.items()), table


# ------------------------------------------------------------------ another vocabulary


def test_rows_of_equal_tokens_are_taken_and_others_reinitialised(run, tmp_path, caplog):
    data = spanish(tmp_path / "es", train=5, dev=1, test=1)
    before, after, table = begun(tmp_path, data, caplog, init_from=str(run))
    theirs, pieces = saved(run, "epoch2"), read_run(run).keys.tokenizer.pieces()
    brain = target(tmp_path / "new", data)
    own = brain.keys.tokenizer.pieces()
    assert own != pieces and "ñ" in own
    for place, piece in enumerate(own):
        there = pieces.index(piece) if piece in pieces else None
        for tensor in ("3.w.weight", "3.w.bias", "2.w.weight", "1.custom_tgt_module.layers.0.emb.Embedding.weight"):
            expected = before[f"model.{tensor}"] if there is None else theirs[tensor]
            assert torch.equal(after[f"model.{tensor}"][place], expected[place if there is None else there]), piece
    common = len(set(own) & set(pieces))
    assert f"for {common} of {len(own)} tokens, {len(own) - common} are reinitialised" in table
    assert torch.equal(after["model.0.convblock_0.convs.conv_0.conv.weight"],
                       theirs["0.convblock_0.convs.conv_0.conv.weight"])


def test_labels_of_a_ctc_text_encoder_are_tokens_and_can_be_kept(bundle, run, english, tmp_path, caplog):
    folder = Path(shutil.copytree(bundle, tmp_path / "asr"))
    (folder / "config.json").unlink()
    pieces, theirs = read_run(run).keys.tokenizer.pieces(), saved(run, "epoch2")["3.w.weight"]
    labels = CTCTextEncoder()
    labels.insert_blank(index=0)
    labels.update_from_iterable([piece.replace("▁", " ") for piece in pieces[1:]], sequence_input=False)
    labels.bos_label, labels.eos_label = "<s>", "</s>"
    labels.save(folder / "tokenizer.ckpt")
    _, after, table = begun(tmp_path, spanish(tmp_path / "es", train=5, dev=1, test=1), caplog, init_from=str(folder))
    own = target(tmp_path / "new", tmp_path / "es").keys.tokenizer.pieces()
    common = [(place, pieces.index(piece)) for place, piece in enumerate(own) if piece in pieces]
    assert len(common) > 5
    assert all(torch.equal(after["model.3.w.weight"][here], theirs[there]) for here, there in common)
    assert f"for {len(common)} of {len(own)} tokens" in table
    _, after, _ = begun(tmp_path / "kept", english, caplog, init_from=str(folder), init_tokenizer="keep")
    assert torch.equal(after["model.3.w.weight"], theirs)
    labels = CTCTextEncoder()
    labels.update_from_iterable([piece.replace("▁", " ") for piece in pieces], sequence_input=False)
    labels.save(folder / "tokenizer.ckpt")
    with refused("unknown-tokens", key="init_tokenizer"):
        target(tmp_path / "none", english, init_from=str(folder), init_tokenizer="keep")
    (folder / "tokenizer.ckpt").write_text("'a' is 1\n")
    refusal("unknown-tokens", english, tmp_path / "bad", folder)
    begun(tmp_path / "left", english, caplog, init_from=str(folder), init_leave=["ctc_lin"])


def test_what_is_named_is_reinitialised(run, english, tmp_path, caplog):
    before, after, table = begun(tmp_path, english, caplog, init_from=str(run),
                                   init_leave=["ctc_lin", "Transformer.*.norm1"])
    kept = [name for name in after if "norm1" in name or "model.3" in name]
    assert len(kept) == 6 and all(torch.equal(before[name], after[name]) for name in kept)
    assert "init_leave" in table


# ------------------------------------------------------------------ what is refused, in one message


def refusal(code, data, tmp_path, source, wording=True, **keys):
    brain = target(tmp_path / "new", data, init_from=str(source), **keys)
    before = state(brain)
    with refused(code, wording=wording) as error:
        initial.load(brain)
    assert all(torch.equal(value, state(brain)[name]) for name, value in before.items())  # nothing half way
    return error.value


def test_what_is_not_there_is_told_before_the_corpus_is_prepared(english, tmp_path):
    brain = target(tmp_path / "new", english, init_from=str(tmp_path / "nowhere"))
    with refused("no-such-path", key="init_from", file=tmp_path / "nowhere") as error:
        initial.open_source(brain.keys, {})
    assert "a run, a checkpoint, a bundle" in error.value.hint


@pytest.mark.parametrize("name, text, code", [
    pytest.param("config.json", "{}", "no-weights", id="an empty config"),
    pytest.param("config.json", "[" * 100_000, "no-weights", id="a deep config"),
    pytest.param("hyperparams.yaml", "checkpointer: null\n", "no-checkpoint", id="no checkpointer"),
    pytest.param("config.json", json.dumps({"format": layout.FORMAT}), "no-weights", id="a bundle of graphs"),
    pytest.param("hyperparams.yaml", "lr: 3\n", "no-weights", id="no pretrainer")])
def test_a_folder_that_has_no_weights_for_a_run(english, tmp_path, name, text, code):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / name).write_text(text)
    refusal(code, english, tmp_path, tmp_path / "odd")


def test_a_pretrained_encoder_is_another_keys(english, tmp_path):
    encoders.make(tmp_path / "xls-r", "wav2vec2-layer")
    brain = target(tmp_path / "new", english, init_from=str(tmp_path / "xls-r"))
    with pytest.raises(SbkitError, match="is a model of transformers") as caught:
        initial.load(brain)
    assert caught.value.hint.endswith(f"takes it as --encoder_source {tmp_path / 'xls-r'}")


def test_a_run_without_the_checkpoint(run, english, tmp_path):
    refusal("no-checkpoint", english, tmp_path, run, init_checkpoint="epoch9")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "hyperparams.yaml", bare)
    refusal("no-checkpoint", english, tmp_path, bare)


@pytest.mark.parametrize("asked", [{"init_average": 5}, {"init_checkpoint": "last"}])
def test_one_checkpoint_leaves_nothing_to_choose(run, english, tmp_path, asked):
    (folder,) = run.glob("save/*epoch2*")
    error = refusal("conflicting-options", english, tmp_path, folder, **asked)
    assert [error.key] == list(asked)


class Ruin:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_is_no_tensors_and_nothing_in_it_runs(english, tmp_path):
    torch.save({"a": Ruin(tmp_path / "ran")}, tmp_path / "model.ckpt")
    refusal("unsafe-file", english, tmp_path, tmp_path / "model.ckpt")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps([1, 2]))
    refusal("damaged-file", english, tmp_path, tmp_path / "plain.ckpt")


@pytest.mark.parametrize("name", ["half.safetensors", "half.ckpt", "empty.safetensors", "text.pt"])
def test_a_file_that_is_damaged_or_half_written(run, english, tmp_path, name):
    path, state = tmp_path / name, {key: value.contiguous() for key, value in saved(run, "epoch2").items()}
    if name.startswith("half"):
        (save_file if name.endswith("safetensors") else torch.save)(state, path)
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    else:
        path.write_text("" if name.startswith("empty") else "no weights at all")
    error = refusal("damaged-file", english, tmp_path, path, wording=False)  # the libraries' words differ by release
    assert error.file == str(path) and error.hint


def test_a_damaged_checkpoint_is_passed_over_and_one_that_was_named_is_not(run, english, tmp_path, caplog):
    copied = with_a_damaged(run, "epoch2", tmp_path)
    refusal("damaged-checkpoint", english, tmp_path, copied, wording=False, init_checkpoint="epoch2")
    _, after, table = begun(tmp_path, english, caplog, init_from=str(copied))
    assert "epoch3" in table and torch.equal(after["model.3.w.bias"], saved(run, "epoch3")["3.w.bias"])


def test_a_model_of_another_shape_is_told_whole(run, english, tmp_path):
    error = refusal("init-mismatch", english, tmp_path, run, wording=False, d_model=24, cnn_channels=6)
    assert "ctc_lin.w.weight: " in error.message or "more" in error.message
    assert "CNN.convblock_1.convs.conv_0.conv.weight: 4x4x3x3 there, 6x4x3x3 here" in error.message
    assert "--init_leave" in error.hint


def test_one_layer_of_another_shape_is_an_error_that_says_how_to_leave_it(run, english, tmp_path, caplog):
    error = refusal("init-mismatch", english, tmp_path, run, n_mels=40, **{"Transformer": {"input_size": 40}})
    assert "Transformer.custom_src_module" in error.message
    named = ["CNN.convblock_0", "CNN.convblock_1", "Transformer.custom_src_module"]
    assert error.hint.endswith(f'reinitialise them: --init_leave "[{", ".join(named)}]"')
    shutil.rmtree(tmp_path / "new")
    _, _, table = begun(tmp_path, english, caplog, init_from=str(run), n_mels=40, Transformer={"input_size": 40},
                          init_leave=named)
    assert "Transformer.custom_src_module" in table and table.count("init_leave") == 2


def test_another_vocabulary_where_the_source_has_no_tokenizer(run, tmp_path, caplog):
    data, path = spanish(tmp_path / "es", train=5, dev=1, test=1), file_of(tmp_path, saved(run, "epoch2"), "model")
    error = refusal("unknown-tokens", data, tmp_path, path)
    assert "ctc_lin.w.weight: " in error.message
    assert error.hint == "reinitialise them: --init_leave \"[Transformer.custom_tgt_module, seq_lin, ctc_lin]\""
    _, _, table = begun(tmp_path, data, caplog, init_from=str(path),
                        init_leave=["ctc_lin", "seq_lin", "Transformer.custom_tgt_module"])
    assert table.count("init_leave") == 3


def test_rows_that_nobody_knows_are_taken_as_they_lie_and_that_is_said(run, english, tmp_path, caplog):
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    (tokenizer,) = copied.glob("save/*.model")
    tokenizer.unlink()
    _, after, table = begun(tmp_path, english, caplog, init_from=str(copied))
    assert torch.equal(after["model.3.w.weight"], saved(run, "epoch2")["3.w.weight"])
    told = [line.split(maxsplit=3)[3] for line in table.splitlines() if line.split()[:1] == ["ctc_lin"]]
    assert told == ["rows in their order: the source has no tokenizer"]
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"names the tokenizer {tokenizer}, which doesn't exist" in warning


def test_a_model_of_which_nothing_fits(english, tmp_path):
    refusal("no-matching-weights", english, tmp_path, file_of(tmp_path, {"bert.layer.weight": torch.ones(3)}))


def test_a_pattern_that_fits_nothing(run, english, tmp_path):
    refusal("unknown-module", english, tmp_path, run, init_leave=["ctc_line"])


def test_a_folder_that_lacks_a_file_of_its_recipe(bundle, english, tmp_path):
    folder = Path(shutil.copytree(bundle, tmp_path / "asr"))
    (folder / "model.ckpt").unlink()
    refusal("missing-file", english, tmp_path, folder)


@pytest.mark.parametrize("key, value", [("init_tokenizer", "old"), ("init_leave", "ctc_lin"), ("init_average", 0)])
def test_values_that_say_nothing_are_refused(english, tmp_path, key, value):
    with pytest.raises(SbkitError, match=f"{key} is .*, and must be "):
        target(tmp_path / "new", english, lr=0.01, **{key: value})


BEGUN = SimpleNamespace(list_checkpoints=lambda: ["one"])


@pytest.mark.parametrize("key, before, now", [
    *((key, *pair) for key in ("init_from", "replay_from") for pair in (("a", "b"), ("null", "runs/b"))),
    *((key, "0.2", now) for key in ("replay", "replay_from") for now in ("null", "nothing")),
    ("replay", "null", "0.2")])
def test_a_run_that_began_goes_on_from_no_other_source(tmp_path, key, before, now):
    keys = SimpleNamespace(checkpointer=BEGUN, folder=tmp_path, init_from=now)
    gone = {"init_from": ("runs/b", "null"), "consistency": ("0.2", "null")} if key == "replay" else {}
    with refused("changed-key", key=key):
        initial.open_source(keys, {"lr": ("1", "2"), **gone, key: (before, now)})


@pytest.mark.parametrize("changed", [
    {"data_folder": ("/data/fr", "null")},
    {"data_folder": ("nothing", "null"), "data_folder.train": ("a.csv", "nothing"),
     "data_folder.test[1]": ("b.csv", "nothing")}], ids=["one", "a mapping"])
def test_a_run_that_began_does_not_go_on_by_the_default_corpus(tmp_path, changed):
    with refused("changed-key", key="data_folder"):
        initial.open_source(SimpleNamespace(checkpointer=BEGUN, folder=tmp_path, init_from=None), changed)


def test_a_run_that_began_keeps_its_normalisation(tmp_path):
    keys = SimpleNamespace(checkpointer=BEGUN, folder=tmp_path, init_from=None)
    with refused("changed-key", key="normalize.norm_type"):
        initial.open_source(keys, {"normalize.norm_type": ("sentence", "global")})


@pytest.mark.parametrize("changed", [{}, {"data_folder": ("nothing", "null")}, {"data_folder": ("/data/fr", "/new/fr")},
                                     {"data_folder": ("null", "/data/fr"), "data_folders": ("a", "b")}])
def test_a_corpus_that_moved_or_never_was_named_is_no_other(tmp_path, changed):
    initial.open_source(SimpleNamespace(checkpointer=BEGUN, folder=tmp_path, init_from=None), changed)


@pytest.mark.parametrize("before, now", [
    ("runs/a", "./runs/a/"), ("nothing", "null"), ("runs/a", "nothing"), ("~/runs/a", str(Path.home() / "runs" / "a"))])
def test_the_same_source_in_other_words_or_none_is_no_other(tmp_path, before, now):
    keys = SimpleNamespace(checkpointer=BEGUN, folder=tmp_path, init_from=now)
    initial.open_source(keys, {"init_from": (before, now), "replay": ("0.2", "0.3")})


def test_a_source_that_another_key_names_is_left_to_those_who_read_that(tmp_path):
    """A voice refuses another codec by what it holds, and its bundle may be elsewhere now."""
    keys, moved = SimpleNamespace(checkpointer=BEGUN, folder=tmp_path, init_from="b"), ("a", "b")
    initial.open_source(keys, {"codec": moved, "init_from": moved})
    with refused("changed-key", key="init_from"):
        initial.open_source(keys, {"init_from": moved, "replay_from": moved, "encoder.init_from": moved})


def test_a_mean_with_the_source_leaves_the_rows_of_tokens_that_it_lacks(run, tmp_path, caplog):
    caplog.set_level(logging.INFO, "sbkit.runs.initial")
    brain = target(tmp_path / "new", spanish(tmp_path / "es", train=4, dev=2, test=2), init_from=str(run))
    trained = state(brain)
    mean = initial.MeanWithSource(brain)
    assert all(torch.equal(value, trained[name]) for name, value in state(brain).items()), "until one is taken"
    assert "Starting from" not in caplog.text, "what a run starts from is told as it starts"
    mean.take(0.25)
    found = state(brain)
    mean.take(1)
    assert all(torch.allclose(value, trained[name]) for name, value in state(brain).items())
    initial.load(brain)
    for name, old in state(brain).items():
        assert torch.allclose(found[name], 0.75 * old + 0.25 * trained[name], atol=1e-6), name
    head = next(name for name in trained if name.startswith("model.3.") and name.endswith("weight"))
    same = (found[head] == trained[head]).all(1)
    assert 0 < same.sum() < len(same)
