"""Checks a wheel as users get it: python -m tests.makers dist_check WHEEL PYTHON.

PYTHON is an environment with the wheel and its extra `flax` alone. The Python blocks of the
description run there, except those after a comment `<!-- not run ... -->`. The last line is the
number of relative links and pictures of the description as PyPI renders it.
"""

import email
import os
import pathlib
import re
import subprocess
import tempfile
import zipfile

from readme_renderer import markdown

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"(?ms)^(<!-- not run[^>]*-->\n+)?^( *)```python\n(.*?)^ *```$")


def main(argv):
    wheel, python = argv
    with zipfile.ZipFile(wheel) as files:
        size = pathlib.Path(wheel).stat().st_size
        print(f"{wheel}: {len(files.namelist())} files, {size / 1e3:.0f} kB")
        (metadata,) = (n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(files.read(metadata))
        description = message.get_payload(decode=True).decode()
    blocks = [
        re.sub(f"(?m)^{indent}", "", code)
        for not_run, indent, code in BLOCK.findall(description)
        if not not_run
    ]
    with tempfile.TemporaryDirectory() as folder:  # Outside of the repository.
        script = pathlib.Path(folder, "readme.py")
        script.write_text("\n".join(blocks))
        subprocess.run(
            [pathlib.Path(python).absolute(), script],
            check=True,
            cwd=folder,
            env={"JAX_PLATFORMS": "cpu"} | os.environ,
        )
    print(f"{len(blocks)} blocks of the description ran with the wheel alone")
    page = markdown.render(description)
    links = re.findall(r'<a [^>]*href="([^"]*)', page)
    pictures = re.findall(r'<img [^>]*src="([^"]*)', page)
    for picture in pictures:
        if "/posenc_jax/v" in picture and not (ROOT / picture.split("/", 6)[-1]).exists():
            raise SystemExit(f"{picture} is no file of the repository")
    print(f"{len(links)} links and {len(pictures)} pictures; relative ones:")
    # The renderer gives headings links to themselves.
    relative = [x for x in links + pictures if not re.match("https:|mailto:|#", x)]
    print(*relative, len(relative), sep="\n")
    return 1 if relative else 0
