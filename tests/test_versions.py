"""The floors of ``setup.cfg`` are those that are tested, in ``constraints/oldest.txt``."""

import configparser
import pathlib

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = pathlib.Path(__file__).parent.parent


def requirements(*extras):
    """What Python 3.10, the oldest, installs, by name; the floor of each."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lists = [settings["options"]["install_requires"], *(settings["options.extras_require"][extra] for extra in extras)]
    wanted = [Requirement(line) for text in lists for line in text.split("\n") if line]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"python_version": "3.10"})]
    return {each.name: next(Version(part.version) for part in each.specifier if part.operator == ">=") for each in wanted}


def pins(name):
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints" / name).read_text().splitlines())
    return {line.split("==")[0]: Version(line.split("==")[1]) for line in lines if line}


def test_the_floors_are_the_oldest_versions_tested():
    tested, floors = pins("oldest.txt"), requirements("arviz", "plots", "dev")
    assert {name: floors[name] for name in tested} == tested
    assert set(requirements("arviz", "plots")) <= set(tested)
