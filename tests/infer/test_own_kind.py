"""A kind of bundle that sbkit does not know, from docs/how-to/extend.md: read, decoded, served, found by commands."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import bundles
import graph_bundles
import httpx
import numpy as np
import pytest
import serving
import soundfile
from refusals import refused

import sbkit.infer
from sbkit.cli import main
from sbkit.export import layout
from sbkit.infer.decoding import DECODERS
from sbkit.infer.kinds import MODELS
from sbkit.serve import registry, served_kinds
from sbkit.serve.served import BundleOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
MODULE = re.search(r"```python\n# backwards.py\n(.*?)```", PAGE, re.S)[1]


@pytest.fixture
def bundle(tmp_path):
    """A recogniser's bundle whose kind is that of the page, beside the page's file."""
    (tmp_path / "backwards.py").write_text(MODULE)
    folder = bundles.make(tmp_path / "bundle")
    return bundles.change(folder, kind="backwards", mirror="right")


@pytest.fixture
def imported(bundle, monkeypatch):
    monkeypatch.syspath_prepend(bundle.parent)
    yield __import__("backwards")
    kind = layout.KINDS.pop("backwards")
    DECODERS.pop(kind)
    MODELS.pop(kind, None)
    served_kinds.SERVED.pop(kind, None)
    del sys.modules["backwards"]


def test_it_is_unknown_until_its_module_is_imported(bundle):
    with refused("unknown-bundle-kind"):
        sbkit.infer.load(bundle)


def test_it_is_loaded_as_its_base_is_and_decoded_by_its_own_decoder(bundle, imported):
    assert layout.read(bundle) == imported.BackwardsConfig.read(bundle) and layout.read(bundle).mirror == "right"
    with sbkit.infer.load(bundle, device="cpu") as model:
        assert model.transcribe(bundles.say("more")).text == "erom"


def test_its_values_are_checked(bundle, imported):
    bundles.change(bundle, mirror="")
    with refused("damaged-bundle"):
        layout.read(bundle)


class Echo(sbkit.infer.LoadedBundle):
    """Keeps what it was opened with, and takes no options of a recogniser."""

    @classmethod
    def open(cls, bundle, model="auto", device="auto", threads=None):
        made = cls(engine=None)
        made.opened = bundle, device
        return made

    def close(self):
        pass


def test_it_is_loaded_by_the_class_that_is_added_for_it(bundle, imported):
    sbkit.infer.add_kind(imported.BackwardsConfig, model=Echo)
    assert sbkit.infer.load(bundle, device="cpu", expect=Echo).opened == (bundle, "cpu")
    with refused("wrong-bundle-kind"):
        sbkit.infer.load(bundle, options=sbkit.infer.Options())
    with refused("wrong-bundle-kind"):
        sbkit.infer.load(bundle, expect=sbkit.infer.Model)


@dataclass(kw_only=True)
class Unnamed(layout.Config):
    """A configuration that forgot to name its kind, so it has that of its base class."""


@dataclass(kw_only=True)
class Forgotten(layout.Config):
    """A configuration that was never added."""

    kind = "forgotten"


def test_a_kind_needs_a_name_of_its_own():
    with refused("duplicate-bundle-kind"):
        sbkit.infer.add_kind(Unnamed)
    assert layout.KINDS["ctc"] is layout.Config


def test_a_bundle_that_nobody_could_read_is_not_written():
    values = {"sample_rate": 16_000, "hop_samples": 160, "subsampling": 4, "vocabulary": 4}
    layout.check_kind(layout.Config(**values))
    with refused("unknown-bundle-kind"):
        layout.check_kind(Forgotten(**values))


def test_a_server_decodes_it_so_too(bundle, imported):
    with serving.serving(bundle) as server:
        answer = httpx.post(f"{server.base}/audio/transcriptions", data={"model": "level"},
                            files={"file": ("a.wav", serving.wav("more"))})
    assert answer.json()["text"] == "erom"


def test_a_server_serves_it_by_a_class_that_names_it(bundle, imported):
    class ServedBackwards(served_kinds.ServedRecogniser):
        does = "recognises speech backwards"

    served_kinds.serve_kind(imported.BackwardsConfig, ServedBackwards)
    models = registry.load({"mine": bundle}, BundleOptions(device="cpu"))
    assert type(models.working("mine", served_kinds.ServedRecogniser)) is ServedBackwards
    models.close()


def test_what_nothing_is_registered_for_is_refused(bundle, imported, codec_bundle):
    with refused("unknown-bundle-kind"):
        layout.ByKind({layout.VoiceConfig: 1}).of(layout.read(bundle))
    with refused("wrong-bundle-kind"):
        registry.load({"codec": codec_bundle}, BundleOptions(device="cpu"))


def test_commands_find_it_by_the_entry_point_of_an_installed_package(bundle, tmp_path):
    made = tmp_path / "backwards-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(f"[{layout.ENTRY_POINTS}]\nbackwards = backwards\n")
    soundfile.write(tmp_path / "clip.wav", bundles.say("more"), bundles.RATE, subtype="FLOAT")
    done = subprocess.run([sys.executable, "-m", "sbkit", "transcribe", str(bundle), str(tmp_path / "clip.wav")],
                          capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
    assert done.returncode == 0 and "erom" in done.stdout, done.stderr


@dataclass(kw_only=True)
class MeterConfig(layout.GraphConfig):
    """The configuration of a model whose output is judged by a limit."""

    kind, what = "meter", "a meter"
    limit: float = layout.value(layout.Number())

    def results(self, outputs):
        return {"loud": bool(outputs["level"][1] > self.limit), "above": [np.float32(self.limit)]}


@pytest.fixture
def meter():
    sbkit.infer.add_kind(MeterConfig)
    yield
    layout.KINDS.pop("meter")


@pytest.mark.slow
@pytest.mark.usefixtures("meter")
def test_what_a_kind_says_of_tensors_is_printed_and_served(tmp_path, capsys):
    bundle = bundles.change(graph_bundles.make(tmp_path / "bundle", labels=False), kind="meter", limit=0.1)
    soundfile.write(tmp_path / "a.wav", np.full(800, 0.5, np.float32), graph_bundles.RATE, subtype="FLOAT")
    assert main(["run", str(bundle), str(tmp_path / "a.wav")]) == 0
    with serving.serving({"meter": bundle}) as server:
        answer = httpx.post(f"{server.base}/audio/outputs", data={"model": "meter"},
                            files={"file": ("a.wav", (tmp_path / "a.wav").read_bytes())}).json()
    for found in json.loads(capsys.readouterr().out), answer:
        assert found["loud"] is True and found["above"] == [0.1] and found["level"] == pytest.approx([-0.4, 0.4])
