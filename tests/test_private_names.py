"""Tests see sbkit as a user does: no private name but those listed here, and the second list may only shrink."""

import ast
import re
from pathlib import Path

FOREIGN = frozenset("""
    _C _apply _asdict _create_fbank_matrix _ctc_loss _cuda_getArchFlags _dynamo _exit _fields _forward_hooks
    _get_ddp_logging_data _get_precomputed_values _local_scalar_dense _patch_lang_tensor _pytree _replace
    _save_intra_epoch_ckpt _schema _shutdown_workers _speechbrain_iterator _statistics_dict _unique2 _version
""".split())
"""Of Python, torch and SpeechBrain, which have no public name for it."""

NOT_YET = frozenset("""
    _Decoder _SLOW_READER_SECONDS _Server _attention _backward _changing _compile
    _compiled _decoder _enter _events _facts _fill _fingerprint _first _follow _forward _found _from_stdin _groups
    _heard _keep _keep_result _kept _label _line _lines _load _loader _model _now _open _over _pipeline
    _places _rehearse _rotated _save _search _session _settled _setup _smi _speakers _state _streams _sums
    _turned _unpack _used _waiting _windows _write
""".split())
"""Of sbkit: to be tested through what is public."""


def private(tree):
    """The private names that a test reads, imports or replaces; its own objects' through ``self`` and ``cls`` aside."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            names = [each.value.split(".")[-1] for each in node.args[:2]
                     if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        yield from (name for name in names if re.fullmatch(r"_[A-Za-z]\w*", name))


def test_no_test_reads_a_private_name():
    found = {(name, path.name) for path in Path(__file__).parent.rglob("*.py")
             for name in private(ast.parse(path.read_text(encoding="utf-8")))}
    new = sorted(each for each in found if each[0] not in FOREIGN | NOT_YET)
    assert new == [], "test it through what is public, or make the name public where others may call it"
    assert sorted(FOREIGN | NOT_YET) == sorted({name for name, _ in found}), "a list names what no test reads any more"


def test_it_finds_each_kind():
    code = "a._b\nself._c\nfrom x import _d\npatch.setattr(x, '_e', 1)\npatch.setattr('x._f', 1)\na.__g__"
    assert sorted(private(ast.parse(code))) == ["_b", "_d", "_e", "_f"]
