"""What an HMC transition costs beyond its gradients: one transition of L leapfrog steps over L raw batched ``value_and_grad``.

    python benchmarks/hmc_overhead.py

Transitions and raw gradients alternate, so that a change of the machine's speed meets both. Target: at most 1.15.
"""

import argparse
import json
import statistics
import sys
import time

from processes import measure, median


def worker(num_data, num_chains, num_steps, repeats):
    import torch
    from problems import probit_model

    import torchgpmc as tg
    from torchgpmc.samplers.preconditioner import identity_preconditioner

    model = probit_model(num_data, 2, ard=False)
    density = tg.joint_log_density(model)
    generator = torch.Generator().manual_seed(0)
    size = model.layout.size
    position = 0.1 * torch.randn(num_chains, size + model.latent_size, generator=generator, dtype=torch.float64)
    tuning = identity_preconditioner(size, position.shape[1], position)
    sampler = tg.samplers.hmc(
        density, step_size=torch.tensor(0.01, dtype=torch.float64), preconditioner=tuning, num_steps=num_steps
    )
    state = sampler.init(position, generator)
    transitions, gradients = [], []
    for repeat in range(repeats + 3):
        began = time.perf_counter()
        state, _ = sampler.step(state, generator)
        middle = time.perf_counter()
        for _ in range(num_steps):
            density.value_and_grad(state.position)
        if repeat >= 3:
            transitions.append(middle - began)
            gradients.append(time.perf_counter() - middle)
    ratios = [a / b for a, b in zip(transitions, gradients, strict=True)]
    print(json.dumps({"ratio": statistics.median(ratios), "gradient_ms": 1e3 * statistics.median(gradients) / num_steps}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=4, type=int)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    print("| N | chains | L | ms a gradient of all chains | transition / (L gradients) |\n|---|---|---|---|---|")
    for num_data, num_chains in ((50, 4), (50, 16), (200, 4)):
        results = [
            measure(sys.executable, "hmc_overhead.py", "--worker", num_data, num_chains, 16, 40) for _ in range(options.runs)
        ]
        print(f"| {num_data} | {num_chains} | 16 | {median(results, 'gradient_ms'):.2f} | {median(results, 'ratio'):.3f} |")


if __name__ == "__main__":
    main()
