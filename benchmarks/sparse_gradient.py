"""Raw gradient of SparseGP against GPflow's compiled SGPMC gradient: RBF-ARD, float64; probit, or several classes.

    python benchmarks/sparse_gradient.py [--cases small medium toy large] [--runs 5]
    OMP_NUM_THREADS=1 python benchmarks/sparse_gradient.py  # beside other work: then read the processor's time

Fresh processes, ours and GPflow's in turn; both warmed up. Times are those of one gradient, divided by the chains it is of. Several
classes are softmax here and robust-max, its own default, in GPflow. The floating-point operations are those of matrix products and
solves.
"""

import argparse
import json
import statistics
import sys
import time
from typing import NamedTuple

from processes import measure, median, peer_python


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


def worker(case, num_chains, data_dtype):
    import torch
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.priors import GammaPrior
    from problems import class_data, sparse_data

    import torchgpmc as tg

    n, d, m, classes, _ = case
    data = sparse_data(n, d) if classes == 1 else class_data(n, d, classes)
    x, y = (torch.as_tensor(array) for array in data)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=d, lengthscale_prior=GammaPrior(2.0, 0.5)), outputscale_prior=GammaPrior(2.0, 1.0))
    likelihood = tg.likelihoods.Bernoulli() if classes == 1 else tg.likelihoods.Softmax(num_classes=classes, mixing_weights=False)
    precision = torch.float32 if data_dtype == "float32" else None
    model = tg.SparseGP(x, y, kernel, likelihood, inducing_points=x[:m], data_dtype=precision)
    density = tg.joint_log_density(model)
    size = model.layout.size
    generator = torch.Generator().manual_seed(0)
    position = 0.3 * torch.randn(num_chains, size + model.latent_size, generator=generator, dtype=torch.float64)
    position[:, :size] += 1.0
    columns = model.layout.columns("kernel.base_kernel.lengthscale")
    position[:, columns] += 0.5 * torch.tensor(d / 18).clamp_min(1.0).log()
    print(json.dumps(timed(lambda: density.value_and_grad(position), num_chains)))


def timed(gradient, num_chains):
    gradient()
    gradient()
    times, processor = [], []
    deadline = time.perf_counter() + 4.0
    while time.perf_counter() < deadline or len(times) < 5:
        began, began_processor = time.perf_counter(), time.process_time()
        gradient()
        times.append(time.perf_counter() - began)
        processor.append(time.process_time() - began_processor)
    return {"ms": 1e3 * statistics.median(times) / num_chains, "processor_ms": 1e3 * statistics.median(processor) / num_chains}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "CHAINS"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--data-dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.worker:
        worker(CASES[options.worker[0]], int(options.worker[1]), options.data_dtype)
        return
    gpflow_python = peer_python("gpflow", ["gpflow==2.11.*", "tensorflow-cpu", "tf-keras"])
    print("| N, D, M, classes | chains | ms a chain | GPflow's | ratio | of processor time | target | GFLOP/s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.cases:
        case = CASES[name]
        peer, ours = [], {count: [] for count in case.targets}
        for _ in range(options.runs):
            peer.append(measure(gpflow_python, "peers/gpflow_gradient.py", *case[:4]))
            for count in ours:
                arguments = ("--data-dtype", options.data_dtype, "--worker", name, count)
                ours[count].append(measure(sys.executable, "sparse_gradient.py", *arguments))
        for count, target in case.targets.items():
            cost, processor = median(ours[count], "ms"), median(ours[count], "processor_ms")
            base, base_processor = median(peer, "ms"), median(peer, "processor_ms")
            speed = operations(case) / processor / 1e6
            described = ", ".join(map(str, case[:4]))
            ratios = f"{cost / base:.2f} | {processor / base_processor:.2f} | {target}"
            print(f"| {described} | {count} | {cost:.2f} | {base:.2f} | {ratios} | {speed:.0f} |", flush=True)


if __name__ == "__main__":
    main()
