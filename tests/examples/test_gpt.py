"""The GPT sees no byte before it has guessed it, learns, and counts its FLOP as PaLM does."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer, seed_everything
from torch import Tensor, nn

from datamodules.text import Text, pack, read, split
from models import gpt
from models.gpt import GPT, peak
from runs import export
from runs.config import check
from tests.conftest import assert_reaches
from tests.test_datamodules import assert_each_task_has_its_part
from tests.test_export import trained
from tests.test_models import assert_measured_over_all_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(**arguments: Any) -> GPT:
    return GPT(**{"layers": 2, "heads": 2, "width": 32, **arguments})


def test_no_position_sees_those_after_it() -> None:
    before = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    after = before.clone()
    after[:, 12:] = (after[:, 12:] + 1) % 256
    model = tiny()
    one, other = model(before), model(after)
    assert torch.equal(one[:, :12], other[:, :12])
    assert not torch.isclose(one[:, 12:], other[:, 12:]).all(-1).any()


def test_positions_make_a_difference() -> None:
    model = tiny(layers=1)  # two would tell the order from who sees whom
    with torch.no_grad():
        model.network.blocks[0].attention.qkv.weight.mul_(20)
    logits = model(torch.tensor([[1, 2, 3, 7], [2, 1, 3, 7]]))[:, -1]
    assert not torch.allclose(logits[0], logits[1], atol=1e-4)


def test_logits_are_those_of_the_formulas() -> None:
    """Of GPT-2, with rotary positions and without biases, written down a second time: in loops,
    with complex numbers, in 64 bits."""
    torch.manual_seed(0)
    model, tokens = tiny().double(), torch.randint(256, (9,))
    net, heads, size = model.network, 2, 16
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)

    def normalized(x: Tensor, weight: Tensor) -> Tensor:
        variance = x.var(dim=-1, unbiased=False, keepdim=True) + 1e-5
        return (x - x.mean(dim=-1, keepdim=True)) / variance.sqrt() * weight

    def turned(x: Tensor, position: int) -> Tensor:
        angles = torch.tensor([position * 10_000 ** (-pair / 8) for pair in range(8)])
        rotated = torch.complex(x[:8], x[8:]) * torch.polar(torch.ones(8), angles)
        return torch.cat([rotated.real, rotated.imag])

    x = net.embedding.weight[tokens]
    for block in net.blocks:
        q, k, v = (block.attention.qkv.weight @ normalized(x, block.norm1.weight).T).T.chunk(3, 1)
        context = torch.zeros_like(x)
        for position in range(9):
            for head in range(heads):
                columns = slice(head * size, (head + 1) * size)
                query = turned(q[position, columns], position)
                scores = [
                    query @ turned(k[other, columns], other) / 4 for other in range(position + 1)
                ]
                context[position, columns] = (
                    torch.stack(scores).softmax(0) @ v[: position + 1, columns]
                )
        x = x + context @ block.attention.out.weight.T
        up = normalized(x, block.norm2.weight) @ block.up.weight.T
        x = x + (up * (1 + torch.erf(up / 2**0.5)) / 2) @ block.out.weight.T
    logits = normalized(x, net.norm.weight) @ net.embedding.weight.T
    torch.testing.assert_close(model(tokens[None])[0], logits, rtol=1e-4, atol=1e-4)


def test_positions_are_exact_under_bf16_true() -> None:
    model, tokens = tiny(layers=1).bfloat16(), torch.zeros(1, 500, dtype=torch.int64)
    angles: list[Tensor] = []
    model.network.blocks[0].register_forward_pre_hook(lambda _, inputs: angles.append(inputs[1]))
    torch.set_default_dtype(torch.bfloat16)  # as Lightning does
    try:
        model(tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(angles[0][:, 0], torch.arange(500).cos(), atol=1e-3)


def test_losses_are_not_rounded_under_bf16_true() -> None:
    batch = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    model = tiny().bfloat16()
    logits = model(batch[:, :-1])
    exact = -logits.double().log_softmax(-1).gather(2, batch[:, 1:, None])[..., 0]
    assert torch.allclose(model._losses(batch).double(), exact, atol=1e-5)
    assert model._dtype == torch.bfloat16  # of its matrix products, for what it could have done


def test_the_target_of_each_position_is_the_next_byte() -> None:
    batch = torch.tensor([[5, 7, 9]], dtype=torch.uint8)
    model: Any = tiny()
    chances = model(torch.tensor([[5, 7]])).log_softmax(-1)[0]
    nats = -(chances[0, 7] + chances[1, 9]) / 2
    assert torch.allclose(model.predict_step(batch, 0), nats)
    logged: dict[str, Any] = {}
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    model.test_step(batch, 0)
    assert logged == pytest.approx(
        {"test/loss": nats.item(), "test/bits_per_byte": nats.item() / math.log(2)}, rel=1e-5
    )


def test_a_width_that_heads_cannot_share_in_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="width=12, heads=4: width must be a multiple of 2 x"):
        GPT(width=12, heads=4)


def test_it_learns_more_than_how_often_bytes_occur(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed_everything(0, verbose=False)
    data = Text(batch_size=8, length=64, megabytes=0.2)
    model = tiny(lr=1e-2, decay_steps=80)
    trainer = Trainer(
        max_epochs=1, max_steps=80, accelerator="cpu", logger=False, gradient_clip_val=1.0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, limit_val_batches=4, val_check_interval=80,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, data)
    counts = torch.bincount(data.splits[1].flatten().long(), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    frequencies = float(-(shares * shares.log()).sum())  # the loss of who knows these alone
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["val/loss"] < frequencies - 0.2
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] / 0.6931, rel=1e-3)
    rate, most = metrics["train/tokens_per_second"], peak(torch.device("cpu"), torch.float32)[0]
    assert metrics["train/mfu"] == pytest.approx(rate * model.flop_per_token(64) / most, rel=1e-3)
    output = capsys.readouterr().out
    assert f"tokens  {rate:,.0f} tokens/s" in output and "measured: float32 products" in output


def test_matrices_alone_decay_and_the_learning_rate_rises_and_falls() -> None:
    model = tiny(lr=0.1, weight_decay=0.2, warmup_steps=4, decay_steps=8)
    groups = model.configure_optimizers()["optimizer"].param_groups
    assert [(group["initial_lr"], group["betas"]) for group in groups] == [(0.1, (0.9, 0.95))] * 2
    decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decay == {p: 0.2 if p.dim() > 1 else 0 for p in model.parameters()}
    shares = [model._lr_factor(step) for step in (0, 3, 4, 6, 8, 99)]
    assert shares == pytest.approx([0.25, 1, 1, 0.55, 0.1, 0.1])
    assert tiny()._lr_factor(10_000) == 1


def test_outputs_that_are_added_up_begin_smaller() -> None:
    block = tiny().network.blocks[0]
    for layer, deviation in ((block.up, 0.02), (block.out, 0.01), (block.attention.out, 0.01)):
        assert float(layer.weight.detach().std()) == pytest.approx(deviation, rel=0.1)


def test_flop_are_counted_by_hand() -> None:
    matrices = 256 * 32 + 2 * 12 * 32**2  # the embedding, which is the head too; two blocks
    norms = 5 * 32
    counted = 6 * (matrices + norms) + 12 * 2 * 32 * 100
    assert tiny().flop_per_token(100) == counted


def test_speed_is_that_of_all_ranks_without_first_batches_and_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.0, 50.0, 51.0])
    monkeypatch.setattr(gpt, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(gpt, "peak", lambda *_: (1e9, "made up"))
    model, batch = tiny(), torch.zeros(4, 11, dtype=torch.uint8)
    logged: dict[str, Any] = {}
    monkeypatch.setattr(
        model, "log", lambda name, *value, **how: logged.update({name: (*value, how)})
    )
    model.on_train_epoch_start()
    model.on_train_epoch_end()  # of a single batch there is none
    assert logged == {}
    for index in range(3):  # from the end of the first, at 10 s
        model.on_train_batch_end(None, batch, index)
    model.on_validation_start()  # at 12 s
    for index in range(2):  # from 50 s
        model.on_train_batch_end(None, batch, index)
    model.on_train_epoch_end()  # at 51 s
    assert (model._tokens, model._seconds) == (3 * 4 * 10, 3.0)
    assert logged == {
        "train/tokens_per_second": (40, {"sync_dist": True, "reduce_fx": "sum"}),
        "train/mfu": (40 * model.flop_per_token(10) / 1e9, {"sync_dist": True}),
    }


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),  # a part of it is less
        ("NVIDIA A100-SXM4-40GB", torch.float32, None),  # the table is of 16 bits
        ("an unknown one", torch.bfloat16, None),
    ],
)
def test_peak_of_known_gpus(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, flops: float | None
) -> None:
    def measured(*_: Any, **__: Any) -> Tensor:
        raise LookupError("no table")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "rand", measured)
    if flops is None:
        with pytest.raises(LookupError):
            peak.__wrapped__(torch.device("cuda"), dtype)
    else:
        assert peak.__wrapped__(torch.device("cuda"), dtype)[0] == flops


def test_compiling_keeps_the_names_in_checkpoints() -> None:
    assert tiny(compile=True).state_dict().keys() == tiny().state_dict().keys()


def test_each_block_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one, no gradient would be sent before backward is over."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    model = tiny(compile=True)
    assert compiled == list(model.network.blocks)


def test_files_are_packed_and_split(tmp_path: Path) -> None:
    for name, content in [
        ("b.py", "bbb"),
        ("a.py", "aa"),
        ("_sysconfigdata_x.py", "no"),
        ("c", ""),
    ]:
        (tmp_path / name).write_text(content)
    listed = SimpleNamespace(glob=lambda names: sorted(tmp_path.glob(names), reverse=True))
    for folder in (tmp_path, listed):  # file systems list files in an order of their own
        assert read(folder, 100) == b"aa\0bbb\0" and read(folder, 5) == b"aa\0bb"
    parts = split(bytes(range(60)))
    assert [len(part) for part in parts] == [54, 3, 3] and b"".join(parts) == bytes(range(60))
    sequences = pack(bytes(range(13)), 5)  # neighbours share a byte, the last two fill none
    assert sequences.tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    with pytest.raises(ValueError, match="length=5: 5 bytes of text are less than a sequence"):
        pack(bytes(5), 5)


def test_other_ranks_take_the_text_of_rank_0() -> None:
    text = bytes(range(60))
    data = Text(length=2, batch_size=16)
    strategy = SimpleNamespace(broadcast=lambda mine: mine or text)
    data.trainer = SimpleNamespace(is_global_zero=False, strategy=strategy)
    data.setup("fit")
    assert data.splits[1].tolist() == [[54, 55, 56]]
    assert [len(batch) for batch in data.train_dataloader()] == [16]  # of 26: all of one size


def test_a_setting_that_is_null_takes_a_number() -> None:
    check(["model=gpt", "model.decay_steps=100"])


def test_training_is_shuffled_and_each_task_has_its_part() -> None:
    assert_each_task_has_its_part(Text(megabytes=0.1))


def test_what_is_measured_is_that_of_all_ranks() -> None:
    assert_measured_over_all_ranks(tiny(), torch.randint(256, (2, 9)))


def test_tokens_are_taken_in_any_length(tmp_path: Path) -> None:
    checkpoint, model = trained(tmp_path, "experiment=gpt_tiny", "model.width=16", "model.layers=1")
    told = export.export(checkpoint, "pt2")
    assert told.endswith("takes uint8 (any batch, any length)")
    made = torch.export.load(checkpoint.with_suffix(".pt2")).module()
    tokens = torch.randint(256, (3, 300), dtype=torch.uint8)  # was traced with 129
    with torch.no_grad():
        torch.testing.assert_close(made(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_reaches_its_result(tmp_path: Path) -> None:
    # Byte frequencies alone: 3.09.
    assert_reaches(tmp_path, "gpt_tiny", {"val/loss": (1.6, 1.85)})
