"""The bench of telephones: recipes that train, tests that repeat themselves, and its table."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile

from sbkit.data.manifest import Manifest
from sbkit.recipe.check import check
from tools.bench.telephone import WAYS, as_markdown, conditions, make_rooms, make_test, recipe_of


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    return make_rooms(tmp_path_factory.mktemp("rooms") / "test", 2)


@pytest.mark.parametrize("way", ["none", "all"])
def test_a_way_is_a_recipe_with_its_stages(tmp_path, rooms, way):
    (tmp_path / "way.yaml").write_text(recipe_of(WAYS[way], rooms))
    result = check(tmp_path / "way.yaml", {"output_folder": str(tmp_path / "run")}, run=False)
    assert not result.errors
    assert [(tmp_path / "way.yaml").read_text().count(f".{stage}\n") for stage in WAYS[way]] == [1] * len(WAYS[way])


def test_each_test_changes_what_is_heard_the_same_way_each_time(tmp_path, rooms):
    signal = np.sin(np.arange(16_000) ** 1.3 / 40).astype(np.float32) * 0.3
    soundfile.write(tmp_path / "a.wav", signal, 16_000, subtype="FLOAT")
    clean = Manifest(ids=["a"], wavs=[str(tmp_path / "a.wav")], durations=[1.0], starts=[0.0], texts=["a word"])
    heard = {}
    for name, stages in conditions(rooms).items():
        made = [soundfile.read(make_test(tmp_path / again / name, clean, stages) / "a.wav", dtype="float32")[0]
                for again in ("once", "twice")]
        assert np.array_equal(*made) and len(made[0]) == len(signal)
        heard[name] = made[0].tobytes()
    assert heard["unchanged"] == signal.tobytes() and len({*heard.values()}) == len(heard)


def test_rooms_of_the_test_are_others_than_those_of_training(tmp_path, rooms):
    def responses(folder):
        return {soundfile.read(path)[0].tobytes() for path in folder.iterdir()}

    assert len(responses(rooms)) == 2 and responses(rooms) == responses(make_rooms(tmp_path / "test", 2))
    assert not responses(rooms) & responses(make_rooms(tmp_path / "train", 2))


def test_the_table_has_a_row_for_each_test_and_a_column_for_each_way():
    lines = as_markdown({"none": {"unchanged": (5.04, 3.0, 7.1), "mobile": (50, 40, 60)},
                         "all": {"unchanged": (6, 4, 8), "mobile": (9.96, 8, 12)}}).splitlines()
    assert lines[0] == "| test | none | all |"
    assert lines[3] == "| mobile | 50.0 % (40.0 to 60.0) | 10.0 % (8.0 to 12.0) |"
