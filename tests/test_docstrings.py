"""What is public shows how it is used: every name has a doctest, which the suite runs."""

import importlib
import importlib.util
import inspect
import pkgutil

import pytest

import torchgpmc

# Numbers have no docstring; the comment beside each says where it comes from.
NUMBERS = {
    "ENOUGH_ESS",
    "LATENTS_KEPT",
    "MAX_ESTIMATE_VARIANCE",
    "MAX_FAILED_SHARE",
    "MAX_HEAT",
    "MAX_LATENT_RHAT",
    "MAX_NOISE_OF_RUNS",
    "MAX_RHAT",
    "MAX_RUN_ERRORS",
    "MIN_EFFICIENCY",
    "MIN_ESS_PER_CHAIN",
}
WITHOUT_BOTORCH = importlib.util.find_spec("botorch") is None  # an extra


def modules():
    yield torchgpmc
    for found in pkgutil.walk_packages(torchgpmc.__path__, "torchgpmc."):
        if not (WITHOUT_BOTORCH and "botorch" in found.name):
            yield importlib.import_module(found.name)


def is_own(value, module):
    """Whether a function or class was written in this module."""
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__


def public_names():
    """Those in any ``__all__``, and of public rooms without one (``scores``) all that have no underscore."""
    found = {}
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not inspect.ismodule(value):
                found[f"{module.__name__}.{name}"] = value
            elif not hasattr(value, "__all__"):
                inside = ((inner, part) for inner, part in vars(value).items() if is_own(part, value))
                found |= {f"{value.__name__}.{inner}": part for inner, part in inside if not inner.startswith("_")}
    return found


PUBLIC = public_names()


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.rpartition(".")[2] not in NUMBERS])
def test_every_public_name_has_a_doctest(name):
    assert ">>>" in (PUBLIC[name].__doc__ or ""), f"{name} has no doctest. Expected its smallest real use, with what that gives."


def test_what_needs_no_doctest_is_a_number():
    assert {name.rpartition(".")[2] for name, value in PUBLIC.items() if isinstance(value, (int, float))} == NUMBERS
