"""Optimizers step with the gradients of all ranks, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, Optimizer

from .buckets import GradientBuckets
from .refusals import refuse_strangers


class GuardedSteps:
    """Refuses steps with gradients or parameters that this rank alone has: weights would differ
    between ranks from then on.

    Args:
        optimizers: whose steps are checked.
        buckets: that combine their gradients.
        combine: turns a loss into the mean, or sum, of all ranks' losses.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], buckets: GradientBuckets, combine: Callable
    ) -> None:
        self._buckets = buckets
        self._combine = combine
        self._groups: dict[int, int] = {}  # an optimizer's id: how many it had at the last check
        # Optimizers of self.optimizers(use_pl_optimizer=False) step without the strategy knowing.
        # Classes that wrap another optimizer often leave out Optimizer.__init__, and have no hooks.
        self._hooks = {
            optimizer: optimizer.register_step_pre_hook(self._before_step)
            for optimizer in optimizers
            if hasattr(optimizer, "_optimizer_step_pre_hooks")
        }

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def has_hook(self, optimizer: Optimizer) -> bool:
        return optimizer in self._hooks

    def check(self, optimizer: Optimizer) -> None:
        if self._buckets.in_backward:
            raise MisconfigurationException(
                "a step within backward, before the gradients of all ranks are there: step when "
                "manual_backward is done"
            )
        if self._groups.get(id(optimizer)) != len(optimizer.param_groups):
            refuse_strangers(optimizer, self._buckets.known)
            self._groups[id(optimizer)] = len(optimizer.param_groups)
        mixed = self._buckets.mixed
        if not (mixed or self._buckets.unprepared or self._buckets.kept):
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p in mixed and p.grad is not None for p in stepped):
            raise MisconfigurationException(
                "op=adasum combines one backward a step: add up the losses, or call zero_grad() "
                "before the next manual_backward"
            )
        if any(map(self._buckets.is_own, stepped)):
            raise MisconfigurationException(
                "a step with gradients of loss.backward() or of block_backward_sync(), which each "
                "rank has for itself: call self.manual_backward(loss) outside of it, which "
                "averages them, or clear them before"
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns other arguments for `step`, or None to leave them as they are."""
        if not any(map(callable, [*args[1:], *kwargs.values()])):
            self.check(optimizer)
            return None

        def then_checked(value: Any) -> Any:
            return self.then_checked(value, optimizer) if callable(value) else value

        others = {name: then_checked(value) for name, value in kwargs.items()}
        return (args[0], *map(then_checked, args[1:])), others

    def then_checked(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """A closure of a step, which clears gradients and makes new ones, and then the check."""

        def checked() -> Any:
            loss = closure()
            self.check(optimizer)
            # A line search calls this until the loss is low enough: by the loss of all ranks, so
            # that they call it equally often.
            return self._combine(loss) if isinstance(optimizer, LBFGS) else loss

        return checked
