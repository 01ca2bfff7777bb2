"""One unbiased estimate of p(y | theta): time a theta and spread, ours over the simple version kept in the tests.

    python benchmarks/evidence.py

Probit GP, d=2 isotropic, a batch of 64 thetas around paper A's (section 4.2). Each row is a fresh process that times the simple
version and one of ours in turn, so that their ratio is of one run; medians over runs. "warm" starts from the approximation at a
neighbouring theta. Targets: 3 and 4.5 times the simple one's speed cold and warm at n=200, 7 and 9 at n=500; EP at least twice.
The spread is given at these thetas, and at others drawn from the normal approximation of the posterior, as a sampler visits them.
"""

import argparse
import json
import pathlib
import sys
import time

from processes import measure, median

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
BATCH = 64
CASES = {
    "Laplace, 16, cold": ("laplace", 16, False),
    "Laplace, 16, warm": ("laplace", 16, True),
    "Laplace, 64, warm": ("laplace", 64, True),
    "EP alone, to 1e-2": ("ep alone", 0, False),
    "EP, 16, cold": ("ep", 16, False),
    "EP, 16, warm": ("ep", 16, True),
}


def medians(functions, rounds):
    """Seconds of each function, taken in turn so that a busy machine slows all alike."""
    times = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        for index, function in enumerate(functions):
            began = time.perf_counter()
            function()
            times[index].append(time.perf_counter() - began)
    return [sorted(values)[len(values) // 2] for values in times]


def worker(num_data, case):
    import torch
    from orthant_evidence import settings
    from problems import probit_model

    import torchgpmc as tg
    from tests.evidence import simple
    from torchgpmc.density import keep_freed_memory
    from torchgpmc.numerics.threads import side_by_side

    keep_freed_memory()
    kind, num_importance, warm = CASES[case]
    model = probit_model(num_data, 2, ard=False)
    generator = torch.Generator().manual_seed(0)
    shifts = torch.rand(BATCH, 2, generator=generator, dtype=torch.float64) + 0.5
    values = {"kernel.outputscale": 2.08 * shifts[:, 0], "kernel.base_kernel.lengthscale": (0.35 * shifts[:, 1]).view(-1, 1, 1)}
    theta = model.layout.unconstrain(values)
    sign = 2 * model.train_y - 1

    def plain():
        matrix = simple.covariance(model.train_x, 0.35 * shifts[:, 1], 2.08 * shifts[:, 0]) + 1e-6 * torch.eye(num_data)
        return simple.log_estimate(matrix, sign, 16, generator)

    approximation = {"laplace": tg.Laplace(), "ep": tg.EP(), "ep alone": tg.EP(tolerance=1e-2)}[kind]
    estimator = tg.evidence.importance(model, approximation, num_importance=max(2, num_importance))

    def begin(theta):
        if not warm:
            return None
        neighbour = theta + torch.tensor([0.14, 0.095], dtype=torch.float64)
        with torch.no_grad():
            return torch.cat([approximation.importance_density(model, model.prior(part)).start for part in neighbour.split(8)])

    def spread(theta):
        start = begin(theta)
        return float(torch.stack([estimator.draw(theta, generator, start).value for _ in range(20)]).std(0).mean())

    start = begin(theta)

    def alone():
        with torch.no_grad():

            def density(rows):
                return approximation.importance_density(model, model.prior(theta[rows]))

            return side_by_side(density, estimator.chunks(theta), theta.device)

    def ours():
        return alone() if kind == "ep alone" else estimator.draw(theta, generator, start)

    rounds = 7 if num_data < 400 else 3
    simple_seconds, our_seconds = medians([plain, ours], rounds)
    deviation = visited = work = float("nan")
    if kind != "ep alone":
        deviation, visited = spread(theta), spread(settings(model, BATCH, generator))
        work = float(estimator.draw(theta, generator, start).num_factorizations.mean())
    row = {
        "simple": 1e3 * simple_seconds / BATCH,
        "ours": 1e3 * our_seconds / BATCH,
        "ratio": simple_seconds / our_seconds,
        "deviation": deviation,
        "visited": visited,
        "work": work,
    }
    matrices = torch.eye(num_data, dtype=torch.float64).expand(8, -1, -1).contiguous()
    (cholesky,) = medians([lambda: torch.linalg.cholesky_ex(matrices)], 9)
    print(json.dumps(row | {"bound": 1e3 * 2 * cholesky / 8}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", type=int, default=[200, 500])
    options = parser.parse_args()
    if options.worker:
        worker(int(options.worker[0]), options.worker[1])
        return
    print("| n | estimate | simple (ms a theta) | ours (ms) | times faster | sd of the log | at the posterior's thetas | ", end="")
    print("factorisations | over two Choleskys |")
    print("|---" * 9 + "|")
    for num_data in options.sizes:
        for case in CASES:
            rows = [measure(sys.executable, "evidence.py", "--worker", num_data, case) for _ in range(options.runs)]
            value = {key: median(rows, key) for key in rows[0]}
            print(
                f"| {num_data} | {case} | {value['simple']:.2f} | {value['ours']:.2f} | {value['ratio']:.1f} | "
                f"{value['deviation']:.4f} | {value['visited']:.4f} | {value['work']:.1f} | {value['ours'] / value['bound']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
