"""What tests of reproductions share."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(scope="module")
def quick_programs():
    """Programs that run only a few times: most of the time goes into compiling them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
