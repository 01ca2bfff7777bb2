"""Every engine that takes a model, with settings that cost a fraction of a second on twelve data."""

from typing import Any, NamedTuple

import torchgpmc as tg
from torchgpmc.evidence import Orthant, SmoothProbit


class Engine(NamedTuple):
    """A method and how long it runs; weighted methods know no chains."""

    method: Any
    num_samples: int
    warmup_steps: int | None = None
    num_chains: int | None = None


def weighted(method, num_samples=1000):
    return Engine(method, num_samples)


def chains(method, num_samples=40, warmup_steps=60):
    """Many short chains: at this size a step of forty costs about what a step of one does."""
    return Engine(method, num_samples, warmup_steps, 40)


IMPORTANCE = {
    "AMIS": weighted(tg.AMIS()),
    "AMIS, logarithms": weighted(tg.AMIS(normal_scale=False)),
    "AMIS, diagonal": weighted(tg.AMIS(diagonal=True)),
    "MAMIS": weighted(tg.MAMIS()),
}
ONE_LATENT = {
    "AMIS, EP": weighted(tg.AMIS(approximation=tg.EP())),
    "NUTS, white under EP's sites": chains(tg.NUTS(whitening=tg.EP(), max_tree_depth=6)),
    "pseudo-marginal, EP": chains(tg.PseudoMarginal(approximation=tg.EP(), num_importance=4)),
}
SCREENED = {"AMIS, screened": weighted(tg.AMIS(screen=tg.Screen(candidates=3)))}
PROBIT = {
    "orthant integrals": weighted(tg.OrthantGPC(num_points=16)),
    "AMIS, white noise out": weighted(tg.AMIS(evidence=SmoothProbit())),
    "pseudo-marginal, orthant integrals": chains(tg.PseudoMarginal(evidence=Orthant(num_points=16))),
}
PSEUDO_MARGINAL = {
    "pseudo-marginal": chains(tg.PseudoMarginal(), 120, 80),
    "pseudo-marginal, correlated": chains(tg.PseudoMarginal(num_importance=4, correlation=0.9), 120, 80),
    "pseudo-marginal, delayed": chains(tg.PseudoMarginal(delayed_acceptance=True), 120, 80),
    "pseudo-marginal, independent proposals": chains(tg.PseudoMarginal(independent_share=0.9), 300, 80),
    "pseudo-marginal, latent moves": chains(tg.PseudoMarginal(num_importance=4, latent_steps=1), 120, 80),
    "pseudo-marginal slice": chains(tg.PseudoMarginalSlice(num_importance=4), 20, 20),
    "NUTS on Laplace's marginal, weighted": chains(tg.NUTS(marginal=tg.Laplace(), importance_weights=16, max_tree_depth=5), 25, 40),
}
GRADIENT = {"NUTS": chains(tg.NUTS(max_tree_depth=5)), "HMC": chains(tg.HMC(num_steps=16), 40, 100)}
OTHER_CHAINS = {"adaptive Metropolis": chains(tg.AdaptiveMH(thinning=20), 40, 600), "slice": chains(tg.Slice(), 12, 12)}
# Up to half a minute each: for the long attack.
SLOW = (
    *("AMIS, EP", "NUTS, white under EP's sites", "pseudo-marginal, EP", "HMC"),
    *(
        "NUTS, white under Laplace's sites",
        "pseudo-marginal slice",
        "pseudo-marginal, latent moves",
        "NUTS on Laplace's marginal, weighted",
    ),
)
WHITE = {"NUTS, white under Laplace's sites": chains(tg.NUTS(whitening=tg.Laplace(), max_tree_depth=6))}


def engines_for(problem):
    """Name to engine, of all that take the model."""
    found = dict(GRADIENT)
    if problem.num_hyperparameters == 0:
        if problem.kind is tg.GPRegression:
            return {}
        found = {"NUTS": GRADIENT["NUTS"], "elliptical slice": chains(tg.EllipticalSlice(), 100)}
        return found | (
            {"exact orthant draws": weighted(tg.OrthantGPC())}
            if problem.likelihood.name == "probit" and problem.kind is tg.GP
            else {}
        )
    found |= OTHER_CHAINS
    if problem.kind is tg.SparseGP and problem.likelihood.name == "laplace":  # expectations of a kink, by adaptive quadrature
        return {"HMC": GRADIENT["HMC"]}
    if problem.kind is tg.SparseGP:
        return found | (WHITE if problem.likelihood.num_latents == 1 else {})
    if problem.likelihood.name == "laplace":  # Newton's method takes all its steps about a kink: a minute a run
        return found | ONE_LATENT
    found |= IMPORTANCE
    if problem.kind is tg.GPRegression:
        return found
    found |= PSEUDO_MARGINAL
    if problem.likelihood.num_latents == 1:
        found |= WHITE | ONE_LATENT | SCREENED
    return found | (PROBIT if problem.likelihood.name == "probit" else {})
