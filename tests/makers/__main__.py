"""Programs that write files of this repository, compare versions, or look for faults.

python -m tests.makers              lists them
python -m tests.makers NAME ...     runs one; --help prints what it says about itself
"""

import argparse
import ast
import importlib
import pathlib
import sys

MAKERS = {
    path.stem: path.read_text()
    for path in sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    if "\ndef main(" in path.read_text()
}


def description(name):
    return ast.get_docstring(ast.parse(MAKERS[name])) or ""


def main(argv):
    listed = [f"  {name:<20} {description(name).splitlines()[0]}" for name in MAKERS]
    parser = argparse.ArgumentParser(
        "python -m tests.makers",
        description=__doc__,
        epilog="\n".join(listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=MAKERS, metavar="NAME")
    name = parser.parse_args(argv[:1]).name
    if name is None:
        return parser.print_help()
    if argv[1:] in (["-h"], ["--help"]) and "import argparse" not in MAKERS[name]:
        return print(description(name))
    return importlib.import_module(f"tests.makers.{name}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
