"""A small GPT: a causal transformer that guesses the next byte of a text.

Batches are uint8 of shape (batch, length + 1): inputs are all but the last byte, targets all but
the first. Logs train/loss, val/loss and test/loss in nats per byte (random guesses: ln 256 = 5.55),
val/bits_per_byte, test/bits_per_byte, and at the end of each epoch train/tokens_per_second of all
ranks and train/mfu, which are printed once more after training.

MFU, model FLOPs utilisation, is the FLOP that the model needs, over those that the devices could
have done in that time (Chowdhery et al., "PaLM", appendix B, https://arxiv.org/abs/2204.02311):

    tokens/s x (6 N + 12 layers x width x length) / peak FLOP/s

6 N: each of N parameters multiplies and adds once forward and twice backward. The second term is
attention, counted in full although half of it is masked. `peak` says what a device can do.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY = 256  # bytes

# FLOP/s of dense 16-bit matrix products, by a part of torch's name for the GPU; first match counts.
# A100: https://www.nvidia.com/en-us/data-center/a100/. H100 and H200: half of what .../h100/ and
# .../h200/ say "with sparsity". H100 PCIe: NVIDIA's "H100 Tensor Core GPU Architecture", table 2.
PEAKS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 80GB HBM3": 989e12,
    "A100": 312e12,
}


class Attention(nn.Module):
    """Causal: each position attends to itself and to those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron for each position; both add to their input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.out(gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Bytes of shape (batch, length) to logits of shape (batch, length, 256)."""

    def __init__(self, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # one matrix, as in GPT-2
        self.pairs = width // heads // 2
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Two outputs per layer are added up; scaled so that their sum does not grow.
                added = 2 * layers if name.endswith("out.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(added))

    def forward(self, tokens: Tensor) -> Tensor:
        # float32 also under bf16-true, whose 8 bits would put angles off by more than a radian.
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        pairs = torch.arange(self.pairs, device=tokens.device, dtype=torch.float32)
        angles = positions.unsqueeze(1) * 10_000.0 ** (-pairs / self.pairs)
        x, cos, sin = self.embedding(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", https://arxiv.org/abs/2104.09864): pairs of features
    are rotated by angles that grow with the position.

    Args:
        x: of shape (..., length, 2 x pairs); a pair is a feature of the first half and one of the
            second.
        cos, sin: of the angles, of shape (length, pairs).
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class GPT(LightningModule):
    """The transformer, trained by AdamW with a warm-up and a cosine down to a tenth.

    Args:
        lr: learning rate after the warm-up.
        layers: blocks of attention and a two-layer perceptron.
        heads: of the attention; `width` is split among them, in pairs.
        width: features of each position.
        weight_decay: of matrices.
        warmup_steps: steps in which the learning rate rises.
        decay_steps: the step from which on it stays at a tenth; -1: it does not fall.
        compile: whether torch.compile makes the blocks' kernels, which takes a minute at the start
            and, on CPUs, a C++ compiler.
    """

    def __init__(
        self,
        lr: float = 3e-3,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        decay_steps: int = -1,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width={width}, heads={heads}: width must be a multiple of 2 x heads")
        self.save_hyperparameters()
        self.network = Transformer(layers, heads, width)
        if compile:
            # Block by block: all in one would give its gradients to the all-reduce only when
            # backward is over. In place, which keeps the names in checkpoints.
            for block in self.network.blocks:
                block.compile()
        self._tokens, self._seconds = 0, 0.0  # of this rank in this epoch
        self._since: float | None = None
        self._dtype = torch.float32  # of matrix products

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each position, of shape (batch, length, 256)."""
        return self.network(tokens.long())

    def _losses(self, batch: Tensor) -> Tensor:
        """Nats of each byte, of shape (batch, length)."""
        logits = self(batch[:, :-1])
        self._dtype = logits.dtype
        # float32 also under bf16-true, whose 8 bits round a loss of 5 nats to steps of 0.03.
        logits = logits.float().transpose(1, 2)
        return cross_entropy(logits, batch[:, 1:].long(), reduction="none")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._losses(batch).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Tensor, stage: str) -> None:
        loss = self._losses(batch).mean()
        self.log(f"{stage}/loss", loss, sync_dist=True)
        self.log(f"{stage}/bits_per_byte", loss / math.log(2), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Nats per byte of each sequence, of shape (batch,): how much it surprises the model."""
        return self._losses(batch).mean(dim=1)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        lr, decay = self.hparams["lr"], self.hparams["weight_decay"]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=decay)
        schedule = {"scheduler": LambdaLR(optimizer, self._lr_factor), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _lr_factor(self, step: int) -> float:
        warmup, end = self.hparams["warmup_steps"], self.hparams["decay_steps"]
        if step < warmup:
            return (step + 1) / warmup
        if end < 0:
            return 1.0
        done = min(1.0, (step - warmup) / max(1, end - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    # ---------------------------------------------------------------- speed

    def flop_per_token(self, length: int) -> float:
        """Of forward and backward, for sequences of `length`."""
        parameters = sum(parameter.numel() for parameter in self.parameters())
        return 6 * parameters + 12 * self.hparams["layers"] * self.hparams["width"] * length

    def on_train_epoch_start(self) -> None:
        self._tokens, self._seconds, self._since = 0, 0.0, None

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        # The clock starts after the first batch, and after the first that follows a validation:
        # what these compile and allocate does not count.
        self._length = batch.shape[1] - 1
        if self._since is None:
            self._since = self._now()
        else:
            self._tokens += len(batch) * self._length

    def on_validation_start(self) -> None:
        self._stop_clock()

    def on_train_epoch_end(self) -> None:
        self._stop_clock()
        if not self._tokens:
            return
        rate = self._tokens / self._seconds
        utilisation = rate * self.flop_per_token(self._length) / peak(self.device, self._dtype)[0]
        self.log("train/tokens_per_second", rate, sync_dist=True, reduce_fx="sum")
        self.log("train/mfu", utilisation, sync_dist=True)  # the mean over ranks

    def on_train_end(self) -> None:
        metrics = self.trainer.callback_metrics
        if not self.trainer.is_global_zero or "train/mfu" not in metrics:
            return
        flops, source = peak(self.device, self._dtype)
        print(
            f"tokens  {float(metrics['train/tokens_per_second']):,.0f} tokens/s in the last epoch; "
            f"model FLOPs utilisation {float(metrics['train/mfu']):.1%} of "
            f"{self.trainer.world_size} x {flops / 1e12:.3g} TFLOP/s ({source})",
            flush=True,
        )

    def _stop_clock(self) -> None:
        if self._since is not None:
            self._seconds += self._now() - self._since
            self._since = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@functools.cache
def peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s that a device can do, and how that is known: from its data sheet or by a measurement.

    The measurement takes the fastest product of square matrices in half a second, while the other
    ranks of the host do the same: the most that was seen, not what the maker promises.
    """
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    if dtype != torch.float32 and "MIG" not in name:
        for part, flops in PEAKS.items():
            if part in name:
                return flops, f"{part}, data sheet"
    # On a CPU a product takes a few milliseconds, so that some are not interrupted by other work.
    size = 8192 if cuda else 512
    a, b = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    fastest, end = math.inf, time.perf_counter() + 0.5
    while (began := time.perf_counter()) < end:
        a @ b
        if cuda:
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest, f"measured: {str(dtype).removeprefix('torch.')} products"
