"""Image segmentation (Hensman et al. 2015, section 5.1): a Gaussian fit against MCMC, by inducing points and their placement.

    python benchmarks/image.py --data DATA --splits 10 --points 5 10 20 50 100 --kernels isotropic ARD --record image.jsonl

1000 training and 1019 test rows of a permutation (67 are left out, as in the paper), standardised on the training rows; Bernoulli
likelihood with a probit link; lengthscales and variance Gamma(1.1, 1). The score is the mean log predictive probability of a test
label. Isotropic kernels are sampled by the default call, which goes on to chains where weighted draws do not pass their checks
(column "weighted": splits of which they do; their worst k-hat), ARD ones by chains around the fit (worst R-hat); "effective" is the
least of any split's slowest hyperparameter. With ``--latents-alone`` hyperparameters stay at the fit's and chains move v alone
(R-hat and effective size are the log density's): what the free form of v does, without averages over theta.
"""

import functools
import math

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import CHAINS, by_chains, by_default, compare, draws_a_chain, halves, of_latents, options, paired, quiet, remembered
from real_data import table

import torchgpmc as tg

DRAWS = 3000
TRAIN, TEST = 1000, 1019


def sparse(x, y, points, ard):
    base = RBFKernel(ard_num_dims=x.shape[1] if ard else None, lengthscale_prior=GammaPrior(1.1, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.1, 1.0))
    return tg.SparseGP(x, y, kernel, tg.likelihoods.Bernoulli(), inducing_points=tg.kmeans_inducing_points(x, points))


def split_of(data, seed):
    """Standardised inputs and labels, of training and of test rows."""
    train, rest = halves(len(data), TRAIN, seed)
    test = rest[:TEST]
    x, y = data[:, :-1], data[:, -1]
    mean, deviation = x[train].mean(0), x[train].std(0)
    return (x[train] - mean) / deviation, y[train], (x[test] - mean) / deviation, y[test]


def main():
    parser = options(__doc__, DRAWS)
    parser.add_argument("--points", type=int, nargs="+", default=[5, 10, 20, 50, 100])
    parser.add_argument("--kernels", nargs="+", choices=["isotropic", "ARD"], default=["isotropic", "ARD"])
    parser.add_argument("--placements", nargs="+", choices=["k-means", "optimised"], default=["k-means", "optimised"])
    parser.add_argument("--latents-alone", action="store_true", help="hold hyperparameters at the fit's")
    arguments = parser.parse_args()
    quiet()
    data = torch.as_tensor(table(arguments.data, "image"))
    draws = draws_a_chain(DRAWS, arguments.fraction)
    print(f"{arguments.splits} splits; of chains {CHAINS} x {draws} draws, of the default call as many as it makes\n")
    print(
        "| kernel | M | inducing points | Gaussian | MCMC | difference (error) | weighted | k-hat | R-hat | effective "
        "| CPU s: fit | draws |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for kernel in arguments.kernels:
        for points in arguments.points:
            for placement in arguments.placements:
                scores = []
                for split in range(arguments.first, arguments.first + arguments.splits):
                    train_x, train_y, test_x, test_y = split_of(data, split)
                    model = sparse(train_x, train_y, points, kernel == "ARD")
                    if arguments.latents_alone:
                        draw, kind = of_latents(draws), f"v alone, {draws} draws"
                    elif kernel == "isotropic":
                        draw, kind = by_default, "weighted"
                    else:
                        draw, kind = by_chains(draws, tg.NUTS(max_tree_depth=8), around_fit=True), f"{draws} draws"
                    make = functools.partial(compare, model, test_x, test_y, split, draw, move_points=placement == "optimised")
                    key = f"image, {kernel}, {points} {placement} points, split {split}, {kind}"
                    scores.append(remembered(arguments.record, key, make))
                gaussian, sampled, difference, error = paired(scores)
                effective = min(found.effective for found in scores)
                by_weights = [found.khat for found in scores if not math.isnan(found.khat)]
                worst = max((found.rhat for found in scores if math.isnan(found.khat)), default=math.nan)
                fitting, sampling = (
                    sum(getattr(found, name) for found in scores) / len(scores) for name in ("fitting", "sampling")
                )
                print(
                    f"| {kernel} | {points} | {placement} | {gaussian:.4f} | {sampled:.4f} | {difference:.4f} ({error:.4f}) | "
                    f"{len(by_weights)} | {max(by_weights, default=math.nan):.2f} | {worst:.3f} | {effective:.0f} | "
                    f"{fitting:.1f} | {sampling:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
