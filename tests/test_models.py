"""The models' own parts: what scores, networks and schedules compute."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, __version__
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from datamodules.digits import Digits
from datamodules.fake import Fake
from models import dcgan
from models.classifier import Classifier
from models.dcgan import DCGAN, Judge
from models.denoiser import Denoiser
from models.gpt import GPT
from models.resnet import ResNet, rise_and_fall
from models.split import Split
from models.unet import UNet

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_classifier_drops_the_share_of_features_that_it_is_given() -> None:
    images = torch.rand(2, 1, 8, 8)
    for dropout, dropped in ((1.0, True), (0.0, False)):
        model = Classifier(dropout=dropout)
        nothing = model.network[-1].bias.expand(2, -1)
        assert torch.equal(model(images), nothing) == dropped
        assert not torch.equal(model.eval()(images), nothing)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Classifier, {}),
        (Denoiser, {"depth": 3, "features": 4}),
        (GPT, {"layers": 1, "width": 32}),
        (ResNet, {"channels": 1}),
        (Split, {"depth": 1, "width": 8}),
    ],
)
def test_what_is_measured_is_that_of_all_ranks(
    kind: type[LightningModule], options: dict[str, int]
) -> None:
    """By a metric that gathers it, or by the mean: else rank 0 logs its own share alone."""
    images, tokens = torch.rand(2, 1, 8, 8), torch.randint(256, (2, 9))
    batches: dict[Any, Any] = {Denoiser: (images,) * 3, GPT: tokens}
    batch = batches.get(kind, (images, torch.arange(2)))
    model: Any = kind(**options).eval()
    gathered: dict[str, bool] = {}
    model.log = lambda name, value, sync_dist=False: gathered.update(
        {name: sync_dist or isinstance(value, Metric)}
    )
    model.validation_step(batch, 0)
    model.test_step(batch, 0)
    assert {name.partition("/")[0] for name in gathered} == {"val", "test"}
    assert [name for name, of_all in gathered.items() if not of_all] == []


class TestDCGAN:
    @pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 1), (64, 3)])
    def test_samples_have_the_shape_of_images(self, size: int, channels: int) -> None:
        model = DCGAN(size=size, channels=channels, width=4)
        samples = model(model.latents(2, torch.Generator()))
        assert samples.shape == (2, channels, size, size)
        assert samples.min() >= 0 and samples.max() <= 1
        assert model.opinion(samples).shape == (2,)

    def test_the_discriminator_sees_images_as_the_generator_makes_them(self) -> None:
        """From -1 to 1, by weights that begin with a deviation of 0.02."""
        model = DCGAN(size=8, channels=1)
        assert float(model.discriminator[0].weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        model.discriminator = nn.Sequential(nn.Identity())
        assert model.opinion(torch.tensor([0, 0.5, 1])).tolist() == [-1, 0, 1]

    def test_it_is_trained_as_in_the_paper(self) -> None:
        model = DCGAN(lr=0.3)
        networks = (model.generator, model.discriminator)
        for network, optimizer in zip(networks, model.configure_optimizers(), strict=True):
            (group,) = optimizer.param_groups
            assert list(map(id, group["params"])) == list(map(id, network.parameters()))
            assert (group["lr"], group["betas"]) == (0.3, (0.5, 0.999))
            scales = [layer.weight for layer in network if isinstance(layer, nn.BatchNorm2d)]
            scale = torch.cat(scales).detach()
            assert float(scale.mean()) == pytest.approx(1, abs=0.01)
            assert float(scale.std()) == pytest.approx(0.02, rel=0.2)

    def test_a_step_has_no_gradients_of_the_one_before(self) -> None:
        """The same batch and latents again, at a rate of 0."""
        model: Any = DCGAN(size=8, channels=1, width=4, lr=0)
        optimizers = model.configure_optimizers()
        model._trainer = SimpleNamespace(optimizers=optimizers)
        model.optimizers = lambda: optimizers
        model.manual_backward = lambda loss: loss.backward()
        model.log = lambda *_: None
        images, gradients = torch.rand(4, 1, 8, 8), []
        for _ in range(2):
            model.draws = torch.Generator().manual_seed(0)
            model.training_step((images, None), 0)
            parameters = [*model.generator.parameters(), *model.discriminator.parameters()]
            gradients.append([parameter.grad.clone() for parameter in parameters])
        torch.testing.assert_close(*gradients)
        assert all(gradient.any() for gradient in gradients[0])

    def test_each_rank_draws_other_latents(self) -> None:
        drawn, judged = [], []
        for rank in (0, 1):
            torch.manual_seed(0)
            model: Any = DCGAN(size=8, channels=1, width=4)
            model._trainer = SimpleNamespace(global_rank=rank, world_size=2, global_step=0)
            model.on_train_start()
            drawn.append(model.latents(4, model.draws))
            model.latents = lambda count, draws: judged.append(draws.initial_seed()) or drawn[0]
            model.log = lambda *_: None
            for batch_idx in (0, 1):
                model.validation_step((torch.rand(4, 1, 8, 8), None), batch_idx)
        assert not torch.equal(*drawn) and len(set(judged)) == 4

    def test_images_that_do_not_fit_are_refused(self) -> None:
        model: Any = DCGAN(size=64, channels=3, width=4)
        model._trainer = SimpleNamespace(datamodule=digits())
        with pytest.raises(ValueError, match=r"1 channels, \[8, 8\] pixels .* model.channels"):
            model.setup("fit")

    def test_images_that_are_normalized_are_refused(self) -> None:
        model: Any = DCGAN(size=8, channels=1, width=4)
        model._trainer = SimpleNamespace(datamodule=Altered(2.0, torch.float32))
        with pytest.raises(ValueError, match=r"values from 0.00 to 2.00, not from 0 to 1"):
            model.setup("fit")

    def test_judge_learns_from_so_many_images_of_any_precision(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dcgan, "JUDGED", 50)
        model: Any = DCGAN(size=8, channels=1, width=4)
        model._trainer = SimpleNamespace(datamodule=Altered(1.0, torch.bfloat16))
        fit, calls = model.judge.fit, []
        model.judge.fit = lambda *args: calls.append(args) or fit(*args)
        model.setup("fit")
        assert [len(args) for args in calls[0]] == [50, 50]

    def test_judge_makes_its_pixels_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = mock.Mock(wraps=dcgan.adaptive_avg_pool2d)
        monkeypatch.setattr(dcgan, "adaptive_avg_pool2d", pool)
        Judge(10).fit(torch.rand(20, 3, 16, 16), torch.arange(20) % 10)
        assert pool.call_count == 1

    def test_judge_knows_digits(self) -> None:
        torch.manual_seed(0)
        judge, data = Judge(10), digits()
        images, labels = (torch.cat(parts) for parts in zip(*data.train_dataloader()))
        judge.fit(images, labels)
        images, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader()))
        assert (judge.last(judge(images)).argmax(1) == labels).float().mean() > 0.93
        assert not any(parameter.requires_grad for parameter in judge.parameters())


class TestResNet:
    def test_it_keeps_the_size_of_small_images(self) -> None:
        model = ResNet()
        sizes: list[int] = []
        model.network.layer1.register_forward_hook(lambda *args: sizes.append(args[2].shape[-1]))
        first = model.network.conv1.weight.detach()
        assert float(first.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)  # by fan-out
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert sizes == [32]
        weight = model.network.layer1[0].conv1.weight
        assert weight.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
    def test_large_images_see_the_network_of_the_paper(self, depth: int, parameters: int) -> None:
        model = ResNet(depth=depth, small_images=False, classes=1000)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        sizes: list[int] = []
        for layer in (model.network.conv1, model.network.layer1, model.network.layer4):
            layer.register_forward_hook(lambda *args: sizes.append(args[2].shape[-1]))
        assert model.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
        assert sizes == [112, 56, 7]
        last = model.network.layer1[0]
        assert not (last.bn3 if depth == 50 else last.bn2).weight.any()

    def test_it_is_trained_as_asked(self) -> None:
        asked = {"momentum": 0.8, "weight_decay": 0.01}
        model: Any = ResNet(lr=0.3, label_smoothing=0.2, **asked)
        model._trainer = SimpleNamespace(estimated_stepping_batches=9, max_steps=9)
        group = model.configure_optimizers()["optimizer"].param_groups[0]
        expected = {"initial_lr": 0.3, "nesterov": True, **asked}
        assert {name: group[name] for name in expected} == expected
        model.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
        model.log = lambda *_, **__: None
        images, labels = torch.rand(4, 3, 8, 8), torch.arange(4)
        loss = cross_entropy(model(images), labels, label_smoothing=0.2)
        assert torch.equal(model.training_step((images, labels), 0), loss)

    def test_another_depth_is_refused(self) -> None:
        with pytest.raises(ValueError, match="depth=34: there are 18, 50"):
            ResNet(depth=34)

    def test_learning_rate_rises_then_falls(self) -> None:
        assert [rise_and_fall(x, 0.1) for x in (0.05, 0.1, 0.55)] == pytest.approx([0.5, 1, 0.5])
        assert rise_and_fall(1, 0.1) == pytest.approx(0) and rise_and_fall(0, 0) == 1

    @pytest.mark.parametrize("end", [{"max_epochs": 6}, {"max_epochs": -1, "max_steps": 17}])
    def test_learning_rate_is_of_the_step_among_all(
        self, end: dict[str, int], tmp_path: Path
    ) -> None:
        rates = learning_rates(tmp_path, batch_size=8, accumulate_grad_batches=3, **end)
        steps = 18 if end["max_epochs"] > 0 else 17  # 8 batches an epoch are 3 steps
        factors = [rise_and_fall((step + 0.5) / steps, 0.1) for step in range(steps)]
        assert rates == [0.1 * factor for factor in factors]

    @pytest.mark.parametrize("batch_size", [4, 16])
    def test_learning_rate_falls_on_after_a_resume_with_another_batch_size(
        self, batch_size: int, tmp_path: Path
    ) -> None:
        keep = ModelCheckpoint(tmp_path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        learning_rates(tmp_path, batch_size=8, max_epochs=4, callbacks=[keep])
        whole = learning_rates(tmp_path, batch_size=batch_size, max_epochs=4)
        checkpoint = tmp_path / "epoch=1.ckpt"
        rest = learning_rates(tmp_path, checkpoint, batch_size=batch_size, max_epochs=4)
        # The first is from the checkpoint: of half a batch of then behind the middle.
        assert rest[1:] == whole[len(whole) // 2 + 1 :]
        assert rest == sorted(rest, reverse=True)

    def test_a_schedule_without_an_end_is_refused(self) -> None:
        model: Any = ResNet()
        model._trainer = SimpleNamespace(estimated_stepping_batches=math.inf)
        with pytest.raises(ValueError, match="max_epochs"):
            model.configure_optimizers()


class TestDenoiser:
    @pytest.mark.parametrize("network", ["dncnn", "unet"])
    def test_what_the_network_predicts_is_subtracted(self, network: str) -> None:
        model = Denoiser(network=network, depth=3, scales=3, features=4)
        images = torch.rand(2, 1, 13, 18)  # sizes that do not halve evenly
        model.eval()
        torch.testing.assert_close(images - model(images), model.network(images))

    def test_dncnn_is_that_of_the_paper(self) -> None:
        """20 layers of 64 features, with batch normalization behind all but the first and last."""
        ends, middle = (9 * 64 + 64) + (9 * 64 + 1), 9 * 64 * 64 + 2 * 64
        assert sum(p.numel() for p in Denoiser().parameters()) == ends + 18 * middle

    def test_it_learns_from_the_target_and_is_measured_against_the_clean_image(self) -> None:
        model: Any = Denoiser(depth=3, features=4).eval()
        logged: dict[str, Any] = {}
        model.log = lambda name, value, **_: logged.update({name: value})
        noisy, target, clean = batch = tuple(torch.rand(3, 2, 1, 8, 8))
        output = model(noisy)
        for step in (model.training_step, model.validation_step, model.test_step):
            step(batch, 0)
        values = {
            name: float((value.compute() if isinstance(value, Metric) else value).detach())
            for name, value in logged.items()
        }
        psnr = {
            name: -10 * float(mse_loss(images, clean).log10())
            for name, images in (
                ("val/psnr", output), ("test/psnr", output), ("test/psnr_noisy", noisy),
            )
        }  # fmt: skip
        losses = dict.fromkeys(("train/loss", "val/loss"), float(mse_loss(output, target)))
        assert values == pytest.approx({**losses, **psnr})
        assert all(map(torch.equal, model.first_images, (noisy, target, output)))

    def test_a_unet_sees_further_with_more_scales(self) -> None:
        torch.manual_seed(0)
        fields = []
        for scales in (1, 3):
            model = Denoiser(network="unet", scales=scales, features=4).eval()
            image = torch.rand(1, 1, 32, 32, requires_grad=True)
            model(image)[0, 0, 16, 16].backward()
            assert image.grad is not None
            fields.append(int((image.grad != 0).any(dim=2).sum()))
        assert fields[0] == 5 and fields[1] > 10
        assert [block[0].out_channels for block in UNet(1, 4, 3).down] == [4, 8, 16]

    @pytest.mark.parametrize("cut", [slice(0, 4), slice(4, None)], ids=["fine", "coarse"])
    def test_a_unet_sees_both_scales(self, cut: slice) -> None:
        """What is left when one of the two is not heard."""
        network, images = UNet(1, 4, 2).eval(), torch.rand(2, 1, 8, 8)
        with torch.no_grad():
            network.up[0][0].weight[:, cut] = 0
            one, other = network(images)
        assert not torch.equal(one, other)

    def test_an_unknown_network_is_refused(self) -> None:
        with pytest.raises(ValueError, match="network=resnet: there are dncnn, unet"):
            Denoiser(network="resnet")


class TestSplit:
    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_loss_and_gradients_are_those_of_the_whole_network(self, micro_batches: int) -> None:
        torch.manual_seed(0)
        whole: Any = Split(depth=1, width=8)
        split: Any = Split(depth=1, width=8, devices=["cpu", "cpu"], micro_batches=micro_batches)
        split.load_state_dict(whole.state_dict())
        split.place()
        batch = torch.randn(8, 1, 8, 8), torch.arange(8)  # three parts: 3, 3 and 2
        passed: list[int] = []
        split.second.register_forward_pre_hook(lambda _, inputs: passed.append(len(inputs[0])))
        losses = []
        for model in (whole, split):
            model.log = lambda *_, **__: None
            losses.append(model.training_step(batch, 0))
            losses[-1].backward()
        assert passed == ([8] if micro_batches == 1 else [3, 3, 2])
        torch.testing.assert_close(*losses)
        for one, other in zip(whole.parameters(), split.parameters()):
            torch.testing.assert_close(one.grad, other.grad)

    def test_a_cpu_waits_for_what_comes_from_a_gpu(self) -> None:
        """On a host with a GPU the Trainer puts batches there, whatever devices= says."""
        copies: list[tuple[str, bool]] = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(
                self, op: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if op is torch.ops.aten._to_copy.default and args[0].is_cuda:
                    copies.append((str(kwargs["device"]), kwargs.get("non_blocking", False)))
                return op(*args, **(kwargs or {}))

        with FakeTensorMode(), Copies():
            model = Split(devices=["cpu", "cpu"], micro_batches=2)
            logits = model(torch.empty(4, 1, 8, 8, device="cuda"))
        assert logits.is_cuda and copies == [("cpu", False)] * 2

    def test_each_half_lies_on_its_device(self) -> None:
        model = Split(devices=["cpu", "meta"])
        model.place()
        assert {parameter.device.type for parameter in model.first.parameters()} == {"cpu"}
        assert {parameter.device.type for parameter in model.second.parameters()} == {"meta"}

    def test_a_restored_optimizer_has_its_state_where_its_parameters_are(self) -> None:
        model: Any = Split(devices=["cpu", "meta"])
        model.place()
        optimizer = model.configure_optimizers()
        for parameter in model.parameters():  # as Lightning restores it
            zeros = torch.zeros(parameter.shape)
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": zeros}
        model.trainer = Mock(spec=Trainer, optimizers=[optimizer])
        model.on_train_start()
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].device == parameter.device and state["step"].item() == 3

    @pytest.mark.parametrize(
        ("gpus", "local_rank", "told"),
        [
            (0, 0, "process sees: 0;"),
            (1, 0, "process sees: 1;"),
            (2, 1, "two ranks of a host"),
            (2, 0, ""),
        ],
    )
    def test_gpus_that_are_not_there_or_taken_are_told(
        self, gpus: int, local_rank: int, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        model: Any = Split(devices=["cuda:0", "cuda:1"])
        model.trainer = Mock(spec=Trainer, local_rank=local_rank)
        with pytest.raises(ValueError, match=told) if told else nullcontext():
            model.setup("fit")

    def test_what_gpus_have_trained_is_loaded_without_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        trained = Split(devices=["cuda:0", "cuda:1"], micro_batches=2)
        checkpoint = {"hyper_parameters": dict(trained.hparams), "state_dict": trained.state_dict()}
        checkpoint["pytorch-lightning_version"] = __version__
        torch.save(checkpoint, tmp_path / "a.ckpt")
        model = Split.load_from_checkpoint(tmp_path / "a.ckpt")
        images = torch.rand(4, 1, 8, 8)
        torch.testing.assert_close(model(images), model.second(model.first(images)))
        with pytest.raises(ValueError, match="process sees: 0"):  # but not trained
            model.setup("fit")


class Altered(Fake):
    """Images times a factor, of another dtype, as a data module's own hook may give them."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        super().__init__(count=80, size=8, channels=1)
        self.factor, self.dtype = factor, dtype

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * self.factor).to(self.dtype), batch[1]


def digits() -> Digits:
    data = Digits()
    data.setup("fit")
    return data


def learning_rates(
    folder: Path, checkpoint: Path | None = None, *, batch_size: int, callbacks: Any = (),
    **options: Any,
) -> list[float]:  # fmt: skip
    """Of each step of a ResNet, with a layer for its network, on 64 images."""
    rates: list[float] = []

    class Rates(Callback):
        def on_before_optimizer_step(self, *arguments: Any) -> None:
            rates.append(arguments[2].param_groups[0]["lr"])

    model: Any = ResNet()
    model.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    trainer = Trainer(
        accelerator="cpu", logger=False, limit_val_batches=0, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(callbacks),
        default_root_dir=folder, callbacks=[*callbacks, Rates()], **options,
    )  # fmt: skip
    trainer.fit(model, Fake(batch_size, count=64, size=8), ckpt_path=checkpoint)
    return rates
