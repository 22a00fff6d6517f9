"""sbkit lm: from files, stdin, manifests and runs to a model and its report, and every wrong command in one line."""

from __future__ import annotations

import gzip
import os

import pytest
import run_folders

from sbkit.cli import main
from sbkit.decode import arpa, lm

TEXT = ["the cat sat on the mat", "the dog sat on the cat", "a cat and a dog", "the mat"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("lm")
    (home / "text.txt").write_text("\n".join(TEXT) + "\n")
    (home / "empty.txt").write_text("\n  \n")
    (home / "held.txt").write_text("the cat sat\nthe bird\n")
    (home / "latin.txt").write_bytes("café".encode("latin-1"))
    rows = [f"u{i},1.0,/none.wav,s,{text}" for i, text in enumerate(TEXT)]
    (home / "texts.csv").write_text("\n".join(["ID,duration,wav,spk_id,wrd", *rows]) + "\n")
    (home / "other.csv").write_text("name,words\na,b\n")
    (home / "folder").mkdir()
    return home


def estimate(home, *words):
    return main(["lm", *(str(word).format(home=home) for word in words)])


def test_a_model_of_text_files_and_its_report(home, tmp_path, capsys):
    assert estimate(home, "{home}/text.txt", "--to", tmp_path / "lm.arpa", "--evaluate", "{home}/held.txt") == 0
    output = capsys.readouterr().out
    assert "19 words in 4 sentences, 8 different" in output
    assert f" on {home}/held.txt (" in output and "1 of 5 words unknown (20.00 %)" in output
    expected = lm.build(TEXT, tmp_path / "same.arpa", evaluate=["the cat sat", "the bird"])
    assert f"perplexity {expected.quality.perplexity:.2f} " in output
    assert (tmp_path / "lm.arpa").read_bytes() == (tmp_path / "same.arpa").read_bytes()
    assert arpa.read(tmp_path / "lm.arpa").counts == expected.counts


def test_packed_files_stdin_and_manifests_are_the_same_text(home, tmp_path, monkeypatch):
    with gzip.open(home / "text.txt.gz", "wt") as file:
        file.write("\n".join(TEXT))
    written = []
    for number, source in enumerate(["text.txt", "text.txt.gz", "texts.csv"]):
        assert estimate(home, home / source, "--to", tmp_path / f"{number}.arpa") == 0
        written.append((tmp_path / f"{number}.arpa").read_bytes())
    with open(home / "text.txt") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert estimate(home, "-", "--to", tmp_path / "stdin.arpa") == 0
    reading, writing = os.pipe()  # what a shell's <(command) gives
    os.write(writing, "\n".join(TEXT).encode())
    os.close(writing)
    assert estimate(home, f"/dev/fd/{reading}", "--to", tmp_path / "pipe.arpa") == 0
    os.close(reading)
    assert {*written, *((tmp_path / name).read_bytes() for name in ("stdin.arpa", "pipe.arpa"))} == {written[0]}


@pytest.mark.parametrize("prune", ["0,0,1", "1", "1e-2"])
def test_pruning_order_and_rare_words(home, tmp_path, capsys, prune):
    assert estimate(home, "{home}/text.txt", "--to", tmp_path / "lm.arpa.gz", "--order", 4, "--prune", prune,
                    "--min-count", 2) == 0
    model = arpa.read(tmp_path / "lm.arpa.gz")
    assert "and" not in model.ids and "cat" in model.ids and all(model.counts)
    assert len(capsys.readouterr().out.split("fallback)")) == 5  # a row for each order, whatever is left of it
    assert sum(model.counts) < sum(lm.build(TEXT, tmp_path / "whole.arpa", order=4, min_count=2).counts)


def test_a_run_gives_its_transcripts_its_rules_and_its_pieces(home, tmp_path, capsys):
    from sbkit.data.manifest import Manifest

    run = home / "run"
    run_folders.run_with_model(run, run_folders.corpus(home / "data", train=24, dev=5))
    assert estimate(home, run, "--to", tmp_path / "run.arpa") == 0
    output = capsys.readouterr().out
    assert f"{len(Manifest.read(run / 'manifests' / 'train.csv'))} sentences" in output
    assert f" on {run}/manifests/dev.csv (" in output
    # Text that is written otherwise becomes like the transcripts.
    (home / "shout.txt").write_text("THE BRAVE Teacher, finds; an old ladder!\n")
    assert estimate(home, "{home}/shout.txt", "--like", run, "--to", tmp_path / "like.arpa", "--order", 2) == 0
    written = set(arpa.read(tmp_path / "like.arpa").words) - {"<unk>", "<s>", "</s>"}
    assert written == set("the brave teacher finds an old ladder".split())
    assert estimate(home, "{home}/shout.txt", "--like", run, "--unit", "piece", "--to", tmp_path / "pieces.arpa") == 0
    assert {"▁", "b"} < set(arpa.read(tmp_path / "pieces.arpa").words)


@pytest.mark.parametrize("words, message", [
    (["{home}/empty.txt"], "[no-text]"), (["{home}/text.txt", "--evaluate", "{home}/empty.txt"], "[no-text]"),
    (["{home}/none.txt"], "[no-such-path]"), (["{home}/text.txt", "--evaluate", "{home}/none.txt"], "[no-such-path]"),
    (["{home}/folder"], "{home}/folder is not a run: it has no hyperparams.yaml"),
    (["{home}/latin.txt"], "latin.txt is not UTF-8"),
    (["{home}/other.csv"], "{home}/other.csv has no column 'wrd'"),
    (["{home}/text.txt", "--unit", "piece"], "[missing-option]"),
    (["{home}/text.txt", "--order", "0"], "order is 0, but a language model has order 1 to 10"),
    (["{home}/text.txt", "--prune", "few"], "[bad-option]"),
    (["{home}/text.txt", "--prune", "0,2,1"], "use counts that don't fall"),
    (["{home}/text.txt", "--to", "{home}/folder"], "{home}/folder is a folder; name a file"),
    (["{home}/text.txt", "--to", "/proc/lm.arpa"], "cannot write /proc/lm.arpa: "),
    (["{home}/text.txt", "--to", "{home}/text.txt/lm.arpa"], "cannot write {home}/text.txt/lm.arpa: "),
])
def test_every_wrong_command_is_one_line(home, tmp_path, capsys, words, message):
    out = [] if "--to" in words else ["--to", tmp_path / "lm.arpa"]
    assert estimate(home, *words, *out) == 2
    output = capsys.readouterr()
    assert message.format(home=home) in output.err and output.err.count("\n") == 1 and not output.out
    assert not list(tmp_path.iterdir())
