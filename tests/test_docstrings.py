"""What is public shows how it is used: every name has a doctest, which the suite runs."""

import importlib
import importlib.util
import inspect
import pkgutil
import re

import pytest

import torchgpmc as tg
from torchgpmc.calls.density_sampling import DensityDraws
from torchgpmc.integrations.pyro import MCMC
from torchgpmc.intensity import Intensity

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
    yield tg
    for found in pkgutil.walk_packages(tg.__path__, "torchgpmc."):
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


# What users are handed.
HANDED = [tg.Posterior, tg.Prediction, tg.Start, tg.Fitted, Intensity, DensityDraws, tg.GPClassifier, tg.GPRegressor, MCMC]
NOT_ASKED = {
    "Posterior.nested_rhat": "not to be had on Python 3.10",
    "Start.white_coordinates": "for chains",
    "Start.digest": "for files",
    "Start.check": "for sample",
    "Start.latents": "for its other methods",
    "Start.height": "for its other methods",
    "Start.log_mass": "for its other methods",
    "Start.chains_began": "for posterior.info",
}


def examples(text):
    return "\n".join(line for line in (text or "").splitlines() if line.strip().startswith((">>>", "...")))


@pytest.mark.parametrize("kind", HANDED, ids=lambda kind: kind.__name__)
def test_every_method_that_users_have_is_used_in_an_example(kind):
    methods = {name: inspect.getattr_static(kind, name) for name in vars(kind) if not name.startswith("_")}
    methods = {name: getattr(value, "__func__", value) for name, value in methods.items()}
    methods = {name: value for name, value in methods.items() if callable(value) or isinstance(value, property)}
    shown = "\n".join(examples(value.__doc__) for value in (kind, *methods.values()))
    unseen = {f"{kind.__name__}.{name}" for name in methods if not re.search(rf"\.{name}\b", shown)}
    assert unseen == {name for name in NOT_ASKED if name.startswith(f"{kind.__name__}.")}


def test_what_needs_no_doctest_is_a_number():
    assert {name.rpartition(".")[2] for name, value in PUBLIC.items() if isinstance(value, (int, float))} == NUMBERS


LITERAL_OR_MATHS = re.compile(r"``.*?``|\\\||:math:`.*?`|^( *)\.\. math::[^\n]*(?:\n\1 +[^\n]*|\n *$)*", re.DOTALL | re.MULTILINE)
SUBSTITUTION = re.compile(r"(?<![\w|])\|[^\s|][^|\n]*\|(?![\w^|])")


def documented(value):
    """Docstrings of a public class or function as pages have them, its methods' too."""
    inside = vars(value).items() if inspect.isclass(value) else ()
    parts = [value, *(part for name, part in inside if not name.startswith("_"))]
    return [part.__doc__ or "" for part in parts if isinstance(part, (type, property)) or callable(part)]


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.rpartition(".")[2] not in NUMBERS])
def test_bars_around_a_word_are_maths_or_literal(name):
    """Outside of these, |e| asks reStructuredText for a substitution, and the pages are not built."""
    found = [bars for text in documented(PUBLIC[name]) for bars in SUBSTITUTION.findall(LITERAL_OR_MATHS.sub("", text))]
    assert not found, f"{name}: {found}. Write them in :math: or between double backquotes."


def test_bars_around_a_word_are_seen():
    text = "mean 1 / (b |e|), ``|f|``, \\|i\\|, :math:`|g|` and |z|^2:\n\n.. math::\n    |h|\n\nP(a | b), |x - y|"
    assert SUBSTITUTION.findall(LITERAL_OR_MATHS.sub("", text)) == ["|e|", "|x - y|"]
