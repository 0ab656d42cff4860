"""Jobs train to what the header of their experiment promises: `make test-slow`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import horovodrun, run

# Metric, and the bounds that it must be in. The header of each file says what was seen. That of
# denoiser is in the README, and so test_readme.py trains it.
EXPECTED = {
    "dcgan": {"val/loss": (0.0, 20.0)},
    "gpt_tiny": {"val/loss": (1.6, 1.85)},  # byte frequencies alone: 3.09
    "model_parallel": {"test/acc": (0.975, 1.0)},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("experiment", EXPECTED)
def test_an_experiment_reaches_its_result(experiment: str, tmp_path: Path) -> None:
    command = [sys.executable, "template.py", f"experiment={experiment}", f"log_dir={tmp_path}"]
    done = run(horovodrun(2, *command), timeout=850)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("*/runs/*/summary.json")
    summary = json.loads(file.read_text())
    assert summary["world_size"] == 2
    for metric, (least, most) in EXPECTED[experiment].items():
        assert least <= summary["metrics"][metric] <= most, (metric, summary["metrics"])
