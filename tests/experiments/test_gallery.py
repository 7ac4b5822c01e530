"""The gallery has the numbers of the schemes, and its page is self-contained."""

import numpy as np
import pytest
from support import slow

import posenc_jax as pe
from experiments.__main__ import main
from experiments.gallery.probe import GRID, LENGTH, frequency_maps, probe, probe_map


def test_picture_of_a_bias_equals_the_bias():
    measured = probe("alibi")
    slopes = np.asarray(pe.alibi_slopes(8))
    np.testing.assert_allclose(measured.heads, -slopes[:, None] * np.arange(LENGTH), atol=1e-3)
    assert np.isnan(measured.picture[3, 4])
    np.testing.assert_allclose(measured.picture[5, 3], -2 * slopes.mean(), atol=1e-4)
    np.testing.assert_allclose(measured.decay.sum(1), 1.0)


def test_picture_of_none_is_zero():
    assert np.abs(probe("none").heads).max() < 1e-5


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


def test_schemes_with_several_axes_have_an_image():
    image = probe("mrope").image
    assert image.shape == (GRID, GRID) and abs(image[GRID // 2, GRID // 2]) < 1e-6
    np.testing.assert_allclose(image, image[::-1, ::-1], atol=1e-3)


def test_wavelengths_with_and_without_a_frequency_map():
    plain, scaled = probe_map(pe.PI).wavelengths
    np.testing.assert_allclose(scaled, 8 * plain, rtol=1e-6)
    assert pe.YaRN in frequency_maps()


def test_gallery_is_self_contained(tmp_path, capsys):
    arguments = ["gallery", "--schemes", "rope,PI", "--out", str(tmp_path)]
    pictures = tmp_path / "pictures"
    arguments += ["--sheet", str(tmp_path / "sheet.png"), "--pictures", str(pictures)]
    assert main(arguments) == 0
    page = (tmp_path / "gallery.html").read_text()
    assert page.count("<svg") == 4
    assert "https://arxiv.org/abs/2104.09864" in page and "w_p = theta^(-2p / d)" in page
    assert 'src="' not in page and "@import" not in page
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert {x.name for x in pictures.iterdir()} == {"rope.png", "rope-distance.png", "PI.png"}


def test_unwritable_sheet_is_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ["gallery", "--schemes", "PI", "--out", str(tmp_path)]
    assert main([*arguments, "--sheet", str(tmp_path / "file" / "sheet.png")]) == 2
    assert "sheet.png: cannot be written" in capsys.readouterr().err


def test_unknown_scheme_is_one_line(capsys, tmp_path):
    assert main(["gallery", "--schemes", "ropes", "--out", str(tmp_path / "new")]) == 2
    assert "rope" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["rope", pytest.param("t5", marks=slow)])
def test_gallery_is_reproducible(name, tmp_path):
    for folder in ("a", "b"):
        main(["gallery", "--schemes", name, "--out", str(tmp_path / folder)])
    assert (tmp_path / "a/gallery.html").read_bytes() == (tmp_path / "b/gallery.html").read_bytes()
