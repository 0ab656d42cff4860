"""Each rank draws its own random numbers in its steps, though all are seeded alike."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def draw_others(step: int) -> None:
    """Have loaders of a training that goes on after so many steps draw other numbers than those of
    its beginning, as for augmentation. Ranks that would have drawn alike do so afterwards."""
    drawn = int(torch.randint(2**62, ())), random.random(), np.random.rand()
    of_torch, of_python, of_numpy = (random.Random(f"{number} {step}") for number in drawn)
    torch.default_generator.manual_seed(of_torch.getrandbits(63))
    random.setstate(of_python.getstate())
    np.random.seed(of_numpy.getrandbits(32))


class OwnDraws:
    """Inside `with draws():`, torch's generators give this rank numbers of its own.

    If all ranks drew the same, the global batch would have only one rank's variety of noise: of a
    diffusion model's noise levels, a GAN's latents, dropout's masks, augmentation on the device.
    But samplers draw from the CPU's generator too, and must draw the same everywhere; so outside,
    it is as if nothing had been drawn inside. Only steps draw from a GPU's generator. Python's and
    NumPy's generators stay alike.

    The first state follows from the generator that all share. Loaders move that one between
    trainings, evaluations and predictions of a program, and `draw_others` at a resume, so each
    draws other numbers; and a program that is run again with its seed draws the same.

    Args:
        rank: among those that train together.
        device: on which it trains.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        shared = torch.Generator()
        shared.set_state(torch.get_rng_state())
        seed = int(torch.randint(2**62, (), generator=shared)) + rank
        self._own = torch.Generator().manual_seed(seed).get_state()
        if device.type == "cuda":
            torch.cuda.manual_seed_all(seed)  # a model may have parts on others too

    @contextmanager
    def __call__(self) -> Generator[None, None, None]:
        state = torch.get_rng_state()
        torch.set_rng_state(self._own)
        try:
            yield
        finally:
            self._own = torch.get_rng_state()
            torch.set_rng_state(state)
