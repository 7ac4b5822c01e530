"""Inventories of other projects, for links to their documentation: names and addresses.

    python docs/_ext/inventories.py

reads the inventories of the projects in docs/inventories.txt from their sites, and writes the
addresses of the names in that file anew. A build needs no network: `write` makes an inventory of
each project from the file.
"""

import urllib.request
import zlib
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "inventories.txt"


def read() -> dict[str, tuple[str, list[list[str]]]]:
    """Returns the address of each project, and its lines: name, role, page, documented name.

    The fourth is there where the project documents the object by another name, or only its module.
    """
    projects: dict[str, tuple[str, list[list[str]]]] = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            project, address = line[1:].split("] ")
            projects[project] = (address, [])
        elif line and not line.startswith("#"):
            projects[project][1].append(line.split())
    return projects


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes inventories in the format of Sphinx; returns `intersphinx_mapping`."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, (address, lines) in read().items():
        header = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        header += "# The remainder of this file is compressed using zlib.\n"
        body = "".join(f"{name} {role} 1 {page} -\n" for name, role, page, *_ in lines)
        file = folder / f"{project}.inv"
        file.write_bytes(header.encode() + zlib.compress(body.encode()))
        mapping[project] = (address, str(file))
    return mapping


def refresh() -> None:
    """Writes docs/inventories.txt with the addresses of today."""
    text = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    for project, (address, lines) in read().items():
        with urllib.request.urlopen(f"{address}objects.inv") as answer:
            content = answer.read().split(b"\n", 4)[4]
        known = {}
        for line in zlib.decompress(content).decode().splitlines():
            name, _, _, page, _ = line.split(maxsplit=4)
            known[name] = page.replace("$", name)
        text += ["", f"[{project}] {address}"]
        for name, role, _, *other in lines:
            documented = (other or [name])[0]
            if documented not in known:
                raise SystemExit(f"{address} has no {documented} any more.")
            text.append(" ".join([name, role, known[documented], *other]))
    FILE.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    refresh()
