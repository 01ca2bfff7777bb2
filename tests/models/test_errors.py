"""Everything a user can get wrong when building a model: the message says expected, got and remedy. And what must just work."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import LCMKernel, Matern52KernelGrad, MultitaskKernel, RBFKernel, RBFKernelGrad, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.problems import LIKELIHOODS, NOT_SMOOTH, fixed_kernel, inputs, kernel

X, Y = inputs(6), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
BERNOULLI = LIKELIHOODS["probit"]
NAN_X = torch.cat([X[:5], torch.full((1, 2), torch.nan)])


def build(x=X, y=Y, k=None, likelihood=None, **options):
    return tg.GP(x, y, kernel() if k is None else k, BERNOULLI() if likelihood is None else likelihood, **options)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: build(x=X.unsqueeze(0)), ValueError, r"train_x has shape \(1, 6, 2\). Expected \(N, D\)"),
        (lambda: build(x=X[:0], y=Y[:0]), ValueError, "at least one row"),
        (lambda: build(y=Y[:4]), ValueError, r"train_y has shape \(4,\) but train_x has 6 rows. Expected \(6,\)"),
        (lambda: build(x=NAN_X), ValueError, "2 NaN or infinite values, the first in row 5.*drop or impute"),
        (lambda: build(y=torch.tensor([0, 1, 1, 0, 1, torch.inf])), ValueError, "train_y has 1 NaN or infinite"),
        (lambda: build(x=[["a", "b"]] * 5), TypeError, r"train_x is list.*Expected numbers.*OrdinalEncoder"),
        (lambda: build(x=None), TypeError, r"train_x is NoneType None.*Expected numbers"),
        (lambda: build(y=[0, 1]), ValueError, r"train_y has shape \(2,\) but train_x has 6 rows"),
        (lambda: build(y=["no", "yes"] * 3), TypeError, r"train_y is list.*Expected numbers.*OrdinalEncoder"),
        (lambda: build(y=Y + 1), ValueError, r"the targets hold \[2.0\]. Expected labels 0 and 1 \(or -1 and \+1\)"),
        (lambda: build(y=torch.tensor([-1.0, 0, 1, 1, 0, 1])), ValueError, r"the targets hold \[0.0\]. Expected labels -1 and \+1"),
        (lambda: build(y=Y - 3, likelihood=tg.likelihoods.Poisson()), ValueError, "Expected counts 0, 1, 2"),
        (lambda: build(y=Y + 0.5, likelihood=tg.likelihoods.Poisson()), ValueError, "Expected counts.*use Gaussian or StudentT"),
        (
            lambda: build(y=Y + 2, likelihood=LIKELIHOODS["softmax"]()),
            ValueError,
            "Expected classes 0 to 2.*Encode the classes from 0",
        ),
        (
            lambda: build(k=ScaleKernel(RBFKernel()), mean=gpytorch.means.ConstantMean()),
            ValueError,
            r"(?s)3 parameters have no prior.*kernel.outputscale: .*GammaPrior\(2.0, 1.0\).*kernel.base_kernel.lengthscale: .*or "
            r"kernel.base_kernel.raw_lengthscale.requires_grad_\(False\).*mean.constant: constant_prior=.*NormalPrior",
        ),
        (
            lambda: build(y=Y + 2, likelihood=NOT_SMOOTH["robust_max"]()),
            ValueError,
            r"the targets hold \[3.0\]. Expected classes 0 to 2",
        ),
        (
            lambda: build(likelihood=tg.likelihoods.Beta()),
            ValueError,
            r"the targets hold \[0.0, 1.0\]. Expected shares between 0 and 1, both excluded. Move shares of exactly 0 or 1",
        ),
        (lambda: build(k=kernel(5)), ValueError, "ard_num_dims=5 but its inputs have 2 columns"),
        (lambda: build(k="rbf"), TypeError, "Expected a gpytorch kernel"),
        (lambda: build(likelihood="probit"), TypeError, r"torchgpmc.likelihoods.Bernoulli\(\)"),
        (lambda: build(likelihood=tg.likelihoods.Bernoulli), TypeError, "Expected a gpytorch or torchgpmc likelihood object"),
        *(
            (
                lambda made=made: build(k=made().requires_grad_(False)),
                ValueError,
                f"{name} gives {count} values an input.*RBFKernel",
            )
            for name, count, made in (
                ("MultitaskKernel", 2, lambda: MultitaskKernel(RBFKernel(), num_tasks=2)),
                ("LCMKernel", 2, lambda: LCMKernel([RBFKernel()], num_tasks=2)),
                ("RBFKernelGrad", 3, RBFKernelGrad),
                ("ScaleKernel", 3, lambda: ScaleKernel(Matern52KernelGrad())),
            )
        ),
        (lambda: build(mean=0.0), TypeError, "Expected a gpytorch mean"),
        (lambda: build(jitter=-1e-6), ValueError, "jitter is -1e-06. Expected a variance of at least 0"),
        (lambda: build(jitter=True), ValueError, "jitter is True. Expected a variance of at least 0"),
        (lambda: build(dtype=torch.int64), ValueError, "Expected torch.float64"),
        (lambda: build(dtype=torch.float16), ValueError, "dtype is torch.float16. Expected torch.float64"),
        (lambda: build().bfloat16(), ValueError, "the model's dtype is torch.bfloat16. Expected torch.float64"),
        (lambda: tg.likelihoods.Bernoulli(link="cauchit"), ValueError, "Expected 'probit' or 'logit'"),
        (lambda: build(x=X.to("meta")), ValueError, "on different devices.*move them with .to"),
    ],
)
def test_mistakes_are_named(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("points", "match"),
    [
        (X[:0], "at least one row"),
        (torch.rand(3, 4), "inducing_points has 4 columns but the model's train_x has 2"),
        (torch.full((2, 2), torch.nan), "NaN or infinite"),
    ],
)
def test_inducing_points_are_checked(points, match):
    with pytest.raises(ValueError, match=match):
        tg.SparseGP(X, Y, kernel(), BERNOULLI(), inducing_points=points)


@pytest.mark.parametrize("kind", [tg.SparseGP, tg.FITC])
def test_a_number_of_inducing_points_names_what_places_them(kind):
    with pytest.raises(TypeError, match=r"inducing_points is 3. Expected their places.*kmeans_inducing_points\(train_x, 3\)"):
        kind(X, Y, kernel(), BERNOULLI(), inducing_points=3)


@pytest.mark.parametrize("options", [{"k": X}, {"likelihood": X}, {"mean": X}])
def test_a_tensor_in_anothers_place_is_not_printed(options):
    with pytest.raises(TypeError, match=r"^(kernel|likelihood|mean) is a Tensor. Expected a gpytorch"):
        build(**options)


@pytest.mark.parametrize("count", [0, 7, 2.0])
def test_kmeans_wants_a_possible_number(count):
    with pytest.raises(ValueError, match="Expected a whole number from 1 to 6"):
        tg.kmeans_inducing_points(X, count)


def test_kmeans_gives_cluster_centres():
    x = torch.cat([torch.zeros(5, 1), torch.ones(5, 1)]) + 0.01 * torch.arange(10.0)[:, None]
    points = tg.kmeans_inducing_points(x, 2)
    torch.testing.assert_close(points.sort(0).values, torch.tensor([[0.02], [1.07]]))


def finite(model):
    value = tg.joint_log_density(model)(torch.zeros(2, model.layout.size + model.latent_size, dtype=model.train_x.dtype))
    return bool(torch.isfinite(value).all())


@pytest.mark.parametrize(
    "model",
    [
        lambda: build(x=X.repeat(2, 1), y=Y.repeat(2)),
        lambda: build(x=torch.cat([X, torch.ones(6, 1)], 1), k=kernel(3)),
        lambda: build(x=X[:1], y=Y[:1]),
        lambda: build(y=2 * Y - 1),
        lambda: build(y=Y.int()),
        lambda: build(y=Y.bool()),
        lambda: build(x=X.float(), k=kernel().float()),
        lambda: build(x=X.float(), dtype=torch.float32),
        lambda: build(x=X[:, 0], k=kernel(1)),
        lambda: build(mean=gpytorch.means.ConstantMean(constant_prior=gpytorch.priors.NormalPrior(0.0, 1.0))),
        lambda: build(k=fixed_kernel()),
        lambda: tg.SparseGP(X, Y, kernel(), BERNOULLI(), inducing_points=X[:3].float()),
    ],
    ids=[
        "duplicate rows",
        "constant column",
        "one datum",
        "-1/+1",
        "int",
        "bool",
        "float32",
        "float32 model",
        "1-D x",
        "mean",
        "fixed",
        "sparse float32",
    ],
)
@pytest.mark.filterwarnings("ignore:train_x. columns .2. are constant")
def test_these_just_work(model):
    assert finite(model())


def test_minus_one_and_zero_labels_are_the_same_model():
    position = torch.zeros(1, 9, dtype=torch.float64)
    torch.testing.assert_close(tg.joint_log_density(build())(position), tg.joint_log_density(build(y=2 * Y - 1))(position))


def test_the_callers_objects_are_copied():
    k, x = kernel(), X.clone()
    model = build(x=x, k=k)
    x.zero_()
    k.outputscale = 7.0
    assert float(model.train_x.abs().sum()) > 0
    assert float(model.kernel.outputscale.detach()) != pytest.approx(7.0)
    assert next(k.parameters()).dtype == torch.float32 and model.kernel.raw_outputscale.dtype == torch.float64


def test_a_mean_function_enters_f_and_predictions():
    mean = gpytorch.means.LinearMean(2)
    mean.weights.data, mean.bias.data = torch.tensor([[2.0], [-1.0]]), torch.tensor([0.5])
    mean.requires_grad_(False)
    with_mean, without = build(mean=mean), build()
    theta, v = (
        torch.zeros(2, 3, dtype=torch.float64),
        torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )
    shift = X @ torch.tensor([2.0, -1.0], dtype=torch.float64) + 0.5
    torch.testing.assert_close(
        with_mean.latents(with_mean.prior(theta), v) - without.latents(without.prior(theta), v), shift.expand(2, 6)
    )
    test_x = inputs(4, seed=3)
    means = [model.marginals(model.at(model.prior(theta), test_x), v).mean for model in (with_mean, without)]
    difference = means[0] - means[1]
    torch.testing.assert_close(difference[:, 0], (test_x @ torch.tensor([2.0, -1.0], dtype=torch.float64) + 0.5).expand(2, 4))


def test_jitter_is_in_the_data_covariance_and_absent_elsewhere():
    model = build(jitter=0.5)
    prior = model.prior(torch.zeros(1, 3, dtype=torch.float64))
    covariance = prior.factor[0] @ prior.factor[0].T
    plain = model.covariance.bind(X, X)(prior.values["kernel"])[0]
    torch.testing.assert_close(covariance, plain + 0.5 * torch.eye(6, dtype=torch.float64))
    v = torch.zeros(1, 6, dtype=torch.float64)
    far = model.marginals(model.at(prior, torch.full((1, 2), 1e3, dtype=torch.float64)), v)
    torch.testing.assert_close(far.variance.flatten(), prior.values["kernel"]["raw_outputscale"])


def test_an_odd_prior_of_the_users_own_needs_log_prob_alone():
    class Own(gpytorch.priors.Prior):
        arg_constraints = {}

        def __init__(self):
            torch.nn.Module.__init__(self)
            super().__init__(validate_args=False)
            self._transform = None

        def log_prob(self, x):
            return -x

    k = ScaleKernel(RBFKernel(lengthscale_prior=Own()), outputscale_prior=GammaPrior(2.0, 1.0))
    assert finite(build(k=k))


class _Exact(gpytorch.models.ExactGP):
    """A model of gpytorch's own, which is not ours."""


_TAKES_A_MODEL = (
    tg.sample,
    tg.explain,
    tg.recommend,
    tg.fit,
    tg.initialize,
    tg.tune_hmc,
    tg.joint_log_density,
    lambda model: tg.approximations.laplace(model, torch.zeros(1, 0)),
    lambda model: tg.approximations.predict(model, torch.zeros(1, 0), tg.Laplace(), [0.0]),
    lambda model: tg.evidence.classify(model, torch.zeros(1, 0)),
)


@pytest.mark.parametrize("function", _TAKES_A_MODEL)
@pytest.mark.parametrize("given", [None, torch.zeros(3), RBFKernel(), tg.GP])
def test_what_is_no_model_is_refused_by_all_that_take_one(function, given):
    with pytest.raises(TypeError, match=r"^model is .*\. Expected a torchgpmc\."):
        function(given)


@pytest.mark.parametrize("function", [tg.sample, tg.explain, tg.recommend, tg.fit])
def test_a_model_of_gpytorch_comes_with_the_call_that_converts_it(function):
    with pytest.raises(TypeError, match=r"Convert it: torchgpmc.from_gpytorch"):
        function(_Exact(torch.zeros(2), torch.zeros(2), gpytorch.likelihoods.GaussianLikelihood()))
