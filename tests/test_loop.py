"""sample(): seeds, checkpoints, kill -9, Ctrl-C, a full disk, failures of one chain, chunks."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch

import torchgpmc as tg
from tests.problems import gp, sparse_gp
from tests.runs import resume
from tests.runs.resume import Stop, same
from tests.speed import quick
from torchgpmc.calls.loop import _Loop
from torchgpmc.models import JointLogDensity
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.run import Settings
from torchgpmc.runs.weighted import ImportanceRun
from torchgpmc.storage import checkpoint as checkpoint_module
from torchgpmc.storage import files
from torchgpmc.storage.draws import DrawStore
from torchgpmc.storage.files import read_tensors, write_atomically

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
OPTIONS = {"num_samples": 12, "warmup_steps": 25, "num_chains": 3, "seed": 4, "progress": False}
METHODS = [tg.NUTS(max_tree_depth=4), tg.HMC(num_steps=3), tg.HMC(num_steps=2, whitening=tg.Laplace())]
METHODS += [
    tg.ChEES(max_steps=4),
    tg.AdaptiveMH(),
    tg.Slice(),
    tg.PseudoMarginal(num_importance=4),
    tg.PseudoMarginal(num_importance=2, correlation=0.9, approximation=tg.EP()),
    tg.PseudoMarginal(num_importance=2, delayed_acceptance=True),
    tg.PseudoMarginal(num_importance=2, independent_share=0.5),
    tg.PseudoMarginalSlice(num_importance=2),
    tg.NUTS(marginal=tg.Laplace(), importance_weights=2, max_tree_depth=3),
    tg.HMC(num_steps=3, least_steps=2, marginal=tg.EP(), importance_weights=2, normal_scale=True),
]


WEIGHTED = [
    tg.AMIS(num_importance=4, begin=tg.AtModes(1)),
    tg.MAMIS(num_importance=2, degrees_of_freedom=None, begin=tg.AtModes(1)),
    tg.AMIS(num_importance=4, begin=tg.AtPrior(), screen=tg.Screen(candidates=3)),
]


def each(methods):
    """Parameters of a test; methods that take many densities a draw, and a class's second option set, are for the slow suite."""
    seen = {tg.Slice, tg.PseudoMarginalSlice, tg.NUTS, tg.ChEES, tg.MAMIS}
    for method in methods:
        kind = type(method)
        yield pytest.param(method, marks=pytest.mark.slow if kind in seen else (), id=kind.__name__)
        seen.add(kind)


def options_of(method):
    alone = {"warmup_steps": None, "num_chains": None, "num_samples": 90} if method in WEIGHTED else {}
    return {**OPTIONS, **alone}


def whole_run(method):
    return resume.whole_run(gp, method, tuple(options_of(method).items()))


def made_and_sampled():
    model, method = gp("probit", num_data=6), tg.NUTS(max_tree_depth=2, whitening=tg.Laplace())
    theta = tg.sample(model, method, **(OPTIONS | {"num_samples": 3, "warmup_steps": 3})).theta
    start = tg.initialize(sparse_gp("probit"), max_iterations=2, progress=False)
    density = tg.sample_density(
        lambda x: -x.square().sum(-1), torch.ones(3, 2), tg.HMC(num_steps=2), **(OPTIONS | {"num_chains": None})
    )
    return theta, density.position, start.theta, tg.fit(model, max_iterations=3).kernel.raw_outputscale


@pytest.mark.slow
def test_inference_mode_around_everything_changes_no_number():
    plain = made_and_sampled()
    with torch.inference_mode():
        assert all(torch.equal(a, b) for a, b in zip(plain, made_and_sampled(), strict=True))


@pytest.mark.parametrize("method", [*each(METHODS), *quick([], WEIGHTED)])
def test_the_same_seed_gives_the_same_draws_and_another_does_not(method):
    model, options = gp("probit"), options_of(method)
    other = tg.sample(model, method, **{**options, "seed": 5})
    assert same(whole_run(method), tg.sample(model, method, **options)) and not same(whole_run(method), other)


def test_numpys_whole_numbers_are_whole_numbers(tmp_path):
    model = gp("probit")
    options = OPTIONS | {name: np.int64(OPTIONS[name]) for name in ("num_samples", "warmup_steps", "num_chains", "seed")}
    posterior = tg.sample(model, tg.HMC(num_steps=np.int64(2)), **options)
    assert same(posterior, tg.sample(model, tg.HMC(num_steps=2), **OPTIONS))
    posterior.save(tmp_path / "run.pt")
    assert same(posterior, tg.Posterior.load(tmp_path / "run.pt", model))


def test_seed_none_records_the_seed_it_drew():
    model = gp("probit")
    first = tg.sample(model, tg.HMC(num_steps=2), **{**OPTIONS, "seed": None})
    again = tg.sample(model, tg.HMC(num_steps=2), **{**OPTIONS, "seed": first.info["seed"]})
    assert same(first, again)


def test_the_global_generator_and_the_module_are_untouched():
    model = gp("gaussian")
    before = torch.random.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    tg.sample(model, tg.HMC(num_steps=2), **OPTIONS)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert all(torch.equal(before[1][k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("method", each(METHODS))
def test_chunks_do_not_change_the_draws(method):
    model, options = gp("probit"), {**OPTIONS, "num_samples": 1, "warmup_steps": 8}
    whole = tg.sample(model, method, **options)
    for chunk in (1, 2, 7):
        chunked = tg.sample(model, method, **options, chain_chunk=chunk)
        # A batch of another size may round differently in its last digit, and chaos makes that visible in time.
        torch.testing.assert_close(chunked.theta[:, 0], whole.theta[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [tg.Slice(max_steps_out=1), tg.AdaptiveMH()], ids=["Slice", "AdaptiveMH"])
def test_no_more_chains_than_a_chunk_are_evaluated_at_once(method, monkeypatch):
    largest = []
    original = tg.GP.prior_at

    def counted(self, hyperparameters, *arguments):
        largest.append(hyperparameters.num_settings)
        return original(self, hyperparameters, *arguments)

    monkeypatch.setattr(tg.GP, "prior_at", counted)
    tg.sample(gp("probit"), method, **{**OPTIONS, "num_samples": 1, "warmup_steps": 1}, chain_chunk=1)
    assert max(largest) == 1


@pytest.mark.parametrize("method", each(METHODS + WEIGHTED))
def test_checkpoints_do_not_change_the_draws_and_a_finished_run_is_returned(method, tmp_path):
    model, options = gp("probit"), options_of(method)
    every, plain = 2 if method in WEIGHTED else 7, whole_run(method)
    path = tmp_path / "run.ckpt"
    saved = tg.sample(model, method, **options, checkpoint=tg.Checkpoint(path, every=every))
    assert same(plain, saved)
    written = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert same(plain, tg.sample(model, method, **options, checkpoint=tg.Checkpoint(path, every=every)))
    assert written == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


def stop_after(monkeypatch, advances, error):
    """Makes the run raise ``error`` in the middle of a later advance."""
    original = JointLogDensity.value_and_grad
    calls = []

    def interrupted(self, position):
        calls.append(1)
        if len(calls) > advances:
            raise error
        return original(self, position)

    monkeypatch.setattr(JointLogDensity, "value_and_grad", interrupted)


@pytest.mark.parametrize("method", each(METHODS[:3]))
@pytest.mark.parametrize("calls", quick([60], [20, 60, 120]))
def test_a_run_that_died_resumes_to_the_same_bits(method, calls, tmp_path, monkeypatch):
    model = gp("probit")
    plain, checkpoint = whole_run(method), tg.Checkpoint(tmp_path / "run.ckpt", every=5)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_after(patch, calls if isinstance(method, tg.NUTS) else calls // 2, Stop())
        tg.sample(model, method, **OPTIONS, checkpoint=checkpoint)
    assert same(plain, tg.sample(model, method, **OPTIONS, checkpoint=checkpoint))


@pytest.mark.parametrize(
    "method", each(method for method in METHODS if isinstance(method, tg.PseudoMarginal | tg.Slice | tg.ChEES))
)
# While tuned, at the hand-over, in the rest of warm-up, in the draws.
@pytest.mark.parametrize("advances", quick([20], [9, 20, 23, 29]))
def test_runs_in_phases_resume_to_the_same_bits(method, advances, tmp_path, monkeypatch):
    options = {**OPTIONS, "num_samples": 6}
    assert resume.dies_and_resumes(gp, method, options, advances, tmp_path / "run.ckpt", monkeypatch)


@pytest.mark.parametrize("method", [method for method in METHODS if isinstance(method, tg.PseudoMarginal)])
def test_the_log_density_of_a_pseudo_marginal_chain_is_never_that_of_its_surrogate(method):
    model, steps = gp("probit"), 20  # of the 25 of warm-up
    run, generator = method.prepare(model, Settings(2, 25, 3, None)), torch.Generator().manual_seed(2)
    state = run.init(generator)
    for iteration in range(run.num_advances()):
        chain = state.chain
        if iteration < steps:
            assert bool(chain.log_density.isnan().all()) and bool(torch.isfinite(chain.surrogate).all())
        else:
            expected = model.layout.log_prior(chain.position) + chain.payload.value
            torch.testing.assert_close(chain.log_density, expected, rtol=1e-12, atol=1e-12)
        state, _, _ = run.advance(state, generator)


@pytest.mark.slow
def test_ctrl_c_keeps_the_draws_so_far_and_the_checkpoint_goes_on(tmp_path, monkeypatch):
    model = gp("probit")
    plain = tg.sample(model, tg.HMC(num_steps=3, random_length=False), **OPTIONS)
    checkpoint = tg.Checkpoint(tmp_path / "run.ckpt", every=1000)
    with monkeypatch.context() as patch, pytest.warns(tg.SamplingWarning, match="interrupted: .* draws a chain are kept"):
        stop_after(patch, 115, KeyboardInterrupt())
        partial = tg.sample(model, tg.HMC(num_steps=3, random_length=False), **OPTIONS, checkpoint=checkpoint)
    assert partial.info["interrupted"] and 0 < partial.num_draws < 12
    assert torch.equal(partial.theta, plain.theta[:, : partial.num_draws])
    assert same(plain, tg.sample(model, tg.HMC(num_steps=3, random_length=False), **OPTIONS, checkpoint=checkpoint))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_ctrl_c_between_keeping_a_batch_and_weighing_it(monkeypatch):
    model, options = gp("probit"), {"num_samples": 120, "seed": 4, "progress": False}
    keep, kept = DrawStore.append, []

    def interrupted(self, draw, stats):
        keep(self, draw, stats)
        kept.append(draw.theta.shape[1])
        if len(kept) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DrawStore, "append", interrupted)
        partial = tg.sample(model, tg.AMIS(batch_size=20), **options)
    weighed = sum(kept[:2])
    assert partial.theta.shape[1] == partial.log_weights.shape[1] == partial.stats["lp"].shape[1] == weighed
    assert torch.equal(partial.theta, tg.sample(model, tg.AMIS(batch_size=20), **options).theta[:, :weighed])


@pytest.mark.slow
@pytest.mark.parametrize("method", [tg.HMC(num_steps=3), tg.AMIS(num_importance=4, begin=tg.AtModes(1))], ids=["HMC", "AMIS"])
@pytest.mark.parametrize("place", ["advance", "append", "_counted", "_has_ended"])
def test_ctrl_c_within_a_step_resumes_to_the_same_bits(place, method, tmp_path, monkeypatch):
    """After a draw was made, kept, counted or judged, and before the next of these."""
    run = ChainRun if isinstance(method, tg.HMC) else ImportanceRun
    owner = {"advance": run, "append": DrawStore}.get(place, _Loop)
    original, calls = getattr(owner, place), []

    def interrupted(*arguments):
        found = original(*arguments)
        calls.append(0)
        if len(calls) == (31 if run is ChainRun and owner is not DrawStore else 3):
            raise KeyboardInterrupt
        return found

    model, options = gp("probit"), options_of(method)
    checkpoint = tg.Checkpoint(tmp_path / "run.ckpt", every=1000)
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        assert tg.sample(model, method, **options, checkpoint=checkpoint).info["interrupted"]
    whole, resumed = whole_run(method), tg.sample(model, method, **options, checkpoint=checkpoint)
    assert same(whole, resumed) and whole.info["num_evaluations"] == resumed.info["num_evaluations"]


def test_ctrl_c_in_warm_up_has_nothing_to_keep(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match=r"in warm-up after .* no draws exist yet"):
        stop_after(patch, 10, KeyboardInterrupt())
        tg.sample(gp("probit"), tg.HMC(num_steps=3), **OPTIONS)


def test_ctrl_c_in_warm_up_says_where_its_checkpoint_is(monkeypatch, tmp_path):
    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt, match=r"no draws exist yet. The same call goes on from"),
    ):
        stop_after(patch, 10, KeyboardInterrupt())
        tg.sample(gp("probit"), tg.HMC(num_steps=3), **OPTIONS, checkpoint=tmp_path / "run.ckpt")


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "method"),
    [
        ("torchgpmc.NUTS.prepare", tg.NUTS()),
        ("torchgpmc.runs.chain.ChainRun.init", tg.NUTS()),
        ("torchgpmc.runs.weighted.ImportanceRun.init", tg.AMIS()),
        ("torchgpmc.runs.weighted.ImportanceRun.init", None),
        ("torchgpmc.calls.sampling.candidates", None),
    ],
)
def test_ctrl_c_in_preparation_says_that_there_are_no_draws(place, method, monkeypatch, tmp_path):
    monkeypatch.setattr(place, interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"before the first step: no draws exist yet, .* Ctrl-C returns them"):
        tg.sample(gp("probit"), method, seed=0, progress=False)
    with pytest.raises(KeyboardInterrupt, match=r"no draws exist yet, .* the same call begins anew"):
        tg.sample(gp("probit"), method, seed=0, progress=False, checkpoint=tmp_path / "run.ckpt")


def test_weighted_draws_have_no_warm_up_to_be_interrupted_in(monkeypatch):
    monkeypatch.setattr("torchgpmc.runs.weighted.ImportanceRun.advance", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted in the first of [0-9]+ steps: no draws exist yet"):
        tg.sample(gp("probit"), tg.AMIS(), seed=0, progress=False)


@pytest.mark.parametrize("method", [tg.HMC(num_steps=2), None])
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_the_same_line_without_a_seed_goes_on_with_the_checkpoints(method, tmp_path):
    options = {"num_samples": 12, "progress": False, "checkpoint": tmp_path / "run.ckpt"}
    first = tg.sample(gp("probit"), method, **options)
    again = tg.sample(gp("probit"), method, **options)
    assert same(first, again) and again.info["seed"] == first.info["seed"]
    with pytest.raises(ValueError, match=r"belongs to another run: .*was '?12'?, is '?13'?") as raised:
        tg.sample(gp("probit"), method, **{**options, "num_samples": 13})
    assert "seed" not in str(raised.value)


def test_a_first_engine_that_left_no_file_leaves_the_seed_to_the_seconds(tmp_path):
    path = tmp_path / "run.ckpt"
    tg.sample(gp("probit"), tg.HMC(num_steps=2), **OPTIONS, checkpoint=f"{path}.2")
    assert checkpoint_module.saved_seed(tg.Checkpoint(path)) == OPTIONS["seed"]


def test_what_is_no_checkpoint_is_said(tmp_path):
    with pytest.raises(TypeError, match=r"checkpoint is 3. Expected a path"):
        tg.sample(gp("probit"), tg.NUTS(), checkpoint=3)
    with pytest.raises(ValueError, match=r"is a folder. Expected the path of a file"):
        tg.sample(gp("probit"), tg.NUTS(), checkpoint=tmp_path)
    (tmp_path / "notes.txt").write_text("of another kind")
    with pytest.raises(
        ValueError, match=r"not a torchgpmc file, or is damaged. Expected one that torchgpmc wrote, or a new path.$"
    ):
        tg.sample(gp("probit"), tg.NUTS(), checkpoint=tmp_path / "notes.txt")


def test_batches_of_weighted_draws_are_saved_as_they_come(tmp_path, monkeypatch):
    saves = []
    original = checkpoint_module.CheckpointFile.save

    def counted(self, state, generator_state, num_done, info, store):
        saves.append(len(store))
        original(self, state, generator_state, num_done, info, store)

    monkeypatch.setattr(checkpoint_module.CheckpointFile, "save", counted)
    method = tg.AMIS(num_importance=2, batch_sizes=[150, 20, 20, 160, 50])
    tg.sample(gp("probit"), method, num_samples=400, seed=0, progress=False, checkpoint=tmp_path / "run.ckpt")
    assert saves == [150, 350, 400]  # beyond 100, 300 and 400 draws, not after 100 batches


SCRIPT = """
    import sys
    import torchgpmc as tg
    from tests import test_loop as of_this
    tg.sample(of_this.killed_model(), of_this.KILLED, **of_this.LONG, checkpoint=tg.Checkpoint(sys.argv[1], every=10))
"""
KILLED, LONG = tg.HMC(num_steps=5), {**OPTIONS, "num_samples": 300, "warmup_steps": 100}


def killed_model():
    return gp("probit", num_data=20)


@pytest.mark.slow
def test_kill_minus_nine_and_resume_to_the_same_bits(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent.parent)}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "run.ckpt")], env=environment)
    while process.poll() is None and len(list(tmp_path.glob("run.ckpt*"))) < 3:
        time.sleep(0.001)
    assert process.poll() is None, "the run finished before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = tg.sample(killed_model(), KILLED, **LONG, checkpoint=tg.Checkpoint(tmp_path / "run.ckpt", every=10))
    assert same(resumed, tg.sample(killed_model(), KILLED, **LONG))


def test_other_settings_are_refused(tmp_path):
    model, path = gp("probit"), tmp_path / "run.ckpt"
    tg.sample(model, tg.HMC(num_steps=2), **OPTIONS, checkpoint=path)
    for other, method, options in (
        (model, tg.HMC(num_steps=3), OPTIONS),
        (model, tg.HMC(num_steps=2), {**OPTIONS, "seed": 9}),
        (model, tg.HMC(num_steps=2), {**OPTIONS, "num_samples": 11}),
        (gp("probit", num_data=7), tg.HMC(num_steps=2), OPTIONS),
        (gp("logit"), tg.HMC(num_steps=2), OPTIONS),
    ):
        with pytest.raises(ValueError, match=r"belongs to another run: .* was .*, is "):
            tg.sample(other, method, **options, checkpoint=path)


@pytest.mark.parametrize("method", [tg.HMC(num_steps=2), tg.Gibbs(), tg.PseudoMarginal()])
def test_chains_go_on_to_more_draws_than_a_finished_checkpoint_has(method, tmp_path):
    model, path, more = gp("probit"), tmp_path / "run.ckpt", {**OPTIONS, "num_samples": 17}
    few = tg.sample(model, method, **OPTIONS, checkpoint=path)
    many = tg.sample(model, method, **more, checkpoint=path)
    assert same(many, tg.sample(model, method, **more))
    assert torch.equal(many.theta[:, : few.num_draws], few.theta) and many.info["num_samples"] == 17


def test_weighted_draws_and_a_warm_up_as_long_as_the_run_do_not(tmp_path):
    options = {"num_samples": 400, "seed": 1, "progress": False}
    for method, name in ((tg.AMIS(), "weighted"), (tg.HMC(num_steps=2), "chains")):
        tg.sample(gp("probit"), method, **options, checkpoint=tmp_path / name)
        with pytest.raises(ValueError, match="num_samples was '400', is '500'"):
            tg.sample(gp("probit"), method, **{**options, "num_samples": 500}, checkpoint=tmp_path / name)


def test_what_differs_is_named_alone(tmp_path):
    """Not the whole description of a method or a model in which it is."""
    model, path = gp("probit"), tmp_path / "run.ckpt"
    tg.sample(model, tg.HMC(num_steps=2), **OPTIONS, checkpoint=path)
    with pytest.raises(ValueError, match=r"another run: method was 'num_steps=2', is 'num_steps=3'\. Expected"):
        tg.sample(model, tg.HMC(num_steps=3), **OPTIONS, checkpoint=path)
    with pytest.raises(ValueError, match=r"; model was 'train_y=\S* \w{16}', is 'train_y=\S* \w{16}'\. Expected"):
        tg.sample(model.with_targets(1 - model.train_y), tg.HMC(num_steps=2), **OPTIONS, checkpoint=path)


def test_a_checkpoint_without_all_of_its_files_is_an_error_that_says_so(tmp_path):
    call = partial(tg.sample, gp("probit"), tg.HMC(num_steps=2), **OPTIONS)
    call(checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"holds 'torchgpmc checkpoint segment \d'. Expected 'torchgpmc checkpoint \d'\.$"):
        call(checkpoint=tmp_path / "run.ckpt.00000")
    (tmp_path / "run.ckpt.00000").unlink()
    with pytest.raises(ValueError, match=r"run.ckpt lacks some of its draws, the file .*run.ckpt.00000. Expected all files"):
        call(checkpoint=tmp_path / "run.ckpt")


def test_a_damaged_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    path = tmp_path / "run.ckpt"
    path.write_bytes(b"half a file")
    with pytest.raises(ValueError, match="not a torchgpmc file, or is damaged"):
        tg.sample(gp("probit"), tg.HMC(num_steps=2), **OPTIONS, checkpoint=path)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    model, path = gp("probit"), tmp_path / "run.ckpt"
    plain = tg.sample(model, tg.HMC(num_steps=2), **OPTIONS)
    original = checkpoint_module.write_atomically
    calls = []

    def sometimes_full(path, content):
        calls.append(1)
        if 3 <= len(calls) <= 5:
            raise OSError(28, "No space left on device")
        original(path, content)

    with monkeypatch.context() as patch, pytest.warns(tg.SamplingWarning, match="could not be written.*No space left"):
        patch.setattr(checkpoint_module, "write_atomically", sometimes_full)
        assert same(plain, tg.sample(model, tg.HMC(num_steps=2), **OPTIONS, checkpoint=tg.Checkpoint(path, every=5)))
    assert same(plain, tg.sample(model, tg.HMC(num_steps=2), **OPTIONS, checkpoint=tg.Checkpoint(path, every=5)))


def test_a_disk_that_fills_while_torch_writes_is_said_to_be_full(tmp_path):
    path = tmp_path / "file.pt"
    write_atomically(path, {"format": "kind 1"})

    class Full(torch.Tensor):
        def __reduce_ex__(self, protocol):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 73152 vs 73104")

    with pytest.raises(OSError, match="torch could not write all of it; is the disk full"):
        write_atomically(path, {"format": "kind 1", "theta": torch.zeros(2).as_subclass(Full)})
    assert read_tensors(path, "kind 1", []) == {"format": "kind 1"} and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_save_left_is_removed_by_the_next_and_nothing_else(tmp_path):
    path = tmp_path / "run.ckpt"
    write = (
        "import os, pathlib, signal, sys; from torchgpmc.storage import files; "
        "files._save = lambda content, file: os.kill(os.getpid(), signal.SIGKILL); "
        "files.write_atomically(pathlib.Path(sys.argv[1]), {'format': 'kind 1'})"
    )
    for name in ("run.ckpt", "run.ckpt.00000"):
        killed = subprocess.Popen([sys.executable, "-c", write, str(tmp_path / name)])
        assert killed.wait() == -signal.SIGKILL
        (tmp_path / f"{name}.{killed.pid}.tmp").write_bytes(b"half")
    left = tmp_path / f"run.ckpt.{killed.pid}.tmp"  # as another process of that number, elsewhere, would be at
    left.write_bytes(b"half")
    running = tmp_path / f"run.ckpt.{os.getppid()}.tmp"
    running.write_bytes(b"half")
    others = {running, tmp_path / f"run.ckpt.00000.{killed.pid}.tmp", tmp_path / "run.ckpt.notes.tmp"}
    (tmp_path / "run.ckpt.notes.tmp").touch()
    with open(left, "rb") as file:
        files._lock(file)
        write_atomically(path, {"format": "kind 1"})
        assert set(tmp_path.iterdir()) == {path, left, *others}
    write_atomically(path, {"format": "kind 1"})
    assert set(tmp_path.iterdir()) == {path, *others}


def test_a_failed_row_is_that_chains_alone():
    """Hyperparameters that overflow make one chain's covariance useless; the others' values and gradients stand."""
    model = gp("probit")
    position = torch.zeros(3, model.layout.size + model.latent_size, dtype=torch.float64)
    position[1, : model.layout.size] = 800.0  # overflows
    value, gradient = tg.joint_log_density(model).value_and_grad(position)
    assert value[1] == -torch.inf and bool((gradient[1] == 0).all())
    assert bool(torch.isfinite(value[[0, 2]]).all() and torch.isfinite(gradient[[0, 2]]).all())


@pytest.mark.slow
def test_failures_are_counted_and_reported():
    model = gp("probit", jitter=0.0, num_data=40)
    with pytest.warns(tg.SamplingWarning, match=r"density evaluations failed .*raise the model's jitter"):
        posterior = tg.sample(model, tg.NUTS(max_tree_depth=3), **{**OPTIONS, "num_samples": 30})
    assert float(posterior.stats["n_failures"].sum()) > 0
    assert bool(torch.isfinite(posterior.theta).all())


def test_a_start_that_cannot_be_found_is_an_error():
    import gpytorch

    model = tg.GP(
        torch.zeros(3, 1),
        torch.tensor([1.0, 2.0, 3.0]),
        gpytorch.kernels.RBFKernel().requires_grad_(False),
        tg.likelihoods.Poisson(),
        jitter=0.0,
    )
    with pytest.raises(ValueError, match=r"found no starting point.*raise jitter"):
        tg.sample(model, tg.NUTS(), **OPTIONS)


def test_the_bar_shows_acceptance_step_and_divergences(capsys):
    tg.sample(gp("probit"), tg.NUTS(max_tree_depth=3), **{**OPTIONS, "progress": True})
    shown = capsys.readouterr().err
    for words in ("accept=", "step=", "depth=", "gradients/s=", "divergences=", "37/37"):
        assert words in shown


def test_kept_draws_leave_the_device_and_hold_no_graph():
    posterior = tg.sample(sparse_gp("probit"), tg.HMC(num_steps=2), **OPTIONS)
    for tensor in (posterior.theta, posterior.whitened, *posterior.samples.values(), *posterior.stats.values()):
        assert tensor.device.type == "cpu" and not tensor.requires_grad


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_samples": 0}, "num_samples is 0. Expected a whole number of at least 1"),
        ({"num_chains": -1}, "num_chains is -1"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"chain_chunk": 0}, "chain_chunk is 0"),
        ({"num_samples": 2.5}, "num_samples is 2.5"),
        ({"seed": -3}, "seed is -3"),
    ],
)
def test_bad_numbers_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        tg.sample(gp("probit"), tg.NUTS(), **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (tg.NUTS(target_accept_prob=1.5), "target_accept_prob is 1.5"),
        (tg.NUTS(step_size=0.0), "step_size is 0.0"),
        (tg.NUTS(max_tree_depth=0), "max_tree_depth is 0"),
        (tg.HMC(num_steps=0), "num_steps is 0"),
        (tg.AdaptiveMH(thinning=0), "thinning is 0"),
        (tg.Slice(max_steps_out=0), "max_steps_out is 0"),
    ],
)
def test_bad_options_are_refused(method, match):
    with pytest.raises(ValueError, match=match):
        tg.sample(gp("probit"), method, **OPTIONS)


@pytest.mark.parametrize("method", ["NUTS", tg.NUTS, 3])
def test_only_a_method_object_is_a_method(method):
    with pytest.raises(TypeError, match=r"Expected a method object, for instance torchgpmc.NUTS\(\)"):
        tg.sample(gp("probit"), method, **OPTIONS)


def test_latent_only_methods_advise_what_exists():
    with pytest.raises(ValueError, match=r"EllipticalSlice samples latents alone.*requires_grad_\(False\), or .* NUTS\(\)\.$"):
        tg.sample(gp("probit"), tg.EllipticalSlice(), **OPTIONS)


def test_targets_for_each_chain_must_match_the_chains():
    model = gp("probit").with_targets(torch.ones(5, 6))
    with pytest.raises(ValueError, match="Expected num_chains=5"):
        tg.sample(model, tg.NUTS(), **OPTIONS)


def test_defaults_of_numbers(monkeypatch):
    seen = {}

    def prepare(self, model, settings):
        seen.update(settings._asdict(), method=self)
        raise Stop

    monkeypatch.setattr(tg.NUTS, "prepare", prepare)
    with pytest.raises(Stop):
        tg.sample(sparse_gp("probit"), tg.NUTS())
    assert seen["num_samples"] == 1000 and seen["warmup_steps"] is None and seen["num_chains"] is None


@pytest.mark.slow
def test_quiet_when_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tg.SamplingWarning)
        posterior = tg.sample(
            gp("probit", num_data=10),
            tg.NUTS(whitening=tg.Laplace(), target_accept_prob=0.95),  # at 0.8 one transition in some thousands diverges
            num_samples=200,  # of 24 chains, whose R-hat is 1.007 and less; of four and 500 over 1.01 with every third seed
            warmup_steps=100,
            num_chains=24,
            seed=2,
            progress=False,
        )
    assert posterior.complaints() == []


def test_a_parameter_fixed_in_place_is_fixed():
    model = gp("probit")
    model.kernel.raw_outputscale.requires_grad_(False)
    posterior = tg.sample(model, tg.HMC(num_steps=2), **OPTIONS)
    assert list(posterior.samples) == ["kernel.base_kernel.lengthscale"]
