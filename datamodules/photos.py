"""Pairs of noisy parts of two photographs: those that come with scikit-learn, in shades of grey.

Nothing is downloaded. The left 70 % of both are to train, the next 15 % to validate and the last
15 % to test, so that no pixel is in two splits; but all are of the same two scenes, a temple and a
flower, and parts overlap within a split. Batches, noise and arguments are those of
datamodules/noise.py.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_sample_images

from datamodules.noise import Noise

COLUMNS = [0, 448, 544, 640]  # where splits begin and end


class Photos(Noise):
    """`count` parts to train, and an eighth of that (at least 8) to validate and to test each."""

    things = "photos"

    def draw(self) -> np.ndarray:
        size, rng = self.hparams["size"], np.random.default_rng(self.hparams["seed"])
        if size > (most := COLUMNS[2] - COLUMNS[1]):
            raise ValueError(f"data.size={size}: parts to validate with are of at most {most}")
        colours = load_sample_images().images  # uint8, each of shape (427, 640, 3)
        photos = [photo.mean(axis=2).round().astype(np.uint8) for photo in colours]
        parts = []
        for count, begin, end in zip(self.counts, COLUMNS, COLUMNS[1:]):
            for number in range(count):
                photo = photos[number % len(photos)]
                row = rng.integers(0, len(photo) - size + 1)
                column = rng.integers(begin, end - size + 1)
                parts.append(photo[row : row + size, column : column + size])
        return np.stack(parts)
