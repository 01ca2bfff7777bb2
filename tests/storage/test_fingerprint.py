"""What files know of their model: every difference in density is seen, nothing else is taken for one."""

import copy
import math
import pickle

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RFFKernel,
    ScaleKernel,
)
from gpytorch.means import ConstantMean, Mean
from gpytorch.priors import (
    GammaPrior,
    HalfCauchyPrior,
    LogNormalPrior,
    MultivariateNormalPrior,
    NormalPrior,
    Prior,
    SmoothedBoxPrior,
    UniformPrior,
)

import torchgpmc as tg
from tests.problems import gp, gp_regression, inputs, sparse_gp
from tests.speed import quick
from tests.test_posterior import posterior_of
from torchgpmc.storage.files import read_tensors, write_atomically

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
RUN = {"num_samples": 1, "warmup_steps": 1, "num_chains": 2, "seed": 1, "progress": False}
X = torch.linspace(0, 1, 6, dtype=torch.float64)
Y = (X.mul(20).sin() > 0).double()


def model(kernel=None, likelihood=None, *, prior=None, x=X, y=Y, kind=tg.GP, **options):
    prior = GammaPrior(2.0, 4.0) if prior is None else prior
    kernel = RBFKernel(lengthscale_prior=prior) if kernel is None else kernel
    return kind(x, y, kernel, tg.likelihoods.Bernoulli() if likelihood is None else likelihood, **options)


def user_prior(rate):
    class Exponential(Prior):
        arg_constraints = {}

        def __init__(self):
            torch.nn.Module.__init__(self)
            torch.distributions.Distribution.__init__(self, validate_args=False)

        def log_prob(self, x):
            return math.log(rate) - rate * x

    return Exponential()


def user_kernel(constant, between=False):
    class Own(Kernel):
        has_lengthscale = True

        def forward(self, x1, x2, diag=False, **params):
            first, second = x1 / self.lengthscale, x2 / self.lengthscale
            distance = (first - second).abs().sum(-1) if diag else (first[..., :, None, :] - second[..., None, :, :]).abs().sum(-1)
            if between:  # another function, and the same at the data
                first, second = ((1 + constant * (5 * math.pi * x).sin().square().sum(-1)) for x in (x1, x2))
                weight = first * second if diag else first[..., :, None] * second[..., None, :]
                return weight * (-distance).exp()
            return (1 + distance).pow(-constant)

    return Own(lengthscale_prior=GammaPrior(2.0, 4.0))


def user_mean(power):
    class Trend(Mean):
        def forward(self, x):
            return x[..., 0] ** power

    return Trend()


def user_likelihood(deviation, slope=1.0):
    class Noise(gpytorch.likelihoods.Likelihood):
        def __init__(self):
            super().__init__()
            self.register_buffer("deviation", torch.tensor(deviation))

        def forward(self, function_samples):
            return torch.distributions.Normal(slope * function_samples, self.deviation)

    return Noise()


def user_model(power, **options):
    class Tempered(tg.GP):
        def log_likelihood(self, *arguments):
            return power * super().log_likelihood(*arguments)

    return model(kind=Tempered, **options)


def fixed(lengthscale):
    kernel = ScaleKernel(RBFKernel(), outputscale_prior=GammaPrior(2.0, 1.0))
    kernel.base_kernel.lengthscale = lengthscale
    kernel.base_kernel.requires_grad_(False)
    return model(kernel)


def faint(kernel):
    kernel = ScaleKernel(kernel)
    kernel.outputscale = 1e-9
    kernel.raw_outputscale.requires_grad_(False)
    return kernel


def polynomial(power):
    return model(PolynomialKernel(power=power, offset_prior=GammaPrior(2.0, 2.0)))


def matern(**options):
    return MaternKernel(lengthscale_prior=GammaPrior(2.0, 4.0), **options)


def joint_prior(correlation):
    return MultivariateNormalPrior(torch.ones(2), torch.tensor([[1.0, correlation], [correlation, 1.0]]))


def two_columns(prior):
    return model(RBFKernel(ard_num_dims=2, lengthscale_prior=prior), x=inputs(6))


def random_features(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model(RFFKernel(num_samples=5, num_dims=1, lengthscale_prior=GammaPrior(2.0, 4.0)))


def sparse(last):
    return model(kind=tg.SparseGP, inducing_points=torch.tensor([0.1, 0.5, last], dtype=torch.float64))


def regression(**options):
    return model(kind=tg.GPRegression, likelihood=tg.likelihoods.Gaussian(noise_prior=GammaPrior(2.0, 4.0)), **options)


def nudged(y):
    y = y.clone()
    y[2] = torch.nextafter(y[2], torch.tensor(2.0, dtype=y.dtype))
    return y


PAIRS = {
    "gamma prior": lambda c: model(prior=GammaPrior(*((2.0, 4.0), (20.0, 1.0))[c])),
    "class of prior": lambda c: model(prior=(LogNormalPrior(0.0, 1.0), HalfCauchyPrior(1.0))[c]),
    "log-normal prior": lambda c: model(prior=LogNormalPrior(0.0, (1.0, 1.001)[c])),
    "uniform prior": lambda c: model(prior=UniformPrior(0.0, (2.0, 2.5)[c])),
    "half-Cauchy prior": lambda c: model(prior=HalfCauchyPrior((1.0, 1.001)[c])),
    "box prior": lambda c: model(prior=SmoothedBoxPrior(0.1, 1.0, (0.1, 0.2)[c])),
    "joint prior": lambda c: two_columns(joint_prior((0.2, 0.3)[c])),
    "user's prior": lambda c: model(prior=user_prior((1.0, 1.5)[c])),
    "prior of noise": lambda c: model(
        y=X, likelihood=gpytorch.likelihoods.LaplaceLikelihood(noise_prior=GammaPrior(2.0, (3.0, 4.0)[c]))
    ),
    "constraint": lambda c: model(
        RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0), lengthscale_constraint=(GreaterThan(0.1), Interval(0.1, 5.0))[c])
    ),
    "bound of constraint": lambda c: model(
        RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0), lengthscale_constraint=GreaterThan((0.1, 0.2)[c]))
    ),
    "Matern nu": lambda c: model(matern(nu=(1.5, 2.5)[c])),
    "Matern nu at far apart inputs": lambda c: model(matern(nu=(1.5, 2.5)[c]), x=1e6 * X),
    "active_dims": lambda c: model(matern(active_dims=((0,), (1,))[c]), x=inputs(6)),
    "polynomial power": lambda c: polynomial((2, 3)[c]),
    "sum or product": lambda c: model((AdditiveKernel, ProductKernel)[c](matern(nu=0.5), matern(nu=2.5))),
    "Bernoulli link": lambda c: model(likelihood=tg.likelihoods.Bernoulli(("probit", "logit")[c])),
    "mean's prior": lambda c: model(mean=ConstantMean(constant_prior=NormalPrior((0.0, 0.1)[c], 1.0))),
    "mean's formula": lambda c: model(mean=user_mean((1, 2)[c])),
    "likelihood's buffer": lambda c: model(likelihood=user_likelihood((1.0, 1.01)[c])),
    "likelihood's formula": lambda c: model(likelihood=user_likelihood(1.0, (1.0, 1.1)[c])),
    "kernel's formula": lambda c: model(user_kernel((1.0, 1.1)[c])),
    "kernel's formula between the data": lambda c: model(user_kernel((0.0, 0.1)[c], between=True)),
    "random features": lambda c: random_features(c),
    "model's formula": lambda c: user_model((1.0, 0.9)[c]),
    "fixed value": lambda c: fixed((0.5, 0.51)[c]),
    "tiny fixed value": lambda c: fixed((1e-9, 1.1e-9)[c]),
    "formula of a faint kernel": lambda c: model(faint(user_kernel((1.0, 1.1)[c]))),
    "last bit of the targets": lambda c: regression(y=(X, nudged(X))[c]),
    "last bit of the inputs": lambda c: model(x=(X, nudged(X))[c]),
    "inducing point": lambda c: sparse((0.8, 0.9)[c]),
    "jitter": lambda c: model(jitter=(1e-6, 1.1e-6)[c]),
    "dtype": lambda c: model(dtype=(torch.float64, torch.float32)[c]),
    "single precision": lambda c: model(user_kernel((1.0, 1.1)[c]), dtype=torch.float32),
    "regression's prior": lambda c: regression(prior=GammaPrior(2.0, (4.0, 5.0)[c])),
}


QUICK = [PAIRS[name] for name in ("class of prior", "mean's formula", "fixed value", "last bit of the inputs", "jitter", "dtype")]


@pytest.mark.parametrize("build", quick(QUICK, PAIRS.values()), ids=PAIRS)
def test_models_of_other_densities_are_told_apart(build, tmp_path):
    check_told_apart(build, tmp_path)


def check_told_apart(build, tmp_path):
    """Files of ``build(0)`` serve another ``build(0)`` and are refused to ``build(1)``."""
    first, second, again = build(0), build(1), build(0)
    posterior = posterior_of(first)
    posterior.save(tmp_path / "posterior.pt")
    with pytest.raises(ValueError, match=r"was made with another model: .* (was .*, is |differs by up to )"):
        tg.Posterior.load(tmp_path / "posterior.pt", second)
    assert torch.equal(tg.Posterior.load(tmp_path / "posterior.pt", again).theta, posterior.theta)
    drawn = tg.sample(first, tg.HMC(num_steps=1), **RUN, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"belongs to another run: .* (was .*, is |differs by up to )"):
        tg.sample(second, tg.HMC(num_steps=1), **RUN, checkpoint=tmp_path / "run.ckpt")
    assert torch.equal(tg.sample(again, tg.HMC(num_steps=1), **RUN, checkpoint=tmp_path / "run.ckpt").theta, drawn.theta)


def other_present_values(made):
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 + parameter)
    return made


def used(made):
    tg.sample(made, tg.HMC(num_steps=1), **RUN).predict(made.train_x)
    return made


def with_threads(made):
    return torch.set_num_threads(2) or made


SAME = {
    "copied": copy.deepcopy,
    "pickled": lambda made: pickle.loads(pickle.dumps(made)),
    "moved": lambda made: made.to("cpu"),
    "for evaluation": lambda made: made.eval(),
    "with other present values": other_present_values,
    "used": used,
    "on more threads": with_threads,
}
OF_PAIRS = "joint prior", "box prior", "uniform prior", "constraint", "random features"
OF_LOCAL_CLASSES = "user's prior", "kernel's formula", "mean's formula", "likelihood's buffer"  # which cannot be pickled
MODELS = {
    **{name: lambda build=PAIRS[name]: build(0) for name in (*OF_PAIRS, *OF_LOCAL_CLASSES)},
    "poisson": lambda: gp("poisson"),
    "several latents": lambda: gp("softmax"),
    "sparse": lambda: sparse_gp("logit"),
    "gaussian": lambda: gp_regression(),
    "ill conditioned": lambda: gp("probit", num_data=150, jitter=1e-9),
    "not to be factorised": lambda: gp("probit", num_data=40, jitter=0.0),
    "one datum": lambda: gp("logit", num_data=1),
}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A posterior's file of each model, by name."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {name: folder / f"{number}.pt" for number, name in enumerate(MODELS)}
    for name, path in paths.items():
        posterior_of(MODELS[name]()).save(path)
    return paths


@pytest.mark.usefixtures("threads")
@pytest.mark.slow
@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_a_model_is_taken_for_itself(change, saved):
    refused = []
    for name, build in MODELS.items():
        if name in {SAME["used"]: ["not to be factorised"], SAME["pickled"]: OF_LOCAL_CLASSES}.get(change, ()):
            continue
        changed = change(build())
        try:
            tg.Posterior.load(saved[name], changed)
        except ValueError as error:
            refused.append(f"{name}: {error}")
    assert not refused, refused


def test_a_prior_changed_in_place_is_another_models(tmp_path):
    posterior_of(model()).save(tmp_path / "posterior.pt")
    changed = model()
    changed.kernel.lengthscale_prior.rate = torch.tensor(5.0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"kernel\.lengthscale_prior was .*rate=4\.0.*, is .*rate=5\.0.*log prior differs"):
        tg.Posterior.load(tmp_path / "posterior.pt", changed)


def test_a_posterior_is_saved_as_of_the_model_that_was_sampled(tmp_path):
    made = model()
    posterior = tg.sample(made, tg.HMC(num_steps=1), **RUN)
    made.kernel.lengthscale_prior.rate = torch.tensor(5.0, dtype=torch.float64)
    posterior.save(tmp_path / "posterior.pt")
    again = tg.Posterior.load(tmp_path / "posterior.pt", model())
    again.save(tmp_path / "again.pt")
    for name in ("posterior.pt", "again.pt"):
        assert torch.equal(tg.Posterior.load(tmp_path / name, model()).theta, posterior.theta)
        with pytest.raises(ValueError, match="was made with another model"):
            tg.Posterior.load(tmp_path / name, made)


def edited(path, **changes):
    content = torch.load(path, weights_only=True)
    torch.save({**content, **changes}, path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"theta": torch.zeros(2, 5, 4)}, r"holds theta of shape \[2, 5, 4\]. Expected \[2, 5, 3\]"),
        ({"theta": torch.zeros(3)}, r"holds theta of shape \[3\]"),
        ({"theta": None}, "holds theta of shape NoneType"),
        ({"whitened": torch.zeros(2, 5, 7)}, r"holds whitened of shape \[2, 5, 7\]. Expected \[2, 5, 6\]: 3 hyper.* 6 latents"),
        ({"whitened": torch.zeros(2, 4, 6)}, r"holds whitened of shape \[2, 4, 6\]. Expected \[2, 5, 6\]"),
        ({"log_weights": torch.zeros(1, 10)}, r"holds log_weights of shape \[1, 10\]. Expected \[2, 5\]"),
        ({"stats": {"lp": torch.zeros(2, 6)}}, r"holds lp of shape \[2, 6\]. Expected \[2, 5\]"),
        ({"format": "torchgpmc posterior 1"}, "holds 'torchgpmc posterior 1'. .* Another version of torchgpmc wrote it"),
    ],
)
def test_a_posterior_of_the_right_model_and_wrong_shapes_is_refused(changes, match, tmp_path):
    posterior_of(gp("probit")).save(tmp_path / "posterior.pt")
    edited(tmp_path / "posterior.pt", **changes)
    with pytest.raises(ValueError, match=match):
        tg.Posterior.load(tmp_path / "posterior.pt", gp("probit"))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_damaged(tmp_path, share):
    path = tmp_path / "run.pt"
    write_atomically(path, {"format": "kind 1", "draws": torch.zeros(4, 500), "info": {"method": "NUTS()"}})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="is not a torchgpmc file, or is damaged"):
        read_tensors(path, "kind 1", ["draws"])


def test_a_posterior_is_loaded_by_its_path_and_its_model(tmp_path):
    with pytest.raises(TypeError, match=r"Expected the model that was sampled, after the path: load\(path, model\)"):
        tg.Posterior.load(gp("probit"), tmp_path / "posterior.pt")


def test_a_posterior_that_lacks_something_is_damaged(tmp_path):
    torch.save({"format": "torchgpmc posterior 2", "theta": torch.zeros(2, 5, 3)}, tmp_path / "posterior.pt")
    with pytest.raises(ValueError, match="is damaged: it lacks model, whitened"):
        tg.Posterior.load(tmp_path / "posterior.pt", gp("probit"))


def shortened(state):
    return state[:-1] if isinstance(state, list) else state


def narrowed(state):
    if isinstance(state, list):
        return [narrowed(part) for part in state]
    return state[..., :-1] if isinstance(state, torch.Tensor) and state.dim() == 2 else state


@pytest.mark.parametrize("change", [shortened, narrowed])
def test_a_checkpoint_of_the_right_run_and_another_state_is_refused(change, tmp_path):
    path = tmp_path / "run.ckpt"
    tg.sample(gp("probit"), tg.HMC(num_steps=1), **RUN, checkpoint=path)
    edited(path, state=change(torch.load(path, weights_only=True)["state"]))
    with pytest.raises(ValueError, match=r"the checkpoint's state holds .* where this run has .*delete it"):
        tg.sample(gp("probit"), tg.HMC(num_steps=1), **RUN, checkpoint=path)


def test_a_checkpoint_with_draws_of_another_run_is_refused(tmp_path):
    for name, columns in (("one", 2), ("other", 3)):
        made = gp("probit", num_columns=columns)
        tg.sample(made, tg.HMC(num_steps=1), **RUN, checkpoint=tg.Checkpoint(tmp_path / name, every=1))
    (tmp_path / "other.00000").replace(tmp_path / "one.00000")
    with pytest.raises(ValueError, match=r"one\.00000 holds theta of shape \[2, 1, 4\]. Expected \[2, 1, 3\]"):
        tg.sample(gp("probit"), tg.HMC(num_steps=1), **RUN, checkpoint=tg.Checkpoint(tmp_path / "one", every=1))
