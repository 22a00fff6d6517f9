"""Nowhere in sbkit is a key read that no class declares, or with a default of the reader's own."""

import re
from pathlib import Path

import pytest

import sbkit
from sbkit.recipe.run_options import RUN_OPTIONS
from sbkit.tasks.ctc import CTC

HOME = Path(sbkit.__file__).parent
FILES = {str(path.relative_to(HOME)): path.read_text(encoding="utf-8") for path in sorted(HOME.rglob("*.py"))
         if "starter" not in path.parts}
_READ = r"\bhparams(?:\.\w+\b(?!\()|\.get\([^()]*\)|\[[^][]+\])"
_LITERAL = r"[-\d\"'({[]|(?:True|False)\b"
#: A value of a recipe that is read together with what it is to be otherwise.
OWN_DEFAULT = re.compile(rf"""
    getattr\( [\w.]*\b(?:hparams|keys) , \s* [^,()]+ ,
    | getattr\( {_READ} , [^,()]+ , \s* [\w.]*hparams\b
    | \bhparams\)? \. (?:get|pop|setdefault)\( [^,()]+ , \s* \S
    | {_READ} \s+ or \s+ (?: {_LITERAL} | None\b | [\w.]*hparams\b )
    | \b in \s [\w.]*\b(?:hparams|keys)\b\)? \s+ else \s+ (?: {_LITERAL} )
    """, re.X)
#: A key that is read by its name.
NAMED = re.compile(r"""
    \bhparams(?: \.(?!(?:clear|copy|get|items|keys|pop|setdefault|update|values)\b) (\w+)
               | \.(?:get|pop|setdefault)\( \s* ["'](\w+) | \[ ["'](\w+) ["']\] )
    | getattr\( [\w.]*\bhparams, \s* ["'](\w+)
    """, re.X)


def own_defaults(code):
    """Lines in which a value of a recipe is read together with what it is to be otherwise."""
    return [1 + code.count("\n", 0, match.start()) for match in OWN_DEFAULT.finditer(code)]


def names_read(code):
    """Lines in which a recipe's values are read by a name, with that name."""
    return [(1 + code.count("\n", 0, match.start()), next(filter(None, match.groups())))
            for match in NAMED.finditer(code)]


@pytest.mark.parametrize("line", [
    "getattr(self.hparams, 'seed', 0)", "getattr(hparams, name, None)", "getattr(self.keys, 'seed', 0)",
    "hparams.get('seed', 0)", "built.hparams.pop('seed', None)", "vars(self.hparams).get('seed', 0)",
    "hparams.setdefault('seed', 0)", "hparams.get('seed', default=0)", "hparams.get('seed') or 0",
    "self.hparams.seed or 0", "hparams['seed'] or []", "hparams['seed'] if 'seed' in hparams else -1",
    "getattr(hparams.get('batching'), 'seconds', hparams.get('seconds'))", "hparams.get('seed') or hparams['draw']",
])
def test_such_a_read_is_found(line):
    assert own_defaults(f"x = 1\nif x:\n    y = {line}\n") == [3]


@pytest.mark.parametrize("line", [
    "self.hparams.seed", "getattr(keys, name)", "built.hparams.get('tokenizer')", "keys.get(word, 0)",
    "hparams['seed'] if 'seed' in hparams else keys.seed", "getattr(keys.ema, 'decay', 1)", "'seed' in hparams",
    "keys.tokenizer if 'tokenizer' in vars(keys) else None",
])
def test_a_read_without_one_is_not(line):
    assert own_defaults(line) == []


def test_no_file_has_one():
    found = {name: lines for name, code in FILES.items() if (lines := own_defaults(code))}
    assert len(FILES) > 200 and found == {}, "declare the key, with its default, in the class that reads it"


@pytest.mark.parametrize("line", ["hparams.get('seed')", "self.hparams.seed", "built.hparams['seed']",
                                  "getattr(hparams, 'seed')", "getattr(hparams.get('seed'), 'limit', 1)"])
def test_a_name_that_is_read_is_found(line):
    assert names_read(f"\n{line}") == [(2, "seed")]


@pytest.mark.parametrize("line", ["hparams.get(name)", "hparams[name]", "hparams.items()", "keys.seed", "self.hparams"])
def test_what_is_no_name_is_not(line):
    assert names_read(line) == []


def test_every_name_that_is_read_is_declared():
    declared = {*CTC.Keys.declared(), *RUN_OPTIONS}
    found = {name: undeclared for name, code in FILES.items()
             if (undeclared := [read for read in names_read(code) if read[1] not in declared])}
    assert found == {}, "declare the key in the class that reads it"
