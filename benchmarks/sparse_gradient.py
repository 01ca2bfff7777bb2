"""Raw gradient of SparseGP against GPflow's compiled SGPMC gradient: RBF-ARD, float64; probit, or several classes by robust-max.

    python benchmarks/sparse_gradient.py [--cases small medium toy large] [--threads 1] [--turns 10] [--gpflow PYTHON]

Both processes live on, warmed up, and are measured in turns, so that neither has the quieter machine. With one thread each, read is
the processor's time, with more the clock, on a machine that has nothing else to do; either is longer where a machine is busy
(caches, shared cores), so it is each side's quickest call. That of ours is divided by the chains that it is of. The floating-point
operations are those of matrix products and solves.
"""

import argparse
import pathlib
import sys
import time
from typing import NamedTuple

from processes import Worker, peer_python, serve


class Case(NamedTuple):
    num_data: int
    num_columns: int
    num_inducing: int
    num_classes: int
    targets: dict[int, float]  # chains -> at most this share of GPflow's time


CASES = {
    "small": Case(1000, 18, 50, 1, {1: 0.4, 16: 0.25}),
    "medium": Case(1000, 18, 200, 1, {1: 0.33, 16: 0.33}),
    "toy": Case(750, 2, 50, 3, {1: 0.5}),
    "large": Case(10000, 784, 500, 10, {1: 0.33}),
}


def operations(case):
    """Of one gradient: two products with X and Z, three with an M x M matrix (two of them triangular), and those of M x M."""
    n, d, m = case[:3]
    return 4 * n * m * d + 4 * n * m * m + 3 * m**3


def work(case, num_chains, data_dtype, threads):
    import torch
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.priors import GammaPrior
    from problems import class_data, sparse_data

    import torchgpmc as tg
    from torchgpmc.numerics.threads import one_torch_thread
    from torchgpmc.runs.chain_targets import shared

    torch.set_num_threads(threads)
    n, d, m, classes, _ = case
    data = sparse_data(n, d) if classes == 1 else class_data(n, d, classes)
    x, y = (torch.as_tensor(array) for array in data)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=d, lengthscale_prior=GammaPrior(2.0, 0.5)), outputscale_prior=GammaPrior(2.0, 1.0))
    likelihood = tg.likelihoods.Bernoulli() if classes == 1 else tg.likelihoods.RobustMax(num_classes=classes)
    precision = torch.float32 if data_dtype == "float32" else None
    model = tg.SparseGP(x, y, kernel, likelihood, inducing_points=x[:m], data_dtype=precision)
    density = tg.joint_log_density(model)
    size = model.layout.size
    generator = torch.Generator().manual_seed(0)
    position = 0.3 * torch.randn(num_chains, size + model.latent_size, generator=generator, dtype=torch.float64)
    position[:, :size] += 1.0
    columns = model.layout.columns("kernel.base_kernel.lengthscale")
    position[:, columns] += 0.5 * torch.tensor(d / 18).clamp_min(1.0).log()
    if threads > 1:  # as a run shares it
        density = shared(density, model)
    with one_torch_thread():
        serve(lambda: density.value_and_grad(position), clock_of(threads))


def clock_of(threads):
    return time.process_time if threads == 1 else time.perf_counter


def quickest(workers, turns, seconds):
    """Milliseconds of each worker's quickest call, measured one after another in turns."""
    for worker in workers:
        worker.ask(seconds / 2)
    found = [[] for _ in workers]
    for _ in range(turns):
        for times, worker in zip(found, workers, strict=True):
            times += worker.ask(seconds)
    for worker in workers:
        worker.stop()
    return [1e3 * min(times) for times in found]


def rows(name, gpflow_python, options):
    case = CASES[name]
    same = options.data_dtype, options.threads
    ours = [Worker(sys.executable, __file__, "--worker", name, count, *same) for count in case.targets]
    peer = Worker(gpflow_python, "peers/gpflow_gradient.py", *case[:4], options.threads)
    peer, *found = quickest([peer, *ours], options.turns, options.seconds)
    for (count, target), whole in zip(case.targets.items(), found, strict=True):
        cost = whole / count
        described = ", ".join(map(str, case[:4]))
        speed = operations(case) / cost / 1e6
        yield f"| {described} | {count} | {cost:.2f} | {peer:.2f} | {cost / peer:.2f} | {target} | {speed:.0f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=4, metavar=("CASE", "CHAINS", "DTYPE", "THREADS"), help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--data-dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--threads", type=int, default=1, help="of each side; more than one on an idle machine alone")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--gpflow", help="a Python that has gpflow 2.11; one is made where none is given")
    parser.add_argument("--write", type=pathlib.Path, help="a file that gets the table too")
    options = parser.parse_args()
    if options.worker:
        name, chains, data_dtype, threads = options.worker
        work(CASES[name], int(chains), data_dtype, int(threads))
        return
    gpflow_python = options.gpflow or peer_python("gpflow", ["gpflow==2.11.*", "tensorflow-cpu", "tf-keras"])
    table = ["| N, D, M, classes | chains | ms a chain | GPflow's | ratio | target | GFLOP/s |", "|---|---|---|---|---|---|---|"]
    print(*table, sep="\n")
    for name in options.cases:
        for row in rows(name, gpflow_python, options):
            print(row, flush=True)
            table.append(row)
    if options.write:
        options.write.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
