"""The rules that keep the tree readable: who imports whom, and what a scheme must have."""

import ast
import dataclasses
import pathlib
import re
import sys

import pytest

import posenc_jax as pe

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "posenc_jax"
FAMILIES = ("additive", "rotary", "bias", "relative")
VOCABULARY = {"num_heads", "head_dim", "model_dim", "max_length"}
BASIS = {"checks", "positions", "mask", "angles", "rules", "grids", "random_positions"}
SHARED = BASIS | {"scheme"}
FLAX = {"attend", "cache", "checks", "mask", "positions", "scheme", "stock", "additive.none"}


def imports(path):
    """Modules of this package that a file imports, without the package's name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("posenc_jax"):
            names.add(node.module.removeprefix("posenc_jax").removeprefix("."))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("posenc_jax."):
                    names.add(alias.name.removeprefix("posenc_jax."))
    return names


def modules(folder):
    return sorted(p for p in (PACKAGE / folder).glob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize(
    "path", [PACKAGE / f"{name}.py" for name in sorted(BASIS)], ids=lambda p: p.stem
)
def test_the_basis_imports_the_basis(path):
    assert imports(path) <= BASIS


def test_scheme_imports_the_basis():
    assert imports(PACKAGE / "scheme.py") <= BASIS


@pytest.mark.parametrize("path", [p for f in FAMILIES for p in modules(f)], ids=lambda p: p.stem)
def test_a_scheme_file_imports_the_basis_and_its_family(path):
    family = path.parent.name
    assert {n for n in imports(path) if not n.startswith(f"{family}.")} <= SHARED


@pytest.mark.parametrize("path", modules("engine"), ids=lambda p: p.stem)
def test_the_engine_knows_no_scheme_and_no_other_implementation(path):
    # The reference is the definition: others may apply it to a part.
    allowed = SHARED | {"engine.problem", "engine.tiling", "engine.reference"}
    # An implementation may be split into files that begin with its name.
    own = path.stem.split("_")[0]
    found = {n for n in imports(path) if not n.startswith(f"engine.{own}")}
    assert found <= allowed


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_flax_modules_know_no_scheme_by_name(name):
    assert imports(PACKAGE / f"{name}.py") <= FLAX


def test_the_functions_work_without_flax():
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in ("nnx", "linen"):
            assert "flax" not in path.read_text().replace("Flax", ""), path


def test_experiments_use_public_names_only():
    public = {"", "nnx", "linen", "positions"}
    for path in (ROOT / "experiments").rglob("*.py"):
        assert imports(path) <= public, path


def test_every_scheme_is_complete():
    readme = (ROOT / "README.md").read_text()
    for name, cls in pe.SCHEMES.items():
        module = sys.modules[cls.__module__]
        family, file = cls.__module__.split(".")[1:]
        assert family in FAMILIES
        assert getattr(pe, cls.__name__) is cls
        link = re.search(r"https://arxiv.org/abs/[\d.]+\d", module.__doc__)
        assert link, f"{file} cites no paper"
        row = next((r for r in readme.splitlines() if r.startswith(f"| `{name}` |")), None)
        assert row, f"README has no row for {name}"
        assert f"`{cls.__name__}`" in row
        assert ROOT.joinpath("tests", family, f"test_{file}.py").exists()


def test_the_readme_table_says_what_the_schemes_do():
    import jax
    from support import build

    readme = (ROOT / "README.md").read_text()
    for name, cls in pe.SCHEMES.items():
        scheme = build(cls)
        row = next(r for r in readme.splitlines() if r.startswith(f"| `{name}` |"))
        acts, learned, relative = (cell.strip() for cell in row.split("|")[3:6])
        assert acts == (", ".join(scheme.acts_on) or "nothing")
        assert learned == ("yes" if jax.tree.leaves(scheme.init(jax.random.key(0))) else "no")
        assert relative == ("yes" if scheme.relative else "no")


def test_required_settings_are_sizes_of_the_model():
    for cls in pe.SCHEMES.values():
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING:
                assert field.name in VOCABULARY, f"{cls.__name__}.{field.name}"


def test_files_stay_short():
    for folder in ("posenc_jax", "experiments", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            most = 150 if path.parent.name in FAMILIES and folder == "posenc_jax" else 400
            assert lines <= most, f"{path} has {lines} lines"


def test_every_scheme_class_is_final():
    for cls in pe.SCHEMES.values():
        assert cls.__bases__ == (pe.Scheme,)
