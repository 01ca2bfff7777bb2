"""The README's program runs as printed (with fewer steps), and the documents name only what exists."""

import pathlib
import re

import pytest

import torchgpmc as tg

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
def test_the_readme_program_runs(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = program.replace("num_samples=500, warmup_steps=300", "num_samples=15, warmup_steps=15, progress=False")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(program, "README.md", "exec"), names)
    assert names["prediction"].probs.shape == (190,)


def test_documents_name_what_exists():
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    for name in set(re.findall(r"`tg\.(\w+)", text)):
        assert hasattr(tg, name), f"the documents speak of tg.{name}"
    for path in set(re.findall(r"`((?:benchmarks|tests|torchgpmc)/[\w/]+\.py)`", text)):
        assert (ROOT / path).exists(), f"the documents speak of {path}"


def test_every_public_name_has_a_place_in_the_reference():
    listed = set(re.findall(r"^   (\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    in_rooms = {name for room in listed for name in getattr(getattr(tg, room, None), "__all__", ())}
    assert set(tg.__all__) <= listed | in_rooms


def test_the_changelog_speaks_of_this_version():
    assert f"## {tg.__version__}" in (ROOT / "CHANGELOG.md").read_text()
