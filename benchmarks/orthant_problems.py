"""Problems of paper B with known answers, in numpy alone."""

import math

import numpy as np
import scipy.special

# Class means and standard deviations, training and test sizes of experiment 2.
LINEAR = {
    1: (100, 50, (0.0, 1.0), (0.2, 0.3)),
    2: (200, 100, (0.0, 1.0), (2.0, 1.0)),
    3: (400, 200, (0.0, 1.5), (0.5, 0.75)),
    4: (800, 400, (0.0, 1.0), (1.0, 0.75)),
}


def integrate(log_values, u):
    return float(scipy.special.logsumexp(log_values) + math.log(u[1] - u[0]))


def one_factor(size, seed):
    """Covariance of experiment 1, its d, and the log orthant probability by eq. 63."""
    d = np.random.default_rng(1000 * size + seed).uniform(-1, 1, size)
    covariance = np.outer(d, d)
    np.fill_diagonal(covariance, 1.0)
    u = np.linspace(-12, 12, 40001)
    log_values = -0.5 * u * u - 0.5 * math.log(2 * math.pi)
    for value in d / np.sqrt(1 - d * d):
        log_values += scipy.special.log_ndtr(u * value)
    return covariance, d, integrate(log_values, u)


def linear_problem(number, seed=0):
    """Shuffled training and test sets of experiment 2, with the truth by eq. 66: x, y, test x, log evidence, probabilities."""
    num_train, num_test, means, deviations = LINEAR[number]
    generator = np.random.default_rng(100 * number + seed)

    def draw(count):
        y = generator.permutation(np.arange(count) % 2)
        return generator.normal(np.take(means, y), np.take(deviations, y)), y

    (x, y), (tests, _) = draw(num_train), draw(num_test)
    u = np.linspace(-12, 12, 20001)
    log_joint = -0.5 * u * u - 0.5 * math.log(2 * math.pi)
    for value in (2 * y - 1) * x:
        log_joint += scipy.special.log_ndtr(u * value)
    weights = np.exp(log_joint - log_joint.max())
    probabilities = np.array([(scipy.special.ndtr(u * value) * weights).sum() for value in tests]) / weights.sum()
    return x, y, tests, integrate(log_joint, u), probabilities


def linear_model(x, y):
    import torch
    from gpytorch.kernels import LinearKernel

    import torchgpmc as tg

    kernel = LinearKernel()
    kernel.variance = 1.0
    return tg.GP(torch.as_tensor(x), torch.as_tensor(y), kernel.requires_grad_(False), tg.likelihoods.Bernoulli(), jitter=1e-10)
