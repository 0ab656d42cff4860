"""Loggers that need more than their constructor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import MLFlowLogger

from runs.refusal import launched_rank


def mlflow(
    folder: str, run_dir: str, run_name: str | None = None, **arguments: Any
) -> MLFlowLogger:
    """MLflow at MLFLOW_TRACKING_URI, else in a database in `folder`; the rest is for MLFlowLogger.

    A run's name is that of its folder, as seen from `folder`: MLflow draws one from Python's
    generator, which is seeded, so that all runs, those of a sweep too, would have the same.

    Lightning writes on rank 0 alone but connects on all, and ranks that make the tables of a new
    database at the same time fail. So the others get an address that is never used.
    """
    if launched_rank() > 0:
        address = "http://localhost:9"
    elif not (address := os.environ.get("MLFLOW_TRACKING_URI", "")):
        address = f"sqlite:///{folder}/mlflow.db"
        arguments = {"artifact_location": f"file://{folder}/mlflow", **arguments}
        Path(folder).mkdir(parents=True, exist_ok=True)  # with run_dir= the run lies elsewhere
    name = run_name or os.path.relpath(run_dir, folder)
    return MLFlowLogger(tracking_uri=address, run_name=name, **arguments)
