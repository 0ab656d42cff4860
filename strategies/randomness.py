"""Random numbers that a rank draws for itself in its steps, though all are seeded alike."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import torch


class OwnDraws:
    """Inside `with draws():`, torch's generators give this rank numbers of its own.

    Where all ranks draw the same, the global batch has a world size-th of the noise it should
    have: of a diffusion model's noise levels, a GAN's latents, dropout's masks, augmentation on the
    device. But samplers draw from the generator of the CPU too, and must draw the same everywhere;
    so outside, it is as if nothing had been drawn inside. From that of a GPU only steps draw.
    Python's and NumPy's generators stay alike.

    The first state follows from that of the generator that all share. So each training, evaluation
    and prediction of a program draws other numbers, as loaders move that one in between, and a
    program that is run again with its seed draws the same.

    Args:
        rank: among those that train together.
        device: on which it trains.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        shared = torch.Generator()
        shared.set_state(torch.get_rng_state())
        self._of_all = int(torch.randint(2**62, (), generator=shared))
        self.seed(0)

    def seed(self, step: int) -> None:
        """Start anew; a resumed training repeats no draws.

        Args:
            step: how many were made before.
        """
        mixed = random.Random(f"{self._of_all} {self.rank} {step}").getrandbits(63)
        self._own = torch.Generator().manual_seed(mixed).get_state()
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(mixed)  # a model may have parts on others too

    @contextmanager
    def __call__(self) -> Generator[None, None, None]:
        state = torch.get_rng_state()
        torch.set_rng_state(self._own)
        try:
            yield
        finally:
            self._own = torch.get_rng_state()
            torch.set_rng_state(state)
