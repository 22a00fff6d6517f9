"""Servers that many tests of a file share."""

import bundles
import pytest
import serving


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    return bundles.make(tmp_path_factory.mktemp("serve") / "level")


@pytest.fixture(scope="module")
def server(bundle):
    with serving.serving(bundle, names=("level", "whisper-1")) as server:
        yield server
