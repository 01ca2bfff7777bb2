"""Three classes in the plane: where a Gaussian fit and the sampled posterior are sure, and where each may not be."""

import argparse
import pathlib

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from matplotlib.figure import Figure
from sklearn.datasets import make_blobs

import torchgpmc as tg

LEVELS = [0.3, 0.95, 0.99]
STYLES = ["dotted", "dashed", "solid"]
COLOURS = ["tab:blue", "tab:orange", "tab:green"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("classes-output"))
    parser.add_argument("--count", type=int, default=150, help="points in all")
    parser.add_argument("--points", type=int, default=12, help="inducing points")
    parser.add_argument("--samples", type=int, default=150, help="a chain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # tensors are small: more threads would wait for one another

    centres = [[-1.2, -0.6], [1.2, -0.6], [0.0, 1.2]]
    x, y = map(torch.as_tensor, make_blobs(arguments.count, centers=centres, cluster_std=0.7, random_state=arguments.seed))
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0)), outputscale_prior=GammaPrior(3.0, 3.0))
    points = tg.kmeans_inducing_points(x, arguments.points)
    model = tg.SparseGP(x, y, kernel, tg.likelihoods.RobustMax(num_classes=3, epsilon=1e-3), inducing_points=points)
    start = tg.initialize(model, optimize_inducing_points=False)  # moving them would take minutes here
    posterior = tg.sample(start.model, tg.NUTS(max_tree_depth=6), start=start, num_samples=arguments.samples, seed=arguments.seed)
    print(posterior.summary())

    axis = torch.linspace(-4, 4, 60, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    found = {"Gaussian": start.predict(grid).probs, "sampled": posterior.predict(grid, num_draws=100).probs}
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    for panel, (name, probs) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for label, colour in enumerate(COLOURS):
            panel.scatter(*x[y == label].T, s=5, color=colour, alpha=0.5)
            values = probs[:, label].view(len(axis), len(axis)).T
            panel.contour(axis, axis, values, levels=LEVELS, colors=[colour], linestyles=STYLES)
        panel.scatter(*start.model.inducing_points.T, s=14, color="black", marker="x")
        lines = ", ".join(f"{level} {style}" for level, style in zip(LEVELS, STYLES, strict=True))
        panel.set(title=f"{name}: {lines}", aspect="equal")
        print(f"{name}: sure to 0.95 on {float((probs.max(-1).values >= 0.95).double().mean()):.0%} of the square")
    figure.savefig(arguments.output / "three_classes.png", dpi=120)


if __name__ == "__main__":
    main()
