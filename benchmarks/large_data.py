"""Large data: AMIS on a sparse model beside gpytorch's SVI, on the same split, with the same kernel and priors.

    python benchmarks/large_data.py --record FOLDER --tasks regression classification

Friedman's function of five of eight uniform inputs, scaled to a variance of about one: 20000 rows with normal noise, or 5000 with
probit labels; 5000 more to test. RBF kernel with a lengthscale a column; M = 200 inducing points by k-means. ``SVI``: gpytorch's
``ApproximateGP`` with a full Cholesky factor, Adam, minibatches, double precision; once with those inducing points, once with
learnt ones, at which AMIS then runs too. ``fit`` is ``tg.initialize`` at k-means' points, a Gaussian q(v) at one theta:
how much sampling improves on it. ``truth`` is the density that made the data. Every row is a process of its own; processor
seconds, and how much memory grew to at its peak. Each leaves its numbers in the folder; the table is of all that are there.
"""

import argparse
import json
import math
import multiprocessing
import pathlib
import resource
import time

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from gpytorch.means import ZeroMean
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP
from gpytorch.priors import GammaPrior
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from held_out import quiet, worst

import torchgpmc as tg

ROWS = {"regression": 20_000, "classification": 5_000}
TESTS, COLUMNS, POINTS = 5_000, 8, 200
NOISE, STEEPNESS = 0.2, 2.0  # deviation of the noise; what f is multiplied with before the probit
BATCH, RATE = 1024, 0.01  # of SVI
EFFECTIVE = 400  # draws


def friedman(x):
    """Friedman's first function (1991), whose mean and deviation over the unit cube are about 14.4 and 4.9."""
    a, b, c, d, e, *_ = x.unbind(-1)
    return ((10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e) - 14.4) / 4.9


def problem(task):
    """Inputs and targets of training rows and of test rows, and the log density of the latter under what made them."""
    generator = torch.Generator().manual_seed(0)
    rows = ROWS[task]
    x = torch.rand(rows + TESTS, COLUMNS, generator=generator, dtype=torch.float64)
    f, noise = friedman(x), torch.randn(rows + TESTS, generator=generator, dtype=torch.float64)
    if task == "regression":
        y = f + NOISE * noise
        density = torch.distributions.Normal(f, NOISE).log_prob(y)
    else:
        y = (STEEPNESS * f + noise > 0).double()
        density = torch.special.log_ndtr((2 * y - 1) * STEEPNESS * f)
    return x[:rows], y[:rows], x[rows:], y[rows:], density[rows:]


def kernel_and_likelihood(task):
    base = RBFKernel(ard_num_dims=COLUMNS, lengthscale_prior=GammaPrior(2.0, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.5)).double()
    if task == "regression":
        return kernel, GaussianLikelihood(noise_prior=GammaPrior(1.1, 1.0)).double()
    return kernel, BernoulliLikelihood()


class SVGP(ApproximateGP):
    def __init__(self, kernel, points, moves):
        distribution = CholeskyVariationalDistribution(len(points))
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=moves))
        self.mean_module, self.covar_module = ZeroMean(), kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def svi(task, steps, points, moves):
    x, y, test_x, test_y, _ = problem(task)
    kernel, likelihood = kernel_and_likelihood(task)
    model = SVGP(kernel, points.clone(), moves).double()
    bound = VariationalELBO(likelihood, model, num_data=len(x))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=RATE)
    generator, values = torch.Generator().manual_seed(0), []
    while len(values) < steps:
        for rows in torch.randperm(len(x), generator=generator).split(BATCH)[: steps - len(values)]:
            optimiser.zero_grad()
            loss = -bound(model(x[rows]), y[rows])
            loss.backward()
            optimiser.step()
            values.append(-float(loss.detach()))
    model.eval()
    with torch.no_grad():
        scores = likelihood.log_marginal(test_y, model(test_x))
    tenth = steps // 10
    late, before = (sum(values[-end - tenth : len(values) - end]) / tenth for end in (0, tenth))
    found = model.variational_strategy.inducing_points.tolist()
    return {"scores": scores.tolist(), "points": found, "about": f"{steps} steps; rose by {len(x) * (late - before):.1f} nats"}


def sparse_model(task, points):
    x, y, test_x, test_y, _ = problem(task)
    return tg.SparseGP(x, y, *kernel_and_likelihood(task), inducing_points=points), test_x, test_y


def fit(task, points):
    model, test_x, test_y = sparse_model(task, points)
    start = tg.initialize(model, optimize_inducing_points=False, progress=False)
    about = "converged" if start.converged else "not converged"
    return {"scores": start.predict(test_x).log_prob(test_y).tolist(), "about": about}


def sampled(task, points):
    model, test_x, test_y = sparse_model(task, points)
    posterior = tg.sample(model, tg.AMIS(effective_size=EFFECTIVE), num_samples=10 * EFFECTIVE, seed=0, progress=False)
    effective = worst(posterior)[1]
    about = f"{effective:.0f} effective of {posterior.num_draws}; {posterior.verdict().split(':')[0].lower()}"
    began = time.process_time()
    scores = posterior.predict(test_x, num_draws=400).log_prob(test_y).tolist()
    return {"scores": scores, "about": about, "predicting": time.process_time() - began}


def truth(task):
    return {"scores": problem(task)[-1].tolist(), "about": ""}


def kmeans(task):
    return tg.kmeans_inducing_points(problem(task)[0], POINTS)


PARTS = {
    "truth": lambda task, options: truth(task),
    "SVI": lambda task, options: svi(task, options.steps, kmeans(task), moves=False),
    "fit": lambda task, options: fit(task, kmeans(task)),
    "AMIS": lambda task, options: sampled(task, kmeans(task)),
    "SVI, learnt points": lambda task, options: svi(task, options.steps, kmeans(task), moves=True),
    "AMIS, learnt points": lambda task, options: sampled(task, learnt(task, options)),
}


def learnt(task, options):
    return torch.tensor(json.loads(path_of(task, "SVI, learnt points", options).read_text())["points"], dtype=torch.float64)


def path_of(task, part, options):
    return options.record / f"{task}_{part.replace(', ', '_').replace(' ', '_')}.json"


def measured(task, part, options):
    """What a part found, its seconds and memory in MiB; in a process of its own."""
    quiet()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = PARTS[part](task, options)
    seconds = time.process_time() - began - found.get("predicting", 0.0)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    path_of(task, part, options).write_text(json.dumps({**found, "seconds": seconds, "memory": memory}))


def report(task, options):
    found = {part: json.loads(path.read_text()) for part in PARTS if (path := path_of(task, part, options)).exists()}
    scores = {part: torch.tensor(run["scores"], dtype=torch.float64) for part, run in found.items()}
    print(f"\n{task}, {ROWS[task]} rows\n")
    print("| | held-out log density | above SVI (standard error) | CPU s | memory, MiB | |")
    print("|---|---|---|---|---|---|")
    for part, run in found.items():
        above = ""
        if "SVI" in scores and part != "SVI":
            difference = scores[part] - scores["SVI"]
            above = f"{float(difference.mean()):.4f} ({float(difference.std()) / TESTS**0.5:.4f})"
        spent = "" if part == "truth" else f"{run['seconds']:.0f} | {run['memory']:.0f}"
        print(f"| {part} | {float(scores[part].mean()):.4f} | {above} | {spent or ' | '} | {run['about']} |")
    if {"fit", "AMIS"} <= scores.keys():
        difference = scores["AMIS"] - scores["fit"]
        error = float(difference.std()) / TESTS**0.5
        print(f"\nThe draws' log density is above their Gaussian fit's by {float(difference.mean()):.5f} ({error:.5f}).")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=pathlib.Path, required=True, help="folder of what is done")
    parser.add_argument("--tasks", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, default=2000, help="of SVI")
    options = parser.parse_args()
    options.record.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        for part in options.parts:
            if not path_of(task, part, options).exists():
                child = multiprocessing.get_context("spawn").Process(target=measured, args=(task, part, options))
                child.start()
                child.join()
        report(task, options)


if __name__ == "__main__":
    main()
