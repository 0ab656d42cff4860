"""Each case of matrix/ under Horovod with 1, 2, 4 ranks and under DDP with 2, 4: as one process.

Where a number deviates, it shows on which side. All cases of a strategy run in one launch.
`make test` has them all on two ranks, and on four those in which it matters how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.matrix.cases import CASES, TOLERANCES, WITHOUT_DDP, run_cases

LAUNCHES = [("horovod", 1), ("horovod", 2), ("horovod", 4), ("ddp", 2), ("ddp", 4)]
OF_HOW_MANY = {  # what is divided, gathered or paired by the number of ranks, or unlike on some
    "accumulation", "adasum_of_equal_gradients", "adversaries", "clip_by_norm", "compression_bf16",
    "gradient_predivide", "many_buckets", "metrics_of_9_samples", "metrics_of_one_sample_a_rank",
    "metrics_of_51_samples", "metrics_of_a_sampler_of_ones_own", "parameters_that_some_ranks_use",
    "plain", "resume_within_an_epoch", "second_derivatives_through_all_gather", "sparse_gradients",
    "sum_of_gradients", "sync_batchnorm", "validation_while_training",
}  # fmt: skip
CLASS = {"horovod": "HorovodStrategy", "ddp": "HorovodrunDDP", "single": "SingleDeviceStrategy"}


def parameters() -> Iterator[Any]:
    assert set(CASES) >= OF_HOW_MANY
    for case in CASES:
        for strategy, ranks in LAUNCHES:
            if strategy == "ddp" and case in WITHOUT_DDP:
                continue
            fast = ranks == 2 or (strategy == "horovod" and ranks == 4 and case in OF_HOW_MANY)
            marks = [] if fast else [pytest.mark.slow]
            yield pytest.param(case, strategy, ranks, marks=marks)


@pytest.fixture(scope="module")
def results(
    launch: Callable, launch_anew: Callable, request: pytest.FixtureRequest
) -> Callable[[str, int], list[dict[str, Any]]]:
    """The results of all ranks of a launch, which is made when it is first asked for."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    asked = [call.params for call in calls if call and {"case", "strategy"} <= call.params.keys()]
    cache: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def results(strategy: str, ranks: int) -> list[dict[str, Any]]:
        if (strategy, ranks) not in cache:
            cache[strategy, ranks] = []  # a launch that fails is not repeated for each case
            wanted = {
                params["case"]
                for params in asked
                if strategy == "single"
                or (params["strategy"], params["ranks"]) == (strategy, ranks)
            }
            names = [name for name in CASES if name in wanted]
            start = launch_anew if strategy == "ddp" else launch
            cache[strategy, ranks] = start(run_cases, ranks, strategy=strategy, names=names)
        if not cache[strategy, ranks]:
            pytest.fail(f"the launch of {strategy} on {ranks} ranks has failed, see above")
        return cache[strategy, ranks]

    return results


def assert_same(actual: Any, expected: Any, tolerance: float, where: str = "") -> None:
    """Equal structure, and numbers within a tolerance: relative, absolute for those below 1."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], tolerance, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected)):
            assert_same(one, other, tolerance, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        message = lambda text: f"{where}: {text}"  # noqa: E731
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=message)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance), where
    else:
        assert actual == expected, where


@pytest.mark.parametrize(("case", "strategy", "ranks"), list(parameters()))
def test_numbers_are_those_of_one_process(
    results: Callable, case: str, strategy: str, ranks: int
) -> None:
    (one,) = results("single", 1)
    assert not isinstance(one[case], str), one[case]
    for rank in results(strategy, ranks):
        assert (rank["strategy"], rank["size"]) == (CLASS[strategy], ranks)
        assert not isinstance(rank[case], str), rank[case]
        assert_same(rank[case], one[case], TOLERANCES[case], case)
