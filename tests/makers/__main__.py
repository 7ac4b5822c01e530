"""Programs that write files of this repository, compare versions, or look for faults.

python -m tests.makers              lists them
python -m tests.makers NAME ...     runs one; --help prints what it says about itself
"""

import ast
import importlib
import pathlib
import sys

MAKERS = {
    path.stem: ast.get_docstring(ast.parse(text)) or ""
    for path in sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    if "\ndef main(" in (text := path.read_text())
}


def main(argv):
    if not argv or argv[0] not in MAKERS:
        print(__doc__, *(f"  {n:<20} {doc.splitlines()[0]}" for n, doc in MAKERS.items()), sep="\n")
        return int(bool(argv) and not argv[0].startswith("-"))
    name, *arguments = argv
    if {"-h", "--help"} & {*arguments}:
        return print(MAKERS[name])
    return importlib.import_module(f"tests.makers.{name}").main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
