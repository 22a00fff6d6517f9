"""``sbkit show RECIPE.yaml [--key value ...]``: print the resolved recipe, with where each value comes from."""

from __future__ import annotations

from sbkit.system.environment import check_torch

HELP = (
    "Print the resolved recipe, with where each value comes from.\n"
    "Behind each is a comment: its file and line, the command line, or that it is the default of the task."
)
OPTIONS: tuple[str, ...] = ()


def run(argv: list[str]) -> int:
    check_torch()
    from sbkit.recipe import arguments, load, writing
    from sbkit.recipe.names import declared

    request = arguments.parse(argv)
    root = load.resolved(request.path, request.overrides)
    for node in root.walk():
        keys = node.value if isinstance(node.value, dict) else ()
        node.comments = {key: ([], f"# {node.origin_of(key)[0]}") for key in keys}
    print(writing.text(root), end="")
    for name, known in declared(root).items():
        if name not in root.value and not known.needed:
            print(f"{name}: {writing.scalar(known.default) if known.default != () else '[]'}    # default")
    return 0
