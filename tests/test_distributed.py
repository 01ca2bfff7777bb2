"""Two gloo processes, started once, again after one was killed, and by torchrun; what they did is in ``distributed_program.py``.

The tests' own workers share these runs: the first to need one starts it, the others read what it left.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import torchgpmc as tg
from tests import distributed_program as program
from torchgpmc.distributed.chains import rank_seed

LIMIT = 240  # seconds a pair, which takes a few on two free cores


def run_pair(folder, scenarios, by_environment=False):
    """How the two processes ended; what each scenario left is in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    context = multiprocessing.get_context("forkserver")  # its processes share one import
    context.set_forkserver_preload(["tests.distributed_program"])
    processes = []
    for rank in range(2):
        environment = {**place, "RANK": str(rank)} if by_environment else {}  # as torchrun sets it
        processes.append(context.Process(target=program.run, args=(scenarios, folder, rank, environment)))
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of two processes were still at work after {LIMIT} seconds"
    return [process.exitcode for process in processes]


def run_by_torchrun(folder, scenarios):
    """Started by torchrun with the options that the documentation gives; what each scenario left is in the folder."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.distributed_program"]
    root = program.CLUSTERS.parent.parent.parent
    done = subprocess.run(
        [sys.executable, *command, folder, *scenarios],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=root,
        timeout=LIMIT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def left_in(folder, scenarios):
    """What each scenario left, by scenario and rank."""
    paths = {name: {rank: folder / f"{name}.{rank}.pt" for rank in range(2)} for name in scenarios}
    return {
        name: {rank: torch.load(path, weights_only=False) if path.exists() else None for rank, path in ranks.items()}
        for name, ranks in paths.items()
    }


def once_for_all_workers(tmp_path_factory, name, program_run):
    """The folder in which ``program_run(folder)`` left its files, and what it returned: run by whichever worker comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    returned = folder / "returned.json"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go at the file's close, or by a worker that dies
        if not returned.exists():
            returned.write_text(json.dumps(program_run(folder)))
    return folder, json.loads(returned.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    first = ["pooled", "refused", "refused_at_once", "interrupted", "sharded", "sharded_interrupted", "killed"]
    second = ["resumed", "leader_killed"]
    folder, codes = once_for_all_workers(
        tmp_path_factory,
        "ranks",
        lambda folder: run_pair(folder, first) + run_pair(folder, second, by_environment=True),
    )
    return SimpleNamespace(folder=folder, codes=codes, **left_in(folder, first + second))


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory):
    scenarios = ["repeated", "documented"]
    folder, _ = once_for_all_workers(tmp_path_factory, "torchrun", lambda folder: run_by_torchrun(folder, scenarios))
    return SimpleNamespace(folder=folder, **left_in(folder, scenarios))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("theta", "whitened")) and all(
        torch.equal(value, other["stats"][name]) for name, value in one["stats"].items()
    )


class TestChainsOverRanks:
    @pytest.mark.slow
    def test_every_rank_has_all_chains(self, runs):
        found = runs.pooled[0]
        assert found["theta"].shape == (4, 12, 2)
        assert found["info"]["ranks"] == 2 and found["info"]["seed"] == 5
        assert same(found, runs.pooled[1])
        starts = found["theta"][:, 0]
        assert len(starts.unique(dim=0)) == 4  # a stream a rank: none of the four chains is another's

    @pytest.mark.slow
    def test_all_ranks_have_the_same_tuning_at_every_step(self, runs):
        mine, others = (runs.pooled[rank]["tunings"] for rank in range(2))
        assert len(mine) == len(others) == 42
        for one, other in zip(mine, others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert not torch.equal(mine[0][0], mine[29][0])  # it was learned

    @pytest.mark.slow
    def test_the_tuning_is_learned_from_all_chains(self, runs):
        moments = runs.pooled[1]["tunings"][20][9:]
        assert float(moments[0]) == 4 * 16  # four chains, from iteration 5 to 20

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["chees", "slice"])
    def test_other_methods(self, runs, name):
        assert same(runs.pooled[0][name], runs.pooled[1][name])
        assert runs.pooled[0][name]["theta"].shape[0] == 4

    @pytest.mark.slow
    def test_the_same_seed_gives_the_same_draws_under_torchrun(self, runs, by_torchrun):
        assert same(runs.pooled[0], by_torchrun.repeated[0])
        assert same(runs.pooled[0], by_torchrun.repeated[1])

    def test_streams_differ(self):
        assert len({rank_seed(seed, rank) for seed in range(3) for rank in range(3)}) == 9

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_cannot_be_shared_is_refused_on_every_rank(self, runs, rank):
        chains, method, seed = runs.refused[rank]
        assert "Expected a multiple of 2" in chains
        assert "AMIS, which has no chains" in method
        assert "seed was '5', is '6'" in seed

    @pytest.mark.slow
    def test_a_rank_that_leaves_at_once_does_not_end_the_others(self, runs):
        assert runs.refused_at_once == {0: True, 1: True}

    def test_without_ranks(self):
        with pytest.raises(ValueError, match="Expected a program started by torchrun"):
            tg.distributed.sample(program.whole_model(), num_samples=2)


class TestInterruption:
    @pytest.mark.slow
    def test_all_ranks_stop_at_the_same_draw(self, runs):
        for rank in range(2):
            partial = runs.interrupted[rank]["partial"]
            assert partial["info"]["interrupted"]
            # Pressed on rank 1 at the fourth draw; the next meeting is at the eleventh.
            assert partial["theta"].shape == (4, 10, 2)
            assert any("10 draws a chain are kept" in message for message in runs.interrupted[rank]["warnings"])

    @pytest.mark.slow
    def test_the_rest_is_as_if_nothing_had_been(self, runs):
        assert same(runs.interrupted[0]["rest"], runs.pooled[0])

    @pytest.mark.slow
    def test_a_sharded_run_stops_on_rank_0(self, runs):
        assert runs.sharded_interrupted[0]["info"]["interrupted"]
        assert runs.sharded_interrupted[0]["theta"].shape == (2, 3, 2)
        assert runs.sharded_interrupted[1] == {"left": True}


class TestALostRank:
    sentence = "rank {} has lost another rank of 2, which ended or did not answer for 1800 seconds. Start all ranks again"

    @pytest.mark.slow
    def test_ends_the_others_with_a_sentence(self, runs):
        assert runs.codes == [0, 7, 7, 0]
        assert runs.killed[0].startswith(self.sentence.format(0))
        assert runs.leader_killed[1].startswith(self.sentence.format(1))

    @pytest.mark.slow
    def test_the_run_goes_on_from_checkpoints_at_different_draws(self, runs):
        """Rank 0 had drawn up to the meeting at draw 10, rank 1 died after five: it catches up."""
        assert same(runs.resumed[0], runs.pooled[0])

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
    def test_the_leaders_checkpoint_serves(self, runs, all_shards_here):
        """It goes on, to the bits of the whole run, in one process that sums the same shards."""
        checkpoint = tg.Checkpoint(runs.folder / "leader.ckpt", every=4)
        saved = torch.load(checkpoint.path, weights_only=True)
        assert saved["num_done"] == 32
        posterior = in_one_process(program.METHODS["nuts"], checkpoint)
        assert same(program.told(posterior), runs.sharded[0]["nuts"])


@pytest.fixture
def all_shards_here(monkeypatch):
    """A process that has all shards."""
    other = program.shard(1)

    def shards(self, request):
        return [self.shard(request, with_prior=True), other.shard(request, with_prior=False)]

    monkeypatch.setattr(tg.distributed.ShardedGP, "shards", shards)


def in_one_process(method, checkpoint=None):
    return tg.sample(program.shard(0), method, **program.SHARDED, checkpoint=checkpoint)


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
class TestShards:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["nuts", "metropolis"])
    def test_chains_are_those_of_one_process(self, runs, all_shards_here, name):
        assert same(program.told(in_one_process(program.METHODS[name])), runs.sharded[0][name])

    def test_the_sum_is_the_density_of_all_data(self, all_shards_here):
        model = program.shard(0)
        x, y = program.data()
        whole = tg.SparseGP(x, y, program.kernel(), tg.likelihoods.Bernoulli(), inducing_points=x[::3])
        position = torch.randn(3, 2 + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found, expected = (tg.joint_log_density(m).value_and_grad(position) for m in (model, whole))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(tg.joint_log_density(model)(position), expected[0], rtol=1e-10, atol=1e-10)

    @pytest.mark.slow
    def test_what_needs_all_data_at_once_is_refused(self, runs):
        assert len(runs.sharded[0]["refused"]) == 3
        assert runs.sharded[1] == {"left": True}

    def test_a_copy_is_not_at_work(self):
        with pytest.raises(ValueError, match=r"within: with model\.leading"):
            tg.joint_log_density(program.shard(0))(torch.zeros(1, 7, dtype=torch.float64))


@pytest.mark.slow
def test_the_documentations_programs_run_under_torchrun(by_torchrun):
    chains, shards = by_torchrun.documented[0]
    assert chains["theta"].shape == (8, 10, 2) and chains["info"]["ranks"] == 2
    assert shards["theta"].shape[1:] == (10, 2)
    others_chains, nothing = by_torchrun.documented[1]
    assert same(chains, others_chains) and nothing is None
    assert {"posterior.pt", "run.ckpt.rank0", "run.ckpt.rank1", "shards.ckpt"} <= {
        file.name for file in by_torchrun.folder.iterdir()
    }


def test_ctrl_c_is_acted_upon_afterwards():
    from torchgpmc.distributed.ranks import held_interrupt

    before = signal.getsignal(signal.SIGINT)
    with held_interrupt() as held:
        os.kill(os.getpid(), signal.SIGINT)
        assert held.seen
    assert signal.getsignal(signal.SIGINT) is before
