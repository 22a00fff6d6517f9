"""Several corpora as one: joined, named, drawn by weights, and mistakes about them reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.augment import Augment, Gain
from sbkit.data.columns import BatchColumns, LabelColumn, SignalColumn
from sbkit.data.corpus import Corpus
from sbkit.data.loader import EvalLoader, TrainLoader
from sbkit.data.mixture import Mixture, hours_of, hours_of_pass
from sbkit.data.plan import Batching, Plan


class Keys:
    """Of a recipe."""

    def __init__(self, corpus: Corpus):
        self.corpus, self.languages = corpus, ["cs", "en"]


def source(folder: Path, seconds: float = 1.0, rate: int = 16_000, wavs: Path | None = None, extra: str = "",
           **splits: list[str]) -> str:
    """CSVs whose rows are recordings of so many seconds, of speakers 0 and 1."""
    wavs = wavs or folder
    for split, texts in splits.items():
        lines = ["ID,duration,wav,spk_id,wrd" + (f",{extra}" if extra else "")]
        for i, text in enumerate(texts):
            wavs.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            wav = wavs / f"{split}{i}.wav"
            if not wav.exists():
                noise = np.random.default_rng(hash((split, i)) % 2**32).normal(0, 0.1, round(seconds * rate))
                soundfile.write(wav, noise, rate)
            lines.append(f"{split}{i},{seconds},{wav},{i % 2},{text}" + (",loud" if extra else ""))
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


@pytest.fixture
def two(tmp_path) -> dict[str, Corpus]:
    """An hour or so in small: 6 s of English, 2 of Czech at another rate."""
    english = source(tmp_path / "en", train=["One."] * 6, dev=["Two"], test=["Three"])
    czech = source(tmp_path / "cs", rate=8000, extra="mood", train=["Čtyři!"] * 2, dev=["Pět", "Šest"], test=["Sedm"])
    return {"read": Corpus(english, language="en"), "calls": Corpus(czech, language="cs")}


def test_manifests_are_joined_and_say_which_part_each_row_is_of(two, tmp_path):
    mixture = Mixture(two, tmp_path / "m", weights={"read": 1, "calls": 3})
    found = mixture.prepare(show_progress=False, needed=("train", "dev", "test"))
    assert {split: len(each) for split, each in found.items()} == {"train": 8, "dev": 3, "test": 2}
    row = found["train"].row(6)
    assert (row.id, row.text, row.speaker, row.meta) == (
        "calls:train0", "čtyři", "calls:0", {"mood": "loud", "corpus": "calls", "language": "cs"})
    assert found["train"].row(0).meta == {"mood": "", "corpus": "read", "language": "en"}
    assert {mixture.part_of(name) for name in found["dev"].ids} == {"read", "calls"}
    assert found["train"].shares == {"read": 0.25, "calls": 0.75} and not found["dev"].shares
    assert hours_of(found["train"]) == pytest.approx({"read": 6 / 3600, "calls": 2 / 3600})
    assert mixture.rows(found["train"]) == [["read", "en", 6, 0.0, 25.0, 0.33], ["calls", "cs", 2, 0.0, 75.0, 3.0]]
    assert "times seen in a pass" in mixture.summary() and "read: " in mixture.summary()
    report = json.loads((tmp_path / "m" / "prepare_report.json").read_text())
    assert report["options"]["max_duration"] is None and "language" not in report["options"]
    assert report["options"]["parts"]["calls"]["language"] == "cs"
    assert report["splits"]["train"]["rows"] == 8 == report["splits"]["train"]["kept"]
    assert (tmp_path / "m" / "calls" / "train.csv").is_file(), "a part is prepared below the mixture"
    speakers = [name for each in report["leaks"] if each["what"] == "speakers" for name in each["examples"]]
    assert "read:0" in speakers and "calls:0" in speakers, "speakers of two parts are never one"


def test_it_is_prepared_again_only_when_a_part_has_changed(two, tmp_path):
    mixture = Mixture(two, tmp_path / "m")
    mixture.prepare(show_progress=False)
    before = (tmp_path / "m" / "train.csv").stat().st_mtime_ns
    Mixture(two, tmp_path / "m", weights={"read": 1, "calls": 9}).prepare(show_progress=False)
    assert (tmp_path / "m" / "train.csv").stat().st_mtime_ns == before, "weights change no manifest"
    source(tmp_path / "cs", rate=8000, extra="mood", train=["Čtyři!"] * 3, dev=["Pět"], test=["Sedm"])
    assert len(Mixture(two, tmp_path / "m").prepare(show_progress=False)["train"]) == 9


def test_parts_have_the_shares_that_weights_temperature_or_hours_give(two, tmp_path):
    hours = {"read": 80.0, "calls": 10.0}
    for options, calls in (({}, 1 / 9), ({"temperature": 1}, 1 / 9), ({"temperature": 3}, 1 / 3),
                           ({"weights": {"read": 1, "calls": 4}}, 0.8), ({"weights": {"read": 0, "calls": 2}}, 1.0)):
        shares = Mixture(two, tmp_path / "m", **options).shares(hours)
        assert shares == pytest.approx({"read": 1 - calls, "calls": calls})
    assert Mixture(two, weights={"read": 1, "calls": 4}).shares({"read": 5.0}) == {"read": 1.0}


def test_a_pass_can_go_through_one_part_once(two, tmp_path):
    mixture = Mixture(two, tmp_path / "m", weights={"read": 1, "calls": 3}, once="calls")
    train = mixture.prepare(show_progress=False)["train"]
    assert [row[-1] for row in mixture.rows(train)] == [0.11, 1.0]
    passes = [hours_of_pass(each) for each in (train, mixture.parts["read"].manifest("train"))]
    assert passes == pytest.approx([2 / 0.75 / 3600, 6 / 3600])
    assert len(Plan.of(train.select(np.arange(len(train))), Batching(3), None, 1).epoch(1).members) == 3
    silent = two | {"silent": Corpus(two["read"].source, "en", only=["test"])}
    with refused("part-without-rows"):
        Mixture(silent, tmp_path / "s", once="silent").prepare(show_progress=False)


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.001, 1e4), min_size=1), st.floats(0.5, 100))
def test_a_higher_temperature_makes_shares_more_alike(hours, temperature):
    parts = {name: Corpus(".") for name in hours}
    warm, cold = (Mixture(parts, temperature=each).shares(hours) for each in (temperature * 2, temperature))
    assert sum(warm.values()) == pytest.approx(1) and sum(cold.values()) == pytest.approx(1)
    assert max(warm.values()) - min(warm.values()) <= max(cold.values()) - min(cold.values()) + 1e-9
    assert sorted(hours, key=lambda name: (hours[name], name)) == sorted(hours, key=lambda name: (
        round(warm[name], 15), hours[name], name))


def test_batches_say_which_corpus_and_language_each_row_is_of(two, tmp_path):
    mixture = Mixture(two, tmp_path / "m", weights={"read": 1, "calls": 1})
    found = mixture.prepare(show_progress=False)
    columns = BatchColumns({}, Keys(mixture))
    plan = Plan.of(found["train"], Batching(4), None, 1)
    with TrainLoader(found["train"], None, plan, columns=columns, workers=0) as loader:
        batches = list(loader.at(1))
    seen = [tag for batch in batches for tag in zip(batch.ids, batch.columns["corpus"], batch.columns["language"],
                                                    strict=True)]
    assert all(id_.split(":")[0] == corpus and {"read": "en", "calls": "cs"}[corpus] == language
               for id_, corpus, language in seen)
    assert [corpus for _, corpus, _ in seen].count("calls") == 4 == len(seen) // 2
    with EvalLoader(found["dev"], None, max_batch_seconds=9, columns=columns, workers=0) as dev:
        assert sorted(next(iter(dev)).columns["corpus"]) == ["calls", "calls", "read"]
    other = Corpus(source(tmp_path / "other", test=["Eight"]), folder=tmp_path / "o", only=("test",)).prepare(False)
    with EvalLoader(other["test"], None, max_batch_seconds=9, columns=columns, workers=0) as test:
        assert next(iter(test)).columns["corpus"] == [""], "another corpus has none"
    assert set(columns.dummy(batches[0].signals, batches[0].signal_lengths)["columns"]) == {"corpus", "language"}
    numbered = BatchColumns({"language": LabelColumn("languages")}, Keys(mixture))
    texts = {"corpus": ["read", "calls", "", ""], "language": ["en", "cs", "de", ""]}
    labels = numbered.of_rows(texts, {}, 3, pad=lambda signals: torch.zeros(0))["labels"]
    assert labels["language"].tolist() == [1, 0, -1, 0]  # the last one fills a shape


def test_a_row_that_comes_twice_in_a_pass_is_augmented_in_two_ways(two, tmp_path):
    train = Mixture(two, tmp_path / "m", weights={"read": 1, "calls": 3}).prepare(show_progress=False)["train"]
    plan = Plan.of(train, Batching(3), None, 1)
    peaks = []
    for _ in range(2):
        with TrainLoader(train, None, plan, workers=0, augment=Augment([Gain(prob=1.0)])) as loader:
            peaks += [float(signal.abs().max()) for batch in loader.at(1)
                      for name, signal in zip(batch.ids, batch.signals, strict=True) if name == "calls:train0"]
    assert len(peaks) == 6 and len(set(peaks)) == 3, "three times in a pass, each another, and again the same"


def test_training_has_nothing_of_what_another_part_tests_on(two, tmp_path, caplog):
    again = source(tmp_path / "again", wavs=tmp_path / "en", train=["One."] * 3, dev=["Two"])
    (tmp_path / "again" / "train.csv").write_text(
        (tmp_path / "again" / "train.csv").read_text() + f"extra,1.0,{tmp_path}/en/test0.wav,0,Three\n")
    mixture = Mixture({**two, "more": Corpus(again, only=("train",))}, tmp_path / "m")
    found = mixture.prepare(show_progress=False)
    assert "more:extra" not in found["train"].ids and len(found["train"]) == 11
    assert "1 training rows of the mixture are in the dev or test of another part" in caplog.text
    assert "1 also in dev or test" in mixture.left_out("train")


def test_a_part_may_lack_a_split_that_others_have(two, tmp_path):
    only = Corpus(source(tmp_path / "only", train=["Nine"]), language="en", only=("train",))
    mixture = Mixture({**two, "only": only}, tmp_path / "m")
    found = mixture.prepare(show_progress=False, needed=("train", "dev", "test"))
    assert set(found["dev"].column("corpus")) == {"read", "calls"} and "only:train0" in found["train"].ids
    with refused("missing-split"):
        Mixture({**two, "only": only}, tmp_path / "m", best_by="only").prepare(False, needed=("dev",))
    with refused("missing-split"):
        Mixture({"only": only}, tmp_path / "n").prepare(False, needed=("train", "test"))
    tested = Corpus(source(tmp_path / "tested", test=["Ten"]), only=("test",))
    with refused("part-without-rows"):
        Mixture({**two, "tested": tested}, tmp_path / "m", weights={"read": 1, "calls": 1, "tested": 1}).prepare(False)
    found = Mixture({**two, "tested": tested}, tmp_path / "m",
                    weights={"read": 1, "calls": 1, "tested": 0}).prepare(False)
    assert found["train"].shares == {"read": 0.5, "calls": 0.5} and "tested:test0" in found["test"].ids


def test_a_clean_column_that_one_part_lacks_is_its_own_recording(two, tmp_path):
    columns = {"clean": SignalColumn(or_recording=True)}
    for split in ("train", "dev", "test"):
        path = tmp_path / "cs" / f"{split}.csv"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([f"{lines[0]},quiet", *(f"{line},{tmp_path}/cs/{split}0.wav" for line in lines[1:])]))
    two["calls"] = Corpus(str(tmp_path / "cs"), language="cs", columns={"clean": "quiet"})
    found = Mixture(two, tmp_path / "m").prepare(False, columns=columns)["train"]
    clean = found.column("clean")
    assert clean[0] == found.wavs[0] and clean[7] == f"{tmp_path}/cs/train0.wav"


WRONG = [
    ({"weights": {"read": 0, "calls": 0}}, "bad-value"), ({"weights": {"read": 1, "phone": 1}}, "unknown-part"),
    ({"weights": {"read": 1}}, "bad-value"), ({"weights": {"read": 1, "calls": -1}}, "bad-value"),
    ({"weights": [1, 2]}, "bad-value"), ({"weights": {"read": 1, "calls": 1}, "temperature": 2}, "conflicting-options"),
    ({"temperature": 0}, "bad-value"), ({"weights": {"read": 1, "calls": 0}, "once": "calls"}, "conflicting-options"),
    ({"weights": [1, 2], "once": "calls"}, "bad-value"), ({"once": ["calls"]}, "unknown-part"),
    ({"best_by": "phone"}, "unknown-part"), ({"parts": {}}, "bad-value"), ({"parts": {"read": "/data"}}, "bad-value"),
    ({"parts": {"a:b": Corpus(".")}}, "bad-value"),
    ({"parts": {"a": Corpus("."), "b": Corpus(".", text={"case": "upper"})}}, "different-text-rules"),
    ({"parts": {"a": Corpus(".", "en"), "b": Corpus(".", "cs"), "c": Corpus(".", "cs", text={"keep_anywhere": "."})}},
     "different-text-rules"),
    ({"parts": {"a": Corpus(".", "english")}}, "bad-value"),
]


@pytest.mark.parametrize("options, code", WRONG)
def test_mistakes_are_named(options, code):
    parts = {"read": Corpus("."), "calls": Corpus(".")}
    with refused(code):
        Mixture(**{"parts": parts, **options})


def test_a_split_that_is_none_of_a_mixture_is_refused(two, tmp_path):
    with refused("missing-split"):
        Mixture(two, tmp_path / "m").only_split("other", tmp_path / "o")


def test_a_part_that_can_not_be_prepared_is_named(two, tmp_path):
    gone = {**two, "gone": Corpus(str(tmp_path / "gone"))}
    with refused("no-such-path"):
        Mixture(gone, tmp_path / "m").prepare(False)
    with refused("no-such-path"):
        Mixture(gone, tmp_path / "m").check_exists()
    short = {**two, "short": Corpus(str(tmp_path / "en"), min_duration=5)}
    with refused("all-rows-left-out"):
        Mixture(short, tmp_path / "m").prepare(False)
