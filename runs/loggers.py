"""Loggers that need more than their constructor."""

from __future__ import annotations

import os
from typing import Any

from pytorch_lightning.loggers import MLFlowLogger

from runs.refusal import launched_rank


def mlflow(folder: str, **arguments: Any) -> MLFlowLogger:
    """MLflow at MLFLOW_TRACKING_URI, else in a database in `folder`; the rest is for MLFlowLogger.

    Lightning writes on rank 0 alone but connects on all, and ranks that make the tables of a new
    database at the same time fail. So the others get an address that is never used.
    """
    address = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not address:
        address = f"sqlite:///{folder}/mlflow.db"
        arguments = {"artifact_location": f"file://{folder}/mlflow", **arguments}
    if launched_rank() > 0:
        address = "http://localhost:9"
    return MLFlowLogger(tracking_uri=address, **arguments)
