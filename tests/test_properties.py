"""Properties of samplers, buckets and gathers, on examples that hypothesis draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler

from strategies import HorovodStrategy, collectives
from strategies.buckets import MIB, GradientBuckets, split
from strategies.collectives import DTYPES, World
from strategies.reductions import add
from strategies.resuming import WithoutFirst
from strategies.samplers import EvenBatches
from tests.matrix.trainings import RANK, SIZE

COUNTS = draw.integers(1, 200)
RANKS = draw.integers(1, 9)
SHAPES = draw.lists(draw.integers(0, 3), max_size=3)


class TestEvenBatches:
    @given(COUNTS, RANKS, draw.integers(1, 20))
    def test_each_sample_once_in_equally_many_batches(
        self, more: int, ranks: int, batch_size: int
    ) -> None:
        samples = ranks + more
        shares = [list(EvenBatches(samples, ranks, rank, batch_size)) for rank in range(ranks)]
        indices = [index for share in shares for batch in share for index in batch]
        assert sorted(indices) == list(range(samples))
        assert all(1 <= len(batch) <= batch_size for share in shares for batch in share)
        numbers = {len(share) for share in shares}
        # Ranks can only differ by a batch where batches hold one sample.
        assert max(numbers) - min(numbers) <= (batch_size == 1)
        full = -(-samples // (ranks * batch_size))
        assert max(numbers) == full or batch_size == 1

    @given(COUNTS, RANKS, draw.integers(1, 20))
    def test_its_length_is_true(self, more: int, ranks: int, batch_size: int) -> None:
        for rank in range(ranks):
            batches = EvenBatches(ranks + more, ranks, rank, batch_size)
            assert len(batches) == len(list(batches)) == len(list(batches))


@given(COUNTS, draw.integers(1, 20), draw.integers(0, 50))
def test_without_first_leaves_them_out_once(samples: int, size: int, trained: int) -> None:
    whole = BatchSampler(SequentialSampler(range(samples)), size, drop_last=False)
    rest = WithoutFirst(whole, trained)
    assert list(rest) == list(whole)[trained:]
    assert list(rest) == list(whole)
    assert len(rest) == len(whole) and rest.batch_size == size


class TestBuckets:
    @given(
        draw.lists(draw.tuples(draw.integers(0, 2**20), draw.sampled_from("abc")), max_size=30),
        draw.floats(0, 8 * MIB),
    )
    def test_parameters_are_split_without_loss(
        self, sizes: list[tuple[int, str]], bytes_: float
    ) -> None:
        parameters = [
            (nn.Parameter(torch.empty(size, device="meta")), kind) for size, kind in sizes
        ]
        groups = split(parameters, bytes_)
        kinds = {id(parameter): kind for parameter, kind in parameters}
        assert sorted(id(p) for group in groups for p in group) == sorted(kinds)
        order = {id(parameter): index for index, (parameter, _) in enumerate(parameters)}
        for index, group in enumerate(groups):
            assert len({kinds[id(p)] for p in group}) == 1
            assert [order[id(p)] for p in group] == sorted(order[id(p)] for p in group)
            # Without its last parameter a group is smaller than the limit.
            limit = min(MIB * 2**index, bytes_)
            assert sum(p.numel() * 4 for p in group[:-1]) < max(limit, 1)

    def test_they_grow(self) -> None:
        half = [(nn.Parameter(torch.empty(2**17, device="meta")), 0) for _ in range(40)]
        groups = split(half, 4 * MIB)
        assert [len(group) / 2 for group in groups] == [1, 2, 4, 4, 4, 4, 1]
        assert [len(group) / 2 for group in split(half, MIB)] == [1] * 20

    def test_a_sixth_of_the_gradients(self) -> None:
        def sizes(mib: int) -> list[float]:
            half = [(nn.Parameter(torch.empty(2**17, device="meta")), 0) for _ in range(2 * mib)]
            return [len(group) / 2 for group in split(half)]

        assert sizes(3) == [1, 1, 1]
        assert sizes(15) == [1, 2, *[2.5] * 4, 2]
        assert sizes(40) == [1, 2, *[4] * 9, 1]

        model = nn.Sequential(*(nn.Linear(2**18, 1, bias=False) for _ in range(12)))
        strategy = HorovodStrategy()
        buckets = GradientBuckets(model, strategy.world, add, strategy.bucket_mib, 1, 1)
        buckets.start()
        assert [len(bucket.parameters) for bucket in buckets.buckets] == [1, 2, 2, 2, 2, 2, 1]
        buckets.remove()

    def test_no_bucket_waits_for_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its next step starts with the next gradient; after backward, though others are late."""
        begun: list[str] = []
        asked: Counter[str] = Counter()

        def two_steps(buffer: Tensor, sizes: list[int], name: str, world: World) -> Iterator[str]:
            for step in ("first", "second"):
                begun.append(f"{step} of {name[-1]}")
                yield begun[-1]

        def poll(operation: str) -> bool:
            asked[operation] += 1
            assert asked[operation] < 1000, f"{operation} is waited for alone"
            late = operation == "first of 0" and "second of 3" not in begun
            return asked[operation] > 1 and not late

        monkeypatch.setattr(hvd, "poll", poll)
        monkeypatch.setattr(hvd, "synchronize", lambda operation: operation)
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
        world, two = HorovodStrategy().world, 8 / MIB  # two numbers a bucket
        buckets = GradientBuckets(model, world, two_steps, two, before=1, after=1)
        buckets.start()
        model(torch.ones(1)).sum().backward()
        assert begun.index("second of 2") < begun.index("first of 3")
        assert "second of 3" not in begun
        buckets.finish()
        assert asked["second of 0"] and asked["second of 3"]
        buckets.remove()

    @given(draw.lists(draw.lists(draw.booleans(), min_size=6, max_size=6), min_size=1, max_size=6))
    def test_any_parameters_can_be_toggled(self, steps: list[list[bool]]) -> None:
        """With one rank the gradients are what backward alone gives, and of none that is frozen."""
        model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(6))
        world = HorovodStrategy().world
        buckets = GradientBuckets(model, world, add, bucket_mib=3e-5, before=1, after=1)
        for trained in steps:
            for layer, on in zip(model, trained):
                layer.requires_grad_(on)
                layer.weight.grad = None
            if not any(trained):
                continue
            buckets.start()
            for bucket in buckets.buckets:  # else it would wait for backward's end to leave
                assert len({parameter.requires_grad for parameter in bucket.parameters}) == 1
            torch.stack([layer(torch.ones(2)).sum() for layer in model]).sum().backward()
            assert buckets.finish()()
            for layer, on in zip(model, trained):
                assert (layer.weight.grad is not None) == on
                assert not on or torch.equal(layer.weight.grad, torch.ones(2, 2))
        buckets.remove()


def gathers(most_bytes: int) -> int:
    """On all ranks the same examples are drawn; each rank takes its part of them."""
    world = HorovodStrategy().world
    count = 0
    collectives.MOST_BYTES, usual = most_bytes, collectives.MOST_BYTES

    # In ranks there is no pytest that would load the profile of conftest.py.
    @settings(max_examples=100, derandomize=True, database=None, deadline=None)
    @given(
        draw.sampled_from(DTYPES), SHAPES,
        draw.lists(draw.integers(0, 5), min_size=SIZE, max_size=SIZE),
    )  # fmt: skip
    def rows_of_all_ranks_come_in_order(dtype: Any, shape: list[int], rows: list[int]) -> None:
        nonlocal count
        count += 1

        def of(rank: int) -> Tensor:
            torch.manual_seed(rank)
            return (torch.randn(rows[rank], *shape) * 9).to(dtype)

        gathered = world.gather(of(RANK))
        assert len(gathered) == SIZE
        for rank, tensor in enumerate(gathered):
            assert tensor.dtype == dtype
            assert torch.equal(tensor.reshape(-1), of(rank).reshape(-1))
        joined = torch.cat(gathered)
        assert len(joined) == sum(rows) or 0 in shape

    try:
        rows_of_all_ranks_come_in_order()
    finally:
        collectives.MOST_BYTES = usual
    return count


@pytest.mark.parametrize("most_bytes", [2**30, 50])
def test_gathers_of_any_shape_and_dtype(launch: Callable, most_bytes: int) -> None:
    first, second = launch(gathers, 2, most_bytes=most_bytes)
    assert first == second >= 100
