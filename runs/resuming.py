"""Callbacks of Lightning that a resumed run, which has a folder and settings of its own, needs; and
what averaged weights need to be tested.

Names of the former are Lightning's: checkpoints keep their state by name, so a Trainer without this
package takes it as well, and the other way round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_warn


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """Knows what was best before the resume. Lightning's forgets it where the folder is another,
    and takes the best of the epochs since then, which may be worse."""

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            return
        gone = [file for file in state.get("best_k_models", ()) if not Path(file).is_file()]
        if gone := trainer.strategy.broadcast(gone):
            del checkpoint["callbacks"][self.state_key]
            if self.monitor:
                rank_zero_warn(
                    f"the best of before is gone ({gone[0]}): best is now that of the epochs "
                    "from here on"
                )
        else:
            state["dirpath"] = self.dirpath


class EarlyStopping(callbacks.EarlyStopping):
    """Has the patience that it is given now; Lightning's takes that of the checkpoint. And it says
    so where there is no validation that it could stop after."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._check_on_train_epoch_end and not trainer.enable_validation:
            rank_zero_warn(
                f"nothing is validated, so {self.monitor} stops nothing: ~callbacks.early_stopping "
                "leaves it out"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})


class EvaluatesAverages(callbacks.Callback):
    """Behind Lightning's WeightAveraging (EMA): a checkpoint's averages are tested and predict also
    after training. There Lightning's puts the weights that training would go on from."""

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if "current_model_state" in checkpoint and trainer.state.fn != TrainerFn.FITTING:
            strict = pl_module.strict_loading
            trainer.strategy.load_model_state_dict(checkpoint, strict=strict)
