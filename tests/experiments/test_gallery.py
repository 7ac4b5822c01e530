"""The gallery, docs/drawn.md and the explorer have the numbers of the library."""

import io
import json
import pathlib
import random
import re

import numpy as np
import pytest
from PIL import Image

import posenc_jax as pe
from experiments.__main__ import main
from experiments.gallery import explorer
from experiments.gallery.drawn import digest, draw
from experiments.gallery.page import STRIP, strip
from experiments.gallery.probe import GRID, LENGTH, Probe, frequency_maps, probe, probe_map
from tests.experiments.one_line import refusal
from tests.support import slow

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "drawn.md").read_text()
BLOCK = r"(?ms)^```python\n(.*?)^```$"


def words(text):
    return " ".join(text.split())


def test_pictures_are_those_of_the_code():
    """Otherwise run python -m experiments drawn, and look at them."""
    pictures = {path.stem: path.read_text() for path in (DOCS / "drawn").iterdir()}
    assert {name: re.search(r"<!-- (\w+) -->", svg)[1] for name, svg in pictures.items()} == digest(
        PAGE
    )
    assert len(pictures) == 8
    assert all("prefers-color-scheme: dark" in svg for svg in pictures.values())


@slow
def test_the_page_draws_its_arrays():
    _, imports, *sections = re.split("(?m)^(?=## |```python\nimport)", PAGE)
    pictures = draw(imports + "".join(sections[4:7]))
    assert list(pictures) == ["wavelengths", "scaling", "padding"]
    assert "YaRN" in pictures["scaling"] and "positions in the cache" in pictures["padding"]
    assert digest(PAGE)["padding"] not in pictures["padding"]  # The page has other code before it.


def test_numbers_of_the_text():
    def slowest(dim, theta):
        return 2 * np.pi / pe.rope_frequencies(dim, theta)[0][-1]

    text = words(PAGE)
    assert round(slowest(64, 1e4), -3) == 47e3 and "to 47 thousand" in text
    assert round(slowest(128, 1e4), -3) == 54e3 and "54 thousand with theta = 1e4" in text
    assert round(slowest(128, 5e5), -5) == 2.6e6 and "2.6 million with 5e5" in text
    assert "6.3 tokens for a turn" in text and "0.1 ln 8 + 1" in text
    assert pe.rope_frequencies(8, scaling=pe.YaRN(8.0, 4096))[1] == 0.1 * np.log(8) + 1


def test_the_explorer_requests_nothing():
    requests = r"<(?:link (?!rel=.icon. href=.data:)|img |script )|@import|url\(|fetch\("
    page = explorer.render()
    assert not re.search(requests, page) and 'href="index.html"' in page


@pytest.mark.parametrize("scaling", [pe.PI, pe.NTK, pe.YaRN, pe.Llama3, pe.LongRoPE])
def test_the_explorer_has_the_frequencies_of_the_library(scaling):
    """With the formulas of its script."""
    data = json.loads(re.search(r"const DATA = (.*);\n", explorer.render())[1])
    draws = random.Random(scaling.__name__)
    for _ in range(20):
        i, j, n = (draws.randrange(len(data[k])) for k in ("thetas", "lengths", "factors"))
        theta, length, factor = data["thetas"][i], data["lengths"][j], data["factors"][n]
        plain, scale = np.array(data["frequencies"][i]), 1.0
        if scaling is pe.LongRoPE:
            theta, change = 1e4, explorer.LONGROPE
            scaled, scale = data["longrope"], data["scale"]["longrope"]
        elif scaling is pe.NTK:
            change, scaled = pe.NTK(factor), plain * factor ** -np.array(data["slope"])
        else:
            change = pe.PI(factor) if scaling is pe.PI else scaling(factor, length)
            keep = np.zeros(64)
            if scaling is not pe.PI:
                keep = np.array(data["keep"][scaling.__name__.lower()][i][j])
            scaled = plain * (keep + (1 - keep) / factor)
            scale = data["scale"]["yarn"][n] if scaling is pe.YaRN else 1.0
        frequencies, attention_factor = pe.rope_frequencies(128, theta, change)
        np.testing.assert_allclose(scaled, frequencies, rtol=1e-9)
        np.testing.assert_allclose(scale, attention_factor, rtol=1e-12)


def test_the_strip_has_its_schemes():
    """Otherwise run python -m experiments drawn."""
    with Image.open(DOCS / "strip.png") as image:
        assert image.size == (2400, 390) and image.text["Schemes"] == ", ".join(STRIP)
    probes = [Probe(name, "", picture=np.eye(4)) for name in STRIP]
    with Image.open(io.BytesIO(strip(probes))) as image:
        assert image.size == (2400, 390) and image.text["Schemes"] == ", ".join(STRIP)


def test_picture_of_a_bias_equals_the_bias():
    measured = probe("alibi")
    slopes = np.asarray(pe.alibi_slopes(8))
    np.testing.assert_allclose(measured.heads, -slopes[:, None] * np.arange(LENGTH), atol=1e-3)
    assert np.isnan(measured.picture[3, 4])
    np.testing.assert_allclose(measured.picture[5, 3], -2 * slopes.mean(), atol=1e-4)


@slow
def test_schemes_that_need_content_have_keys_that_differ():
    """A matching key has the logit 4, others have -4: the median of a row."""
    factor = 0.43 * np.log(np.arange(20, LENGTH) + 1)
    expected = np.zeros((LENGTH - 20, 16))
    expected[:, 8] = 8 * (factor - 1)
    measured = probe("ssmax")
    assert measured.marked and measured.heads is None
    np.testing.assert_allclose(measured.picture[20:, :16], expected, atol=1e-3)
    picture = probe("partial_key_offset").picture[20:, :16]  # Half of a key is the one before.
    assert (picture[:, 8] < -3).all()
    np.testing.assert_allclose(picture[:, 8], -picture[:, 9], atol=1e-3)


def test_embedding_schemes_show_table_and_similarity():
    measured = probe("sinusoidal")
    table = pe.sinusoidal_encoding(np.arange(LENGTH), 512)
    np.testing.assert_allclose(measured.encoding, table, atol=1e-6)
    np.testing.assert_allclose(measured.heads[0, 0], 1.0, rtol=1e-5)


@slow
def test_schemes_with_several_axes_have_an_image():
    image = probe("mrope").image
    assert image.shape == (GRID, GRID) and abs(image[GRID // 2, GRID // 2]) < 1e-6
    np.testing.assert_allclose(image, image[::-1, ::-1], atol=1e-3)


def test_wavelengths_with_and_without_a_frequency_map():
    plain, scaled = probe_map(pe.PI).wavelengths
    np.testing.assert_allclose(scaled, 8 * plain, rtol=1e-6)
    assert pe.YaRN in frequency_maps()


@slow
def test_the_gallery_is_a_sheet_and_pictures(tmp_path):
    assert main(["gallery", "--schemes", "rope,PI", "--out", str(tmp_path)]) == 0
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")}
    assert files == {"gallery.png", "gallery/rope.png", "gallery/PI.png"}
    with Image.open(tmp_path / "gallery.png") as image:
        assert image.text["Schemes"] == "rope, PI"


def test_errors_are_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["gallery", "--schemes", "PI", "--out", str(tmp_path / "file")]) == 2
    assert "gallery.png: cannot be written" in capsys.readouterr().err
    assert "did you mean 'rope'" in refusal(capsys, "gallery", "--schemes", "ropes")
