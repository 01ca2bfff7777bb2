"""A deep kernel: features trained by the evidence, then held fixed while hyperparameters are sampled.

    python examples/deep_kernel.py --output demo-output

A spiral of two classes. The network is trained through `torchgpmc.approximations.negative_log_evidence`, and the GP on its
features is then sampled exactly; the picture shows the probability of class 1 under a plain kernel and under the deep one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg


def spiral(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points ``(count, 2)`` of two arms, and their labels."""
    labels = torch.arange(count) % 2
    turn = 3.5 * torch.rand(count, generator=generator).sqrt() * 1.3 + 0.4
    angle = turn + torch.pi * labels
    noise = 0.12 * torch.randn(count, 2, generator=generator)
    return (torch.stack([turn * angle.cos(), turn * angle.sin()], -1) + noise).double() / 2, labels


def kernel() -> ScaleKernel:
    return ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0)), outputscale_prior=GammaPrior(2.0, 0.3))


def train(x: torch.Tensor, y: torch.Tensor, steps: int) -> torch.nn.Module:
    """Features that make Laplace's evidence of the labels large."""
    torch.manual_seed(0)
    features = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)).double()
    model = tg.GP(x, y, kernel(), tg.likelihoods.Bernoulli())
    parameters = [*features.parameters(), *model.kernel.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        tg.approximations.negative_log_evidence(model, inputs=features(x)).backward()
        optimizer.step()
    return features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    x, y = spiral(120, torch.Generator().manual_seed(0))
    test_x, test_y = spiral(400, torch.Generator().manual_seed(1))
    features = train(x, y, options.steps)
    side = torch.linspace(-3, 3, 60, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    maps = {"plain kernel": lambda points: points, "deep kernel": lambda points: features(points).detach()}
    for axis, (name, transform) in zip(axes, maps.items(), strict=True):
        model = tg.GP(transform(x), y, kernel(), tg.likelihoods.Bernoulli())
        posterior = tg.sample(model, tg.AMIS(), num_samples=500, seed=0)
        score = posterior.predict(transform(test_x)).log_prob(test_y).mean()
        print(f"{name}: log density of a test label {float(score):.3f}")
        probs = posterior.predict(transform(grid), num_draws=100).probs.view(60, 60).T
        axis.contourf(side, side, probs, levels=[0, 0.05, 0.25, 0.5, 0.75, 0.95, 1], cmap="RdBu_r")
        axis.scatter(*x.T, c=y, cmap="RdBu_r", edgecolors="black", s=15)
        axis.set_title(f"{name}: log density {float(score):.3f} a test label")
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / "deep_kernel.png", dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
