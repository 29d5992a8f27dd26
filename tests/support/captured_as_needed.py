"""A fixture for folders whose tests are not about what is captured before the first request: a
shared batch captures one shape then, and the others when they are needed."""

from collections.abc import Iterator

import pytest

from medusa_kit.infer.device import verifier


@pytest.fixture(scope="module", autouse=True)
def captured_as_needed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "usual_steps", lambda num_rows: [[1]])
        yield
