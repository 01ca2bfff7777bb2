"""What the proofs of sparse MCMC share: the Gaussian fit and the sampled posterior on one split, and their paired difference.

The Gaussian rival is the start of the chains, so both see the same inducing points, priors and data.
"""

import argparse
import copy
import json
import math
import pathlib
import time
import warnings
from typing import NamedTuple

import torch

import torchgpmc as tg

CHAINS = 4


class Scores(NamedTuple):
    """Held-out mean log densities of one split, and what they cost."""

    gaussian: float
    sampled: float
    rhat: float
    effective: float  # of the slowest hyperparameter
    fitting: float  # processor seconds
    sampling: float
    fit: dict[str, list[float]]  # hyperparameters of the Gaussian fit
    khat: float = math.nan  # of weighted draws; chains have none


def options(description, draws):
    """The arguments that every proof has; ``draws`` are all draws of all chains in the paper."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--splits", type=int, default=10, help="random halves of the data")
    parser.add_argument("--fraction", type=float, default=1.0, help=f"of {draws} draws in {CHAINS} chains")
    parser.add_argument("--first", type=int, default=0, help="split to begin with")
    parser.add_argument("--record", type=pathlib.Path, help="file of JSON lines that holds what is done, for a run in pieces")
    return parser


def remembered(record, key, make):
    """The scores under ``key`` in the file ``record``, or what ``make()`` returns, which is then added to it."""
    found = {}
    if record is not None and record.exists():
        found = dict(json.loads(line) for line in record.read_text().splitlines())
    if key in found:
        return Scores(**found[key])
    scores = make()
    if record is not None:
        with record.open("a") as file:
            print(json.dumps([key, scores._asdict()]), file=file)
    return scores


def draws_a_chain(draws, fraction):
    return max(50, math.ceil(draws * fraction / CHAINS))


def halves(count, train, seed):
    """Rows to train on, and the rest."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:train], order[train:]


def compare(model, test_x, test_y, seed, draw, *, move_points=False):
    """Scores of the Gaussian fit of ``model`` and of the posterior at its inducing points, which ``draw(start, seed)`` samples."""
    began = time.process_time()
    start = tg.initialize(model, optimize_inducing_points=move_points, progress=False)
    gaussian = float(start.predict(test_x).log_prob(test_y).mean())
    fitting = time.process_time() - began
    began = time.process_time()
    posterior = draw(start, seed)
    sampling = time.process_time() - began
    sampled = float(
        posterior.predict(test_x, num_draws=min(2000, posterior.num_chains * posterior.num_draws)).log_prob(test_y).mean()
    )
    rhat, effective = worst(posterior)
    khat = max(row.khat for row in posterior.summary().rows)
    fit = {name: value.flatten().tolist() for name, value in start.model.layout.constrain(start.theta[None]).items()}
    return Scores(gaussian, sampled, rhat, effective, fitting, sampling, fit, khat)


def by_default(start, seed):
    """The default call's draws: weighted ones until they pass their own checks, chains where they do not."""
    return tg.sample(start.model, seed=seed, progress=False)


def by_chains(draws, method, around_fit):
    """Draws by ``draws`` transitions a chain after at most 200 of warm-up, in the fit's coordinates or the method's own."""

    def draw(start, seed):
        chains = {"num_samples": draws, "warmup_steps": min(draws, 200), "num_chains": CHAINS}
        return tg.sample(start.model, method, start=start if around_fit else None, seed=seed, progress=False, **chains)

    return draw


def of_latents(draws):
    """Draws of v alone, hyperparameters staying at the fit's, in coordinates that are white under its q."""

    def draw(start, seed):
        fit = start.model
        modules = (copy.deepcopy(module).requires_grad_(False) for module in (fit.kernel, fit.likelihood))
        held = tg.initialize(
            tg.SparseGP(fit.train_x, fit.train_y, *modules, inducing_points=fit.inducing_points),
            optimize_inducing_points=False,
            progress=False,
        )
        return by_chains(draws, tg.NUTS(max_tree_depth=8), around_fit=True)(held, seed)

    return draw


def worst(posterior):
    """The largest R-hat and the smallest bulk effective size of hyperparameters; of the log density where there are none."""
    rows = posterior.summary().rows
    rows = [row for row in rows if row.name != "lp"] or rows
    return max(row.rhat for row in rows), min(row.ess_bulk for row in rows)


def paired(scores):
    """Mean Gaussian and sampled score, their mean difference and its standard error (NaN of one split)."""
    gaussian, sampled = (torch.tensor([getattr(found, name) for found in scores]) for name in ("gaussian", "sampled"))
    difference = sampled - gaussian
    error = float(difference.std() / len(difference) ** 0.5) if len(difference) > 1 else math.nan
    return float(gaussian.mean()), float(sampled.mean()), float(difference.mean()), error


def quiet():
    """Short runs are complained about in every row; R-hat and effective sizes are in the table."""
    warnings.simplefilter("ignore", tg.SamplingWarning)
    torch.set_num_threads(1)
