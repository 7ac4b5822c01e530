"""The table of schemes agrees with their classes."""

import pytest

import posenc_jax as pe
from experiments.__main__ import main
from experiments.commands.scheme_table import COLUMNS, row
from tests.support import KINDS, slow


@pytest.mark.parametrize("names", [KINDS, pytest.param(pe.SCHEMES, marks=slow)], ids=len)
def test_every_scheme_has_a_row(names, capsys, monkeypatch):
    monkeypatch.setattr(pe, "SCHEMES", {name: pe.SCHEMES[name] for name in names})
    assert main(["schemes"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 + len(pe.SCHEMES)
    assert {line.count(" | ") for line in lines} == {len(COLUMNS) - 1}


def test_row_has_acts_parameters_and_implementations():
    said = dict(zip(COLUMNS, row("t5"), strict=True))
    assert said["acts on"] == "logits" and said["learned"] == "128"
    assert said["runs on"] == "reference, dense, xla, jax" and said["cached"] == "k, v"
    assert dict(zip(COLUMNS, row("fox"), strict=True))["runs on"] == "reference, dense, xla"
    assert dict(zip(COLUMNS, row("sinusoidal"), strict=True))["runs on"] == "any"
