"""``sbkit serve``: bundles behind an OpenAI-shaped API, a live WebSocket and a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import above, add_search, count
from sbkit.serve.limits import Limits

#: What each of the limits of ``sbkit serve`` bounds (``sbkit.serve.limits``).
LIMITS = {
    "max-upload-mb": "megabytes of one request", "max-audio-seconds": "of one recording, decoded",
    "max-requests": "in the house at once; the next one gets a 429", "max-active": "of those, worked on at once",
    "max-live": "live sessions at once",
    "client-share": "of the places for requests, and for live sessions, that one address may have; this machine's "
                    "own address has no share, nor has who comes through a proxy there",
    "max-connections": "open at once, if ulimit -n allows it; one that asks for nothing gives way to a new one",
    "max-disk-mb": "that uploads and decoded audio may take of the temporary folder, and never more than half of "
                   "what is free there; the next one gets a 503",
    "min-upload-kbs": "kilobytes a second that an upload has to come in at",
    "upload-grace-seconds": "before that is looked at",
    "request-seconds": "for one request, upload and all",
    "decoders": "processes that decode audio", "decode-seconds": "of processor time to decode one recording",
    "idle-seconds": "that a live session may send nothing",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("bundles", metavar="BUNDLE", nargs="+",
                        help="BUNDLE, called as its folder, or NAME=BUNDLE; several are served side by side")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="auto", help="onnx, int8 (on a CPU) or torch "
                        "(default: the first that is there)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=count, help="of each model on the CPU (default: all it may use)")
    parser.add_argument("--batch-seconds", type=above, metavar="S", help="audio in one batch, padding counted")
    parser.add_argument("--chunk-seconds", type=above, metavar="S", help="longest that a model hears at once")
    parser.add_argument("--no-batching", dest="batching", action="store_false", help="run each signal alone")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE",
                        help="keys, one a line (one alone: SBKIT_API_KEY in the environment)")
    parser.add_argument("--allow-origin", dest="allow_origins", action="append", default=[], metavar="URL",
                        help="a web page elsewhere that may use this server (again for more; * for all)")
    parser.add_argument("--allow-host", dest="allow_hosts", action="append", default=[], metavar="NAME",
                        help="a name that this server answers to (again for more). On this machine's own address it "
                             "answers to localhost, 127.0.0.1 and [::1] alone; on others to every name unless this is "
                             "given")
    parser.add_argument("--trust-proxy", dest="trust_proxies", action="append", default=[], metavar="ADDRESS",
                        help="a proxy whose X-Forwarded-For says who asks (again for more). Without it nobody's does: "
                             "all who come through a proxy on another machine share one address, see --client-share")
    parser.add_argument("--grace-seconds", type=above, default=30.0, metavar="S",
                        help="in all, for what is in flight at SIGTERM (30)")
    for name, what in LIMITS.items():
        usual = getattr(Limits, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(usual), default=argparse.SUPPRESS,
                            metavar="S" if "seconds" in name else "N", help=f"{what} ({usual:g})")
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    from sbkit.decode.search_options import search
    from sbkit.serve.server import ServeRequest, serve

    given = vars(args)
    limits = Limits(**{name: given[name] for name in Limits.__dataclass_fields__ if name in given})
    found = search(args.lm, args.lm_weight, args.word_score, args.beam, args.hot_words)
    taken = {name: given[name] for name in ServeRequest.__dataclass_fields__ if name in given}
    return serve(ServeRequest(**taken, search=found, limits=limits))
