"""The mutations of `make test-mutations` fit the code as it is."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_text_is_there_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.folder / mutation.file).read_text().count(mutation.old) == 1
    assert (ROOT / "tests" / f"{mutation.module}.py").exists()
