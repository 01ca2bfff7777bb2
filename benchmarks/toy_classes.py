"""Three classes of 750 points (Hensman et al. 2015, section 5.3): contours of a Gaussian fit and of MCMC, and which are bolder.

    python benchmarks/toy_classes.py --fraction 1.0

Points from three normal distributions, RobustMax, M = 50 inducing points that the fit placed, lengthscale Gamma(3, 2), variance
Gamma(3, 3). Writes docs/results/toy_classes.png. The paper made 10000 draws; its figure has contours at 0.3, 0.95 and 0.99.
"""

import argparse
import time

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import CHAINS, draws_a_chain, quiet, worst
from matplotlib.figure import Figure
from real_data import OUTPUT

import torchgpmc as tg

DRAWS = 10_000
LEVELS = [0.3, 0.95, 0.99]
COLOURS = ["tab:blue", "tab:orange", "tab:green"]


def clouds(count, seed):
    """Points of three overlapping normal distributions, and which."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[-1.2, -0.6], [1.2, -0.6], [0.0, 1.2]], dtype=torch.float64)
    roots = torch.tensor([[[0.8, 0.0], [0.3, 0.6]], [[0.8, 0.0], [-0.3, 0.6]], [[0.9, 0.0], [0.0, 0.6]]], dtype=torch.float64)
    label = torch.arange(count) % 3
    noise = torch.randn(count, 2, 1, dtype=torch.float64, generator=generator)
    return centres[label] + (roots[label] @ noise).squeeze(-1), label


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=1.0, help=f"of {DRAWS} draws in {CHAINS} chains")
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--grid", type=int, default=60)
    arguments = parser.parse_args()
    quiet()
    x, y = clouds(750, seed=0)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0)), outputscale_prior=GammaPrior(3.0, 3.0))
    likelihood = tg.likelihoods.RobustMax(num_classes=3, epsilon=1e-3)
    model = tg.SparseGP(x, y, kernel, likelihood, inducing_points=tg.kmeans_inducing_points(x, arguments.points))
    began = time.perf_counter()
    start = tg.initialize(model, progress=False)
    fitting = time.perf_counter() - began
    draws = draws_a_chain(DRAWS, arguments.fraction)
    began = time.perf_counter()
    posterior = tg.sample(
        start.model,
        tg.NUTS(),
        start=start,
        num_samples=draws,
        warmup_steps=min(draws, 300),
        num_chains=CHAINS,
        seed=0,
        progress=False,
    )
    sampling = time.perf_counter() - began
    rhat, effective = worst(posterior)
    axis = torch.linspace(-4.5, 4.5, arguments.grid, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    found = {"Gaussian": start.predict(grid).probs, "MCMC": posterior.predict(grid, num_draws=300).probs}
    print(
        f"{CHAINS} x {draws} draws; fit {fitting:.0f} s, sampling {sampling:.0f} s, R-hat {rhat:.3f}, effective {effective:.0f}\n"
    )
    print("| share of the square where the likeliest class has at least | " + " | ".join(found) + " |")
    print("|---|---|---|")
    for level in LEVELS[1:]:
        shares = [float((probs.max(-1).values >= level).double().mean()) for probs in found.values()]
        print(f"| {level} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    draw(found, x, y, start.model.inducing_points, axis)


def draw(found, x, y, inducing_points, axis):
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    for panel, (name, probs) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for label, colour in enumerate(COLOURS):
            panel.scatter(*x[y == label].T, s=4, color=colour, alpha=0.4)
            values = probs[:, label].view(len(axis), len(axis)).T
            lines = panel.contour(axis, axis, values, levels=LEVELS, colors=[colour], linestyles=["dotted", "dashed", "solid"])
            panel.clabel(lines, fontsize=7)
        panel.scatter(*inducing_points.T, s=12, color="black", marker="x")
        panel.set(title=name, aspect="equal")
    figure.savefig(OUTPUT / "toy_classes.png", dpi=110)


if __name__ == "__main__":
    main()
