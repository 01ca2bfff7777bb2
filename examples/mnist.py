"""Handwritten digits: a Gaussian fit on minibatches, then chains around it. Small; benchmarks/mnist.py is the large one."""

import argparse
import pathlib

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import torchgpmc as tg


def draw(images, labels, predictions):
    """The ten digits that the sampled classifier is least sure of, with what each gives their label."""
    chances = {name: found.probs.gather(1, labels[:, None]).squeeze(1) for name, found in predictions.items()}
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for panel, k in zip(figure.subplots(2, 5).flat, chances["sampled"].argsort()[:10].tolist(), strict=True):
        panel.imshow(images[k], cmap="gray_r")
        panel.set_title("\n".join([f"a {labels[k]}", *(f"{name}: {float(p[k]):.2f}" for name, p in chances.items())]), fontsize=8)
        panel.set_axis_off()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("mnist-output"))
    parser.add_argument("--images", type=int, default=600, help="to train on, of 1797 with 8 x 8 pixels")
    parser.add_argument("--points", type=int, default=40, help="inducing points")
    parser.add_argument("--samples", type=int, default=50, help="a chain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # tensors are small: more threads would wait for one another

    pixels, y = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(arguments.seed))
    train, test = order[: arguments.images], order[arguments.images :]
    x = pixels[:, pixels[train].std(0) > 0] / 8 - 1  # without those that are white in every image
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(4.0, 1.0)), outputscale_prior=GammaPrior(4.0, 1.3))
    points = tg.kmeans_inducing_points(x[train], arguments.points)
    likelihood = tg.likelihoods.RobustMax(num_classes=10, epsilon=1e-3)
    model = tg.SparseGP(x[train], y[train], kernel, likelihood, inducing_points=points)
    start = tg.initialize(model, batch_size=200, max_iterations=30, optimize_inducing_points=False)
    method = tg.NUTS(max_tree_depth=5)
    posterior = tg.sample(start.model, method, start=start, num_samples=arguments.samples, num_chains=2, seed=arguments.seed)
    print(posterior.summary())
    predictions = {"Gaussian": start.predict(x[test]), "sampled": posterior.predict(x[test], num_draws=50)}
    for name, prediction in predictions.items():
        right = (prediction.probs.argmax(-1) == y[test]).double().mean()
        print(f"{name}: {float(right):.1%} right, mean log density {float(prediction.log_prob(y[test].double()).mean()):.4f}")
    draw(pixels[test].view(-1, 8, 8), y[test], predictions).savefig(arguments.output / "digits.png", dpi=120)


if __name__ == "__main__":
    main()
