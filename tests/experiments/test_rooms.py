"""The rooms of experiments import only rooms below them."""

import pathlib
import re

ROOMS = (
    "errors",
    "stats",
    "settings",
    "claims",
    "models",
    "tasks",
    "training",
    "runs",
    "pages",
    "released",
)
ROOMS += ("bench", "gallery", "study", "scoreboard", "lengths", "commands")
FOLDER = pathlib.Path(__file__).parents[2] / "experiments"


def test_imports_run_downward():
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == {*ROOMS} - {
        "errors",
        "stats",
        "claims",
    }
    for path in FOLDER.rglob("*.py"):
        room = path.relative_to(FOLDER).with_suffix("").parts[0]
        for imported in re.findall(r"(?m)^\s*from experiments\.(\w+)", path.read_text()):
            allowed = ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else ROOMS
            assert imported in allowed, f"{path.name} imports {imported}"
