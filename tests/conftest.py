"""What all tests share: the seed."""

import os

import pytest

DEFAULT_SEED = 20260709


def pytest_report_header():
    return f"seed: {seed_value()} (set SEED to another)"


def seed_value():
    return int(os.environ.get("SEED", DEFAULT_SEED))


@pytest.fixture
def seed():
    """Seed of random data; printed in the header and settable by SEED."""
    return seed_value()
