"""What two processes do in ``test_distributed.py``.

Each scenario leaves what it found in ``FOLDER/SCENARIO.RANK.pt``. By hand:
``torchrun --standalone --nproc-per-node 2 -m tests.distributed_program FOLDER repeated``.
"""

import os
import pathlib
import re
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from torchgpmc.distributed.chains import RankRun
from torchgpmc.distributed.ranks import RankLostError
from torchgpmc.runs.chain import ChainRun

CLUSTERS = pathlib.Path(__file__).parent.parent / "docs" / "for" / "clusters.md"
SETTINGS = {"num_samples": 12, "warmup_steps": 30, "num_chains": 4, "seed": 5, "progress": False}
SHARDED = {**SETTINGS, "num_samples": 5, "num_chains": 2}
METHODS = {"nuts": tg.NUTS(max_tree_depth=3), "chees": tg.ChEES(), "metropolis": tg.AdaptiveMH(), "slice": tg.Slice()}


def kernel():
    return ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), outputscale_prior=GammaPrior(2.0, 1.0))


def data():
    x = torch.linspace(0, 1, 14, dtype=torch.float64)
    return x, (torch.sin(7 * x) > 0).int()


def whole_model():
    return tg.GP(*data(), kernel(), tg.likelihoods.Bernoulli())


def shard(rank):
    x, y = data()
    rows = slice(0, 8) if rank == 0 else slice(8, 14)  # unequal shards
    return tg.distributed.ShardedGP(x[rows], y[rows], kernel(), tg.likelihoods.Bernoulli(), inducing_points=x[::3])


def at_iteration(iteration, act):
    """``act`` where the chains have done ``iteration`` transitions, just before the next."""
    before = ChainRun.advance

    def advance(self, state, generator):
        if state.iteration == iteration:
            act()
        return before(self, state, generator)

    ChainRun.advance = advance


def watched(tunings):
    """Keeps each state's tuning."""
    before = RankRun.advance

    def advance(self, state, generator):
        tunings.append(state.tuning)
        return before(self, state, generator)

    RankRun.advance = advance


def chains(name, **changes):
    return tg.distributed.sample(whole_model(), METHODS[name], **{**SETTINGS, **changes})


def told(posterior):
    stats = {name: posterior.stats[name] for name in ("lp", "step_size") if name in posterior.stats}
    return {"theta": posterior.theta, "whitened": posterior.whitened, "stats": stats, "info": posterior.info}


def pooled(rank, folder):
    before, tunings = RankRun.advance, []
    watched(tunings)
    found = told(chains("nuts"))
    RankRun.advance = before
    found["tunings"] = [[t.step_size, *t.preconditioner, t.mean, *t.averaging, *t.moments] for t in tunings]
    for name in ("chees", "slice"):
        found[name] = told(chains(name, warmup_steps=40 if name == "chees" else 3))
    return found


def repeated(rank, folder):
    return told(chains("nuts"))


def refused_at_once(rank, folder):
    """Again and again: a rank that leaves before the others are connected ended them once in some hundred times."""
    for _ in range(30):
        try:
            chains("nuts", num_chains=3)
        except ValueError:
            continue
    return True


def refused(rank, folder):
    found = []
    for changes, method in (({"num_chains": 3}, tg.NUTS()), ({}, tg.AMIS()), ({"seed": 5 + rank}, tg.NUTS())):
        try:
            tg.distributed.sample(whole_model(), method, **{**SETTINGS, **changes})
        except ValueError as error:
            found.append(str(error))
    return found


def interrupted(rank, folder):
    """Ctrl-C on rank 1 alone, and then the rest of the run."""
    before = ChainRun.advance
    if rank == 1:
        at_iteration(33, lambda: signal.raise_signal(signal.SIGINT))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        partial = chains("nuts", checkpoint=folder / "interrupted.ckpt")
    ChainRun.advance = before
    rest = chains("nuts", checkpoint=folder / "interrupted.ckpt")
    return {"partial": told(partial), "rest": told(rest), "warnings": [str(warning.message) for warning in caught]}


def sharded(rank, folder):
    model, found = shard(rank), {}
    with model.leading() as leads:
        if leads:
            for name in ("nuts", "metropolis"):
                found[name] = told(tg.sample(model, METHODS[name], **SHARDED))
            found["refused"] = []
            for method in (tg.AMIS(), tg.NUTS(whitening=tg.Laplace()), tg.NUTS(marginal=tg.Laplace())):
                try:
                    tg.sample(model, method, num_samples=2, progress=False)
                except ValueError as error:
                    found["refused"].append(str(error))
    return {**found, "left": True}


def sharded_interrupted(rank, folder):
    """Ctrl-C on both, as a terminal sends it: rank 0 stops, rank 1 works on until it does."""
    before = ChainRun.advance
    model, found = shard(rank), {}
    if rank == 1:
        answer = model.shard
        model.shard = lambda *args, **options: (signal.raise_signal(signal.SIGINT), answer(*args, **options))[1]
    with model.leading() as leads:
        if leads:
            at_iteration(33, lambda: signal.raise_signal(signal.SIGINT))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = told(tg.sample(model, METHODS["nuts"], **SHARDED))
    ChainRun.advance = before
    return {**found, "left": True}


def killed(rank, folder):
    if rank == 1:
        at_iteration(35, lambda: os._exit(7))
    try:
        chains("nuts", checkpoint=tg.Checkpoint(folder / "killed.ckpt", every=4))
    except RankLostError as error:
        return str(error)


def resumed(rank, folder):
    return told(chains("nuts", checkpoint=tg.Checkpoint(folder / "killed.ckpt", every=4)))


def leader_killed(rank, folder):
    model = shard(rank)
    try:
        with model.leading() as leads:
            if leads:
                at_iteration(34, lambda: os._exit(7))
                tg.sample(model, METHODS["nuts"], **SHARDED, checkpoint=tg.Checkpoint(folder / "leader.ckpt", every=4))
    except RankLostError as error:
        return str(error)


def documented(rank, folder):
    """The programs of the page for clusters, with fewer draws."""
    known, found = {}, []
    os.chdir(folder)
    for program in re.findall(r"```python\n(.*?)```", CLUSTERS.read_text(), flags=re.DOTALL):
        program, count = re.subn("num_samples=300, warmup_steps=200", "num_samples=10, warmup_steps=10, progress=False", program)
        assert count == 1
        exec(compile(program, str(CLUSTERS), "exec"), known)
        found.append(told(known.pop("posterior")) if "posterior" in known else None)
    return found


def run(names, folder, rank, environment):
    """The scenarios of one process, one after another."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that Ctrl-C is ignored
    warnings.simplefilter("ignore", tg.SamplingWarning)
    if not environment:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    for name in names:
        torch.save(globals()[name](rank, folder), folder / f"{name}.{rank}.pt")


if __name__ == "__main__":
    run(sys.argv[2:], pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), os.environ)
