"""Bundles that many tests read and none changes."""

import bundles
import pytest
import toy_codec
import voices


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """A recogniser for recordings and streams, in ONNX and in torch."""
    return bundles.make(tmp_path_factory.mktemp("recogniser") / "bundle", torch_too=True, streams=True)


@pytest.fixture(scope="session")
def codec_bundle(tmp_path_factory):
    return toy_codec.make(tmp_path_factory.mktemp("codec") / "bundle")


@pytest.fixture(scope="session")
def voice_bundle(tmp_path_factory):
    """A voice in ONNX and in torch."""
    return voices.make(tmp_path_factory.mktemp("voice") / "bundle", torch_too=True)
