"""The U-Net: what is seen at a coarse scale joins what is seen at a fine one.

After Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI
2015, https://arxiv.org/abs/1505.04597. Unlike there, convolutions keep the size of the image and
are followed by batch normalization, and features are scaled up by bilinear interpolation.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d


class UNet(nn.Module):
    """Images to images of the same shape; height and width are at least 2^(scales - 1).

    Args:
        channels: of the images.
        features: channels of the finest scale; each coarser one has twice as many.
        scales: number of sizes at which the image is seen, each half of the one before.
    """

    def __init__(self, channels: int, features: int, scales: int) -> None:
        super().__init__()
        widths = [features * 2**scale for scale in range(scales)]
        self.down = nn.ModuleList(
            two_convolutions(before, after) for before, after in zip([channels, *widths], widths)
        )
        self.up = nn.ModuleList(
            two_convolutions(coarse + fine, fine) for fine, coarse in pairwise(widths)
        )
        self.last = nn.Conv2d(features, channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine: list[Tensor] = []
        for scale, block in enumerate(self.down):
            images = block(max_pool2d(images, 2) if scale else images)
            fine.append(images)
        fine.pop()
        for block in reversed(self.up):
            skip = fine.pop()
            images = interpolate(images, size=skip.shape[-2:], mode="bilinear")
            images = block(torch.cat([skip, images], dim=1))
        return self.last(images)


def two_convolutions(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [
            nn.Conv2d(channels, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
