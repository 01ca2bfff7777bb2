"""How often the host waits for the device; ``python -m tests.device.waits docs/testing.md`` writes the table there."""

import sys
from collections import Counter
from pathlib import Path

import torch

import torchgpmc as tg
from tests.device.other import DEVICE, other_device
from tests.problems import gp, sparse_gp
from tests.test_conformance import METHODS, NEED_START, OF_LATENTS, WEIGHTED
from torchgpmc.runs.run import Settings

MARK = "<!-- waits -->\n"
STEPS = 4
CHAINS = {name: method for name, method in METHODS.items() if name not in WEIGHTED} | {
    "NUTS": tg.NUTS(max_tree_depth=3),
    "HMC": tg.HMC(num_steps=4),
    "StochasticGradientHMC": tg.StochasticGradientHMC(batch_size=5, num_steps=4),
}


def of_a_run(name: str, model: tg.GP, waits: Counter[str], method: object = None) -> tuple[float, float]:
    """Waits and evaluations of a transition, after warm-up: the mean of a few, two chains."""
    if name in OF_LATENTS:
        for part in (model.kernel, model.likelihood):
            part.requires_grad_(False)
        model.refresh()
    start = tg.initialize(model, optimize_inducing_points=False, progress=False) if name in NEED_START else None
    model = model if start is None else start.model
    run = (CHAINS[name] if method is None else method).prepare(model, Settings(STEPS, STEPS, 2, None, start))
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    state = run.init(generator)
    waited, evaluations = 0, 0.0
    for index in range(2 * STEPS):
        waits.clear()
        state, _, stats = run.advance(state, generator)
        if index >= STEPS:
            waited += waits.total()
            evaluations += float(stats["n_steps"].max())
    return waited / STEPS, evaluations / STEPS


def table() -> str:
    """One row a method; ``-`` where it does not sample the model."""
    lines = ["| method | GP: waits a transition | evaluations | SparseGP: waits a transition | evaluations |"]
    lines.append("|---|---|---|---|---|")
    with other_device() as waits:
        for name in CHAINS:
            cells = []
            for make in (gp, sparse_gp):
                try:
                    cells += [f"{number:.1f}" for number in of_a_run(name, make(device=DEVICE), waits)]
                except ValueError:  # no latents at the data
                    cells += ["-", "-"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, _, after = page.read_text().split(MARK)
    page.write_text(before + MARK + table() + MARK + after)
