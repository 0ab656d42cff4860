"""Two curves beside a training's own metrics: the learning rate and the norm of the gradient."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.optim import Optimizer


class Curves(Callback):
    """Logs `lr` and `grad_norm` every trainer.log_every_n_steps.

    The norm is that of all gradients of an optimizer, averaged over the ranks, before clipping (and
    with precision=16-mixed as the scaler left it). A second optimizer has `lr_1`, `grad_norm_1`.
    Steps are counted as Lightning counts those of metrics: one a batch, whatever steps in it.
    """

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if not trainer.loggers or not every or (step + 1) % every:
            return
        if not optimizer.param_groups:  # Lightning's stand-in, where a module has none
            return
        index = trainer.optimizers.index(optimizer)
        suffix = f"_{index}" if index else ""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        metrics: dict[str, float] = {}
        rates = [group.get("lr") for group in optimizer.param_groups]
        for number, rate in enumerate(rates):
            if rate is not None and (number == 0 or rate != rates[0]):
                metrics[f"lr{suffix}" + (f"_group_{number}" if number else "")] = rate
        if not any(gradient.is_sparse for gradient in gradients):
            metrics[f"grad_norm{suffix}"] = float(torch.nn.utils.get_total_norm(gradients))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
