"""The trainer reads of a Brain what SpeechBrain documents, and little more; nobody reads a Brain's private names."""

import ast
import re
from pathlib import Path

import speechbrain as sb
from toys import brain

import sbkit

HOUSE = Path(sbkit.__file__).parent
#: Methods and options of sbkit.Brain's own that its loops use.
OURS = {"close_batch", "close_stage", "close_step", "compiled", "keys", "metrics_log", "open_stage", "open_step",
        "restoring", "shares_validation", "utilisation"}


def test_no_other_file_reads_a_private_name_of_a_brain():
    private = re.compile(r"\b(?:brain|toy)\._[a-z]\w*")
    found = {str(path.relative_to(HOUSE)): names for path in HOUSE.rglob("*.py")
             if (names := private.findall(path.read_text(encoding="utf-8")))}
    assert found == {}


def read_of_brain(file):
    """Attributes that a file reads of what it calls ``brain`` or ``self.brain``."""
    tree = ast.parse((HOUSE / "train" / file).read_text(encoding="utf-8"))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and getattr(node.value, "id", getattr(node.value, "attr", "")) == "brain"}


def test_the_loops_use_speechbrains_contract_and_little_more(tmp_path):
    read = set().union(*map(read_of_brain, ("trainer.py", "evaluation.py")))
    toy = brain(profile_training=True, hparams={"output_folder": str(tmp_path)})
    toy.on_fit_start()
    stock = sb.core.Brain({"model": toy.modules["model"]}, toy.opt_class, {"output_folder": str(tmp_path)},
                          {"device": "cpu", "profile_training": True})
    stock.init_optimizers()
    assert {name for name in read if not hasattr(stock, name)} == OURS and all(hasattr(toy, name) for name in OURS)
