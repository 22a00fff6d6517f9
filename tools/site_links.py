"""A hook of mkdocs.yml: links from docs/ to files outside of it lead to the repository, or are text without one."""

from __future__ import annotations

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # mkdocs' own, which may not be here
    """Rewrite a page's links to files that the site doesn't have."""
    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        if "://" in link[2] or not link[2] or target.startswith("docs/"):
            return link[0]
        address = config.repo_url
        return f"[{link[1]}]({address.rstrip('/')}/blob/main/{target}{link[3]})" if address else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#\s]*)((?:#[^)\s]*)?)\)", rewritten, markdown)
