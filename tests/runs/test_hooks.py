"""Lightning calls those hooks of a batch that callbacks have, and no empty ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.profilers import Profiler
from torch import Tensor
from torch.utils.data import DataLoader

from runs.hooks import LeavesOutEmptyHooks
from tests.runs.trainings import IsValidated, quiet_trainer


class Called(Profiler):
    """Hooks of callbacks, by name: what Lightning tells its profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def start(self, action_name: str) -> None:
        if action_name.startswith("[Callback]"):
            name, hook = action_name.removeprefix("[Callback]").split(".")
            if "batch" in hook or "fore" in hook or "after" in hook:
                self.names.add(f"{name.partition('{')[0]}.{hook}")

    def stop(self, action_name: str) -> None:
        pass


class Idle(Callback):
    pass


class Begins(Callback):
    def __init__(self) -> None:
        self.begun: list[Any] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun.append("train")

    def on_test_batch_start(self, *_: Any) -> None:
        self.begun.append("test")


class BeginsToo(Begins):
    """Has what it inherits from another callback."""

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        super().on_before_zero_grad(trainer, module, optimizer)  # which does nothing
        self.begun.append("zero_grad")


class WithTest(IsValidated):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("left_out", [True, False])
def test_only_hooks_with_code_are_called(left_out: bool) -> None:
    called, given, own, own_too = Called(), list[str](), Begins(), BeginsToo()
    lambdas = LambdaCallback(on_before_backward=lambda *_: given.append("backward"))
    callbacks = [Idle(), own, own_too, lambdas, *([LeavesOutEmptyHooks()] if left_out else [])]
    trainer = quiet_trainer(*callbacks, max_epochs=1, num_sanity_val_steps=1, profiler=called)
    one: Any = DataLoader(torch.ones(1))
    for _ in range(2):
        trainer.fit(WithTest(), one, one)
        trainer.fit_loop.epoch_progress.reset()
    trainer.test(WithTest(), one, verbose=False)
    with_code = {
        "Begins.on_train_batch_start", "Begins.on_test_batch_start",
        "BeginsToo.on_train_batch_start", "BeginsToo.on_test_batch_start",
        "BeginsToo.on_before_zero_grad", "LambdaCallback.on_before_backward",
    }  # fmt: skip
    if left_out:
        assert called.names == with_code
    else:
        assert called.names > with_code and "Idle.on_validation_batch_end" in called.names
    assert own.begun == ["train", "train", "test"] and given == ["backward"] * 2
    assert own_too.begun == ["train", "zero_grad"] * 2 + ["test"]
