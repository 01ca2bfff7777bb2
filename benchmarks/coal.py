"""Coal-mining disasters (Hensman et al. 2015, section 5.2): a Gaussian fit against MCMC on held-out halves, sparse against full.

    python benchmarks/coal.py --data DATA --splits 10 --fraction 1.0 --record coal.jsonl

Half of the 191 events are held out, the rest is counted in 100 bins whose right edges are inputs; M = 30 evenly spaced inducing
points, RBF kernel, lengthscale Gamma(1.1, 0.1), variance Gamma(1, 0.3). The score is the mean over bins of the log predictive
probability of the held-out counts.
"""

import functools
import time

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import CHAINS, by_chains, compare, draws_a_chain, halves, options, paired, quiet, remembered, worst
from real_data import table
from scipy.stats import wasserstein_distance

import torchgpmc as tg

DRAWS = 3000
BINS, POINTS = 100, 30


def parts(dates, window):
    """Inputs, counts, kernel and likelihood."""
    binned = tg.bin_events(dates, window, BINS)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(1.1, 0.1)), outputscale_prior=GammaPrior(1.0, 0.3))
    return binned.centres + binned.area / 2, binned.counts, kernel, tg.likelihoods.Poisson(exposure=binned.area)


def sparse(dates, window):
    x, *rest = parts(dates, window)
    return tg.SparseGP(x, *rest, inducing_points=torch.linspace(*window, POINTS, dtype=x.dtype))


def theta(posterior):
    """Name -> draws of every hyperparameter ``(chains, draws)``."""
    return {name.rsplit(".", 1)[-1]: values.flatten(1) for name, values in posterior.samples.items()}


def distances(one, other):
    """Wasserstein distance of each hyperparameter, in standard deviations of the other's."""
    pairs = zip(one.items(), other.values(), strict=True)
    return {
        name: float(wasserstein_distance(values.flatten(), against.flatten()) / against.std()) for (name, values), against in pairs
    }


def main():
    parser = options(__doc__, DRAWS)
    parser.add_argument("--full-draws", type=int, default=2000, help="a chain, of the sparse and the full model on all events")
    arguments = parser.parse_args()
    quiet()
    dates = torch.as_tensor(table(arguments.data, "coal")).view(-1, 1)
    window = (float(dates.min()), float(dates.max()))
    draws = draws_a_chain(DRAWS, arguments.fraction)
    print(f"{CHAINS} x {draws} draws a split\n")
    print("| split | Gaussian | MCMC | difference | lengthscale, variance of the fit | R-hat | effective | CPU s: fit | draws |")
    print("|---|---|---|---|---|---|---|---|---|")
    scores = []
    for split in range(arguments.first, arguments.first + arguments.splits):
        train, test = halves(len(dates), len(dates) // 2, split)
        model = sparse(dates[train], window)
        held_out = tg.bin_events(dates[test], window, BINS).counts
        key = f"coal, split {split}, {draws} draws"
        # White under Laplace's sites at every theta: that moves the lengthscale far further than the fit's coordinates do.
        draw = by_chains(draws, tg.NUTS(whitening=tg.Laplace()), around_fit=False)
        found = remembered(arguments.record, key, functools.partial(compare, model, model.train_x, held_out, split, draw))
        scores.append(found)
        (variance,), (lengthscale,) = found.fit["kernel.outputscale"], found.fit["kernel.base_kernel.lengthscale"]
        print(
            f"| {split} | {found.gaussian:.4f} | {found.sampled:.4f} | {found.sampled - found.gaussian:.4f} | "
            f"{lengthscale:.2f}, {variance:.2f} | {found.rhat:.3f} | "
            f"{found.effective:.0f} | {found.fitting:.1f} | {found.sampling:.1f} |",
            flush=True,
        )
    if scores:
        gaussian, sampled, difference, error = paired(scores)
        better = sum(found.sampled > found.gaussian for found in scores)
        print(f"\n{len(scores)} splits: Gaussian {gaussian:.4f}, MCMC {sampled:.4f},")
        print(f"difference {difference:.4f} (standard error {error:.4f}), MCMC better on {better}.")
        print("The paper: -1.229, -1.225, 0.003, always.\n")
    if arguments.full_draws:
        whole(dates, window, arguments.full_draws)


def whole(dates, window, draws):
    """The Gaussian point on all events, and the marginals of theta with and without inducing points."""
    model = sparse(dates, window)
    start = tg.initialize(model, optimize_inducing_points=False, progress=False)
    kernel = start.model.kernel
    found = f"{kernel.base_kernel.lengthscale.item():.2f}, variance {kernel.outputscale.item():.2f}"
    print(f"All events: the Gaussian fit has lengthscale {found} (the paper: 12.06, 0.55).\n")
    settings = {"num_samples": draws, "warmup_steps": 200, "num_chains": CHAINS, "progress": False}
    runs = {}
    print("| model | effective draws | R-hat | CPU s |")
    print("|---|---|---|---|")
    for name, model in (
        ("sparse", start.model),
        ("full", tg.GP(*parts(dates, window))),
    ):
        began = time.process_time()
        posterior = tg.sample(model, tg.NUTS(whitening=tg.Laplace()), seed=len(runs), **settings)
        rhat, effective = worst(posterior)
        print(f"| {name} | {effective:.0f} | {rhat:.3f} | {time.process_time() - began:.1f} |", flush=True)
        runs[name] = theta(posterior)
    half = CHAINS // 2
    show("sparse against full", runs["sparse"], runs["full"])
    for name, draws in runs.items():  # what chance alone makes of half the draws
        show(f"two halves of the {name} chains", {k: v[:half] for k, v in draws.items()}, {k: v[half:] for k, v in draws.items()})


def show(label, one, other):
    print(
        f"\nWasserstein distance in sd, {label}: " + ", ".join(f"{key} {value:.3f}" for key, value in distances(one, other).items())
    )


if __name__ == "__main__":
    main()
