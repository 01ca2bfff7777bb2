"""A gpytorch SVGP, trained as ever, made Bayesian in three lines: hyperparameters and latents are sampled."""

import argparse
import pathlib

import gpytorch
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from matplotlib.figure import Figure

import torchgpmc as tg


class SVGP(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(inducing_points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing_points, q, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ZeroMean()
        base = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        self.covar_module = ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(x, y, steps):
    svgp, likelihood = SVGP(x[:: len(x) // 12].clone()).double(), gpytorch.likelihoods.BernoulliLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, svgp, num_data=len(y))
    optimizer = torch.optim.Adam(svgp.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -bound(svgp(x), y)
        loss.backward()
        optimizer.step()
    return svgp, likelihood


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("svgp-output"))
    parser.add_argument("--count", type=int, default=150, help="data")
    parser.add_argument("--steps", type=int, default=400, help="of Adam")
    parser.add_argument("--samples", type=int, default=150, help="a chain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # tensors are small: more threads would wait for one another
    torch.manual_seed(arguments.seed)

    x = torch.rand(arguments.count, 1, dtype=torch.float64).sort(0).values
    truth = torch.special.ndtr(1.5 * torch.sin(9 * x[:, 0]))
    y = torch.bernoulli(truth)
    svgp, likelihood = train(x, y, arguments.steps)

    start = tg.Start.from_gpytorch(svgp, likelihood, x, y)
    posterior = tg.sample(start.model, tg.NUTS(), start=start, num_samples=arguments.samples, seed=arguments.seed)
    sampled = posterior.predict(torch.linspace(-0.2, 1.2, 200, dtype=torch.float64))

    print(posterior.summary())
    grid = torch.linspace(-0.2, 1.2, 200, dtype=torch.float64)
    figure = Figure(figsize=(10, 4), layout="constrained")
    for panel, (name, found) in zip(
        figure.subplots(1, 2, sharey=True), {"the trained SVGP": start.predict(grid), "sampled": sampled}.items(), strict=True
    ):
        spread = 2 * found.latent_variance.sqrt()
        panel.fill_between(grid, found.latent_mean - spread, found.latent_mean + spread, alpha=0.3, label="f, two sd")
        panel.plot(grid, found.latent_mean)
        panel.plot(grid, 1.5 * torch.sin(9 * grid), "k--", linewidth=1, label="true f")
        panel.plot(x[:, 0], 8 * y - 4, "|", color="grey", label="labels")
        panel.set(title=name, xlabel="x")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(arguments.output / "svgp.png", dpi=120)


if __name__ == "__main__":
    main()
