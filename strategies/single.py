"""One process on its own device, without Horovod: what the others are compared with."""

import torch
from pytorch_lightning.strategies import SingleDeviceStrategy


def single_device() -> SingleDeviceStrategy:
    """Lightning's strategy for one device: the first GPU, or the CPU where there is none."""
    return SingleDeviceStrategy("cuda:0" if torch.cuda.is_available() else "cpu")
