"""Engines of models whose evidence is exact: regressions, and inducing values with Gaussian noise."""

from __future__ import annotations

from torchgpmc.approximations import Conjugate
from torchgpmc.calls.candidate import Candidate, some_use
from torchgpmc.calls.chain_engines import CHAINS_MAY_TAKE_LONG, budget_of_chains, chains
from torchgpmc.calls.emulated_engines import emulated, emulated_twice
from torchgpmc.calls.weighted_engines import AGAIN, LEARNING, MANY_HYPERPARAMETERS, SHORT_TAILS, weighted
from torchgpmc.methods import AMIS, NUTS, EmulatedHMC
from torchgpmc.models import GPModel
from torchgpmc.runs.beginnings import AtModes

_MOST_FOR_WEIGHTS = 40  # hyperparameters
# Of the draws wanted, what weights must head for by 4000 where an emulator can go on, which takes as long as 2500 draws.
_HEADING = 1.25
# The exact evidence's gradient is products and one factorisation of large matrices; what is beside them costs as much as elsewhere.
_OPERATIONS_A_SECOND = 2e10


def of_regression(model: GPModel, wanted: int) -> list[Candidate]:
    """Weighted draws of theta, then chains of theta alone."""
    size = model.layout.size
    if size <= MANY_HYPERPARAMETERS:
        exact = "the evidence is exact and the hyperparameters are few: weighted draws, no warm-up."
        none = "should weights not do, chains of the hyperparameters need none."
        careful = NUTS(max_tree_depth=8, target_accept_prob=0.9)
        # Of 35 data with a period one seed of two found all of its lobes; chains then moved in one of them for minutes.
        return [*(weighted(model, AMIS(), why, wanted) for why in (exact, AGAIN)), _of_theta(model, careful, none, 150)]
    # From nothing, warm-up of 32 hyperparameters took all that chains may; from weighted draws worth ten it is short.
    many = f"{size} hyperparameters may be more than importance weights survive, but chains can begin at such draws."
    at_draws = _of_theta(model, NUTS(max_tree_depth=8), many, 60)._replace(goes_on=True)
    if size > _MOST_FOR_WEIGHTS:
        few = "weighted draws for chains to begin at, seldom even enough for more."
        first = weighted(model, AMIS(degrees_of_freedom=SHORT_TAILS), few, wanted).with_limits(patience=LEARNING)
        return [first._replace(only_begins=True), at_draws]
    # Weights of more look even where they miss an arm, a hundredth of the mass along one lengthscale.
    far = "the evidence is exact: weighted draws, no warm-up, some from far along each hyperparameter that has mass there."
    method = AMIS(degrees_of_freedom=SHORT_TAILS, begin=AtModes(search_tails=True))
    if model.operations < CHAINS_MAY_TAKE_LONG:
        return [*(weighted(model, method, why, wanted) for why in (far, AGAIN)), at_draws]
    # Of large matrices a step on an emulator costs a tenth of one by the evidence: 500 x 19 and 500 x 11, of next to no noise,
    # took 205 CPU seconds by weights, twice, then chains, and take a third with it.
    near = "what weights found teaches an emulator of the evidence, which is exact, and chains on that need no gradients."
    learned = emulated(model, EmulatedHMC(scaled_to_draws=True), near, wanted)._replace(goes_on=True, given=some_use)
    return [weighted(model, method, far, wanted).with_limits(heading=_HEADING), *emulated_twice(learned), at_draws]


def _of_theta(model: GPModel, method: NUTS, why: str, warmup_steps: int) -> Candidate:
    """Chains of theta alone."""
    if model.collapses:
        alone = NUTS(marginal=Conjugate(), from_mode=True, max_tree_depth=8, target_accept_prob=0.9)
        # The curvature at the mode is the mass matrix, so that warm-up has a step size to find and no more.
        found = chains(model, alone, why, 50)
    else:
        found = chains(model, method, why, warmup_steps)
    return found.with_limits(budget=budget_of_chains(model, operations_a_second=_OPERATIONS_A_SECOND))
