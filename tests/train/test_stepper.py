"""A training step reads from top to bottom: a short way to compute_forward, and a protocol in the Brain's place."""

import ast
import re
import sys
from pathlib import Path

import pytest
from toys import ToyBrain, ToyTrainLoader, brain

import sbkit
from sbkit.train import hooks
from sbkit.train.epoch import TrainLoop

HOUSE = Path(sbkit.__file__).parent
PROTOCOLS = {"epoch.py": hooks.Trains, "evaluation.py": hooks.Evaluates, "between.py": hooks.Decides,
             "stepper.py": hooks.Steps, "objective.py": hooks.Computes, "memory/oom.py": hooks.Evaluates,
             "loaders.py": hooks.Loads}


def test_a_batch_is_five_calls_away_from_compute_forward():
    ways = []

    class Looking(ToyBrain):
        def compute_forward(self, batch, stage):
            frame, calls = sys._getframe(), []
            while frame.f_code is not TrainLoop.run.__code__:
                if "/torch/" not in frame.f_code.co_filename:
                    calls.append(frame.f_code.co_name)
                frame = frame.f_back
            ways.append(calls[::-1])
            return super().compute_forward(batch, stage)

    brain(Looking).fit([1], ToyTrainLoader(2))
    assert ways == [["fit_batch", "run", "backward", "__call__", "compute_forward"]] * 2


def test_no_other_file_reads_a_private_name_of_a_brain():
    private = re.compile(r"\b(?:brain|hooks|toy)\._[a-z]\w*")
    found = {str(path.relative_to(HOUSE)): names for path in HOUSE.rglob("*.py")
             if (names := private.findall(path.read_text(encoding="utf-8")))}
    assert found == {}


def asked(protocol):
    """The names that a protocol has, those of the ones it is made of too."""
    own = {name for kind in protocol.__mro__ if kind.__module__ == hooks.__name__
           for name in (*vars(kind).get("__annotations__", {}), *vars(kind))}
    return {name for name in own if not name.startswith("_")}


def read_of_hooks(path, name="hooks"):
    """Attributes that a file reads of what it calls ``hooks`` or ``self.hooks``, or by another name."""
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
    return {node.attr for node in found if getattr(node.value, "id", getattr(node.value, "attr", "")) == name}


@pytest.mark.parametrize("file", PROTOCOLS)
def test_a_part_of_training_reads_of_a_brain_what_its_protocol_says(file, tmp_path):
    names = asked(PROTOCOLS[file])
    assert read_of_hooks(HOUSE / "train" / file) <= names
    toy = brain(profile_training=True, hparams={"output_folder": str(tmp_path)})
    toy.on_fit_start()
    assert {name for name in names if not hasattr(toy, name)} == set()


def test_everything_that_a_protocol_asks_for_is_read():
    read = set().union(*(read_of_hooks(HOUSE / "train" / file) for file in PROTOCOLS))
    read |= read_of_hooks(HOUSE / "train" / "diagnose" / "culprit.py", "brain")  # a step is run again without loops
    assert set().union(*(asked(protocol) for protocol in PROTOCOLS.values())) <= read
