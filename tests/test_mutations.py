"""The mutations of `make test-mutations` fit the code and its tests as they are."""

from __future__ import annotations

import sys
from collections import defaultdict

import pytest

from tests.conftest import run
from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_text_is_there_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.folder / mutation.file).read_text().count(mutation.old) == 1


def test_the_tests_are_there() -> None:
    """The words that choose them are in the name of one at least, all that `and` joins."""
    modules = sorted({f"tests/{mutation.module}.py" for mutation in MUTATIONS})
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not gpu", *modules]
    lines = run(collect).stdout.splitlines()
    names = defaultdict(list)
    for module, _, name in (line.partition("::") for line in lines):
        names[module].append(name)
    for mutation in MUTATIONS:
        of_module = names[f"tests/{mutation.module}.py"]
        for part in mutation.tests.split(" or "):  # none has `not` or brackets
            words = part.split(" and ")
            assert any(all(word in name for word in words) for name in of_module), (
                mutation.name, part,
            )  # fmt: skip
