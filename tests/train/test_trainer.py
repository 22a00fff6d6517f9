"""The trainer reads of a Brain what SpeechBrain documents, and little more; nobody reads a Brain's private names."""

import ast
import re
from pathlib import Path

import speechbrain as sb
from toys import brain

import sbkit

HOUSE = Path(sbkit.__file__).parent
#: Methods and options of sbkit.Brain's own that the trainer uses.
OURS = {"close_stage", "close_step", "compiled", "keys", "metrics_log", "open_stage", "open_step", "restoring",
        "utilisation"}


def test_no_other_file_reads_a_private_name_of_a_brain():
    private = re.compile(r"\b(?:brain|toy)\._[a-z]\w*")
    found = {str(path.relative_to(HOUSE)): names for path in HOUSE.rglob("*.py")
             if (names := private.findall(path.read_text(encoding="utf-8")))}
    assert found == {}


def test_the_trainer_uses_speechbrains_contract_and_little_more(tmp_path):
    tree = ast.parse((HOUSE / "train" / "trainer.py").read_text(encoding="utf-8"))
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and getattr(node.value, "id", getattr(node.value, "attr", "")) == "brain"}
    toy = brain(profile_training=True, hparams={"output_folder": str(tmp_path)})
    toy.on_fit_start()
    stock = sb.core.Brain({"model": toy.modules["model"]}, toy.opt_class, {"output_folder": str(tmp_path)},
                          {"device": "cpu", "profile_training": True})
    stock.init_optimizers()
    assert {name for name in read if not hasattr(stock, name)} == OURS and all(hasattr(toy, name) for name in OURS)
