"""Pages from the jinja2 templates of the package: all text is escaped, and only a page's own script may run."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import sbkit

#: Templates are named by their path below the package; None is shown as nothing.
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(sbkit.__file__).parent), autoescape=True,
                               trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
                               finalize=lambda value: "" if value is None else value)


def render(template: str, script: str, **values: Any) -> str:
    """Fill a page, a template that extends ``base.html``, and give it the script of this folder with that name."""
    code = Path(__file__).with_name(script).read_text(encoding="utf-8")
    # Whatever a transcript contains: a browser runs nothing but what has this digest.
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = ("default-src 'none'; style-src 'unsafe-inline'; media-src data:; img-src data:; "
              f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'")
    return TEMPLATES.get_template(template).render(values, script=Markup(code), policy=policy)
