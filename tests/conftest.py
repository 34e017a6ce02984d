"""What all tests share: the seed, and how seldom the garbage collector runs."""

import gc
import os

import pytest

DEFAULT_SEED = 20260709


def pytest_report_header():
    return f"seed: {seed_value()} (set SEED to another)"


def pytest_collection_finish():
    # What was imported stays, and designs are many objects at once: to look at all of them every 700 objects takes a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def seed_value():
    return int(os.environ.get("SEED", DEFAULT_SEED))


@pytest.fixture
def seed():
    """Seed of random data; printed in the header and settable by SEED."""
    return seed_value()
