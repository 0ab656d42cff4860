"""Batches wait for no empty hooks.

Lightning calls all hooks of all callbacks, with a record for its profiler around each, even those
that a callback only inherits and that do nothing: in a step most hooks of a dozen callbacks.
"""

from __future__ import annotations

import pytorch_lightning as pl

OF_A_BATCH = [name for name in vars(pl.Callback) if "_batch_" in name] + [
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
]  # fmt: skip


class LeavesOutEmptyHooks(pl.Callback):
    """Makes the hooks of a batch None where a callback has no code for them: Lightning takes what
    can be called (`_call_callback_hooks` in its trainer/call.py)."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for name in OF_A_BATCH:
                inherited = getattr(getattr(callback, name), "__func__", None)
                if inherited is getattr(pl.Callback, name):
                    setattr(callback, name, None)

    on_test_start = on_predict_start = on_fit_start
