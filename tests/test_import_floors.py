"""A module imports only from floors below its own, read from the syntax tree; and files stay readable."""

import ast
import pathlib

import pytest

import torchgpmc

ROOT = pathlib.Path(torchgpmc.__file__).parent
FLOORS = [
    {"types", "checks", "arrays", "trees", "versions", "overriding"},
    {"numerics"},
    {"density", "scores", "intensity", "point_process", "fitted", "kept_rows", "priors"},
    {"diagnostics", "likelihoods", "kernels"},
    {"adapter", "samplers", "importance", "orthant"},
    {"parameters"},
    {"models"},
    {"prediction", "storage"},
    {"posterior", "approximations"},
    {"evidence", "variational"},
    {"runs"},
    {"methods"},
    {"calls"},
    {"plots", "distributed"},
    {"integrations"},
    {"__init__"},
]


def floor_of(unit):
    return next(number for number, floor in enumerate(FLOORS) if unit in floor)


def units():
    return sorted(path for path in ROOT.rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torchgpmc":
            parts = node.module.split(".")[1:]
            yield from [parts[0]] if parts else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torchgpmc."))
            assert "torchgpmc" not in {alias.name for alias in node.names}, f"{path} imports the package itself"


@pytest.mark.parametrize("path", units(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_come_from_lower_floors(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for unit in imports(path):
        if unit != own:  # files of one folder may use one another
            assert floor_of(unit) < floor_of(own), f"{own} (floor {floor_of(own)}) imports {unit} (floor {floor_of(unit)})"


def test_every_unit_has_a_floor():
    found = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in units()}
    assert found == set().union(*FLOORS)


@pytest.mark.parametrize("path", units(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_under_400_lines(path):
    assert len(path.read_text().splitlines()) < 400


def test_no_two_files_share_a_name():
    names = [path.stem for path in units() if path.stem != "__init__"]
    assert sorted(names) == sorted(set(names))


def test_no_two_public_classes_share_a_name():
    """But for those of other packages' kinds, which bear the names that their own users know."""
    classes = [
        node.name
        for path in units()
        if "integrations" not in path.parts
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(classes) == sorted(set(classes))
