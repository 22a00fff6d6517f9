"""What two splits share is counted and named, of any rows and of a million."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from sbkit.data import leaks
from sbkit.data.manifest import Manifest
from sbkit.system.console import table


def manifest(split: str, rows: list[tuple[str, str, str, float, float]]) -> Manifest:
    speakers, texts, wavs, starts, durations = zip(*rows, strict=True) if rows else [()] * 5
    return Manifest(ids=[f"{split}{i}" for i in range(len(rows))], speakers=speakers, texts=texts, wavs=wavs,
                    starts=starts, durations=durations)


ROWS = st.lists(st.tuples(st.sampled_from(["", "ann", "bob", "eve"]), st.sampled_from(["", "yes", "no", "Äh"]),
                          st.sampled_from(["a.wav", "b.wav", "c.wav"]), st.sampled_from([0.0, 1.0, 2.5, 4.0]),
                          st.sampled_from([0.5, 1.0, 2.0])), max_size=8)


@given(ROWS, ROWS, ROWS)
def test_it_is_what_a_comparison_of_each_with_each_gives(train, dev, test):
    splits = {"train": train, "dev": dev, "test": test}
    found = leaks.shared({split: manifest(split, each) for split, each in splits.items()})
    expected = {}
    for split, other in (("test", "dev"), ("test", "train"), ("dev", "train")):
        one, two = splits[split], splits[other]
        for field, what in enumerate(("speakers", "sentences", "recordings")):
            both = {row[field] for row in one} & {row[field] for row in two} - {""}
            expected[split, other, what] = len(both), sum(row[field] in both for row in one)
        over = sum(any(a[2] == b[2] and a[3] < b[3] + b[4] and b[3] < a[3] + a[4] for b in two) for a in one)
        expected[split, other, "overlaps"] = over, over
    assert {(each["split"], each["with"], each["what"]): (each["count"], each["rows"]) for each in found} == {
        place: counts for place, counts in expected.items() if counts[0]}
    assert len(leaks.rows(found)) == len(found)


def test_the_table_names_them_and_says_what_follows():
    train = manifest("train", [("ann", "yes it is", "a.wav", 0, 3), ("bob", "no", "b.wav", 0, 3)])
    test = manifest("test", [("ann", "no", "c.wav", 0, 1), ("ann", "so", "a.wav", 2.95, 1),
                             ("eve", "it", "d.wav", 0, 1)])
    entries = leaks.shared({"train": train, "test": test}, {"test": {}, "train": {}})
    assert leaks.rows(entries) == [["test", "train", "speakers", 1, 2, 2, "66.7"],
                                   ["test", "train", "sentences", 1, 3, 1, "33.3"],
                                   ["test", "train", "recordings", 1, 3, 1, "33.3"]]
    assert [line.split(":")[0] for line in leaks.remarks(entries)] == [
        "speakers, such as ann", "sentences, such as no", "recordings, such as a.wav"]
    [entry] = leaks.shared({"dev": test, "test": test.select([])}, {"dev": {"test1": "test: u"}})
    assert (entry["what"], entry["count"], entry["examples"]) == ("copies", 1, ["test1 = test: u"])


def test_the_table_fits_into_a_terminal():
    counts = {"count": 1_234_567, "of": 1_234_567, "rows": 1_234_567, "share": 1.0, "examples": ["word " * 40] * 3}
    entries = [{"split": "train", "with": "test", "what": what, **counts} for what in leaks.MEANS]
    assert all(len(line) <= 80 for line in table(leaks.COLUMNS, leaks.rows(entries)).splitlines())
    assert all(line.count("...;") == 2 for line in leaks.remarks(entries))


def test_a_million_rows_would_take_less_than_a_minute():
    rows = 200_000
    rng = np.random.default_rng(0)

    def split(count: int, folder: str) -> Manifest:
        numbers = pa.array(np.arange(count)).cast(pa.large_string())
        drawn = [pa.array(rng.integers(0, size, count)).cast(pa.large_string()) for size in (count // 20, 2 * count)]
        return Manifest(ids=numbers, durations=rng.uniform(1, 10, count), speakers=drawn[0], texts=drawn[1],
                        wavs=[f"/corpus/{folder}/clip{i % (count // 3)}.mp3" for i in range(count)],
                        starts=rng.uniform(0, 1000, count))

    splits = {"train": split(rows * 8 // 10, "x"), "dev": split(rows // 10, "x"), "test": split(rows // 10, "y")}
    began = time.process_time()
    entries = leaks.shared(splits)
    assert time.process_time() - began < 60 * rows / 1_000_000
    assert {"speakers", "sentences", "recordings", "overlaps"} == {entry["what"] for entry in entries}
