"""What tests of EAGLE heads share."""

import pytest
from support.eagle_world import load_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A loaded model without pages, and transformers' own in fp64."""
    return load_target(tmp_path_factory.mktemp("target"))
