"""predictions.csv of what is no single number for a sample; test_runs.py has the rest of it."""

from __future__ import annotations

from pathlib import Path

from pytorch_lightning import LightningModule
from torch import Tensor

from tests.test_runs import OfFiles, predict


class Logits(LightningModule):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.unsqueeze(1).expand(-1, 2)


def test_several_numbers_for_a_sample_are_left_to_the_other_file(tmp_path: Path) -> None:
    assert predict(Logits(), OfFiles(), tmp_path).names_files
    rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert rows[:4] == ["file", "9.png", "0.png", "1.png"] and len(rows) == 8
