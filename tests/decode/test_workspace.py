"""Large arrays are in files, on any system."""

import os

import numpy as np
import pytest

from sbkit.decode import workspace


@pytest.mark.parametrize("reserves", [True, False])
def test_a_large_array_is_in_a_file_also_where_none_can_be_reserved(reserves, tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "CHUNK", 4)
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    array = workspace.Workspace(tmp_path).full(10, 3, np.int32)
    array[7] = 5
    assert array.tolist() == [3] * 7 + [5] + [3] * 2
    assert not array.flags.owndata and not list(tmp_path.iterdir())
