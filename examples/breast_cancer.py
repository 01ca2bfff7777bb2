"""A fully Bayesian GP classifier on scikit-learn's Wisconsin breast cancer data, beside type-II maximum likelihood.

Run by ``make demo``. Everything it needs comes with the installed libraries.
"""

import argparse
import pathlib
import time

import gpytorch
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import torchgpmc as tg
from torchgpmc import plots


def load_data(seed):
    x, y = load_breast_cancer(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.3, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(train_x)
    arrays = scaler.transform(train_x), train_y, scaler.transform(test_x), test_y
    return tuple(torch.as_tensor(array, dtype=torch.float64) for array in arrays)


def make_kernel(num_columns):
    base = RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0 / num_columns**0.5))
    return ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.5))


class VariationalGP(gpytorch.models.ApproximateGP):
    """The same model for gpytorch's own variational inference: Gaussian q(u), point estimates of the hyperparameters."""

    def __init__(self, inducing_points, kernel):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing_points))
        strategy = gpytorch.variational.VariationalStrategy(self, inducing_points, distribution, learn_inducing_locations=False)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def fit_by_maximum_likelihood(train_x, train_y, inducing_points, num_steps=400):
    """Type-II maximum likelihood: the evidence lower bound, maximised in q(u) and the hyperparameters (priors left out)."""
    model = VariationalGP(inducing_points.clone(), make_kernel(train_x.shape[1])).double()
    likelihood = tg.likelihoods.Bernoulli()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(train_y))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with gpytorch.settings.fast_computations(covar_root_decomposition=False, log_prob=False, solves=False):
        for _ in range(num_steps):
            optimizer.zero_grad()
            # VariationalELBO adds the kernel's priors; taking them away leaves the bound on log p(y | theta).
            log_prior = sum(prior.log_prob(closure(module)).sum() for _, module, prior, closure, _ in model.named_priors())
            loss = -bound(model(train_x), train_y) + log_prior / len(train_y)
            loss.backward()
            optimizer.step()
    return model.eval(), likelihood


def scores(probabilities, log_probabilities, test_y):
    accuracy = ((probabilities > 0.5) == (test_y > 0.5)).double().mean()
    return f"test accuracy {float(accuracy):.4f}, mean log predictive density {float(log_probabilities.mean()):.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("demo-output"), help="folder for the figures")
    parser.add_argument("--num-samples", type=int, default=400, help="effective draws wanted")
    parser.add_argument("--num-inducing", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    train_x, train_y, test_x, test_y = load_data(options.seed)
    inducing_points = tg.kmeans_inducing_points(train_x, options.num_inducing, seed=options.seed)
    print(f"breast cancer: {len(train_x)} training rows, {len(test_x)} test rows, {train_x.shape[1]} columns")
    print(f"{options.num_inducing} inducing points by k-means")

    model = tg.SparseGP(
        train_x, train_y, make_kernel(train_x.shape[1]), tg.likelihoods.Bernoulli(), inducing_points=inducing_points
    )
    posterior = tg.sample(model, num_samples=options.num_samples, seed=options.seed)
    prediction = posterior.predict(test_x)
    began = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other busy processes steps this small take fifty times as long on two
    point, likelihood = fit_by_maximum_likelihood(train_x, train_y, inducing_points)
    torch.set_num_threads(threads)
    fit_seconds = time.perf_counter() - began
    with torch.no_grad():
        latent = point(test_x)
        point_log_prob = likelihood.predictive_log_prob(latent.mean, latent.variance, test_y)
        point_probs = likelihood.response_moments(latent.mean, latent.variance).mean

    print()
    print(f"fully Bayesian:                 {scores(prediction.probs, prediction.log_prob(test_y), test_y)}")
    print(f"type-II maximum likelihood:     {scores(point_probs, point_log_prob, test_y)}  ({fit_seconds:.0f} s)")
    print()
    print(posterior.summary())
    print()
    print(f"{posterior.num_draws} draws by {posterior.info['method'].split('(')[0]} in {posterior.info['seconds']:.0f} s")

    options.output.mkdir(parents=True, exist_ok=True)
    plots.plot_trace(posterior).savefig(options.output / "trace.png", dpi=110)
    plots.plot_pair(posterior).savefig(options.output / "pair.png", dpi=110)
    curves = {"fully Bayesian": prediction.probs, "type-II maximum likelihood": point_probs}
    plots.plot_calibration(curves, test_y, bins=6).savefig(options.output / "calibration.png", dpi=110)
    print(f"figures: {', '.join(str(options.output / name) for name in ('trace.png', 'pair.png', 'calibration.png'))}")


if __name__ == "__main__":
    main()
