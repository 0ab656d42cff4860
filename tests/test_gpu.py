"""The engine on GPUs: `make test-gpu`, on a host with at least one.

A single rank sends its gradients through buckets and Horovod too. Where there are several GPUs, as
many ranks are launched as well; on a single one two, which share it and pass for hosts of their
own, so that NCCL sends what it has over sockets. `make test-slow` runs the same on a CPU, which
keeps these tests true where there is no GPU.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

from runs.anatomy import Anatomy
from strategies.batchnorm import SyncLayers
from strategies.buckets import GradientBuckets
from strategies.collectives import DTYPES, World
from strategies.environment import IN_STREAM, initialize
from strategies.reductions import add
from tests.conftest import AS_HOSTS, ranks_share_a_gpu, run
from tests.matrix import trainings
from tests.matrix.cases import CASES, TOLERANCES, run_cases
from tests.matrix.trainings import Net, loader, trainer
from tests.test_matrix import assert_same

GPUS = torch.cuda.device_count()  # none where tests/conftest.py hides them
SHARED = ranks_share_a_gpu()
MOST = 4 if GPUS >= 4 else 2  # ranks: of the global batch of 8 each has as much
LAUNCHES = [
    pytest.param("cpu", 1, marks=pytest.mark.slow),
    pytest.param("cuda", 1, marks=pytest.mark.gpu),
    *([pytest.param("cuda", MOST, marks=pytest.mark.gpu)] if GPUS > 1 or SHARED else []),
]
NOT_ALONE = {"adasum_of_equal_gradients"}  # it has nothing to send
IN_STEPS = {name for name in CASES if name.startswith(("compression", "adasum"))}
LEAST = {"cpu": 0.0, "cuda": 1e-5}  # tolerances: a GPU adds up in an order of its own

pytestmark = pytest.mark.parametrize("device, ranks", LAUNCHES)


@pytest.fixture(autouse=True)
def there_is_one(device: str) -> None:
    if device == "cuda" and not GPUS:
        pytest.exit("no GPU can be used here (nvidia-smi lists those that there are)", 2)


@pytest.fixture(scope="module")
def results(
    launch_anew: Callable, request: pytest.FixtureRequest
) -> Callable[[str, str, int], list[dict[str, Any]]]:
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {call.params.get("case") for call in selected if call}
    cache: dict[tuple[str, str, int], list[dict[str, Any]]] = {}

    def results(strategy: str, device: str, ranks: int) -> list[dict[str, Any]]:
        key = (strategy, device, ranks)
        if key not in cache:
            cache[key] = []  # a launch that fails is not repeated for each case
            names = [name for name in CASES if name in asked]
            names = [name for name in names if ranks > 1 or name not in NOT_ALONE]
            kwargs = {"strategy": strategy, "device": device, "buckets_alone": True}
            parts = []
            for in_steps in (False, True):
                part = [name for name in names if (name in IN_STEPS) == in_steps]
                with pytest.MonkeyPatch.context() as patch:
                    if in_steps:  # as HorovodStrategy has it, made first for one of these
                        patch.setenv(IN_STREAM, "0")
                    parts.append(launch_anew(run_cases, ranks, names=part, **kwargs))
            cache[key] = [one | other for one, other in zip(*parts)]
        if not cache[key]:
            pytest.fail(f"the launch of {strategy} on {ranks} ranks has failed, see above")
        return cache[key]

    return results


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_one_process(
    results: Callable, case: str, device: str, ranks: int
) -> None:
    if ranks == 1 and case in NOT_ALONE:
        return
    (one,) = results("single", device, 1)
    assert not isinstance(one[case], str), one[case]
    tolerance = max(TOLERANCES[case], LEAST[device])
    for rank in results("horovod", device, ranks):
        assert (rank["strategy"], rank["size"]) == ("HorovodStrategy", ranks)
        assert not isinstance(rank[case], str), rank[case]
        assert_same(rank[case], one[case], tolerance, case)


def on(device: str) -> tuple[World, torch.device]:
    world = initialize()
    if device != "cuda":
        return world, torch.device("cpu")
    assert hvd.nccl_built(), "this Horovod has no NCCL"
    place = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(place)
    return world, place


def same(tensor: Tensor, expected: Tensor) -> bool:
    """By their bytes: not all dtypes can be compared."""
    alike = (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    return alike and torch.equal(tensor.cpu().view(torch.uint8), expected.view(torch.uint8))


def collect(device: str) -> list[str]:
    """What went wrong with tensors of each dtype, moved between ranks by each collective."""
    world, place = on(device)
    failures = []
    for dtype in DTYPES:
        tensors = [
            (torch.arange(6).reshape(2, 3) % 2 + rank).to(dtype) for rank in range(world.size)
        ]
        mine = tensors[world.rank].to(place)
        gathered = world.gather(mine)
        if not all(same(x, y) for x, y in zip(gathered, tensors, strict=True)):
            failures.append(f"gather {dtype}")
        sent = mine.clone()
        world.broadcast([sent], root=world.size - 1)
        if sent.device != place or not same(sent, tensors[-1]):
            failures.append(f"broadcast {dtype}")
        if dtype.is_complex:
            continue
        stacked = torch.stack(tensors).double()
        for operation, expected in {
            "sum": stacked.sum(0), "mean": stacked.mean(0), "product": stacked.prod(0),
            "min": stacked.amin(0), "max": stacked.amax(0),
        }.items():  # fmt: skip
            reduced = world.reduce(mine, operation)
            if dtype is torch.bool and operation in ("sum", "mean", "product"):
                continue  # 1 + 1 is no bool
            if reduced.device != place or not torch.equal(reduced.double().cpu(), expected):
                failures.append(f"{operation} {dtype}")
    return failures


def test_every_dtype_travels(launch: Callable, device: str, ranks: int) -> None:
    assert launch(collect, ranks, device=device) == [[]] * ranks


def go_backward(device: str) -> list[float]:
    """The gradient of each step, which may be queued, and not wait for what is queued."""
    world, place = on(device)
    model = nn.Linear(1, 1).to(place)
    buckets = GradientBuckets(model, world, add, 1, before=1 / world.size, after=1)
    gradients = []
    for step in range(3):
        loss = model(torch.full((1, 1), float(world.rank + step), device=place)).sum()
        model.zero_grad()
        if device == "cuda":
            torch.cuda._sleep(10**9 * (step > 0))  # half a second; what loads at first, waits
            awake = torch.cuda.Event()
            awake.record()
            torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            buckets.prepare()
            buckets.start(last_batch=step == 2)
            loss.backward()
            agreed = buckets.finish()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        if device == "cuda" and step:
            assert not awake.query(), "the GPU was waited for"
        assert model.weight.grad is not None
        gradients.append(float(model.weight.grad))
        assert agreed()
    return gradients


def test_a_step_is_queued_without_a_wait_for_the_gpu(
    launch: Callable, device: str, ranks: int
) -> None:
    """Else the program hands it nothing more meanwhile, and it has nothing to do afterwards."""
    mean = (ranks - 1) / 2
    assert launch(go_backward, ranks, device=device) == [[mean, mean + 1, mean + 2]] * ranks


class Busy(Net):
    """Gives a GPU so many cycles of work before what the others do."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles = cycles

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.device.type == "cuda":
            torch.cuda._sleep(self.cycles)
        return super().training_step(batch, batch_idx)


def keep_up(device: str) -> list[tuple[float | None, str]]:
    trainings.DEVICE = device
    told = []
    for cycles in (0, 10**8):
        timed = Anatomy(warmup=2)
        trainer("horovod", callbacks=[timed]).fit(Busy(cycles), loader())
        assert timed.found is not None
        told.append((timed.found["gpu_keeps_up"], timed.found["verdict"].partition(":")[0]))
    return told


def test_a_gpu_that_waits_for_the_program_is_told_from_one_that_works(
    launch: Callable, device: str, ranks: int
) -> None:
    if SHARED and ranks > 1:
        pytest.skip("where ranks share a GPU, each waits for the other")
    for idle, busy in launch(keep_up, ranks, device=device):
        if device == "cpu":
            assert idle[0] is None and busy[0] is None
        else:
            assert idle[0] >= 0.9 and idle[1] == "launches"
            assert busy[0] <= 0.1 and busy[1] != "launches"


def normalize(device: str, half: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Ours, on this rank's half or all of a batch, beside torch's on the whole."""
    world, place = on(device)
    torch.manual_seed(0)
    whole = torch.randn(4 * world.size, 3, 5, 5, device=place)
    layers: list[nn.Module] = [nn.BatchNorm2d(3).to(place)]
    layers.append(SyncLayers(world).apply(nn.BatchNorm2d(3).to(place)))
    outputs: list[dict[str, Tensor]] = []
    for layer, rows in zip(layers, (slice(None), slice(world.rank, None, world.size))):
        x = whole[rows].clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=half):
            y = layer(x.bfloat16() if half else x)
            assert y.dtype == (torch.bfloat16 if half else torch.float32)
            y.float().pow(3).sum().backward()
        assert x.grad is not None
        mine = slice(world.rank, None, world.size) if layer is layers[0] else slice(None)
        outputs.append(
            {"y": y[mine].float(), "gradient": x.grad[mine], **dict(layer.named_buffers())}
        )
    return {
        key: (outputs[1][key].detach().cpu(), outputs[0][key].detach().cpu()) for key in outputs[0]
    }


@pytest.mark.parametrize("half", [False, True])
def test_batches_are_normalized_as_by_torch(
    launch: Callable, half: bool, device: str, ranks: int
) -> None:
    for rank in launch(normalize, ranks, device=device, half=half):
        for key, (ours, torchs) in rank.items():
            assert_same(ours, torchs, 0.05 if half else 1e-5, key)


def launcher(ranks: int) -> list[str]:
    """Under ours, that imports once a host; not where each rank passes for a host."""
    ours = [sys.executable, "-m", "cluster.horovodrun", "-np", str(ranks)]
    return [*ours, "-H", f"localhost:{ranks}", *(AS_HOSTS if SHARED and ranks > 1 else [])]


def test_a_job_is_trained_and_explained(device: str, ranks: int, tmp_path: Path) -> None:
    """CUDA must survive the fork of a rank that has imported all; then a CPU tests it."""
    kind = {"cuda": "gpu"}.get(device, device)
    job = [sys.executable, "template.py", "profiler=trace", "trainer.max_epochs=8"]
    job += [f"trainer.accelerator={kind}", f"log_dir={tmp_path / device}"]
    done = run([*launcher(ranks), *job])
    assert done.returncode == 0, done.stdout
    (folder,) = tmp_path.glob(f"{device}/*/runs/*")
    trained = json.loads((folder / "summary.json").read_text())
    assert (trained["world_size"], trained["strategy"]) == (ranks, "horovod")
    assert trained["metrics"]["test/acc"] > 0.9
    anatomy = trained["anatomy"]
    assert anatomy["verdict"] and len(anatomy["ranks"]) == ranks
    assert sum(anatomy["shares"].values()) == pytest.approx(1, abs=1e-3)
    with gzip.open(folder / "trace" / f"rank-{ranks - 1}.json.gz") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert ("kernel" in kinds) == (device == "cuda")

    resume = ["trainer.accelerator=cpu", "train=false", f"ckpt_path={trained['checkpoint']}"]
    log = tmp_path / "again"
    done = run([sys.executable, "template.py", *resume, f"log_dir={log}"])
    assert done.returncode == 0, done.stdout
    (again,) = (json.loads(file.read_text()) for file in log.glob("*/runs/*/summary.json"))
    assert again["metrics"]["test/acc"] == pytest.approx(trained["metrics"]["test/acc"], abs=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "horovod"])
def test_each_sample_has_its_prediction(
    strategy: str, device: str, ranks: int, tmp_path: Path
) -> None:
    """On the CPU in the file, whatever it was made on; DDP is over NCCL on GPUs."""
    kind = {"cuda": "gpu"}.get(device, device)
    job = [sys.executable, "template.py", f"strategy={strategy}", "trainer.max_epochs=1"]
    job += ["predict=true", f"trainer.accelerator={kind}", f"log_dir={tmp_path}"]
    done = run([*launcher(ranks), *job])
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("*/runs/*/summary.json")
    summary = json.loads(file.read_text())
    assert (summary["world_size"], summary["strategy"]) == (ranks, strategy)
    predictions = torch.load(summary["predictions"])
    assert len(predictions) == 360 and predictions.device.type == "cpu"


def test_a_step_is_timed(device: str, ranks: int, tmp_path: Path) -> None:
    if SHARED and ranks > 1:
        pytest.skip("where ranks share a GPU, their times say nothing")
    names = ["no communication", "Lightning DDP", "Lightning + HorovodStrategy"]
    model = "resnet50" if device == "cuda" else "mlp"
    done = run(
        [sys.executable, "-m", "benchmarks.step", "--hosts", f"localhost:{ranks}",
         "--device", device, "--models", model, "--batch", "2", "--repeats", "1",
         "--block-seconds", "0.2", "--out", str(tmp_path), "--variants", *names],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob(f"step_{model}_batch-2_*.json")
    measured = json.loads(file.read_text())["models"][model]
    came, sizes = zip(*measured["arrivals"])
    assert 0 < came[0] < came[-1] < 1 and list(came) == sorted(came)
    assert sum(sizes) == measured["gradient_bytes"]
    variants = measured["variants"]
    assert all(variant["block_medians_ms"][0] > 0 for variant in variants.values())
    assert set(names) <= variants.keys()
