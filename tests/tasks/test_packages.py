"""The package of each task has its keys at hand, and imports what trains when it is asked for."""

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sbkit.tasks
from sbkit.recipe.load import tree
from sbkit.recipe.signatures import locate

ROOT = Path(__file__).parents[2]
#: The class that each task's flagship names under ``brain``.
BRAINS = sorted({tree(path).value["brain"].tag.removeprefix("!name:") for path in (ROOT / "hparams").glob("*.yaml")})
PACKAGES = sorted({name.rpartition(".")[0] for name in BRAINS})


@pytest.mark.parametrize("name", BRAINS)
def test_the_keys_of_a_package_are_those_of_its_task(name):
    package = importlib.import_module(name.rpartition(".")[0])
    assert package.Keys is locate(name).Keys


def test_every_task_has_a_flagship():
    tasks = {module.name for module in pkgutil.iter_modules(sbkit.tasks.__path__) if module.ispkg}
    assert {f"sbkit.tasks.{name}" for name in tasks - {"recognise"}} == set(PACKAGES)


def test_keys_are_imported_without_torch_and_speechbrain():
    script = ("import importlib, json, sys\n"
              "fields = [len(importlib.import_module(name).Keys.__dataclass_fields__) for name in sys.argv[1:]]\n"
              "print(json.dumps([fields, [name for name in ('torch', 'speechbrain') if name in sys.modules]]))")
    printed = subprocess.run([sys.executable, "-c", script, *PACKAGES], capture_output=True, text=True, check=True)
    fields, heavy = json.loads(printed.stdout)
    assert min(fields) > 30 and heavy == []


def test_what_a_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'sbkit.tasks.ctc' has no attribute 'CTX'$"):
        getattr(importlib.import_module("sbkit.tasks.ctc"), "CTX")  # noqa: B009 (as a recipe's name is looked up)
