"""``sbkit serve``: serve bundles through an OpenAI-style API, a live WebSocket and a web page."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from sbkit.commands.options import (
    above,
    add_model,
    add_search,
    add_vad,
    not_negative,
    request_of,
    require_language_model,
)
from sbkit.serve.limits import DRAIN_SECONDS, GRACE_SECONDS, Limits


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", metavar="BUNDLE", nargs="+",
                        help="BUNDLE, named after its folder, or NAME=BUNDLE; several are served side by side")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--corrections", type=Path, metavar="FOLDER",
                        help="keep recordings there whose words people correct on the page, as a corpus for training; "
                             "whoever can use this server can add to it (default: nothing is kept)")
    add_model(parser)
    parser.add_argument("--batch-seconds", type=above, metavar="S",
                        help="seconds of audio in one batch, padding included")
    parser.add_argument("--chunk-seconds", type=above, metavar="S",
                        help="longest piece of audio that a model gets at once")
    parser.add_argument("--no-batching", dest="batching", action="store_false", help="run each recording by itself")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE",
                        help="file of API keys, one per line (for a single key: SBKIT_API_KEY in the environment)")
    parser.add_argument("--allow-origin", dest="allow_origins", action="append", default=[], metavar="URL",
                        help="origin of a web page that may use this server (repeatable; * for all)")
    parser.add_argument("--allow-host", dest="allow_hosts", action="append", default=[], metavar="NAME",
                        help="a host name that requests may use besides localhost, 127.0.0.1 and [::1] (repeatable; "
                             "default: only those if --host is this machine only; otherwise, with an API key any, "
                             "without one also addresses, this machine's names and names without a dot)")
    parser.add_argument("--trust-proxy", dest="trust_proxies", action="append", default=[], metavar="ADDRESS",
                        help="a proxy whose X-Forwarded-For is trusted (repeatable). Without it, all clients of a "
                             "proxy on another machine have one address, see --client-share")
    parser.add_argument("--drain-seconds", type=not_negative, default=DRAIN_SECONDS, metavar="S",
                        help="time after SIGTERM in which requests are still accepted, while /ready answers 503 so "
                             f"that they are sent elsewhere; a second signal ends it ({DRAIN_SECONDS:g}; 0: none)")
    parser.add_argument("--grace-seconds", type=above, default=GRACE_SECONDS, metavar="S",
                        help=f"time after that to finish requests in flight ({GRACE_SECONDS:g})")
    for limit in dataclasses.fields(Limits):
        parser.add_argument(f"--{limit.name.replace('_', '-')}", type=type(limit.default), default=argparse.SUPPRESS,
                            metavar="S" if "seconds" in limit.name else "N",
                            help=f"{limit.metadata['help']} ({limit.default:g})")
    add_vad(parser)
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    require_language_model(args.lm)
    from sbkit.decode.search_options import SearchRequest
    from sbkit.serve.server import ServeRequest, serve

    search = request_of(SearchRequest, args).search
    return serve(request_of(ServeRequest, args, search=search, limits=request_of(Limits, args)))
