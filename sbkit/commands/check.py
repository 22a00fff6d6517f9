"""``sbkit check RECIPE.yaml [--key value ...]``: report everything wrong with a recipe, what it costs and what fits in
memory."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from functools import partial
from pathlib import Path

from sbkit.commands.options import price
from sbkit.errors import SbkitError
from sbkit.system import disk
from sbkit.system.environment import check_torch

HELP = (
    "--json prints it for programs, --measure times a few steps.\n"
    "--as 8xH100 rehearses the whole run on fake GPUs;\n"
    "--html FILE writes its report as a page.\n--price 2.5 predicts hours, energy and cost of the whole run, at this "
    "price of a device per hour.\n--no-run imports only speechbrain, torch and sbkit, builds and calls nothing,\n"
    "and lists what it could not check."
)
FLAGS = ("json", "measure", "no-run")
OPTIONS = (*FLAGS, "as", "html", "price")


def run(argv: list[str]) -> int:
    gc.disable()  # what is imported and built stays until the end, and searching it for cycles is slow
    try:
        return _check(argv)
    finally:
        gc.enable()


def _check(argv: list[str]) -> int:
    check_torch()
    from sbkit.recipe import arguments
    from sbkit.recipe.check import check

    given, argv = arguments.command_options(argv, "see sbkit check --help", FLAGS, as_=str, html=Path, price=price)
    if given.price is not None and given.no_run:
        raise SbkitError("--price needs the model, which --no-run doesn't build", hint="drop one of them")
    if given.measure and given.no_run:
        raise SbkitError("--measure runs steps of the recipe, which --no-run doesn't", hint="drop one of them")
    if given.as_ is not None:
        if given.measure or given.no_run:
            raise SbkitError("--as rehearses the whole run, so it can't be used with "
                             f"{'--measure' if given.measure else '--no-run'}", hint="drop one of them")
        return _rehearse(argv, given)
    if given.html is not None:
        raise SbkitError("--html writes the report of a rehearsal", hint="add --as CARDS, such as --as 8xH100")
    request = arguments.parse(argv, importable=not given.no_run)
    measure = None
    if given.measure:
        from sbkit.train.memory import trials

        measure = partial(trials.measure, request, planned=given.price is not None)
    pricing = None
    if given.price is not None:
        from sbkit.recipe.price import PriceRequest
        from sbkit.rehearsal.cards import CARDS

        pricing = PriceRequest(given.price, watts={card.name: card.watts for card in CARDS.values()})
    report = check(request.path, request.overrides, run_opts=request.run_opts, run=not given.no_run, measure=measure,
                   pricing=pricing)
    if given.json:
        print(report.json())
    else:
        ignored = {"unknown-override", "no-value"} & {each.code for each in report.errors}  # tables would mislead
        facts = "" if ignored else report.facts()
        if facts:
            print(facts, flush=True)
        if report.problems():
            print(f"{chr(10) if facts else ''}{report.problems()}", file=sys.stderr, flush=True)
        print(f"\n{report.verdict()}", file=sys.stderr if report.errors else sys.stdout)
    return 1 if report.errors else 0


def _rehearse(argv: list[str], given: argparse.Namespace) -> int:
    from sbkit.recipe import arguments
    from sbkit.recipe.load import check_overrides
    from sbkit.rehearsal.cards import parse_cards
    from sbkit.rehearsal.report import assemble, page, write_html
    from sbkit.rehearsal.run import rehearse

    count, card = parse_cards(given.as_)
    html: Path | None = given.html
    if html is not None:
        disk.check_writable(html, "--html")
    request = arguments.parse([*argv, "--device", "cuda"])
    if not given.json:  # JSON has these errors among its findings
        check_overrides(request.path, request.overrides)
    sections, notes = {}, []
    if given.price is not None:  # first: a corpus that isn't prepared is told now, not after the rehearsal
        from sbkit.recipe.check import check
        from sbkit.recipe.price import PriceRequest

        pricing = PriceRequest(given.price, count, card.name, {card.name: card.watts})
        priced = check(request.path, request.overrides, run_opts=request.run_opts, pricing=pricing)
        sections = {name: each for name, each in priced.sections.items() if name == "price"}
        notes = [note for note in priced.notes if note.startswith("the price")]
        for note in notes:
            print(f"not checked: {note}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    report = assemble(str(request.path), rehearse(argv, count, card), count, card, time.perf_counter() - started)
    report.sections |= sections
    report.notes += notes
    print(report.json() if given.json else page(report))
    if html is not None:
        try:
            write_html(report, html)
        except OSError as error:
            raise disk.unwritable(html, "--html", error) from error
    return 1 if report.errors else 0
