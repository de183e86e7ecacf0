"""Tests that fail, for test_job.py: in all processes of a job, in one, or with the process."""

import os
import time

import jax


def test_passes_everywhere():
    assert jax.process_count() == int(os.environ["JAX_EP_TEST_WANTED"])
    assert len(jax.devices()) == 4


def test_fails_everywhere():
    raise AssertionError("on purpose")


def test_fails_alone():
    if jax.process_index() == 1:
        raise AssertionError("on purpose")
    time.sleep(600)


def test_dies():
    if jax.process_index() == 1:
        os._exit(3)
    time.sleep(600)
