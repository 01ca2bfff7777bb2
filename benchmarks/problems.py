"""The benchmarks' data and models. numpy alone makes the data, so that peers in other environments get the same numbers."""

import numpy as np


def probit_data(num_data, num_columns, seed=0, lengthscale=0.35, outputscale=2.08):
    """Uniform inputs and labels -1/+1 from a probit GP (paper A, section 4.2)."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(size=(num_data, num_columns))
    distance = ((x[:, None] - x[None]) ** 2).sum(-1)
    covariance = outputscale * np.exp(-0.5 * distance / lengthscale**2) + 1e-8 * np.eye(num_data)
    f = np.linalg.cholesky(covariance) @ generator.normal(size=num_data)
    return x, np.where(generator.normal(size=num_data) < f, 1.0, -1.0)


def determined_data(num_data, num_columns, seed=0, lengthscales=(0.4, 0.6, 0.8), outputscale=10.0):
    """Uniform inputs and labels -1/+1 from a probit GP of the first few inputs alone, whose lengthscales the labels determine."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(size=(num_data, num_columns))
    scaled = x[:, : len(lengthscales)] / np.asarray(lengthscales)
    distance = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
    covariance = outputscale * np.exp(-0.5 * distance) + 1e-8 * np.eye(num_data)
    f = np.linalg.cholesky(covariance) @ generator.normal(size=num_data)
    return x, np.where(generator.normal(size=num_data) < f, 1.0, -1.0)


def sparse_data(num_data, num_columns, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(num_data, num_columns)), (generator.normal(size=num_data) > 0).astype(float)


def class_data(num_data, num_columns, num_classes, seed=0):
    """Normal inputs, and classes 0, 1, ... that do not depend on them."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(num_data, num_columns)), generator.integers(num_classes, size=num_data).astype(float)


def probit_model(num_data, num_columns, ard, data=probit_data):
    """A probit GP with paper A's Gamma priors: outputscale (a variance) Gamma(1.2, 0.2), lengthscales Gamma(1, 1 / sqrt(d))."""
    import torch
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.priors import GammaPrior

    import torchgpmc as tg

    x, y = data(num_data, num_columns)
    base = RBFKernel(ard_num_dims=num_columns if ard else None, lengthscale_prior=GammaPrior(1.0, 1 / num_columns**0.5))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.2, 0.2))
    return tg.GP(torch.as_tensor(x), torch.as_tensor(y), kernel, tg.likelihoods.Bernoulli())


def regression_data(num_data, num_columns, seed=0):
    """Uniform inputs and noisy values of a GP whose lengthscales grow from column to column."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(size=(num_data, num_columns))
    scaled = x / np.linspace(0.5, 4.0, num_columns)
    distance = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
    factor = np.linalg.cholesky(2.0 * np.exp(-0.5 * distance) + 1e-8 * np.eye(num_data))
    return x, factor @ generator.normal(size=num_data) + 0.3 * generator.normal(size=num_data)


def regression_model(num_data, num_columns):
    """ARD regression; priors Gamma(1.2, 0.2) on the outputscale, Gamma(1, 1 / sqrt(d)) on lengthscales, Gamma(1.2, 2) on noise."""
    import torch
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.likelihoods import GaussianLikelihood
    from gpytorch.priors import GammaPrior

    import torchgpmc as tg

    x, y = regression_data(num_data, num_columns)
    base = RBFKernel(ard_num_dims=num_columns, lengthscale_prior=GammaPrior(1.0, 1 / num_columns**0.5))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(1.2, 0.2))
    return tg.GPRegression(torch.as_tensor(x), torch.as_tensor(y), kernel, GaussianLikelihood(noise_prior=GammaPrior(1.2, 2.0)))
