"""Handwritten digits: a Gaussian fit on minibatches, then chains around it. Small; benchmarks/mnist.py is the large one."""

import argparse

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from sklearn.datasets import load_digits

import torchgpmc as tg


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=600, help="to train on, of 1797 with 8 x 8 pixels")
    parser.add_argument("--points", type=int, default=40, help="inducing points")
    parser.add_argument("--samples", type=int, default=50, help="a chain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small: more threads would wait for one another

    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    x, order = x / 8 - 1, torch.randperm(len(x), generator=torch.Generator().manual_seed(arguments.seed))
    train, test = order[: arguments.images], order[arguments.images :]
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(4.0, 1.0)), outputscale_prior=GammaPrior(4.0, 1.3))
    points = tg.kmeans_inducing_points(x[train], arguments.points)
    likelihood = tg.likelihoods.RobustMax(num_classes=10, epsilon=1e-3)
    model = tg.SparseGP(x[train], y[train], kernel, likelihood, inducing_points=points)
    start = tg.initialize(model, batch_size=200, max_iterations=30, optimize_inducing_points=False)
    method = tg.NUTS(max_tree_depth=5)
    posterior = tg.sample(start.model, method, start=start, num_samples=arguments.samples, num_chains=2, seed=arguments.seed)
    print(posterior.summary())
    for name, prediction in (("Gaussian", start.predict(x[test])), ("sampled", posterior.predict(x[test], num_draws=50))):
        right = (prediction.probs.argmax(-1) == y[test]).double().mean()
        print(f"{name}: {float(right):.1%} right, mean log density {float(prediction.log_prob(y[test].double()).mean()):.4f}")


if __name__ == "__main__":
    main()
