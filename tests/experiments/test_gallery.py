"""The gallery has the numbers of the schemes."""

import numpy as np
from PIL import Image

import posenc_jax as pe
from experiments.__main__ import main
from experiments.gallery.probe import GRID, LENGTH, frequency_maps, probe, probe_map


def test_picture_of_a_bias_equals_the_bias():
    measured = probe("alibi")
    slopes = np.asarray(pe.alibi_slopes(8))
    np.testing.assert_allclose(measured.heads, -slopes[:, None] * np.arange(LENGTH), atol=1e-3)
    assert np.isnan(measured.picture[3, 4])
    np.testing.assert_allclose(measured.picture[5, 3], -2 * slopes.mean(), atol=1e-4)


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


def test_the_gallery_is_a_sheet_and_pictures(tmp_path):
    for folder in ("a", "b"):
        assert main(["gallery", "--schemes", "rope,PI", "--out", str(tmp_path / folder)]) == 0
    files = {path.relative_to(tmp_path / "a"): path for path in (tmp_path / "a").rglob("*.png")}
    pictures = {"gallery.png", "gallery/rope.png", "gallery/PI.png"}
    assert {str(path) for path in files} == pictures
    for path, file in files.items():
        assert file.read_bytes() == (tmp_path / "b" / path).read_bytes()
    with Image.open(tmp_path / "a" / "gallery.png") as image:
        assert image.text["Schemes"] == "rope, PI"


def test_errors_are_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["gallery", "--schemes", "PI", "--out", str(tmp_path / "file")]) == 2
    assert "gallery.png: cannot be written" in capsys.readouterr().err
    assert main(["gallery", "--schemes", "ropes", "--out", str(tmp_path / "new")]) == 2
    assert "did you mean 'rope'" in capsys.readouterr().err and not (tmp_path / "new").exists()
