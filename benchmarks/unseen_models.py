"""Models as newcomers put them together, on simulated data and scikit-learn's: cases of unseen.py that no rule was made on.

Quoted by docs/results/other_data.md, "A third set".
"""

import math

import numpy as np
import pandas
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, ProductKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, HalfCauchyPrior, HalfNormalPrior, LogNormalPrior, NormalPrior, UniformPrior
from sklearn.datasets import load_diabetes, load_digits, load_iris, make_friedman1
from sklearn.decomposition import PCA

import torchgpmc as tg

_FLAT = GammaPrior(2.0, 1.0)


def _noise(prior, **options):
    return GaussianLikelihood(noise_prior=prior, **options)


def _mean(deviation):
    return ConstantMean(constant_prior=NormalPrior(0.0, deviation))


def _rational(prior, alpha):
    kernel = RQKernel(lengthscale_prior=prior)
    kernel.register_prior("alpha_prior", alpha, "alpha")
    return kernel


def eight_alike():
    """Eight labels of one class, bool, logit, half-Cauchys."""
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=HalfCauchyPrior(1.0)), outputscale_prior=HalfCauchyPrior(1.0))
    return tg.GP(np.linspace(0, 1, 8), np.ones(8, bool), kernel, tg.likelihoods.Bernoulli(link="logit"))


def step():
    """30 whole numbers, perfectly separable."""
    x = np.arange(30)
    base = MaternKernel(nu=0.5, lengthscale_prior=LogNormalPrior(2.0, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=LogNormalPrior(0.0, 2.0))
    return tg.GP(x, (x >= 17).astype(int), kernel, tg.likelihoods.Bernoulli())


def two_modes():
    """Eight data with two explanations, a short lengthscale or noise."""
    x = np.array([-2.2, -1.9, -1.0, -0.4, 0.3, 1.1, 1.6, 2.4])
    y = np.array([-1.6, -1.3, -0.2, -0.3, 0.5, 0.6, 1.9, 1.2])
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 1.5)), outputscale_prior=LogNormalPrior(0.0, 1.5))
    return tg.GPRegression(x, y, kernel, _noise(LogNormalPrior(-2.0, 2.0)))


def all_seven():
    """25 targets, all of them 7."""
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=_FLAT), outputscale_prior=GammaPrior(2.0, 0.1))
    return tg.GPRegression(np.random.default_rng(0).random((25, 2)), np.full(25, 7.0), kernel, _noise(GammaPrior(1.1, 10.0)))


def hospitals():
    """60 counts, most of them zero, few large, exposures over five decades."""
    random = np.random.default_rng(3)
    x = random.normal(size=(60, 2))
    exposure = 10.0 ** random.uniform(0, 5, 60)
    base = MaternKernel(nu=1.5, ard_num_dims=2, lengthscale_prior=GammaPrior(3.0, 2.0))
    y, likelihood = random.poisson(exposure * np.exp(-7 + x[:, 0])), tg.likelihoods.Poisson(exposure=exposure)
    return tg.GP(x, y, ScaleKernel(base, outputscale_prior=HalfNormalPrior(2.0)), likelihood, mean=_mean(10.0))


def weekdays():
    """150 days of counts, over-dispersed, with a week in them."""
    random = np.random.default_rng(4)
    x = np.arange(150.0)
    mean = np.exp(1.5 + 0.8 * np.sin(2 * np.pi * x / 7))
    base = PeriodicKernel(period_length_prior=LogNormalPrior(math.log(7), 0.1), lengthscale_prior=GammaPrior(2.0, 2.0))
    likelihood = tg.likelihoods.NegativeBinomial(dispersion_prior=HalfCauchyPrior(1.0))
    y = random.negative_binomial(3, 3 / (3 + mean))
    return tg.GP(x, y, ScaleKernel(base, outputscale_prior=_FLAT), likelihood, mean=_mean(3.0))


def edges():
    """60 shares, many near 0 and 1."""
    random = np.random.default_rng(5)
    x = random.uniform(-2, 2, 60)
    y = np.clip(random.beta(0.5 + 5 / (1 + np.exp(-2 * x)), 0.5 + 5 / (1 + np.exp(2 * x))), 1e-4, 1 - 1e-4)
    kernel = ScaleKernel(MaternKernel(nu=1.5, lengthscale_prior=GammaPrior(2.0, 2.0)), outputscale_prior=_FLAT)
    return tg.GP(x, y, kernel, tg.likelihoods.Beta(scale_prior=HalfCauchyPrior(5.0)))


def cauchy_outliers():
    """100 data, twelve of them a Cauchy number off; Student t, a rational quadratic kernel."""
    random = np.random.default_rng(6)
    x = np.sort(random.uniform(0, 10, 100))
    y = np.sin(x) + 0.1 * random.normal(size=100)
    y[::9] += 10 * random.standard_cauchy(12)
    likelihood = tg.likelihoods.StudentT(noise_prior=HalfCauchyPrior(0.5), deg_free_prior=GammaPrior(2.0, 0.1))
    return tg.GP(x, y, ScaleKernel(_rational(_FLAT, _FLAT), outputscale_prior=_FLAT), likelihood)


def ratings():
    """200 x 4, five levels, a lengthscale a column."""
    random = np.random.default_rng(7)
    x = random.normal(size=(200, 4))
    y = np.digitize(1.5 * np.sin(x[:, 0]) + x[:, 1] + random.normal(size=200), [-1.5, -0.5, 0.5, 1.5])
    base = RBFKernel(ard_num_dims=4, lengthscale_prior=LogNormalPrior(0.5, 1.0))
    return tg.GP(x, y, ScaleKernel(base, outputscale_prior=_FLAT), tg.likelihoods.Ordinal(5))


def four_blobs():
    """120 x 2, four classes."""
    random = np.random.default_rng(8)
    y = random.integers(0, 4, 120)
    x = np.array([[0, 0], [2, 0], [0, 2], [2, 2]])[y] + 0.7 * random.normal(size=(120, 2))
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=_FLAT), outputscale_prior=GammaPrior(2.0, 0.5))
    return tg.GP(x, y, kernel, tg.likelihoods.Softmax(num_classes=4))


def three_digits():
    """200 images of 0, 1 and 2, ten principal components."""
    x, y = load_digits(n_class=3, return_X_y=True)
    x = PCA(10, random_state=0).fit_transform(x)
    base = MaternKernel(nu=2.5, lengthscale_prior=LogNormalPrior(3.0, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.2))
    return tg.GP(x[:200], y[:200], kernel, tg.likelihoods.Softmax(num_classes=3))


def irregular_times():
    """90 irregular times: a trend, a period and a wobble, half-Cauchys everywhere."""
    random = np.random.default_rng(9)
    x = np.sort(random.uniform(0, 20, 90))
    y = 0.1 * x + np.sin(2 * np.pi * x) + 0.3 * np.sin(x) + 0.2 * random.normal(size=90)
    season = PeriodicKernel(period_length_prior=LogNormalPrior(0.0, 0.2), lengthscale_prior=HalfCauchyPrior(1.0))
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=HalfCauchyPrior(10.0)), outputscale_prior=HalfCauchyPrior(2.0))
    kernel = kernel + ScaleKernel(season, outputscale_prior=HalfCauchyPrior(2.0))
    wobble = _rational(HalfCauchyPrior(2.0), HalfCauchyPrior(2.0))
    kernel = kernel + ScaleKernel(wobble, outputscale_prior=HalfCauchyPrior(1.0))
    return tg.GPRegression(x, y, kernel, _noise(HalfCauchyPrior(0.5)))


def thrice():
    """30 rows three times, each time the same target."""
    x = np.tile(np.random.default_rng(10).random((30, 2)), (3, 1))
    base = RBFKernel(ard_num_dims=2, lengthscale_prior=_FLAT)
    likelihood = _noise(HalfCauchyPrior(1.0), noise_constraint=Positive())
    y = np.sin(4 * x[:, 0]) + x[:, 1]
    return tg.GPRegression(x, y, ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.5)), likelihood)


def noiseless():
    """100 values of a smooth function, uniform priors."""
    x = np.linspace(0, 1, 100)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=UniformPrior(0.01, 10.0)), outputscale_prior=UniformPrior(0.01, 100.0))
    return tg.GPRegression(x, np.exp(x) * np.sin(8 * x), kernel, _noise(UniformPrior(1e-4, 1.0)))


def linear_and_more():
    """diabetes, 442 x 10: a linear kernel and another."""
    x, y = load_diabetes(return_X_y=True)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 0.5)), outputscale_prior=GammaPrior(1.5, 1.0))
    kernel = LinearKernel(variance_prior=GammaPrior(1.0, 1.0)) + kernel
    return tg.GPRegression(x / x.std(0), (y - y.mean()) / y.std(), kernel, _noise(HalfNormalPrior(1.0)), mean=_mean(1.0))


def friedman():
    """200 x 10, of which five columns matter, a lengthscale a column."""
    x, y = make_friedman1(200, 10, noise=1.0, random_state=0)
    base = RBFKernel(ard_num_dims=10, lengthscale_prior=LogNormalPrior(0.0, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=HalfCauchyPrior(20.0))
    return tg.GPRegression(x, y - y.mean(), kernel, _noise(HalfCauchyPrior(1.0)))


def day_and_depth():
    """120 x 2: a product of a period along one column and an RBF along the other."""
    random = np.random.default_rng(11)
    x = np.column_stack([random.random(120) * 3, random.uniform(0, 24, 120)])
    y = np.cos(2 * np.pi * x[:, 1] / 24) * x[:, 0] + 0.2 * random.normal(size=120)
    season = PeriodicKernel(active_dims=[1], period_length_prior=NormalPrior(24.0, 1.0), lengthscale_prior=_FLAT)
    kernel = ProductKernel(RBFKernel(active_dims=[0], lengthscale_prior=_FLAT), season)
    return tg.GPRegression(x, y, ScaleKernel(kernel, outputscale_prior=GammaPrior(2.0, 0.5)), _noise(GammaPrior(1.1, 10.0)))


def boxes():
    """100 x 2 labels, logit, uniform priors."""
    random = np.random.default_rng(12)
    x = random.normal(size=(100, 2))
    y = random.random(100) < 1 / (1 + np.exp(-3 * np.sin(2 * x[:, 0])))
    limits = {"lengthscale_prior": UniformPrior(0.05, 20.0), "lengthscale_constraint": Interval(0.05, 20.0)}
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, **limits), outputscale_prior=UniformPrior(0.05, 50.0))
    return tg.GP(x, y, kernel, tg.likelihoods.Bernoulli(link="logit"))


def customers():
    """A frame of whole numbers, prices and bools, 90 x 4, labels -1 and 1; nothing standardised."""
    random = np.random.default_rng(13)
    frame = pandas.DataFrame({"age": random.integers(18, 90, 90), "income": random.lognormal(10, 1, 90).round()})
    frame["member"], frame["score"] = random.random(90) < 0.4, random.normal(size=90)
    y = pandas.Series(np.where((frame.age > 50) ^ (random.random(90) < 0.1), 1, -1))
    base = RBFKernel(ard_num_dims=4, lengthscale_prior=LogNormalPrior(3.0, 3.0))
    return tg.GP(frame, y, ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.5)), tg.likelihoods.Bernoulli())


def temperatures():
    """Every second day of a year, about 15 degrees, a mean of zero, priors for standardised data."""
    random = np.random.default_rng(14)
    x = np.arange(0, 365, 2)
    y = 15 + 10 * np.sin(2 * np.pi * (x - 100) / 365) + 3 * random.normal(size=len(x))
    base = MaternKernel(nu=2.5, lengthscale_prior=GammaPrior(3.0, 6.0))
    return tg.GPRegression(x, y, ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.15)), _noise(GammaPrior(1.1, 0.05)))


def mistyped():
    """80 x 3 labels, one input a million."""
    random = np.random.default_rng(15)
    x = random.normal(size=(80, 3))
    x[7, 1] = 1e6
    y = (x[:, 0] + 0.3 * random.normal(size=80) > 0).astype(int)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 0.5)), outputscale_prior=GammaPrior(2.0, 0.5))
    return tg.GP(x, y, kernel, tg.likelihoods.Bernoulli())


def straight_noise():
    """80 data, gpytorch's Laplace noise."""
    random = np.random.default_rng(16)
    x = np.sort(random.uniform(-3, 3, 80))
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), outputscale_prior=_FLAT)
    y = np.sin(2 * x) + random.laplace(0, 0.2, 80)
    return tg.GP(x, y, kernel, LaplaceLikelihood(noise_prior=GammaPrior(1.1, 2.0)))


def raw_irises():
    """100 x 4 in centimetres, a lengthscale a column under Gamma(3, 6)."""
    x, y = load_iris(return_X_y=True)
    base = MaternKernel(nu=2.5, ard_num_dims=4, lengthscale_prior=GammaPrior(3.0, 6.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.15))
    return tg.GP(x[50:], y[50:] - 1, kernel, tg.likelihoods.Bernoulli())


def three_or_eight():
    """250 images of 3 and 8, 64 raw pixels, some of them constant; logit."""
    x, y = load_digits(return_X_y=True)
    keep = (y == 3) | (y == 8)
    x, y = x[keep][:250], y[keep][:250] == 8
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(3.0, 1.0)), outputscale_prior=GammaPrior(2.0, 0.5))
    return tg.GP(x, y, kernel, tg.likelihoods.Bernoulli(link="logit"))


def three_kernels():
    """150 x 3 labels under a smooth, a rough and a linear kernel."""
    random = np.random.default_rng(17)
    x = random.normal(size=(150, 3))
    y = x[:, 0] + np.sin(3 * x[:, 1]) + 0.5 * random.normal(size=150) > 0
    smooth, rough = RBFKernel(lengthscale_prior=_FLAT), MaternKernel(nu=0.5, lengthscale_prior=_FLAT)
    kernel = ScaleKernel(smooth, outputscale_prior=HalfNormalPrior(2.0)) + ScaleKernel(
        rough, outputscale_prior=HalfNormalPrior(2.0)
    )
    return tg.GP(x, y, kernel + LinearKernel(variance_prior=HalfNormalPrior(1.0)), tg.likelihoods.Bernoulli())


def counts_nine_columns():
    """150 x 9 counts, a lengthscale a column."""
    random = np.random.default_rng(26)
    x = random.normal(size=(150, 9))
    y = random.poisson(np.exp(1 + np.sin(x[:, 0]) + 0.5 * x[:, 1]))
    base = RBFKernel(ard_num_dims=9, lengthscale_prior=LogNormalPrior(1.0, 1.0))
    return tg.GP(x, y, ScaleKernel(base, outputscale_prior=HalfNormalPrior(2.0)), tg.likelihoods.Poisson(), mean=_mean(3.0))


def growing_noise():
    """40 data, noise that grows, two latent functions."""
    random = np.random.default_rng(18)
    x = np.sort(random.uniform(0, 1, 40))
    y = 5 * np.sin(6 * x) + np.exp(2 * x - 1) * random.normal(size=40)
    base = MaternKernel(nu=1.5, lengthscale_prior=GammaPrior(2.0, 4.0))
    kernel = ScaleKernel(base, outputscale_prior=HalfNormalPrior(3.0))
    return tg.GP(x, y, kernel, tg.likelihoods.HeteroskedasticGaussian(scale=1.0))


def _student():
    return tg.likelihoods.StudentT(noise_prior=HalfNormalPrior(1.0), deg_free_prior=GammaPrior(2.0, 0.1))


def student_eight_columns():
    """120 x 8 under Student t noise, a lengthscale a column."""
    random = np.random.default_rng(27)
    x = random.normal(size=(120, 8))
    y = x[:, 0] + np.sin(x[:, 1]) + 0.2 * random.standard_t(2, size=120)
    base = RBFKernel(ard_num_dims=8, lengthscale_prior=LogNormalPrior(1.0, 1.0))
    return tg.GP(x, y, ScaleKernel(base, outputscale_prior=HalfNormalPrior(2.0)), _student())


def sparse_student():
    """1000 x 1 under Student t noise, 20 inducing points."""
    random = np.random.default_rng(33)
    x = random.uniform(-3, 3, (1000, 1))
    y, z = np.sin(3 * x[:, 0]) + 0.2 * random.standard_t(2, size=1000), tg.kmeans_inducing_points(x, 20)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), outputscale_prior=_FLAT)
    return tg.SparseGP(x, y, kernel, _student(), inducing_points=z)


def sparse_mean():
    """3000 x 6 about 100, a mean that is sampled, 80 inducing points, half-Cauchys."""
    random = np.random.default_rng(31)
    x = random.normal(size=(3000, 6))
    y, z = 100 + 20 * np.sin(x[:, 0]) + 5 * x[:, 1] + 10 * random.normal(size=3000), tg.kmeans_inducing_points(x, 80)
    base = RBFKernel(ard_num_dims=6, lengthscale_prior=GammaPrior(2.0, 0.5))
    kernel = ScaleKernel(base, outputscale_prior=HalfCauchyPrior(100.0))
    return tg.SparseGP(x, y, kernel, _noise(HalfCauchyPrior(50.0)), inducing_points=z, mean=_mean(200.0))


def sparse_rare():
    """3000 x 3 labels, a few in a hundred of them true, a mean that is sampled, 50 inducing points."""
    random = np.random.default_rng(32)
    x = random.normal(size=(3000, 3))
    y, z = random.random(3000) < 1 / (1 + np.exp(4.5 - 1.5 * x[:, 0])), tg.kmeans_inducing_points(x, 50)
    base = MaternKernel(nu=2.5, ard_num_dims=3, lengthscale_prior=GammaPrior(2.0, 0.5))
    kernel = ScaleKernel(base, outputscale_prior=HalfCauchyPrior(2.0))
    return tg.SparseGP(x, y, kernel, tg.likelihoods.Bernoulli(), inducing_points=z, mean=_mean(2.0))


def sparse_shares():
    """1000 x 2 shares, 25 inducing points."""
    random = np.random.default_rng(36)
    x = random.random((1000, 2))
    mean, z = 1 / (1 + np.exp(-3 * np.sin(5 * x[:, 0]))), tg.kmeans_inducing_points(x, 25)
    y = np.clip(random.beta(10 * mean, 10 * (1 - mean)), 1e-6, 1 - 1e-6)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), outputscale_prior=_FLAT)
    return tg.SparseGP(x, y, kernel, tg.likelihoods.Beta(scale_prior=GammaPrior(2.0, 0.1)), inducing_points=z)


def sparse_levels():
    """1500 x 3, four levels, a lengthscale a column, 40 inducing points."""
    random = np.random.default_rng(35)
    x = random.normal(size=(1500, 3))
    y = np.digitize(np.sin(2 * x[:, 0]) + x[:, 1] + 0.5 * random.normal(size=1500), [-1, 0, 1])
    base, z = RBFKernel(ard_num_dims=3, lengthscale_prior=LogNormalPrior(0.5, 1.0)), tg.kmeans_inducing_points(x, 40)
    kernel = ScaleKernel(base, outputscale_prior=HalfNormalPrior(3.0))
    return tg.SparseGP(x, y, kernel, tg.likelihoods.Ordinal(4), inducing_points=z)


def sparse_counts():
    """2000 x 2 over-dispersed counts, 40 inducing points."""
    random = np.random.default_rng(34)
    x = random.normal(size=(2000, 2))
    mean, z = np.exp(1 + np.sin(2 * x[:, 0])), tg.kmeans_inducing_points(x, 40)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 1.0)), outputscale_prior=LogNormalPrior(0.0, 1.0))
    likelihood = tg.likelihoods.NegativeBinomial(dispersion_prior=LogNormalPrior(0.0, 1.0))
    return tg.SparseGP(x, random.negative_binomial(2, 2 / (2 + mean)), kernel, likelihood, inducing_points=z)


MODELS = (
    eight_alike,
    step,
    two_modes,
    all_seven,
    hospitals,
    weekdays,
    edges,
    cauchy_outliers,
    ratings,
    four_blobs,
    three_digits,
    irregular_times,
    thrice,
    noiseless,
    linear_and_more,
    friedman,
    day_and_depth,
    boxes,
    customers,
    temperatures,
    mistyped,
    straight_noise,
    raw_irises,
    three_or_eight,
    three_kernels,
    counts_nine_columns,
    growing_noise,
    student_eight_columns,
    sparse_student,
    sparse_mean,
    sparse_rare,
    sparse_shares,
    sparse_levels,
    sparse_counts,
)
