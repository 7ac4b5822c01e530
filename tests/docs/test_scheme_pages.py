"""The head of the page of each scheme and frequency map: its layer runs, its scores are results."""

import csv
import re
import sys

import jax
import pytest

import posenc_jax as pe
from experiments.gallery.probe import frequency_maps
from tests.docs.pages import ROOT
from tests.support import is_contrib, slow_but

sys.path.append(str(ROOT / "docs" / "_ext"))
import scheme_use

CLASSES = [*pe.SCHEMES.values(), *frequency_maps()]


def test_every_scheme_and_map_says_when_to_take_it():
    assert {cls.__name__ for cls in CLASSES} == set(scheme_use.WHEN)


@pytest.mark.parametrize(
    "cls", slow_but(CLASSES, *(c for c in CLASSES if not is_contrib(c))), ids=lambda c: c.__name__
)
def test_the_layer_of_the_page_runs(cls):
    names, code = {}, scheme_use.example(cls)

    def run():
        exec(code, names)
        return names["y"]

    assert jax.eval_shape(run).shape == (2, 16, 64)
    assert f"{cls.__name__}(" in repr(names["position"])
    assert max(map(len, code.splitlines())) <= 97  # The column at 1400 pixels.


def test_scores_are_those_of_the_tables():
    tables = {}
    for name in ("study", "study_catalogue"):
        with (ROOT / "docs" / f"{name}.csv").open() as lines:
            tables[name] = {row["scheme"]: row for row in csv.DictReader(lines)}
    study, screen = tables.values()
    rope = study["rope"]["nonoverlapping 128"], study["rope"]["nonoverlapping 1024"]
    for cls, row, columns in (
        (pe.T5, study["t5"], ("nonoverlapping 128", "nonoverlapping 1024")),
        (pe.contrib.ShortConv, screen["rope+short_conv"], ("128", "1024")),
    ):
        expected = [row[c] for c in columns] + [*rope]
        assert re.findall(r"\d\.\d{3}", scheme_use.score(cls)) == expected
    ntk = re.findall(r"\d\.\d+", scheme_use.score(pe.NTK))
    assert ntk == [study["rope"]["ntk 1024"], rope[1]]
    assert "not in the" in scheme_use.score(pe.MRoPE)
