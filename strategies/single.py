"""One process on its own device, without Horovod: what the others are compared with."""

import torch
from pytorch_lightning.strategies import SingleDeviceStrategy


def single_device(accelerator: str = "auto") -> SingleDeviceStrategy:
    """Lightning's strategy for one device: the first GPU where there is one, unless "cpu"."""
    gpu = accelerator != "cpu" and torch.cuda.is_available()
    return SingleDeviceStrategy("cuda:0" if gpu else "cpu")
