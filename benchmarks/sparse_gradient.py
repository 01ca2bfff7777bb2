"""Raw gradient of SparseGP against GPflow's compiled SGPMC gradient: probit, RBF-ARD, N=1000, D=18, M=50, float64.

    python benchmarks/sparse_gradient.py

Fresh processes, ours and GPflow's in turn. Targets: no slower for one chain; at most 0.6 of GPflow's a chain for 4 to 16.
"""

import argparse
import json
import statistics
import sys
import time

from processes import measure, median, peer_python


def worker(num_chains):
    import torch
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.priors import GammaPrior
    from problems import sparse_data

    import torchgpmc as tg

    x, y = (torch.as_tensor(array) for array in sparse_data(1000, 18))
    kernel = ScaleKernel(RBFKernel(ard_num_dims=18, lengthscale_prior=GammaPrior(2.0, 0.5)), outputscale_prior=GammaPrior(2.0, 1.0))
    model = tg.SparseGP(x, y, kernel, tg.likelihoods.Bernoulli(), inducing_points=x[:50])
    density = tg.joint_log_density(model)
    size = model.layout.size
    generator = torch.Generator().manual_seed(0)
    position = 0.3 * torch.randn(num_chains, size + model.latent_size, generator=generator, dtype=torch.float64)
    position[:, :size] += 1.0
    times = []
    deadline = time.perf_counter() + 4.0
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        density.value_and_grad(position)
        times.append(time.perf_counter() - began)
    print(json.dumps({"ms": 1e3 * statistics.median(times[5:]) / num_chains}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    gpflow_python = peer_python("gpflow", ["gpflow==2.11.*", "tensorflow-cpu", "tf-keras"])
    chains = (1, 4, 8, 16)
    ours = {count: [] for count in chains}
    peer = []
    for _ in range(options.runs):
        peer.append(measure(gpflow_python, "peers/gpflow_gradient.py"))
        for count in chains:
            ours[count].append(measure(sys.executable, "sparse_gradient.py", "--worker", count))
    base = median(peer, "ms")
    print(f"GPflow SGPMC, compiled: {base:.2f} ms a gradient\n")
    print("| chains | ms a chain | over GPflow's | target |\n|---|---|---|---|")
    for count in chains:
        cost = median(ours[count], "ms")
        print(f"| {count} | {cost:.2f} | {cost / base:.2f} | {1.0 if count == 1 else 0.6} |")


if __name__ == "__main__":
    main()
