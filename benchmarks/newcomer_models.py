"""More models as newcomers put them together: cases of unseen.py, quoted by docs/results/other_data.md.

Those from t_noise_ard to regression_of_sixty are of "A fifth set", the others of "A fourth set".
"""

import math

import numpy as np
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, PolynomialKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, HalfCauchyPrior, HalfNormalPrior, LogNormalPrior, NormalPrior
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_classification, make_friedman1

import torchgpmc as tg

_FLAT, _VARIANCE = GammaPrior(2.0, 1.0), GammaPrior(2.0, 0.5)


def _squared(lengthscale=_FLAT, outputscale=_VARIANCE, columns=None):
    return ScaleKernel(RBFKernel(lengthscale_prior=lengthscale, ard_num_dims=columns), outputscale_prior=outputscale)


def _rough(nu, lengthscale=_FLAT, outputscale=_VARIANCE, columns=None):
    base = MaternKernel(nu=nu, lengthscale_prior=lengthscale, ard_num_dims=columns)
    return ScaleKernel(base, outputscale_prior=outputscale)


def one_region():
    """120 labels, all true in one half of the line and of either kind in the other, Matern 1/2."""
    random = np.random.default_rng(2)
    x = random.uniform(0, 1, (120, 1))
    y = np.where(x[:, 0] < 0.5, 1, random.random(120) < 0.5).astype(int)
    return tg.GP(x, y, _rough(0.5, GammaPrior(2.0, 4.0)), tg.likelihoods.Bernoulli())


def hyperplane():
    """60 x 3 separable labels under a linear kernel, a variance a column, logit."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    kernel, mean = (
        LinearKernel(ard_num_dims=3, variance_prior=HalfCauchyPrior(3.0)),
        ConstantMean(constant_prior=NormalPrior(0.0, 3.0)),
    )
    return tg.GP(x, x @ [1, 2, -1] > 0, kernel, tg.likelihoods.Bernoulli(link="logit"), mean=mean)


def quadratic():
    """60 x 2 labels under a polynomial kernel."""
    random = np.random.default_rng(8)
    x = random.uniform(-1, 1, (60, 2))
    kernel = ScaleKernel(PolynomialKernel(2, offset_prior=GammaPrior(2.0, 2.0)), outputscale_prior=LogNormalPrior(1.0, 2.0))
    return tg.GP(x, x[:, 0] * x[:, 1] > 0.05 * random.normal(size=60), kernel, tg.likelihoods.Bernoulli())


def chessboard():
    """150 x 2 labels of a chessboard of four by four, a lengthscale a column, a half-Cauchy outputscale."""
    x = np.random.default_rng(7).uniform(0, 4, (150, 2))
    kernel = _squared(LogNormalPrior(0.0, 1.0), HalfCauchyPrior(3.0), 2)
    return tg.GP(x, np.floor(x).sum(1) % 2, kernel, tg.likelihoods.Bernoulli())


def ten_of_thirty():
    """100 rows and 10 columns of scikit-learn's breast cancer, logit, a lengthscale a column."""
    x, y = load_breast_cancer(return_X_y=True)
    rows = np.random.default_rng(1).permutation(569)[:100]
    x = ((x - x.mean(0)) / x.std(0))[rows, 10:20]
    kernel = _rough(2.5, LogNormalPrior(1.0, 1.0), HalfCauchyPrior(2.0), 10)
    return tg.GP(x, y[rows], kernel, tg.likelihoods.Bernoulli(link="logit"))


def twenty_places():
    """500 x 2 labels at twenty places."""
    random = np.random.default_rng(5)
    x = random.normal(size=(20, 2))[random.integers(0, 20, 500)]
    y = random.random(500) < 1 / (1 + np.exp(-2 * x[:, 0]))
    return tg.GP(x, y, _squared(columns=2), tg.likelihoods.Bernoulli(link="logit"))


def burst():
    """100 counts, nearly all zero, and some thousands in a fifth of the line."""
    random = np.random.default_rng(4)
    x = random.uniform(0, 5, (100, 1))
    y, mean = random.poisson(np.exp(np.where(x[:, 0] > 4, 8.0, -3.0))), ConstantMean(constant_prior=NormalPrior(0.0, 5.0))
    return tg.GP(x, y, _rough(1.5, outputscale=HalfCauchyPrior(5.0)), tg.likelihoods.Poisson(), mean=mean)


def zeros_and_5000():
    """120 x 2 over-dispersed counts, most of them zero, one 5000."""
    random = np.random.default_rng(5)
    x = random.uniform(0, 5, (120, 2))
    y = random.negative_binomial(0.3, 0.3 / (0.3 + 5 * np.exp(2 * np.sin(x[:, 0]))))
    y[0] = 5000
    likelihood = tg.likelihoods.NegativeBinomial(dispersion_prior=LogNormalPrior(0.0, 1.0))
    mean = ConstantMean(constant_prior=NormalPrior(0.0, 3.0))
    return tg.GP(x, y, _squared(LogNormalPrior(0.0, 1.0), columns=2), likelihood, mean=mean)


def months_with_gaps():
    """70 months with two gaps: a period that changes, a product of two kernels."""
    random = np.random.default_rng(0)
    t = np.concatenate([np.arange(0, 30), np.arange(60, 90), np.arange(100, 110)]) * 1.0
    y = np.sin(2 * np.pi * t / 12) * np.exp(-t / 80) + 0.15 * random.normal(size=len(t))
    season = PeriodicKernel(period_length_prior=LogNormalPrior(math.log(12.0), 0.2), lengthscale_prior=LogNormalPrior(0.0, 1.0))
    kernel = ScaleKernel(season * RBFKernel(lengthscale_prior=LogNormalPrior(4.0, 1.0)), outputscale_prior=HalfCauchyPrior(1.0))
    return tg.GPRegression(t, y, kernel, GaussianLikelihood(noise_prior=HalfNormalPrior(0.5)))


def two_scales():
    """60 data of two frequencies, a rational quadratic kernel, half-Cauchys everywhere."""
    random = np.random.default_rng(8)
    x = np.sort(random.uniform(0, 10, 60))
    y = np.sin(x) + 0.3 * np.sin(9 * x) + 0.1 * random.normal(size=60)
    base = RQKernel(lengthscale_prior=HalfCauchyPrior(1.0))
    base.register_prior("alpha_prior", HalfCauchyPrior(1.0), "alpha")
    kernel = ScaleKernel(base, outputscale_prior=HalfCauchyPrior(1.0))
    return tg.GPRegression(x, y, kernel, GaussianLikelihood(noise_prior=HalfCauchyPrior(0.2)))


def cauchy_noise():
    """60 x 2 under Cauchy noise, Student t with degrees of freedom that gpytorch keeps above two."""
    random = np.random.default_rng(3)
    x = random.uniform(-2, 2, (60, 2))
    y = np.sin(3 * x[:, 0]) + 0.1 * random.standard_t(1.0, size=60)
    likelihood = tg.likelihoods.StudentT(noise_prior=HalfCauchyPrior(0.01), deg_free_prior=GammaPrior(2.0, 0.1))
    return tg.GP(x, y, _squared(outputscale=HalfCauchyPrior(1.0)), likelihood)


def t_noise_ard():
    """300 x 5 under Student t noise with two degrees of freedom, which are sampled, a lengthscale a column."""
    random = np.random.default_rng(4)
    x = random.normal(size=(300, 5))
    y = np.sin(2 * x[:, 0]) + 0.3 * random.standard_t(2, size=300)
    likelihood = tg.likelihoods.StudentT(deg_free_prior=GammaPrior(2.0, 0.1), noise_prior=GammaPrior(1.1, 0.5))
    return tg.GP(x, y, _squared(GammaPrior(3.0, 3.0), GammaPrior(2.0, 0.15), 5), likelihood)


def _standardised(x):
    return (x - x.mean(0)) / x.std(0)


def _labels(link, columns, mean=None, **made):
    """Labels that are made, under priors as one has for few standardised columns; ``columns``: of a lengthscale each."""
    x, y = make_classification(**made)
    kernel = _squared(GammaPrior(3.0, 6.0 if columns is None else 3.0), GammaPrior(2.0, 0.15), columns)
    return tg.GP(_standardised(x), y, kernel, tg.likelihoods.Bernoulli(link=link), mean=mean)


def _few_ones(columns):
    mean = ConstantMean(constant_prior=NormalPrior(0.0, 2.0))
    return _labels("probit", columns, mean, n_samples=450, n_features=8, weights=[0.96], n_informative=4, random_state=9)


def imbalanced():
    """450 x 8 labels, 19 of them ones, a lengthscale a column, a mean that is sampled."""
    return _few_ones(8)


def imbalanced_alike():
    """The same with one lengthscale."""
    return _few_ones(None)


def cancer_ard():
    """400 x 30 labels of scikit-learn's breast cancer, probit, a lengthscale a column: 31 hyperparameters."""
    x, y = load_breast_cancer(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[:400]
    return _probit_ard(x[rows], y[rows], GammaPrior(3.0, 3.0))


def three_eight_ard():
    """250 x 50 of scikit-learn's digits, threes and eights, probit, a lengthscale a column under a prior for so many."""
    x, y = load_digits(return_X_y=True)
    chosen = (y == 3) | (y == 8)
    x, y = x[chosen], y[chosen] == 8
    rows = np.random.default_rng(0).permutation(len(x))[:250]
    x = x[rows]
    x = x[:, x.std(0) > 0.3]
    return _probit_ard(x, y[rows], GammaPrior(3.0, 3.0 / x.shape[1] ** 0.5))


def _probit_ard(x, y, lengthscale):
    kernel = _squared(lengthscale, GammaPrior(2.0, 0.15), x.shape[1])
    return tg.GP(_standardised(x), y, kernel, tg.likelihoods.Bernoulli())


def heart_like():
    """270 x 13 labels, logit, a lengthscale a column."""
    return _labels("logit", 13, n_samples=270, n_features=13, n_informative=6, flip_y=0.15, random_state=3)


def german_like():
    """500 x 24 labels, logit, a lengthscale a column."""
    return _labels("logit", 24, n_samples=500, n_features=24, n_informative=8, flip_y=0.3, random_state=2)


def vehicle_like():
    """300 x 18, four classes, a prior of lengthscales that is for few columns."""
    x, y = make_classification(300, 18, n_informative=8, n_classes=4, n_clusters_per_class=1, random_state=4)
    kernel = _squared(GammaPrior(3.0, 6.0), GammaPrior(2.0, 0.15))
    return tg.GP(_standardised(x), y, kernel, tg.likelihoods.Softmax(num_classes=4))


def three_of_eighteen():
    """250 x 18, three classes, the same prior."""
    x, y = make_classification(250, 18, n_informative=8, n_classes=3, n_clusters_per_class=1, random_state=4)
    kernel = _squared(GammaPrior(3.0, 6.0), GammaPrior(2.0, 0.15))
    return tg.GP(_standardised(x), y, kernel, tg.likelihoods.Softmax(num_classes=3))


def _friedman(num_data, num_columns, seed):
    x, y = make_friedman1(num_data, num_columns, noise=1.0, random_state=seed)
    kernel = _squared(LogNormalPrior(1.0, 1.0), GammaPrior(2.0, 0.15), num_columns)
    return tg.GPRegression(x, _standardised(y), kernel, GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.05)))


def regression_of_thirty():
    """500 x 30, a lengthscale a column: 32 hyperparameters."""
    return _friedman(500, 30, 0)


def regression_of_sixty():
    """300 x 60, a lengthscale a column: 62 hyperparameters."""
    return _friedman(300, 60, 1)


def noise_by_column():
    """70 x 4, noise that depends on one column and the mean on another, two latent functions, a lengthscale a column."""
    random = np.random.default_rng(13)
    x = random.normal(size=(70, 4))
    y = x[:, 0] + random.normal(size=70) * np.exp(x[:, 1] - 1)
    return tg.GP(x, y, _squared(LogNormalPrior(0.7, 0.7), columns=4), tg.likelihoods.HeteroskedasticGaussian(scale=0.3))


def robust_irises():
    """150 x 4, three classes by robust max, eight inducing points."""
    x, y = load_iris(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    z = tg.kmeans_inducing_points(x, 8)
    return tg.SparseGP(x, y, _rough(2.5), tg.likelihoods.RobustMax(num_classes=3), inducing_points=z)


def wine_ard():
    """89 x 13, half of scikit-learn's wines, three classes, a lengthscale a column: 14 hyperparameters."""
    x, y = load_wine(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[:89]
    kernel = _squared(GammaPrior(3.0, 3.0), GammaPrior(2.0, 0.15), 13)
    return tg.GP(_standardised(x[rows]), y[rows], kernel, tg.likelihoods.Softmax(num_classes=3))


def noise_of_three():
    """250 x 3, three classes that inputs say nothing of, a half-Cauchy outputscale."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(250, 3)), random.integers(0, 3, 250)
    return tg.GP(x, y, _squared(_FLAT, HalfCauchyPrior(5.0)), tg.likelihoods.Softmax(num_classes=3))


NEWCOMERS = (
    one_region,
    hyperplane,
    quadratic,
    chessboard,
    ten_of_thirty,
    twenty_places,
    burst,
    zeros_and_5000,
    months_with_gaps,
    two_scales,
    cauchy_noise,
    t_noise_ard,
    imbalanced,
    imbalanced_alike,
    cancer_ard,
    three_eight_ard,
    heart_like,
    german_like,
    vehicle_like,
    three_of_eighteen,
    regression_of_thirty,
    regression_of_sixty,
    noise_by_column,
    robust_irises,
    wine_ard,
    noise_of_three,
)
