"""Small models, and what else the tests share."""

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, HalfNormalPrior, LogNormalPrior

import torchgpmc as tg


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(num_data, num_columns=2, seed=0):
    return torch.rand(num_data, num_columns, generator=generator(seed), dtype=torch.float64)


def kernel(num_columns=2, ard=True):
    base = RBFKernel(ard_num_dims=num_columns if ard else None, lengthscale_prior=GammaPrior(2.0, 3.0))
    return ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 1.5))


def fixed_kernel(lengthscale=0.4, outputscale=1.3):
    result = ScaleKernel(RBFKernel())
    result.outputscale, result.base_kernel.lengthscale = outputscale, lengthscale
    return result.requires_grad_(False)


class Halved(tg.GP):
    """A user's model with a likelihood of its own."""

    def log_likelihood(self, *arguments):
        return 0.5 * super().log_likelihood(*arguments)


LIKELIHOODS = {
    "probit": lambda: tg.likelihoods.Bernoulli(link="probit"),
    "logit": lambda: tg.likelihoods.Bernoulli(link="logit"),
    "gaussian": lambda: tg.likelihoods.Gaussian(noise_prior=HalfNormalPrior(0.5)),
    "student_t": lambda: tg.likelihoods.StudentT(noise_prior=LogNormalPrior(-1.0, 0.5), deg_free_prior=GammaPrior(2.0, 0.3)),
    "poisson": lambda: tg.likelihoods.Poisson(),
    "softmax": lambda: tg.likelihoods.Softmax(num_classes=3, mixing_weights=False),
    "laplace": lambda: tg.likelihoods.LaplaceNoise(noise_prior=GammaPrior(2.0, 4.0)),
    "negative_binomial": lambda: tg.likelihoods.NegativeBinomial(dispersion_prior=GammaPrior(2.0, 4.0)),
    "beta": lambda: tg.likelihoods.Beta(scale_prior=GammaPrior(2.0, 0.5)),
    "ordinal": lambda: tg.likelihoods.Ordinal(num_levels=4),
    "heteroskedastic": lambda: tg.likelihoods.HeteroskedasticGaussian(scale=0.5),
}
# Without slopes in f: for the sparse model, and for methods without gradients.
NOT_SMOOTH = {"robust_max": lambda: tg.likelihoods.RobustMax(num_classes=3, epsilon=0.01)}
SEVERAL_LATENTS = ("softmax", "heteroskedastic")


def make(likelihood):
    return (LIKELIHOODS | NOT_SMOOTH)[likelihood]()


def targets(likelihood, num_data, seed=0):
    generator = torch.Generator().manual_seed(100 + seed)
    noise = torch.randn(num_data, generator=generator, dtype=torch.float64)
    return {
        "probit": (noise > 0).double(),
        "logit": (noise > 0.3).double(),
        "poisson": noise.abs().mul(2).floor(),
        "softmax": (noise.abs() * 1.5).floor().clamp_max(2),
        "robust_max": (noise.abs() * 1.5).floor().clamp_max(2),
        "negative_binomial": noise.abs().mul(2).floor(),
        "beta": torch.sigmoid(noise),
        "ordinal": (2 + 1.5 * noise).floor().clamp(0, 3),
    }.get(likelihood, noise)


def gp(likelihood="probit", num_data=6, num_columns=2, device="cpu", **options):
    model = tg.GP(inputs(num_data, num_columns), targets(likelihood, num_data), kernel(num_columns), make(likelihood), **options)
    return model.to(device)


def conditioned_gp(likelihood="probit", num_data=6, num_columns=2, device="cpu", **options):
    known = {"known_inputs": inputs(2, num_columns, seed=9), "known_values": torch.tensor([0.8, -0.5])}
    made = tg.ConditionedGP(
        inputs(num_data, num_columns),
        targets(likelihood, num_data),
        kernel(num_columns),
        make(likelihood),
        **{**known, **options},
    )
    return made.to(device)


def gp_regression(likelihood="gaussian", num_data=6, num_columns=2, device="cpu", **options):
    made = tg.GPRegression(
        inputs(num_data, num_columns), targets("gaussian", num_data), kernel(num_columns), LIKELIHOODS["gaussian"](), **options
    )
    return made.to(device)


def sparse_gp(likelihood="probit", num_data=12, num_inducing=4, num_columns=2, device="cpu", **options):
    x = inputs(num_data, num_columns)
    model = tg.SparseGP(
        x,
        targets(likelihood, num_data),
        kernel(num_columns),
        make(likelihood),
        inducing_points=inputs(num_inducing, num_columns, seed=7),
        **options,
    )
    return model.to(device)


def fitc(likelihood="probit", num_data=6, num_inducing=3, num_columns=2, device="cpu", **options):
    return _approximate_prior(tg.FITC, likelihood, num_data, num_inducing, num_columns, device, options)


def projected_process(likelihood="probit", num_data=6, num_inducing=3, num_columns=2, device="cpu", **options):
    return _approximate_prior(tg.ProjectedProcess, likelihood, num_data, num_inducing, num_columns, device, options)


def _approximate_prior(kind, likelihood, num_data, num_inducing, num_columns, device, options):
    model = kind(
        inputs(num_data, num_columns),
        targets(likelihood, num_data),
        kernel(num_columns),
        make(likelihood),
        inducing_points=inputs(num_inducing, num_columns, seed=7),
        **options,
    )
    return model.to(device)


def some_fit(model, steepness=0.4):
    """A Gaussian fit of no quality, in which latents follow theta."""
    (num_latents, size), num_theta = model.latent_shape, model.layout.size
    like = model.train_x
    scale = torch.eye(size).to(like).expand(num_latents, -1, -1)
    slope = steepness * torch.cos(torch.arange(model.latent_size * num_theta)).view(model.latent_size, num_theta).to(like)
    covariance = (torch.eye(num_theta) + 0.3).to(like)
    return tg.Start(model, like.new_zeros(num_theta), like.new_zeros(num_latents, size), scale, covariance, slope, 0.0, True)
