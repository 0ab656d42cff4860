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
        greys = [photo.mean(axis=2).round() for photo in load_sample_images().images]
        rows = set()
        for split, begin, end in zip(data.splits, (0, 448, 544), (448, 544, 640)):
            for number, grey in enumerate(greys):  # of one and of the other, in turn
                _, _, part = split[number]
                pixels = np.round(255 * part[0].numpy())
                windows = sliding_window_view(grey[:, begin:end], (24, 24))
                places = np.argwhere(windows[:, :, 0, 0] == pixels[0, 0])
                at = [row for row, column in places if (windows[row, column] == pixels).all()]
                assert len(at) == 1
                rows.add(at[0])
        assert len(rows) > 1

    def test_parts_larger_than_what_is_held_out_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"data.size=97: .* at most 96"):
            Photos(str(tmp_path), size=97).prepare_data()
        assert not list(tmp_path.iterdir())
