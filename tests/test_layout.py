"""The rules of the tree: imports between files, the parts of a scheme, names in the design."""

import ast
import functools
import pathlib
import re

import posenc_jax as pe
from tests.makers import scheme_pages
from tests.makers.scheme_pages import FAMILIES
from tests.mutations import MUTATIONS

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "posenc_jax"
IMPORT = re.compile(r"^ *(?:from posenc_jax\.?([\w.]*) import|import posenc_jax\.([\w.]+))", re.M)


def imports(path):
    """Modules of this package that a file imports, without the package's name; docstrings too."""
    return {before or after for before, after in IMPORT.findall(path.read_text())}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def graph():
    """Imports by module; workers that only collect these tests read nothing."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    return {name: imports(path) - {name} for name, path in files.items()}


def test_imports_have_no_cycles():
    done, stack = set(), []

    def visit(name):
        assert name not in stack, " -> ".join([*stack[stack.index(name) :], name])
        if name in done or not name:
            return
        stack.append(name)
        for other in sorted(graph().get(name, ())):
            visit(other)
        stack.pop()
        done.add(name)

    for name in graph():
        visit(name)


def test_the_kernels_have_one_door():
    """Nothing imports them but the implementations that they are for, in their functions."""
    doors = {"engine.pallas", "engine.splash"}
    for name, modules in graph().items():
        if not name.startswith("kernels") and [n for n in modules if n.startswith("kernels")]:
            assert name in doors, name
    for name in doors:
        tree = ast.parse((PACKAGE / f"{name.replace('.', '/')}.py").read_text())
        modules = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert not [n for n in modules if n.startswith("posenc_jax.kernels")], name


def test_flax_modules_import_no_scheme_but_none():
    modules = {n for name in graph() if name.startswith("modules.") for n in graph()[name]}
    families = {n for n in modules if {*n.split(".")[:2]} & {*FAMILIES}}
    assert families == {"schemes.additive.none"}


def test_flax_in_modules_only():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "modules" and path.name not in ("nnx.py", "linen.py", "__main__.py"):
            assert "flax" not in path.read_text().replace("Flax", ""), path


def test_experiments_and_examples_use_public_names_only():
    public = {"", "nnx", "linen", "positions", "sharding"}
    for path in [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        # `make gpu` checks the kernels first.
        also = {"kernels.checks.runner"} if path.name.startswith("accelerator") else set()
        assert imports(path) <= public | also, path


def test_every_scheme_is_complete():
    lines = []
    for cls in scheme_pages.scheme_classes():
        if missing := scheme_pages.missing(cls):
            lines += [f"{cls.__name__} is not complete; CONTRIBUTING.md, Adding a scheme:"]
            lines += [f"  {line}" for line in missing]
    assert not lines, "\n".join(lines)


def test_the_tables_of_schemes_follow_the_code():
    text = scheme_pages.PAGE.read_text()
    assert scheme_pages.with_tables(text) == text, (
        "run python -m tests.makers scheme_pages --tables"
    )


def test_classes_are_abstract_or_final():
    for cls in pe.SCHEMES.values():
        subclasses = [c for c in cls.__subclasses__() if c.__module__.startswith("posenc_jax.")]
        assert not subclasses, cls


DESIGN = ROOT / "docs" / "design.md"


def design():
    return DESIGN.read_text()


def test_imports_follow_the_layers_of_the_design():
    """Files import from their own row of the picture and from rows below it."""
    picture = re.search(r"## Layers.*?```\n(.*?)```", design(), re.DOTALL)[1]
    rows = {
        name: i
        for i, line in enumerate(picture.splitlines())
        for name in re.findall(r"[\w/]+(?:\.py|/)", line)
    }

    def row(module):
        path = pathlib.PurePath(*module.split("."))
        names = [f"{path}.py", *(f"{folder}/" for folder in (path, *path.parents))]
        return next((rows[name] for name in names if name in rows), None)

    for name, modules in graph().items():
        if name not in ("", "engine"):
            assert row(name) is not None, f"{name} is in no layer"
            for other in modules - {""}:
                assert row(name) <= row(other), f"{name} imports {other}"


def test_paths_in_the_design_exist():
    text = re.sub(r"\]\([^)]*\)", "]", design()).replace("\\", "")
    for path in re.findall(r"(?<![\w./-])[\w./-]+(?:\.py|\w/)(?![\w/])", text):
        in_package = any(PACKAGE.rglob(path.rstrip("/")))
        assert in_package or ROOT.joinpath(path).exists(), path


def test_quick_tests_exist():
    """pytest runs none of tests/quick.txt if one is missing."""
    for line in ROOT.joinpath("tests", "quick.txt").read_text().splitlines():
        path, *name = line.split("[")[0].split("::")
        defined = {
            n.name for n in ast.parse(ROOT.joinpath(path).read_text()).body if hasattr(n, "name")
        }
        assert set(name) <= defined, line


def test_each_mutation_has_its_place():
    """A fault that no longer applies shows nothing."""
    texts = {x.path: (ROOT / x.path).read_text() for x in MUTATIONS}
    lost = [x.name for x in MUTATIONS if texts[x.path].count(x.old) != 1]
    assert not lost
    files = {test.split("::")[0] for x in MUTATIONS for test in x.tests.split()}
    assert all((ROOT / file).exists() for file in files)
