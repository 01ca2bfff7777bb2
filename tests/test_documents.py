"""The documents' programs run as printed (with fewer steps), and what they name exists."""

import importlib
import inspect
import pathlib
import re

import pytest
import torch

import torchgpmc as tg

ROOT = pathlib.Path(__file__).parent.parent


# Where a document's programs are shortened: these texts by those, and nothing else.
FEW = "num_samples=2, warmup_steps=2, progress=False"
SHORTER = {
    "README.md": {"sample(model, seed=0)": "sample(model, seed=0, num_samples=40, progress=False)"},
    "docs/guide.md": {
        "tg.AMIS(), num_samples=4000": "tg.AMIS(), num_samples=40, progress=False",
        "num_importance=64), num_samples=2000": f"num_importance=2), {FEW}",
        "fit(model)": "fit(model, num_starts=1, max_iterations=2)",
        "lower=0.0, num_samples=1000": "lower=0.0, num_samples=10",
        "num_points=100_000": "num_points=1000",
        "fit(model, tg.evidence.Orthant())": "fit(model, tg.evidence.Orthant(), num_starts=1, max_iterations=2)",
        "PseudoMarginal(evidence=tg.evidence.Orthant())": f"PseudoMarginal(evidence=tg.evidence.Orthant()), {FEW}",
        "tg.NUTS(), num_samples=300": f"tg.NUTS(max_tree_depth=2), {FEW}",
    },
    "docs/for/gpytorch.md": {},
    "docs/for/orthants.md": {},
    "docs/for/point-processes.md": {
        "num_samples=300, warmup_steps=200": "num_samples=2, warmup_steps=2",
        "shape=(8, 8)": "shape=(4, 4)",
    },
    "docs/for/pyro.md": {"num_samples=300, warmup_steps=200, num_chains=16": "num_samples=5, warmup_steps=3, num_chains=2"},
    "docs/for/scikit-learn.md": {"num_samples=200": "method=tg.AMIS(), num_samples=10"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
@pytest.mark.parametrize("document", SHORTER)
def test_programs_run_as_printed(document, tmp_path, monkeypatch):
    """The README's and the guide's; of a page for those who come from elsewhere the first: ``make docs`` runs all of them."""
    programs = re.findall(r"```(?:python|\{code-cell\})\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    text = "\n".join(programs[:1] if "for/" in document else programs)
    for printed, shorter in SHORTER[document].items():
        assert text.count(printed) == 1, f"{document} has no longer {printed!r}"
        text = text.replace(printed, shorter)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(text, document, "exec"), {})


def test_documents_name_what_exists():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(path.read_text() for path in pages)
    for name in set(re.findall(r"`tg\.(\w+)", text)):
        assert hasattr(tg, name), f"the documents speak of tg.{name}"
    for path in set(re.findall(r"`(\w+/[\w/]+\.py)`", text)):
        assert (ROOT / path).exists() or (ROOT / "torchgpmc" / path).exists(), f"the documents speak of {path}"


def test_every_benchmark_is_named_by_a_page():
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert not {name for name in scripts if not re.search(rf"\b{re.escape(name)}", text)}


def reaches(start, name):
    """Whether ``name``, with dots, leads from an object to another; fields that are annotated count."""
    *path, last = name.split(".")
    for part in path:
        start = getattr(start, part, None)
    return hasattr(start, last) or last in getattr(start, "__annotations__", {})


def test_cross_references_of_docstrings_name_what_exists():
    """In their module or a class of it, their room, the package or one of its public rooms; or by the whole path."""
    rooms = [tg, *(getattr(tg, name) for name in tg.__all__ if inspect.ismodule(getattr(tg, name)))]
    nowhere = []
    for path in sorted((ROOT / "torchgpmc").rglob("*.py")):
        if "botorch" in path.parts:  # an extra, which may not be installed
            continue
        references = set(re.findall(r":(?:func|class|meth|mod|attr|data):`~?([\w.]+)`", path.read_text()))
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module, room = importlib.import_module(name), importlib.import_module(name.rpartition(".")[0] or name)
        starts = [module, room, *rooms, *(part for part in vars(module).values() if inspect.isclass(part))]
        for reference in references:
            whole = reference.removeprefix("torchgpmc.") if reference.startswith("torchgpmc.") else None
            if not (reaches(tg, whole) if whole else any(reaches(start, reference) for start in starts)):
                nowhere.append(f"{name}: {reference}")
    assert not nowhere


def test_every_public_name_has_a_place_in_the_reference():
    listed = set(re.findall(r"^   (\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    in_rooms = {name for room in listed for name in getattr(getattr(tg, room, None), "__all__", ())}
    assert set(tg.__all__) <= listed | in_rooms


def test_the_changelog_speaks_of_this_version():
    assert f"## {tg.__version__}" in (ROOT / "CHANGELOG.md").read_text()
