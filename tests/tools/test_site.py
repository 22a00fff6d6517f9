"""docs/ is built into a site, with every page in its navigation and no link that leads nowhere."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tools import site_links

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation():
    listed = [entry for group in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
              for entry in ([group] if isinstance(group, str) else next(iter(group.values())))]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize(("given", "address", "expected"), [
    ("[results](../../recipes/R.md#speed)", "https://x.org/s", "[results](https://x.org/s/blob/main/recipes/R.md#speed)"),
    ("[results](../../recipes/R.md#speed)", None, "results"),
    ("[data](data.md#silence)", None, "[data](data.md#silence)"),
    ("[there](https://x.org)", None, "[there](https://x.org)"), ("[above](#speed)", None, "[above](#speed)"),
    ("[keys](../reference/keys.md)", "https://x.org/s/", "[keys](../reference/keys.md)"),
])
def test_a_link_to_a_file_outside_of_the_docs_leads_to_the_repository(given, address, expected):
    page, config = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/train.md")), SimpleNamespace(repo_url=address)
    assert site_links.on_page_markdown(given, page, config, None) == expected


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="it needs pip install '.[docs]'")
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path):
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path], cwd=ROOT,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    places = {"tutorials/demo/", "how-to/data/#silence", "reference/keys/#corpus", "reference/commands/#evaluate"}
    assert places <= {entry["location"] for entry in index["docs"]}
