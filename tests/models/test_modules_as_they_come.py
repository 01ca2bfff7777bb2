"""Kernels, means and likelihoods that are not what they seem: a sentence where they would be sampled as something else."""

import warnings

import pytest
import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import GridInterpolationKernel, InducingPointKernel, Kernel, MaternKernel, RBFKernel, RFFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, GaussianLikelihoodWithMissingObs, Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.models import ExactGP
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.problems import fixed_kernel, inputs

X = inputs(8, 1)
LABELS = (X[:, 0] > X[:, 0].median()).int()


def prior():
    return GammaPrior(2.0, 3.0)


def model_of(kernel=None, mean=None, likelihood=None, y=LABELS):
    kernel = RBFKernel(lengthscale_prior=prior()) if kernel is None else kernel
    return tg.GP(X, y, kernel, tg.likelihoods.Bernoulli() if likelihood is None else likelihood, mean=mean)


class Exponential(Kernel):
    """A kernel of one's own; ``careless`` takes a softplus of the raw parameter by itself, ``keeping`` keeps its first answer."""

    def __init__(self, careless=False, keeping=False):
        super().__init__()
        self.careless, self.keeping, self.kept = careless, keeping, {}
        self.register_parameter("raw_decay", torch.nn.Parameter(torch.zeros(1)))
        self.register_constraint("raw_decay", Positive())
        self.register_prior("decay_prior", prior(), lambda kernel: kernel.decay)

    @property
    def decay(self):
        if self.careless:
            return torch.nn.functional.softplus(self.raw_decay)
        return self.raw_decay_constraint.transform(self.raw_decay)

    def forward(self, x1, x2, diag=False, **options):
        key = (len(x1), len(x2), diag)
        if not self.keeping or key not in self.kept:
            distance = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(dim=-1)
            covariance = torch.exp(-self.decay.unsqueeze(-1) * distance)
            self.kept[key] = covariance.diagonal(dim1=-2, dim2=-1) if diag else covariance
        return self.kept[key]


class Careless(Mean):
    def __init__(self):
        super().__init__()
        self.register_parameter("raw_level", torch.nn.Parameter(torch.zeros(())))
        self.register_constraint("raw_level", Positive())
        self.register_prior("level_prior", prior(), lambda mean: mean.raw_level_constraint.transform(mean.raw_level))

    def forward(self, x):
        return torch.nn.functional.softplus(self.raw_level).expand(x.shape[:-1])


class CarelessNoise(Likelihood):
    def __init__(self):
        super().__init__()
        self.register_parameter("raw_noise", torch.nn.Parameter(torch.zeros(1)))
        self.register_constraint("raw_noise", Positive())
        self.register_prior("noise_prior", prior(), lambda made: made.raw_noise_constraint.transform(made.raw_noise))

    def forward(self, function_samples, *args, **kwargs):
        return torch.distributions.Normal(function_samples, torch.nn.functional.softplus(self.raw_noise))


def test_a_raw_parameter_read_past_its_constraint_is_found_out():
    """What stands there while chains are evaluated is the constrained value: the softplus would be taken twice."""
    model_of(Exponential())
    with pytest.raises(ValueError, match=r"the kernel \(Exponential\) answers in two ways .* self.raw_x_constraint"):
        model_of(Exponential(careless=True))
    with pytest.raises(ValueError, match=r"the mean \(Careless\) answers in two ways"):
        model_of(mean=Careless())
    with pytest.raises(ValueError, match=r"the likelihood \(CarelessNoise\) answers in two ways"):
        model_of(likelihood=CarelessNoise(), y=X[:, 0])


@pytest.mark.parametrize("made", [lambda: Exponential(keeping=True), lambda: RFFKernel(num_samples=5)])
def test_a_kernel_that_remembers_or_draws_is_found_out(made):
    kernel = made()
    if isinstance(kernel, RFFKernel):  # whose weights are drawn at the first call: others in each copy
        kernel.register_prior("lengthscale_prior", prior(), "lengthscale")
    with pytest.raises(ValueError, match=r"answers in two ways .* draw no random numbers .* keep nothing between calls"):
        model_of(kernel)


class Pairs(Kernel):
    """exp of minus the distance over ``scale``, and what ``changed`` makes of it: given the inputs, the matrix and the scales."""

    has_lengthscale = True

    def __init__(self, changed):
        super().__init__(lengthscale_prior=prior())
        self.changed = changed

    def forward(self, x1, x2, diag=False, **options):
        covariance = torch.exp(-(x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(dim=-1) / self.lengthscale)
        covariance = self.changed(x1, x2, covariance, self.lengthscale)
        if not diag:
            return covariance
        return covariance.diagonal(dim1=-2, dim2=-1) * (2.0 if self.changed is wrong_diagonal else 1.0)


def as_it_is(x1, x2, covariance, scale):
    return covariance


def wrong_diagonal(x1, x2, covariance, scale):
    return covariance


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (lambda x1, x2, covariance, scale: covariance * (1 + x1), r"K\(x, x\) is not symmetric"),
        (wrong_diagonal, r"diag=True gives other variances than the diagonal of K\(x, x\)"),
        (lambda x1, x2, covariance, scale: covariance / x2.sum(-2, keepdim=True), "depends on which other inputs it is asked for"),
    ],
)
def test_what_is_no_covariance_function_is_refused(changed, match):
    model_of(Pairs(as_it_is))
    with pytest.raises(ValueError, match=match):
        model_of(Pairs(changed))


def test_a_kernel_that_looks_at_all_settings_at_once_is_evaluated_one_by_one():
    kernel = Pairs(lambda x1, x2, covariance, scale: covariance if float(scale.detach().mean()) < 1 else covariance.square())
    model = model_of(kernel)
    theta = torch.tensor([[-2.0], [0.5], [1.5]], dtype=torch.float64)
    alone = torch.cat([model.prior(row[None]).covariance for row in theta])
    torch.testing.assert_close(model.prior(theta).covariance, alone)


def test_a_kernel_without_a_derivative_gets_a_word():
    with pytest.warns(UserWarning, match=r"the kernel \(Pairs\) has no derivative in lengthscale. Expected torch operations"):
        model_of(Pairs(lambda x1, x2, covariance, scale: covariance.detach()))
    fixed = Pairs(as_it_is).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_of(fixed)


class Noise(Likelihood):
    """Normal noise about what ``moved`` makes of f, of a deviation that it makes of the parameter."""

    def __init__(self, moved, deviation=lambda noise: noise):
        super().__init__()
        self.moved, self.deviation = moved, deviation
        self.register_parameter("raw_noise", torch.nn.Parameter(torch.zeros(1)))
        self.register_constraint("raw_noise", Positive())
        self.register_prior("noise_prior", prior(), lambda made: made.noise)

    @property
    def noise(self):
        return self.raw_noise_constraint.transform(self.raw_noise)

    def forward(self, function_samples, *args, **kwargs):
        return torch.distributions.Normal(self.moved(function_samples), self.deviation(self.noise))


def test_a_likelihood_that_mixes_data_is_refused():
    model_of(likelihood=Noise(torch.sin), y=X[:, 0])
    for moved in (lambda f: f - f.mean(-1, keepdim=True), lambda f: f.cumsum(-1), lambda f: f.roll(1, -1)):
        with pytest.raises(ValueError, match="Noise mixes observations: the density of one changes with f at another"):
            model_of(likelihood=Noise(moved), y=X[:, 0])


def test_a_likelihood_without_a_derivative_is_refused_or_gets_a_word():
    with pytest.raises(ValueError, match=r"the log_prob of Noise has no derivative in f. .* is_smooth = False"):
        model_of(likelihood=Noise(torch.Tensor.detach), y=X[:, 0])
    with pytest.warns(UserWarning, match=r"the likelihood \(Noise\) has no derivative in noise. Expected torch operations"):
        model_of(likelihood=Noise(torch.sin, torch.Tensor.detach), y=X[:, 0])


def grid_kernel(lengthscale):
    base = RBFKernel(lengthscale_prior=prior())
    base.lengthscale = lengthscale
    return GridInterpolationKernel(base, grid_size=20, grid_bounds=[(-1.0, 2.0)]).double()


def test_a_kernel_on_a_grid_in_evaluation_mode_follows_its_parameters():
    model = model_of(grid_kernel(1.0).eval())
    lengthscales = torch.tensor([[0.2], [1.5]], dtype=torch.float64)
    found = model.prior(lengthscales.log()).covariance
    for covariance, lengthscale in zip(found, lengthscales, strict=True):
        expected = grid_kernel(float(lengthscale))(model.train_x).to_dense() + model.jitter * torch.eye(8)
        torch.testing.assert_close(covariance, expected, rtol=1e-6, atol=1e-8)


def test_a_kernel_that_keeps_a_prediction_is_refused_in_a_sentence():
    kernel = grid_kernel(1.0).eval()
    kernel(X.double()).to_dense()
    with pytest.raises(ValueError, match="cannot be copied, since it keeps results of earlier calls"):
        model_of(kernel)


def tied(first, second, **options):
    one, other = RBFKernel(lengthscale_prior=first), MaternKernel(lengthscale_prior=second, **options)
    other.raw_lengthscale = one.raw_lengthscale
    return one + other


def test_a_parameter_that_two_kernels_share_has_one_prior_wherever_it_is():
    theta = torch.tensor([[0.3]], dtype=torch.float64)
    shared = prior()
    expected = float(shared.log_prob(theta.exp())) + 0.3
    for first, second in ((shared, None), (None, shared), (shared, shared)):
        assert float(model_of(tied(first, second)).layout.log_prior(theta)) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"'kernel.kernels.1.lengthscale_prior': its parameter .* has a second prior"):
        model_of(tied(prior(), GammaPrior(9.0, 1.0)))
    with pytest.raises(ValueError, match="answers in two ways"):  # one number, and two values that it stands for
        model_of(tied(prior(), None, lengthscale_constraint=Interval(0.1, 0.4)))


class OfKernel(Mean):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        return self.kernel.outputscale.unsqueeze(-1).expand(x.shape[:-1])


def test_a_parameter_that_kernel_and_mean_share_is_refused_unless_it_is_fixed():
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=prior()), outputscale_prior=prior())
    with pytest.raises(ValueError, match=r"kernel.raw_outputscale and mean.kernel.raw_outputscale are one parameter"):
        model_of(kernel, OfKernel(kernel))
    fixed = fixed_kernel()
    model_of(fixed, OfKernel(fixed))


def test_what_is_made_of_gaussian_noise_is_not_taken_for_it():
    with pytest.raises(TypeError, match=r"likelihood is GaussianLikelihoodWithMissingObs. Expected gpytorch.likelihoods.Gaussian"):
        tg.GPRegression(X, X[:, 0], RBFKernel(lengthscale_prior=prior()), GaussianLikelihoodWithMissingObs(noise_prior=prior()))


def test_modules_of_several_models_are_refused():
    several = torch.Size([2])
    with pytest.raises(ValueError, match=r"ConstantMean gives means of shape .* without batch_shape"):
        model_of(mean=ConstantMean(constant_prior=NormalPrior(0.0, 1.0), batch_shape=several))
    with pytest.raises(ValueError, match="GaussianLikelihood has a batch_shape"):
        model_of(likelihood=GaussianLikelihood(noise_prior=prior(), batch_shape=several), y=X[:, 0])


class SGPR(ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
        self.covar_module = InducingPointKernel(RBFKernel(lengthscale_prior=prior()), x[:3].clone(), likelihood)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_gpytorchs_sgpr_is_told_which_model_has_inducing_points():
    likelihood = GaussianLikelihood(noise_prior=prior())
    with pytest.raises(ValueError, match=r"InducingPointKernel.* Expected its base_kernel, in torchgpmc.SparseGP"):
        tg.from_gpytorch(SGPR(X, X[:, 0], likelihood), likelihood)
