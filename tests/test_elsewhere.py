"""strategies/ copied alone into another project, which calls Lightning by either of its names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, horovodrun, run

TRAIN = """
import json
import sys
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import strategies


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.network(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", batch[0].mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


batch = int(sys.argv[1])
torch.manual_seed(0)
model, samples = Model(), torch.randn(24, 4)
trainer = Trainer(
    strategy="horovod", accelerator="cpu", max_epochs=2, sync_batchnorm=True, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
loaders = [DataLoader(TensorDataset(share), batch) for share in (samples, samples[:23])]
trainer.fit(model, *loaders)
answer = {
    "strategy": f"{type(trainer.strategy).__module__} from {strategies.__path__[0]}",
    "ranks": trainer.world_size,
    "mean": float(trainer.callback_metrics["val/mean"]),
    "weights": torch.cat([value.detach().flatten() for value in model.parameters()]).tolist(),
}
Path(f"{trainer.global_rank} of {trainer.world_size}.json").write_text(json.dumps(answer))
"""


def trained(command: list[str], folder: Path, *files: str) -> list[dict[str, Any]]:
    done = run(command, cwd=folder, PYTHONPATH=str(folder), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / file).read_text()) for file in files]


@pytest.mark.parametrize(
    "name", [pytest.param("pytorch_lightning", marks=pytest.mark.slow), "lightning"]
)
def test_trains_in_another_project(name: str, tmp_path: Path) -> None:
    own, source = name == "lightning", TRAIN
    if not own:  # within a package of theirs
        source = TRAIN.replace("import strategies", "from theirs import strategies")
    place = tmp_path / "strategies" if own else tmp_path / "theirs" / "strategies"
    shutil.copytree(ROOT / "strategies", place)
    (tmp_path / "train.py").write_text(source)
    if own:  # as the documentation says to
        text = (ROOT / "docs" / "strategy.md").read_text()
        (command,) = re.findall(r"^sed -i .*$", text, re.M)
        subprocess.run(f"{command} train.py", shell=True, cwd=tmp_path, check=True)
        sources = [file.read_text() for file in tmp_path.rglob("*.py")]
        assert not re.search(r"pytorch_lightning|lightning_fabric", "".join(sources))
    python = [sys.executable, "train.py"]
    ranks = trained(horovodrun(2, *python, "4"), tmp_path, "0 of 2.json", "1 of 2.json")
    (alone,) = trained([*python, "8"], tmp_path, "0 of 1.json")
    for rank in ranks:
        package = "strategies" if own else "theirs.strategies"
        assert rank["strategy"] == f"{package}.horovod from {place}"
        assert rank["ranks"] == 2
        assert rank["mean"] == pytest.approx(alone["mean"], rel=1e-6)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-6)
