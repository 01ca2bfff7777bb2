"""Parts of a batch side by side: same results, the thread count given back, modules not mixed up."""

import os
import signal
import threading
import time

import gpytorch
import pytest
import torch

import torchgpmc as tg
import torchgpmc.numerics.threads as threads_module
from tests.problems import gp
from tests.speed import quick
from torchgpmc.adapter.functional import PureModule
from torchgpmc.density import AutogradDensity, SharedDensity
from torchgpmc.numerics.threads import even_slices, num_cores, one_torch_thread, side_by_side, torch_threads_back

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_each_part_has_one_thread_and_its_own_result(two_threads):
    seen = side_by_side(lambda part: (part, torch.get_num_threads(), threading.get_ident()), range(6), CPU)
    assert [part for part, _, _ in seen] == list(range(6))
    assert {threads for _, threads, _ in seen} == {1}
    assert threading.get_ident() not in {thread for _, _, thread in seen}
    assert torch.get_num_threads() == 2


def both_threads():
    """The threads that work on two parts, which wait for one another."""
    barrier = threading.Barrier(2)

    def met(part):
        barrier.wait(10)
        return threading.current_thread()

    return set(side_by_side(met, range(2), CPU))


def test_threads_are_kept_while_anyone_holds_torch_to_one(two_threads):
    with one_torch_thread():
        first = both_threads()
        with one_torch_thread():
            assert both_threads() == first
        assert all(thread.is_alive() for thread in first)
    assert not any(thread.is_alive() for thread in first)
    assert not both_threads() & first


def test_a_forked_process_has_threads_of_its_own(two_threads):
    with one_torch_thread():
        both_threads()
        child = os.fork()
        if not child:
            os._exit(len(both_threads()) != 2)
        for _ in range(1000):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.01)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for its parent's threads")
    assert status == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_gradients_are_recorded_as_in_the_calling_thread(two_threads, recorded):
    with torch.set_grad_enabled(recorded):
        assert side_by_side(lambda part: torch.is_grad_enabled(), range(3), CPU) == [recorded] * 3


def test_an_error_reaches_the_caller_and_the_thread_count_comes_back(two_threads):
    started = []

    def fail(part):
        started.append(part)
        time.sleep(0.01)
        raise KeyboardInterrupt if part == 0 else RuntimeError(part)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(fail, range(100), CPU)
    assert len(started) < 100
    assert torch.get_num_threads() == 2


def test_callers_in_two_threads_give_the_count_back_once(two_threads):
    def work(part):
        return side_by_side(lambda _: time.sleep(0.005), range(4), CPU)

    callers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("least", [1, 4])
def test_slices_cover_the_batch_evenly(two_threads, count, least):
    slices = even_slices(count, 5, CPU, least)
    rows = [row for part in slices for row in range(count)[part]]
    sizes = [part.stop - part.start for part in slices]
    assert rows == list(range(count))
    assert max(sizes) <= 5
    assert max(sizes) - min(sizes) <= 1
    assert len(slices) % 2 == 0 or count < 2 * least


def test_a_module_keeps_the_values_of_two_threads_apart(two_threads):
    """The module's parameters stand in one place: what one thread puts there another must not read."""
    kernel = gpytorch.kernels.RBFKernel()
    pure = PureModule(kernel)

    def read(number):
        value = torch.full((1, 1), float(number))

        def slowly(module):
            time.sleep(0.002)
            return float(module.lengthscale)

        return pure({"raw_lengthscale": value}, slowly)

    assert side_by_side(read, range(1, 20), CPU) == [float(number) for number in range(1, 20)]


@pytest.mark.parametrize("likelihood", quick(["probit"], ["probit", "poisson", "student_t"]))
def test_an_estimate_does_not_depend_on_the_number_of_threads(two_threads, likelihood):
    model = gp(likelihood, num_data=40)
    estimator = tg.evidence.importance(model, tg.Laplace(), num_importance=4)
    generator = torch.Generator().manual_seed(0)
    theta = model.layout.starting_points(200, generator)  # enough for a thread each
    auxiliary = torch.randn(200, estimator.auxiliary_size, generator=generator, dtype=theta.dtype)
    assert len(estimator.chunks(theta)) > 1
    found = estimator.evaluate(theta, auxiliary).value
    torch.set_num_threads(1)
    torch.testing.assert_close(found, estimator.evaluate(theta, auxiliary).value, rtol=1e-8, atol=1e-6)


def test_a_part_does_not_share_its_work_again(two_threads):
    assert side_by_side(lambda _: num_cores(), range(2), CPU) == [1, 1]


def test_parts_have_one_thread_each_where_torch_has_its_threads_back(two_threads):
    with one_torch_thread(), torch_threads_back():
        assert side_by_side(lambda part: torch.get_num_threads(), range(2), CPU) == [1, 1]
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


def test_torch_has_its_threads_back_only_within_the_outermost_holder(two_threads):
    with one_torch_thread():
        with torch_threads_back():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
        with one_torch_thread(), torch_threads_back():
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


class Watched(AutogradDensity):
    """A density with a row of data for each chain, which notes in which threads, and with how many of torch's, it was evaluated."""

    def __init__(self, centres, seen):
        self.centres, self.seen = centres, seen
        super().__init__(self.evaluate)

    def evaluate(self, position):
        self.seen.append((threading.get_ident(), torch.get_num_threads(), len(position)))
        return -(position - self.centres).square().sum(-1)

    def select(self, rows):
        return Watched(self.centres[rows], self.seen)


@pytest.mark.parametrize(("work", "evaluations"), [(1e4, [(1, 5)]), (1e9, [(1, 3), (1, 2)]), (1e12, [(1, 3), (1, 2)])])
def test_rows_are_shared_where_there_is_enough_to_do(two_threads, work, evaluations):
    position = torch.arange(10.0).view(5, 2)
    centres, seen = position.flip(0), []
    with one_torch_thread():
        value, gradient = SharedDensity(Watched(centres, seen), work, CPU).value_and_grad(position)
    torch.testing.assert_close(value, -(position - centres).square().sum(-1))
    torch.testing.assert_close(gradient, -2 * (position - centres))
    assert sorted((threads, rows) for _, threads, rows in seen) == sorted(evaluations)


@pytest.mark.parametrize(("threads", "rows"), [(1, [2, 2, 1]), (2, [2, 1, 1, 1])])
def test_rows_of_large_tensors_are_few_at_a_time(two_threads, threads, rows):
    torch.set_num_threads(threads)
    position = torch.arange(10.0).view(5, 2)
    centres, seen = position.flip(0), []
    with one_torch_thread():
        value = SharedDensity(Watched(centres, seen), 1e9, CPU, elements=400_000)(position)
    torch.testing.assert_close(value, -(position - centres).square().sum(-1))
    assert sorted((found for *_, found in seen), reverse=True) == rows


def test_one_large_row_has_all_threads_of_torch(two_threads):
    seen = []
    with one_torch_thread():
        SharedDensity(Watched(torch.zeros(1, 2), seen), 1e12, CPU)(torch.ones(1, 2))
    assert [threads for _, threads, _ in seen] == [2]


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")  # twenty draws
@pytest.mark.parametrize("outcome", ["returns", "raises"])
def test_sampling_runs_on_one_torch_thread_and_gives_the_others_back(two_threads, outcome):
    seen = []

    class Watching(gpytorch.kernels.RBFKernel):
        def forward(self, *args, **kwargs):
            seen.append(torch.get_num_threads())
            if outcome == "raises" and len(seen) > 100:
                raise KeyboardInterrupt
            return super().forward(*args, **kwargs)

    x = torch.linspace(0, 1, 5)
    kernel = Watching(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 2.0))
    model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
    seen.clear()
    try:
        posterior = tg.sample(model, tg.HMC(num_steps=2), num_samples=20, warmup_steps=20, num_chains=2, progress=False)
    except KeyboardInterrupt:
        assert outcome == "raises"
    else:
        assert outcome == "returns"
        assert posterior.info["threads"] == 2
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("worth", "threads"), [(1e9, 1), (1.0, 2)])
def test_a_fit_of_little_work_runs_on_one_torch_thread(two_threads, monkeypatch, worth, threads):
    monkeypatch.setattr(threads_module, "_WORTH_TORCH_THREADS", worth)
    seen = []

    class Watching(gpytorch.kernels.RBFKernel):
        def forward(self, *args, **kwargs):
            seen.append(torch.get_num_threads())
            return super().forward(*args, **kwargs)

    x = torch.linspace(0, 1, 8)
    kernel = Watching(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 2.0))
    model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::4])
    seen.clear()
    tg.initialize(model, optimize_inducing_points=False, progress=False)
    assert set(seen) == {threads}
    assert torch.get_num_threads() == 2


def test_approximations_run_on_one_torch_thread(two_threads):
    """Twenty values of EP's evidence beside busy processes took a hundred times as long on two."""
    seen = []

    class Watching(gpytorch.kernels.RBFKernel):
        def forward(self, *args, **kwargs):
            seen.append(torch.get_num_threads())
            return super().forward(*args, **kwargs)

    x = torch.linspace(0, 1, 8, dtype=torch.float64).unsqueeze(-1)
    kernel = Watching(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 4.0))
    model = tg.GP(x, (x[:, 0] > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
    theta = torch.zeros(2, 1, dtype=torch.float64)
    calls = {
        "laplace": lambda: tg.approximations.laplace(model, theta),
        "EP": lambda: tg.approximations.expectation_propagation(model, theta),
        "loss": lambda: tg.approximations.negative_log_evidence(model),
        "predict": lambda: tg.approximations.predict(model, theta, tg.EP(), x),
    }
    for name, call in calls.items():
        seen.clear()
        call()
        assert seen, name
        assert set(seen) == {1}, name
        assert torch.get_num_threads() == 2


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")  # twenty draws
def test_predictions_run_on_one_torch_thread(two_threads):
    """Two beside one other busy process took a hundred times as long."""
    seen = []

    class Watching(gpytorch.kernels.RBFKernel):
        def forward(self, *args, **kwargs):
            seen.append(("covariance", torch.get_num_threads()))
            return super().forward(*args, **kwargs)

    class Counts(tg.likelihoods.Poisson):
        pass

    def watched(name):
        def method(self, *args, **kwargs):
            seen.append((name, torch.get_num_threads()))
            return getattr(tg.likelihoods.Poisson, name)(self, *args, **kwargs)

        return method

    answers = ("predictive_log_prob", "response_moments", "sample", "expected_response")
    for name in answers:
        setattr(Counts, name, watched(name))
    x = torch.linspace(0, 1, 6)
    kernel = Watching(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 2.0))
    model = tg.GP(x, torch.arange(6), kernel, Counts())
    posterior = tg.sample(model, tg.HMC(num_steps=2), num_samples=20, warmup_steps=20, num_chains=1, progress=False)
    seen.clear()
    for chunk in (2, 2048):
        prediction = posterior.predict(x, test_chunk=chunk)
        for answer in (
            lambda at: at.mean,
            lambda at: at.log_prob(torch.arange(6)),
            lambda at: at.quantile(0.5, num_samples=50),
            lambda at: at.sample(3),
            lambda at: at.sample(3, joint=True),
            lambda at: at.intensity.mean,
            lambda at: at.intensity.quantile(0.5),
        ):
            assert torch.isfinite(answer(prediction)).all()
    assert posterior.fitted().mean.shape == (6,) and posterior.latents.shape == (1, 20, 6)
    assert {name for name, _ in seen} == {"covariance", *answers} and {threads for _, threads in seen} == {1}
    assert torch.get_num_threads() == 2
