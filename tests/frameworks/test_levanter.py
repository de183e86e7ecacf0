"""grug's experts with jax_ep train as with grug's own exchange, `ring`."""

import pytest

from training import assert_equal_losses, train


@pytest.mark.parametrize("options", [(), ("--remat",)], ids=["plain", "remat"])
def test_training_equals_ring(options):
    assert_equal_losses(train("levanter", "--jax-ep", *options), train("levanter", *options))


def test_the_same_rows_are_dropped():
    """Without padding, by which `ring` lowers its capacity."""
    options = "--all-words", "--capacity-factor=1.0"
    unmodified = train("levanter", *options)
    assert unmodified.steps["dropped"].all()
    assert_equal_losses(train("levanter", "--jax-ep", *options), unmodified)


def test_losses_show_what_experts_compute():
    """Fewer rows, other losses: so equal ones are no accident."""
    few, all_rows = (
        train("levanter", "--jax-ep", *capacity) for capacity in (["--capacity-factor=0.5"], [])
    )
    assert few.steps["dropped"].all() and not all_rows.steps["dropped"].any()
    assert abs(few.steps["loss"] - all_rows.steps["loss"]).min() > 1e-3
