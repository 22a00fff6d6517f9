"""Keys are read once, all mistakes in them at once; each that the flagship declares has an effect."""

import contextlib
import copy
import dataclasses
import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from safetensors.torch import save_file
from speechbrain.core import Stage
from speechbrain.lobes.features import Fbank
from speechbrain.nnet.linear import Linear
from speechbrain.processing.features import InputNormalization
from speechbrain.utils.epoch_loop import EpochCounter
from speechbrain.utils.parameter_transfer import Pretrainer
from speechbrain.utils.run_opts import RunOptions

from sbkit.data.augment import Augment, Gain
from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.data.nonspeech import NonSpeech
from sbkit.data.plan import Batching
from sbkit.export import bundle, layout, source
from sbkit.export.exported import Exported
from sbkit.nn.chunks import Chunks
from sbkit.nn.spec_augment import SpecAugment
from sbkit.recipe import flops, load
from sbkit.recipe.keys import Keys, key
from sbkit.recipe.load import Recipe
from sbkit.recipe.signatures import locate
from sbkit.recipe.source import Findings, Place
from sbkit.runs import cpu_layout, initial, preparation, pretrained, training
from sbkit.system.schema import Number
from sbkit.tasks.ctc import CTC
from sbkit.train import graphs
from sbkit.train.averaging import EMA
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.schedule import Schedule
from sbkit.train.train_log import TrainLog

RECIPE = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 3, "d_ffn": 16, "cnn_first_channels": 4, "cnn_channels": 4,
         "dropout": 0.1, "precision": "fp32", "number_of_epochs": 3}


# ------------------------------------------------------------------ reading


@dataclasses.dataclass(kw_only=True)
class Mine(Keys):
    width: int = key("layers are so wide", allowed=Number(1, whole=True))
    share: float = key("of something", 0.5, Number(0, 1))
    name: str | None = key("what it is called", None)
    loud: bool = key("whether it is heard", False)
    layer: object = key("anything", None)


def test_what_a_recipe_says_is_read_and_the_rest_is_as_declared():
    read = Mine.read({"width": 3, "loud": True, "other": 1})
    assert (read.width, read.share, read.name, read.loud) == (3, 0.5, None, True)


def test_all_that_is_wrong_is_reported_at_once():
    with refused("bad-value", key="width") as error:
        Mine.read({"width": 0, "share": "half", "name": 3, "loud": None})
    assert error.value.message == (
        "width is 0, and must be a whole number, 1 or more; share is the text 'half', and must be a number from 0 to 1"
        "; name is 3, and must be a text; loud is null, and must be true or false")


def test_a_key_that_a_recipe_lacks_is_missed_when_it_is_read():
    read = Mine.read({})
    with refused("missing-key", key="width"):
        print(read.width)
    with pytest.raises(AttributeError, match="Mine declares no key colour"):
        print(read.colour)
    assert list(Mine.needed()) == ["width"]


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2))


@given(PLAIN)
@pytest.mark.slow
def test_a_value_is_kept_as_it_is_or_refused_with_its_key(value):
    """As Python sees kinds: truth is no number, and a whole number is one."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {"width": number and isinstance(value, int) and value >= 1, "share": number and 0 <= value <= 1,
            "name": value is None or isinstance(value, str), "loud": isinstance(value, bool), "layer": True}
    for name, right in fits.items():
        if right:
            assert getattr(Mine.read({name: value}), name) is value
        else:
            with refused("bad-value", key=name, wording=False):  # of values that are generated
                Mine.read({name: value})


@dataclasses.dataclass(kw_only=True)
class Many(Keys):
    source: Any = key("whatever the recipe builds")
    names: list[str] = key("of parts", ())
    layers: Sequence[int] | None = key("counted from 1", None)
    rates: Mapping[str, float] = key("by name", None)
    pairs: list[tuple[int, float]] = key("of a number and its share", ())
    order: Literal["up", "down"] = key("of something", "up")
    free: list[Any] | None = key("anything, several times", None)
    layer: str | type | Sequence[str | type] | None = key("by name or class", None)


@pytest.mark.parametrize("given, expected", [
    ({"names": ["a", 3]}, "names is ['a', 3], and must be a list of texts"),
    ({"names": "ab"}, "names is the text 'ab', and must be a list of texts"),
    ({"layers": [1, True]}, "layers is [1, True], and must be a list of whole numbers"),
    ({"rates": {"a": "fast"}}, "rates is {'a': 'fast'}, and must be a mapping of texts to numbers"),
    ({"rates": {1: 0.5}}, "rates is {1: 0.5}, and must be a mapping of texts to numbers"),
    ({"pairs": [[1, 2, 3]]}, "pairs is [[1, 2, 3]], and must be a list of lists of a whole number, a number"),
    ({"order": "left"}, "order is the text 'left', and must be up or down"),
    ({"free": 3}, "free is 3, and must be a list"),
    ({"layer": True}, "layer is True, and must be a text or a class or a list of texts or classes"),
])
def test_elements_are_held_to_their_types(given, expected):
    assert [problem.message for problem in Many.wrong(given)] == [expected]


@pytest.mark.parametrize("given", [
    {"source": object(), "names": ["a"], "layers": (1, 2), "rates": {"a": 1}, "pairs": [(1, 0.5), [2, 1]]},
    {"layers": None, "rates": None, "order": "down", "free": [1, "a", None]}, {"names": [], "rates": {}},
])
def test_elements_of_their_types_are_taken(given):
    assert Many.wrong(given) == []


# ------------------------------------------------------------------ each has an effect


class Spelling:
    """A tokenizer that is all a run asks for."""

    def __init__(self, sign="a"):
        self.sign, self.vocab_size, self.model_type = sign, 28, "char"

    def decode(self, ids):
        return self.sign * (len(ids) + 1)

    def entropy(self, texts):
        return 1.0

    def pieces(self):
        return [self.sign + letter for letter in "_abcdefghijklmnopqrstuvwxyz'"]

    def silent_ids(self):
        return []

    def load(self):
        return self

    def check(self, size):
        pass


class Frames(torch.nn.Module):
    """An encoder of one's own, and a front end."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.scale * x[..., :16]


class Batches(torch.utils.data.DataLoader):
    """Some batches, as a loader."""

    def __init__(self, batches):
        super().__init__(batches, collate_fn=lambda rows: rows[0])


class Guess:
    """A search that always finds the same."""

    tokenizer = None

    def decode(self, log_probs, frames):
        return [[SimpleNamespace(text="guessed", confidence=1.0, score=0.0, acoustic=0.0)]] * len(frames)


@pytest.fixture(scope="module")
def flagship(tmp_path_factory):
    hparams = load.load(RECIPE, {**SMALL, "output_folder": str(tmp_path_factory.mktemp("flagship"))})
    return hparams | {"tokenizer": Spelling(), "opt_class": partial(torch.optim.SGD, lr=0.1), "checkpointer": None,
                      "spec_augment": None, "train_logger": None, "schedule": None, "ema": None,
                      "intermediate_ctc": 0.0, "normalize": InputNormalization(norm_type="sentence")}


def batch():
    generator = torch.Generator().manual_seed(0)
    return Batch(ids=["a", "b"], signals=torch.randn(2, 16_000, generator=generator),
                 signal_lengths=torch.tensor([16_000, 11_000]), tokens=torch.tensor([[3, 4, 4, 5], [6, 7, 0, 0]]),
                 token_lengths=torch.tensor([4, 2]), texts=["a b", "c"], samples=27_000)


@dataclasses.dataclass
class Made:
    """A recipe with one value of the key, and where its run may write."""

    recipe: Recipe
    folder: Path
    patch: pytest.MonkeyPatch

    def brain(self):
        return self.recipe.brain(RunOptions(device="cpu", noprogressbar=True,
                                            overridden_args={"device", "noprogressbar"}))


def loss(made):
    brain = made.brain()
    brain.modules.train()
    brain.write_numbers(1)
    torch.manual_seed(0)
    scores = brain.compute_forward(batch(), Stage.TRAIN)
    return float(brain.compute_objectives(scores, batch(), Stage.TRAIN).total.detach())


def heard(made):
    brain = made.brain()
    brain.modules.eval()
    brain.open_stage(Stage.TEST)
    with torch.no_grad():
        brain.evaluate_batch(batch(), Stage.TEST)
    return [row.hypothesis for row in brain.rows]


def fitted(made, brain=None):
    """Weights after a few epochs, and then all files."""
    brain = brain or made.brain()
    brain.open_run(["a b"], 3)
    brain.fit(brain.keys.epoch_counter, Batches([batch()]), Batches([batch()]))
    return brain


def weights(made):
    return [float(parameter.detach().sum()) for parameter in fitted(made).modules.parameters()]


def files(made):
    fitted(made)
    return sorted({path.relative_to(made.folder).parts[0].split("+")[0].split("tfevents")[0]
                   for path in made.folder.rglob("*") if path.is_file()})


def checkpoints(made):
    return len(fitted(made).checkpointer.list_checkpoints())


def averaged(made):
    brain = fitted(made)
    brain.on_evaluate_start(**brain.metric.order)
    return [float(parameter.detach().sum()) for parameter in brain.modules.parameters()]


def lines(made):
    fitted(made)
    written = (Path(made.recipe.keys.output_folder) / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line)["kind"] == "step" for line in written)


def layers(made):
    brain = made.brain()
    brain.on_fit_start()
    return [type(module).__mro__ for module in brain.modules.modules()]


OPENED = "whether the recipe can be opened"


def refusal(made, act):
    try:
        act(made)
    except Exception as error:  # the one or the other
        return str(error)
    return ""


def wrapped(made):
    made.patch.setattr(ranks, "world_size", lambda: 2)
    return "used together with ema" in refusal(made, lambda made: made.brain().on_fit_start())


def captures(made):
    """Whether steps on a GPU would be captured."""
    return graphs.wanted(torch.device("cuda"), made.brain().trainer.settings.graphs)


def loaded(made):
    """What loaders and the plan get, of a run that is then stopped."""
    class Stop(Exception):
        pass

    seen = {}

    def train(manifest, encoder, plan, **reading):
        seen.update(reading, steps=len(plan), batching=plan.batching.max_batch_seconds, noises=[])

    def test(manifest, encoder, *, augment, **reading):
        seen["noises"].append(augment)
        if len(seen["noises"]) == 2:
            raise Stop

    made.patch.setattr(flops, "operations_per_second", lambda *_: 1e6)  # most of the time else
    made.patch.setattr(training, "TrainLoader", train)
    made.patch.setattr(training, "EvalLoader", test)
    manifest = Manifest(ids=["a", "b"], durations=[1.0, 2.0], wavs=["a.wav"] * 2, texts=["a", "b"])
    with pytest.raises(Stop):
        config = SimpleNamespace(run_opts=RunOptions(device="cpu"), device=torch.device("cpu"), cpu=None)
        training.fit_and_test(made.recipe, config, dict.fromkeys(("train", "dev", "test"), manifest), None, None, None)
    return {name: str(value) for name, value in seen.items()}


def use_of_cores(made):
    """How a run uses the cores of a CPU."""
    made.patch.delenv("OMP_NUM_THREADS", raising=False)
    return cpu_layout.choose(SimpleNamespace(device=torch.device("cpu"), keys=lambda: made.recipe.keys))


class Corpus:
    def __init__(self, text):
        self.manifests = {split: [text] for split in preparation.SPLITS}

    def prepare(self, needed, needs_text, columns):
        return self.manifests

    def summary(self):
        return ""


def prepared(made):
    made.patch.setattr(CTC, "prepare", classmethod(lambda cls, keys, manifests, given: {"dev": manifests["dev"]}))
    return preparation.prepare_data(made.recipe.keys, {}, None)


def fetched(made):
    pretrained.load(made.recipe.keys.pretrainer)
    return float(made.recipe.keys.ctc_lin.w.weight.sum())


def exported(made):
    """What any bundle says of a run, such as one of a task that gives no more than a graph."""
    config = layout.GraphConfig(sample_rate=16_000, outputs=["scores"])
    trained = source.Trained(Exported(torch.nn.Identity(), {}, 16_000), made.recipe.keys, {})
    return bundle.complete(config, trained).language


def described(made):
    brain = made.brain()
    best = SimpleNamespace(meta={}, path="CKPT")
    brain.checkpointer = SimpleNamespace(recoverables={})
    with mock.patch.multiple(source.restore, read_run=lambda run: made.recipe, warn_unfinished=lambda recipe: None,
                             build=lambda *_, **__: brain, take_weights=lambda *_: [best]), \
            mock.patch.object(source.old_set, "guard", lambda *_: ""), \
            mock.patch.object(source, "of_brain", lambda brain, run, facts: facts):
        return source.open_run("run")["experiment"]


def warned(made):
    """What is printed of a warning about the labels of the prepared corpus."""
    def check_labels(keys, manifests, findings, nodes):
        findings.warning("no-labels", Place(), "corpus", "the tokenizer finds no token in 1 of 9 utterances")

    keys = SimpleNamespace(corpus=SimpleNamespace(load=dict), ignore_findings=made.recipe.keys.ignore_findings)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        training.before_training(SimpleNamespace(task=SimpleNamespace(check_labels=check_labels), keys=keys), RECIPE)
    return said.getvalue()


def counted(made):
    torch.manual_seed(0)
    return made.brain().dummy_batch(4, 3.0, noise=True).tokens.tolist()


def fits(made):
    findings, node = Findings(), SimpleNamespace(place=Place("recipe.yaml"), key="compute_features", value={})
    built = SimpleNamespace(nodes={"compute_features": node, "Transformer": node}, hparams=made.recipe.hparams)
    CTC.check_parts(made.recipe.keys, built, findings)
    return [finding.message for finding in findings]


def epochs(made):
    return load.load(RECIPE, {"number_of_epochs": made.recipe.keys.number_of_epochs,
                              "output_folder": str(made.folder)})["epoch_counter"].limit


def kept(made, name="save"):
    """The recipe's checkpointer, in this run's folder."""
    return Checkpointer(made.folder / name, {"model": made.recipe.hparams["model"]})


def head(hparams):
    torch.manual_seed(1)
    return Linear(input_size=16, n_neurons=28)


def weight_file(made):
    torch.save({"w.weight": torch.zeros(28, 16), "w.bias": torch.zeros(28)}, made.folder / "lin.ckpt")
    return Pretrainer(loadables={"lin": made.recipe.hparams["ctc_lin"]}, paths={"lin": f"{made.folder}/lin.ckpt"})


def weights_of(made, value):
    """A file with all of the model's tensors at this value."""
    path = made.folder / "weights.safetensors"
    save_file({f"model.{name}": torch.full_like(tensor, value)
               for name, tensor in made.recipe.hparams["model"].state_dict().items()}, path)
    return str(path)


def begun(made):
    """The head after a run took what it starts from."""
    brain = made.brain()
    initial.load(brain)
    return float(brain.keys.ctc_lin.w.weight.detach().sum())


def asked_of(made):
    """What a run is asked for that it starts from."""
    made.patch.setattr(initial.loading, "find", lambda path, weights, metric: weights)
    made.recipe.keys.init_from = "a run"
    return initial.source_of(made.recipe.keys)


class Other(CTC):
    pass


class From:
    """A value that is made of the recipe it is for."""

    def __init__(self, make):
        self.make = make


ALONE = {"tokenizer": Spelling(), "output_folder": From(lambda made: str(made.folder / "out"))}
JOINT = {"ctc_weight": 0.5}
AVERAGED = {"ema": From(lambda made: EMA(made.recipe.hparams["model"], 0.9))}
#: Of each key two values, what differs between them, and what else the recipe says.
CASES = {
    "output_folder": (None, From(lambda made: str(made.folder)), lambda made: made.brain().metrics_log is None),
    "seed": (1, 2, weights),
    "accelerate": (False, True, layers),
    "tf32": (False, True, lambda made: made.brain() and torch.get_float32_matmul_precision()),
    "graphs": (None, False, captures),
    "ema": (None, AVERAGED["ema"], lambda made: made.brain().trainer.moving_average is not None),
    "fsdp": (None, True, wrapped, AVERAGED),
    "activation_checkpointing": (None, "ConformerEncoderLayer", layers),
    "freeze": (None, {"CNN": True}, weights),
    "learning_rates": (None, {"ctc_lin": 3.0}, weights),
    "layer_decay": (1.0, 0.5, weights),
    "log_interval": (0.0, 1e6, lines, {"output_folder": From(lambda made: str(made.folder))}),
    "loggers": ([], ["tensorboard"], lambda made: refusal(made, files) or files(made),
                {"output_folder": From(lambda made: str(made.folder))}),
    "brain": (CTC, Other, lambda made: type(made.brain())),
    "modules": (From(lambda made: {"model": made.recipe.hparams["model"]}),
                From(lambda made: {"head": made.recipe.hparams["ctc_lin"]}), lambda made: list(made.brain().modules)),
    "corpus": (Corpus("a"), Corpus("b"), prepared),
    "batching": (Batching(60), Batching(90), loaded),
    "epoch_counter": (EpochCounter(1), EpochCounter(3), weights),
    "opt_class": (partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.2), weights),
    "schedule": (None, Schedule(peak=0.5, warmup=1), weights),
    "checkpointer": (From(kept), From(lambda made: kept(made, "elsewhere")), files),
    "pretrainer": (None, From(weight_file), fetched),
    "init_from": (None, From(lambda made: weights_of(made, 1)), begun, ALONE),
    "init_checkpoint": ("best", "last", asked_of),
    "init_average": (1, 3, asked_of),
    "init_leave": (None, ["ctc_lin"], begun, {**ALONE, "init_from": From(lambda made: weights_of(made, 1))}),
    "replay": (None, 0.2, OPENED),
    "replay_from": (None, "elsewhere", OPENED),
    "train_logger": (None, From(lambda made: TrainLog(str(made.folder / "train_log.txt"))), files),
    "augment": (None, Augment([Gain()]), loaded),
    "nonspeech": (None, NonSpeech(0.5), loaded),
    "valid_augment": (None, Augment([Gain()]), loaded),
    "test_augment": (None, Augment([Gain()]), loaded),
    "number_of_epochs": (3, 5, epochs),
    "num_workers": (0, 1, loaded),
    "cpu_ranks": (1, 2, use_of_cores, {"cpu_threads": 1}),
    "cpu_threads": (1, 2, use_of_cores, {"cpu_ranks": 1}),
    "sample_rate": (8000, 16_000, loaded),
    "language": ("en", "fr", exported),
    "experiment": ("one", "two", described),
    "keep_checkpoints": (1, 3, checkpoints),
    "keep_every": (None, 1, checkpoints),
    "average_checkpoints": (1, 2, averaged, {"keep_checkpoints": 3}),
    "ignore_findings": (None, ["no-labels"], warned),
    "tokenizer": (Spelling("a"), Spelling("b"), heard),
    "output_neurons": (28, 20, counted),
    "init_tokenizer": ("new", "keep", lambda made: refusal(made, lambda made: CTC.prepare(
        made.recipe.keys, {"train": SimpleNamespace(texts=["a"])}, {}))),
    "spec_augment": (None, SpecAugment(time_masks=20, time_share=0.5, ramp=None), loss),
    "compute_features": (Fbank(n_mels=80), Fbank(n_mels=80, f_max=4000), loss),
    "normalize": (None, InputNormalization(norm_type="sentence"), loss),
    "CNN": (None, From(lambda made: made.recipe.hparams["CNN"]), loss),
    "Transformer": (From(lambda made: made.recipe.hparams["Transformer"]), Frames(), loss),
    "encoder": (Frames(1.0), Frames(2.0), loss, {"Transformer": None}),
    "ctc_lin": (From(lambda made: made.recipe.hparams["ctc_lin"]), From(head), loss),
    "seq_lin": (From(lambda made: made.recipe.hparams["seq_lin"]), From(head), loss, JOINT),
    "decoder": (None, Guess(), heard),
    "n_mels": (80, 40, fits),
    "hop_length": (10, 20, loss),
    "blank_index": (0, 1, loss),
    "bos_index": (1, 2, loss, JOINT),
    "eos_index": (1, 2, loss, JOINT),
    "ctc_weight": (1.0, 0.5, loss),
    "label_smoothing": (0.0, 0.3, loss, JOINT),
    "intermediate_ctc": (0.0, 0.5, loss),
    "intermediate_layers": (None, [2], loss, {"intermediate_ctc": 0.5}),
    "chunks": (None, Chunks(sizes=[2], left_context=[2], whole=0.0, validate=2), loss),
    "consistency": (0.0, 0.5, loss, {"spec_augment": SpecAugment(ramp=None)}),
    "consistency_warmup": (0.0, 1.0, loss, {
        "consistency": 0.5, "spec_augment": SpecAugment(ramp=None),
        "schedule": From(lambda made: SimpleNamespace(total_steps=100))}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CTC.Keys.declared())
def test_a_key_has_an_effect(name, flagship, tmp_path, monkeypatch):
    first, second, see, *more = CASES[name]
    seen = []
    for number, value in enumerate((first, second)):
        folder = tmp_path / str(number)
        folder.mkdir()
        hparams = copy.deepcopy({**flagship, "output_folder": None})
        with monkeypatch.context() as patch:
            made = Made(Recipe(hparams, CTC.Keys.read(hparams), None), folder, patch)
            for other, value_of in {"checkpointer": From(kept), **(more[0] if more else {}), name: value}.items():
                hparams[other] = value_of.make(made) if isinstance(value_of, From) else copy.deepcopy(value_of)
            if see is OPENED:
                seen.append(refusal(made, lambda made, hparams=hparams: load.read_keys(hparams, RECIPE)))
                continue
            made.recipe = Recipe(hparams, load.read_keys(hparams, RECIPE), None)
            seen.append(see(made))
    assert seen[0] != seen[1]


def test_each_declared_key_says_what_it_does():
    assert set(CASES) == set(CTC.Keys.declared())
    assert all(declared.what for declared in CTC.Keys.declared().values())


def test_what_a_key_refers_to_is_there():
    page = (RECIPE.parents[1] / "docs" / "reference" / "keys.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bsbkit(?:\.\w+)+", page))
    assert len(named) > 10 and all(map(locate, named))
