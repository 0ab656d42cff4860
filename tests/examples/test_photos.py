"""Crops of photographs: those to validate and test by were not trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.datasets import load_sample_images

from datamodules.photos import Photos


class TestPhotos:
    def test_parts_are_of_photographs_and_those_held_out_were_not_trained(
        self, tmp_path: Path
    ) -> None:
        data = Photos(str(tmp_path), batch_size=4, count=40, size=24)
        data.prepare_data()
        data.setup("fit")
        assert [len(split) for split in data.splits] == [40, 8, 8]
        noisy, target, clean = next(iter(data.train_dataloader()))
        assert noisy.shape == target.shape == clean.shape == (4, 1, 24, 24)
        assert 0.08 < (noisy - clean).std() < 0.12 and not torch.equal(noisy, target)
        greys = [photo.mean(axis=2) for photo in load_sample_images().images]
        for split, begin, end in zip(data.splits, (0, 448, 544), (448, 544, 640)):
            _, _, part = split[0]
            windows = [sliding_window_view(grey[:, begin:end], (24, 24)) for grey in greys]
            differences = [window - 255 * part[0].numpy() for window in windows]
            assert min(np.abs(d).mean(axis=(2, 3)).min() for d in differences) < 1

    def test_parts_larger_than_what_is_held_out_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"data.size=97: .* at most 96"):
            Photos(str(tmp_path), size=97).prepare_data()
        assert not list(tmp_path.iterdir())
