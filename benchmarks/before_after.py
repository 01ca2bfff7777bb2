"""Speed of one version of the package over another's, on one machine and in one run.

    git worktree add /tmp/before f3ea24f
    python benchmarks/before_after.py /tmp/before .

Each version has a process of its own that lives for the whole run, held to one thread. Both take short turns one after the other,
in another order from round to round, so that a change of the machine's speed meets both; what is compared is the processor's time.
A ratio above one says that the second version is faster: medians over rounds of the ratios within a round. Of effective draws the
ratio is of sums over seeds, the same seeds for both, and its standard error the jackknife's. No ratio should be under 0.97.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
TURN = 0.15  # seconds of processor time, about
TIMED = {
    "an HMC transition over its 16 gradients, N=50, 4 chains": "hmc_overhead",
    "HMC, 16 steps, N=50, 4 chains": "hmc",
    "SparseGP, a gradient, M=50, N=1000, 1 chain": "sparse 1",
    "SparseGP, a gradient, M=50, N=1000, 16 chains": "sparse 16",
    "estimates, n=200, 16 thetas": "estimates 200",
    "estimates, n=500, 4 thetas": "estimates 500",
}
SAMPLED = {
    "AMIS, n=100": "amis",
    "pseudo-marginal, n=50": "pseudo-marginal",
}


def hmc():
    """A transition of 16 steps, and as many gradients."""
    import torch
    from problems import probit_model

    import torchgpmc as tg
    from torchgpmc.samplers.preconditioner import identity_preconditioner

    model = probit_model(50, 2, ard=False)
    density, generator = tg.joint_log_density(model), torch.Generator().manual_seed(0)
    size = model.layout.size
    position = 0.1 * torch.randn(4, size + model.latent_size, generator=generator, dtype=torch.float64)
    unit = identity_preconditioner(size, position.shape[1], position)
    sampler = tg.samplers.hmc(density, step_size=torch.tensor(0.01, dtype=torch.float64), preconditioner=unit, num_steps=16)
    states = [sampler.init(position, generator)]

    def transition():
        states[0] = sampler.step(states[0], generator)[0]

    def gradients():
        for _ in range(16):
            density.value_and_grad(position)

    return transition, gradients


def sparse(num_chains):
    """A gradient of SparseGP, probit, RBF-ARD with 18 lengthscales."""
    import torch
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.priors import GammaPrior
    from problems import sparse_data

    import torchgpmc as tg

    x, y = (torch.as_tensor(array) for array in sparse_data(1000, 18))
    kernel = ScaleKernel(RBFKernel(ard_num_dims=18, lengthscale_prior=GammaPrior(2.0, 0.5)), outputscale_prior=GammaPrior(2.0, 1.0))
    model = tg.SparseGP(x, y, kernel, tg.likelihoods.Bernoulli(), inducing_points=x[:50])
    density, generator = tg.joint_log_density(model), torch.Generator().manual_seed(0)
    position = 0.3 * torch.randn(num_chains, model.layout.size + 50, generator=generator, dtype=torch.float64)
    position[:, : model.layout.size] += 1.0
    return lambda: density.value_and_grad(position)


def estimates(num_data):
    """Unbiased estimates at settings around those that made the data, without a start."""
    import torch
    from problems import probit_model

    import torchgpmc as tg

    model, generator = probit_model(num_data, 2, ard=False), torch.Generator().manual_seed(0)
    shifts = torch.rand(16 if num_data < 400 else 4, 2, generator=generator, dtype=torch.float64) + 0.5
    values = {"kernel.outputscale": 2.08 * shifts[:, 0], "kernel.base_kernel.lengthscale": (0.35 * shifts[:, 1]).view(-1, 1, 1)}
    theta, estimator = model.layout.unconstrain(values), tg.evidence.importance(model, num_importance=16)
    return lambda: estimator.draw(theta, generator)


def sampled(name, seed):
    """Effective draws of a whole run, of the worst hyperparameter, and its processor time."""
    from arviz_stats.base import array_stats
    from problems import probit_model

    import torchgpmc as tg

    model = probit_model(100 if name == "amis" else 50, 2, ard=False)
    began = time.process_time()
    if name == "amis":
        posterior = tg.sample(model, tg.AMIS(), num_samples=1500, seed=seed, progress=False)
        weights = posterior.log_weights.flatten().softmax(0)
        return float(1 / weights.square().sum()), time.process_time() - began
    settings = {"num_samples": 300, "warmup_steps": 100, "num_chains": 16}
    posterior = tg.sample(model, tg.PseudoMarginal(), seed=seed, progress=False, **settings)
    seconds = time.process_time() - began
    draws = (values.log().flatten(2).unbind(-1) if values.dim() > 2 else (values.log(),) for values in posterior.samples.values())
    sizes = [float(array_stats.ess(part.numpy(), chain_axis=0, draw_axis=1)) for parts in draws for part in parts]
    return min(sizes), seconds


def worker():
    """Answers on standard output, a line each, to the names of cases on standard input."""
    import warnings

    import torch

    from torchgpmc.density import keep_freed_memory

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    transition, gradients = hmc()
    timed = {
        "hmc": transition,
        "gradients": gradients,
        "sparse 1": sparse(1),
        "sparse 16": sparse(16),
        "estimates 200": estimates(200),
        "estimates 500": estimates(500),
    }
    counts = {}
    for name, function in timed.items():
        function()
        began = time.process_time()
        function()
        counts[name] = max(1, round(TURN / (time.process_time() - began)))

    def seconds(name):
        began = time.process_time()
        for _ in range(counts[name]):
            timed[name]()
        return (time.process_time() - began) / counts[name]

    for line in sys.stdin:
        name, _, seed = line.strip().partition("/")
        if seed:
            answer = sampled(name, int(seed))
        else:
            answer = seconds("hmc") / seconds("gradients") if name == "hmc_overhead" else seconds(name)
        print(json.dumps(answer), flush=True)


class Version:
    """A version's process."""

    def __init__(self, path):
        alone = {f"{kind}_NUM_THREADS": "1" for kind in ("OMP", "OPENBLAS", "MKL")}
        environment = {**os.environ, **alone, "PYTHONPATH": f"{pathlib.Path(path).resolve()}:{HERE.resolve()}"}
        command = [sys.executable, str(HERE / "before_after.py"), "--worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, name):
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def in_turns(before, after, name, number):
    """What both answer, one of them asked first in one round and the other in the next."""
    found = []
    for turn in range(number):
        order = (before, after) if turn % 2 else (after, before)
        answers = {version: version.ask(name.format(turn)) for version in order}
        found.append((answers[before], answers[after]))
    return found


def rate_ratio(found):
    """Ratio of effective draws a second, sums over seeds, after over before."""
    (drawn, seconds), (drawn_now, seconds_now) = (map(sum, zip(*column, strict=True)) for column in zip(*found, strict=True))
    return (drawn_now / seconds_now) / (drawn / seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help="of two versions' repositories, the earlier one first")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    before, after = map(Version, options.paths)
    print("| | before (ms) | after (ms) | before / after | standard error |\n|---|---|---|---|---|")
    for title, name in TIMED.items():
        found = in_turns(before, after, name, options.rounds)
        ratios = [a / b for a, b in found]
        error = 1.253 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
        scale = 1.0 if name == "hmc_overhead" else 1e3
        times = " | ".join(f"{scale * statistics.median(column):.3g}" for column in zip(*found, strict=True))
        print(f"| {title} | {times} | {statistics.median(ratios):.3f} | {error:.3f} |", flush=True)
    print("\n| effective draws a second | before | after | after / before | standard error | of draws alone | of seconds alone |")
    print("|---" * 7 + "|")
    for title, name in SAMPLED.items():
        found = in_turns(before, after, name + "/{}", options.seeds)
        count = len(found)
        without = [rate_ratio(found[:seed] + found[seed + 1 :]) for seed in range(count)]
        error = (count - 1) ** 0.5 * statistics.pstdev(without)  # the jackknife's
        totals = [[sum(part) for part in zip(*column, strict=True)] for column in zip(*found, strict=True)]
        (drawn, seconds), (drawn_now, seconds_now) = totals
        rates = f"{drawn / seconds:.1f} | {drawn_now / seconds_now:.1f} | {rate_ratio(found):.3f} | {error:.3f}"
        print(f"| {title} | {rates} | {drawn_now / drawn:.3f} | {seconds / seconds_now:.3f} |", flush=True)


if __name__ == "__main__":
    main()
