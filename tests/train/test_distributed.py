import multiprocessing
import os
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from PIL import Image

from wbmm.data import loader
from wbmm.data.augment import SampleDataset
from wbmm.train import dist
from wbmm.train.build import build_model
from wbmm.train.config import config_from_dict, load_config
from wbmm.train.dist import World, is_peer_failure, setup
from wbmm.train.fit import fit

# What two processes and one can have in common: batch norm sees each process's share alone, so it must not look.
COMPARABLE = {
    "model": {"drop_path": 0.0, "bn_eval": True},
    "augment": {"reprob": 0.0, "hflip": 0.0, "scale": [1.0, 1.0], "ratio": [1.0, 1.0]},
    "mix": {"mixup": 0.0, "cutmix": 0.0},
    "schedule": {"epochs": 2},
}


def out_of(config):
    return config.parent / "out"


@pytest.fixture(scope="module")
def one_process(make_config):
    config = make_config(**COMPARABLE)
    fit(load_config(config))
    return config


def nodes(count: int, port: int) -> list[list[str]]:
    """torchrun's arguments: one agent with two workers, or two agents with one worker each."""
    if count == 1:
        return [["--standalone", "--nproc_per_node=2"]]
    rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test"]
    return [["--nnodes=2", "--nproc_per_node=1", "--local_addr=127.0.0.1", *rendezvous]] * 2


@pytest.mark.parametrize(
    "count", [pytest.param(1, id="one node", marks=pytest.mark.heavy), pytest.param(2, id="two nodes")]
)
def test_two_processes_give_the_losses_of_one(count, one_process, make_config, start, metrics, free_port):
    config = make_config(**COMPARABLE)
    agents = [start(config, torchrun=arguments) for arguments in nodes(count, free_port())]
    for agent in agents:
        assert agent.wait() == 0, agent.text()
    for kind, names in (("train", ("loss", "lr")), ("eval", ("loss", "top1", "ema_top1"))):
        got, expected = metrics(out_of(config), kind), metrics(out_of(one_process), kind)
        assert len(got) == len(expected) > 0
        for name in names:
            assert [r[name] for r in got] == pytest.approx([r[name] for r in expected], rel=2e-4), name


@pytest.mark.heavy
def test_a_stuck_rank_ends_the_run_with_the_reason(make_config, start, wait_for_step, free_port):
    config = make_config(schedule={"epochs": 1000}, timeout=5)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    first, second = (start(config, env={**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1))
    wait_for_step(first, out_of(config), 3)
    os.kill(second.popen.pid, signal.SIGSTOP)
    assert first.wait() != 0
    assert "rank 0: another process is gone or stuck" in first.text()


@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.heavy), "SIGINT"])
def test_a_signal_to_the_launcher_saves_on_all_ranks_and_stops(name, make_config, start, wait_for_step):
    data = {"in_memory": False, "workers": 1}  # the launcher signals the data workers as well
    config = make_config(schedule={"epochs": 1000}, save={"every_steps": 0}, data=data)
    agent = start(config, torchrun=["--standalone", "--nproc_per_node=2"])
    wait_for_step(agent, out_of(config), 3)
    agent.popen.send_signal(signal.Signals[name])
    agent.wait()
    assert (out_of(config) / "interrupted.json").exists(), agent.text()
    assert f"{name}: saved at step" in agent.text()
    assert agent.text().count("Ctrl-C: saving after this step") == (name == "SIGINT"), "of the first process alone"
    state = torch.load(out_of(config) / "last.pt", weights_only=True)
    assert state["position"]["step"] >= 3


@pytest.mark.heavy
def test_a_second_ctrl_c_to_the_launcher_stops_at_once(make_config, start, wait_for_step):
    """The launcher passes it on as SIGTERM. The ranks are held, so that they cannot save in between."""
    config = make_config(schedule={"epochs": 1000}, save={"every_steps": 0})
    agent = start(config, torchrun=["--standalone", "--nproc_per_node=2"])
    wait_for_step(agent, out_of(config), 3)
    ranks = agent.children()
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    agent.popen.send_signal(signal.SIGINT)
    time.sleep(2)
    os.kill(ranks[0], signal.SIGCONT)
    time.sleep(2)
    agent.popen.send_signal(signal.SIGINT)
    time.sleep(2)
    os.kill(ranks[1], signal.SIGCONT)
    assert agent.wait() != 0
    assert not (out_of(config) / "interrupted.json").exists()


class Sleeper:
    """A source on a dead file system."""

    labels = np.zeros(8, dtype=np.int64)

    def __len__(self):
        return 8

    def image(self, index):
        time.sleep(1000)


def test_a_data_worker_that_hangs_is_no_lost_process_and_can_be_ended(monkeypatch):
    monkeypatch.setattr(loader, "WORKER_TIMEOUT_S", 0.1)
    fetch = loader.WorkerFetch(SampleDataset(Sleeper(), None, 3, 0, skip_bad=False), workers=1)
    with pytest.raises(RuntimeError, match="timed out") as caught:
        next(fetch(0, [np.arange(1)]))
    assert not is_peer_failure(caught.value)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


class Pictures(Sleeper):
    def image(self, index):
        return Image.new("RGB", (8, 8))


def test_signals_at_the_start_of_a_data_worker_do_not_end_it(monkeypatch):
    def signalled(worker):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        detach_worker(worker)

    detach_worker = loader.detach_worker
    monkeypatch.setattr(loader, "detach_worker", signalled)
    dataset = SampleDataset(Pictures(), lambda image: torch.zeros(3), 3, 0, skip_bad=False)
    images, _ = next(loader.WorkerFetch(dataset, workers=1)(0, [np.arange(2)]))
    assert len(images) == 2


@pytest.mark.parametrize(
    ("device", "processes", "shared"), [("cuda:0", 2, True), ("cuda:0", 1, False), ("cuda", 2, False)]
)
def test_one_gpu_for_all_processes_of_a_node_is_refused(monkeypatch, device, processes, shared):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="all 2 processes of this node on one GPU" if shared else "finds no CUDA"):
        setup(device)


def test_a_process_that_does_not_come_is_a_lost_one(free_port):
    with pytest.raises(RuntimeError) as caught:
        torch.distributed.TCPStore("127.0.0.1", free_port(), 2, is_master=True, timeout=timedelta(seconds=0.5))
    assert is_peer_failure(caught.value)


@pytest.mark.parametrize(("given", "wanted"), [(None, "2"), ("1", "2"), ("0", "0"), ("3", "3")])
def test_nccl_raises_unless_the_user_wants_otherwise(monkeypatch, given, wanted):
    """torchrun gives 1 by itself. The group is not made here: the variable is read when it is."""
    seen = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(dist.NCCL_ERRORS, given) if given else monkeypatch.delenv(dist.NCCL_ERRORS, raising=False)
    monkeypatch.setattr(dist.td, "init_process_group", lambda *_, **__: seen.append(os.environ[dist.NCCL_ERRORS]))
    setup("cpu")
    assert seen == [wanted]
    os.environ.pop(dist.NCCL_ERRORS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711", True),
        ("Timed out waiting 5000ms for recv operation to complete", True),
        ("NCCL communicator was aborted on rank 1", True),
        ("nccl gave up: a sum over 8 processes holds 7", True),
        ("DataLoader timed out after 300 seconds", False),
        ("DataLoader worker (pid 4711) is killed by signal: Broken pipe", False),
        ("Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: connection reset", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_who_is_to_blame(text, expected):
    assert is_peer_failure(RuntimeError(text)) == expected
    assert not is_peer_failure(ValueError(text))


def test_sync_bn_on_cpus_is_refused_for_several_processes_and_needless_for_one():
    config = config_from_dict({"model": {"name": "test_resnet", "sync_bn": True}})
    with pytest.raises(ValueError, match=r"model\.sync_bn needs CUDA: .* set it to false"):
        build_model(config, 5, World(0, 2, torch.device("cpu")))
    model = build_model(config, 5, World(0, 1, torch.device("cpu")))
    assert not any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
