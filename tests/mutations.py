"""Faults that the tests must find: python tests/mutations.py [NAME ...] [--list] [--jobs 2].

Each mutation is one small wrong change: a wrong sign, an off-by-one in a bound, a dropped mask, a
wrong layout, a lost gradient, a stale cache row. It is applied to a copy of the working tree, and
the tests named beside it run there until the first failure: a mutation is caught if one fails.
With --all the whole suite runs where they pass. The exit status is 1 if a mutation survives.
CONTRIBUTING.md says when to run it.

The files of tests/mutations/ have the mutations, each under the file that it changes:

    [["posenc_jax/angles.py"]]
    name = "..."
    old = "..."  # Occurs once in the file, and is replaced by `new`.
    new = "..."
    tests = "..."  # Arguments of pytest.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Replaces `old` by `new`, once, in a file."""

    path: str
    name: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(path, **entry)
    for file in sorted((ROOT / "tests" / "mutations").glob("*.toml"))
    for path, entries in tomllib.loads(file.read_text()).items()
    for entry in entries
]


def copy_of_tree(folder):
    """Copies what git tracks, and what it does not ignore, to a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run(folder, tests):
    """Returns the first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0", *tests]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode in (0, 5):  # 5: none was selected.
        return None
    lines = (result.stdout + result.stderr).splitlines()
    if missing := [x for x in lines if x.startswith("ERROR: not found")]:
        return f"not applied: {missing[0]}"
    if result.returncode not in (1, 2):  # Nothing ran: an environment without JAX catches nothing.
        return f"not applied: pytest returned {result.returncode}: {lines[-1]}"
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else lines[-1]


def attempt(folder, mutation, everything):
    """Returns how a mutation ended: the test that caught it, or None."""
    path = folder / mutation.path
    source = path.read_text()
    if source.count(mutation.old) != 1:
        return f"not applied: {source.count(mutation.old)} places"
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        tests = mutation.tests.split()
        if not all((folder / test.split("::")[0]).exists() for test in tests):
            return f"not applied: {mutation.tests} are not all there"
        return run(folder, tests) or (run(folder, []) if everything else None)
    finally:
        path.write_text(source)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names")
    parser.add_argument("--all", action="store_true", help="the whole suite, where others pass")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        m for m in MUTATIONS if not arguments.names or any(n in m.name for n in arguments.names)
    ]
    if arguments.list:
        return print(*(f"{m.path}: {m.name}" for m in chosen), sep="\n")
    with tempfile.TemporaryDirectory() as top:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build/compiled"))
        folders = [pathlib.Path(top, str(i)) for i in range(arguments.jobs)]
        for folder in folders:
            copy_of_tree(folder)
        survivors = []

        def work(mutation):
            folder, start = folders.pop(), time.monotonic()
            try:
                outcome = attempt(folder, mutation, arguments.all)
            finally:
                folders.append(folder)
            print(
                f"{time.monotonic() - start:4.0f} s  {mutation.name}: {outcome or 'SURVIVES'}",
                flush=True,
            )
            if outcome is None or outcome.startswith("not applied"):
                survivors.append(mutation.name)

        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(work, chosen))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations are caught.")
    for name in survivors:
        print(f"  not caught: {name}")
    return sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
