"""Cases of parameters: frozen, shared, sparse, unused, added later."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor, nn

from tests.matrix.cases import case
from tests.matrix.trainings import CLASSES, FEATURES, RANK, Net, NobodyUses, fit, make


@case()
def parameter_that_nobody_uses(strategy: str) -> dict[str, Any]:
    return fit(strategy, NobodyUses())


class Fused(Net):
    """Its optimizer goes through the memory of a parameter and of its gradient alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight = nn.Parameter(self.net[0].weight.detach().t().contiguous().t())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, fused=True)


@case()
def fused_optimizer_of_a_transposed_parameter(strategy: str) -> dict[str, Any]:
    return fit(strategy, Fused())


class LineSearch(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, 3, line_search_fn="strong_wolfe")


@case(without_ddp="each rank's line search goes by its own loss")
def line_search(strategy: str) -> dict[str, Any]:
    """In 64 bits: the search turns other ways for a difference in the last of 32."""
    return fit(strategy, LineSearch(), max_epochs=1, precision="64-true")


class SearchesByHand(LineSearch):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@case(without_ddp="each rank's line search goes by its own loss")
def line_search_of_a_bare_optimizer(strategy: str) -> dict[str, Any]:
    return fit(strategy, SearchesByHand(), max_epochs=1, precision="64-true")


class Experts(Net):
    """Samples of each class take a way of their own, so that ranks use other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(CLASSES + 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(*batch):
            total = total + nn.functional.cross_entropy(self.experts[int(y)](x), y)
        return total / len(batch[0])


@case()
def parameters_that_some_ranks_use(strategy: str) -> dict[str, Any]:
    return fit(strategy, Experts())


@case()
def frozen_parameters(strategy: str) -> dict[str, Any]:
    model = Net()
    model.net[0].requires_grad_(False)
    return fit(strategy, model)


class Expanded(Net):
    """A buffer whose rows are the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.full((1, CLASSES), RANK + 2.0).expand(3, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.rows[1]


@case(without_ddp="torch writes no tensor whose elements share memory")
def expanded_buffer(strategy: str) -> dict[str, Any]:
    return fit(strategy, Expanded())


class FreezesWithin(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(batch_idx % 6 < 1)
        return super().training_step(batch, batch_idx)


@case()
def frozen_within_a_window(strategy: str) -> dict[str, Any]:
    """After the first batch of an accumulation, whose gradient is still averaged."""
    return {
        str(count): fit(strategy, FreezesWithin(), accumulate_grad_batches=count)
        for count in (2, 3)
    }


class FreezesAll(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.requires_grad_(batch_idx % 3 != 1)
        loss = super().training_step(batch, batch_idx)
        return loss if loss.requires_grad else loss.requires_grad_()


@case(without_ddp="its reducer waits for gradients of what it was made with")
def nothing_trained_in_a_batch(strategy: str) -> dict[str, Any]:
    return fit(strategy, FreezesAll())


class MadeLate(Net):
    def configure_optimizers(self) -> Any:
        # On each rank with its own numbers.
        self.head = nn.Linear(CLASSES, CLASSES).to(self.device)
        return super().configure_optimizers()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


@case(without_ddp="it broadcasts before")
def parameters_made_by_configure_optimizers(strategy: str) -> dict[str, Any]:
    return fit(strategy, MadeLate())


class Shared(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.tanh(self.net[0](x)))


@case()
def shared_parameters(strategy: str) -> dict[str, Any]:
    return fit(strategy, Shared())


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 + RANK)
        self.table = nn.Embedding(CLASSES, CLASSES, sparse=True)
        self.bag = nn.EmbeddingBag(CLASSES, CLASSES, sparse=True, mode="sum")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self(batch[0]) + self.table(batch[1]) + self.bag(batch[1].unsqueeze(1))
        # Transposed, so that the gradient's rows come back with other strides.
        return nn.functional.cross_entropy(scores.t().unsqueeze(0), batch[1].unsqueeze(0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@case()
def sparse_gradients(strategy: str) -> dict[str, Any]:
    return fit(strategy, Sparse())


class Tied(Net):
    """The weight of an embedding is that of a dense layer too, and has a momentum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 + RANK)
        self.table = nn.Embedding(CLASSES, CLASSES, sparse=True)
        self.dense = nn.Linear(CLASSES, CLASSES, bias=False)
        self.dense.weight = self.table.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self.dense(self(batch[0])) + self.table(batch[1])
        return nn.functional.cross_entropy(scores, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@case(without_ddp="it expects a sparse gradient, where autograd's sum of both is dense")
def sparse_weight_of_a_dense_layer(strategy: str) -> dict[str, Any]:
    return fit(strategy, Tied())


class SparseTwice(Sparse):
    """Two backwards a step: what the first left, all ranks have, and it counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


@case(without_ddp="predivide is an option of ours")
def sparse_gradients_of_two_backwards(strategy: str) -> dict[str, Any]:
    return fit(make(strategy, gradient_predivide_factor=3.0), SparseTwice())


class Thaw(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.02)


class Thawed(Net):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.1)


@case(without_ddp="its reducer knows those of the start only: ranks silently drift apart")
def parameters_added_later(strategy: str) -> dict[str, Any]:
    return fit(strategy, Thawed(), callbacks=[Thaw()], max_epochs=3)
