"""MaxText's `RoutedMoE` with jax_ep trains as its dense matmuls do.

XLA has no `ragged_all_to_all` for CPUs, so MaxText's own exchange cannot run here.
"""

import pytest

from training import assert_equal_losses, run, train

DENSE = "sparse_matmul=False", "capacity_factor=-1"
CASES = {
    # Three times the mean: drops nothing here.
    "fsdp": ["ici_fsdp_parallelism=2", "ici_expert_parallelism=4", "ragged_buffer_factor=3.0"],
    # Megablox's kernels are interpreted on CPUs.
    "tensor": ["ici_fsdp_parallelism=1", "ici_tensor_parallelism=2", "megablox=True"],
    "bias": ["check_vma=True", "scan_layers=False", "mlp_bias=True", "prefuse_moe_weights=True"],
    # Ranks are counted along "context" and "expert". The balancing loss is of parts of sequences.
    "context": [
        *["ici_expert_parallelism=2", "ici_context_parallelism=2", "load_balance_loss_weight=0"],
        "custom_mesh_and_rule=cp-as-ep",
    ],
    # By default, dense matmuls count the router's bias in the balancing loss, sparse ones do not.
    "deepseek": [
        *["model_name=deepseek3-tiny", "override_model_config=True", "decoder_block=deepseek"],
        *["base_num_decoder_layers=3", "first_num_dense_layers=1", "attention_type=mla"],
        *["routed_bias_update_rate=0.01", "moe_use_megatron_seq_aux_loss=True"],
    ],
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_training_equals_dense_matmuls(options):
    unmodified = [each for each in options if not each.startswith("ragged_buffer_factor")]
    assert_equal_losses(
        train("maxtext", "--jax-ep", *options), train("maxtext", *DENSE, *unmodified)
    )


def test_losses_show_what_experts_compute():
    """Dropped rows change them, from the first update on: so equal ones are no accident."""
    mesh = CASES["fsdp"][:2]
    few = train("maxtext", "--jax-ep", *mesh, "ragged_buffer_factor=0.5")
    all_rows = train("maxtext", *DENSE, *mesh)
    difference = abs(few.steps["lm_loss"] - all_rows.steps["lm_loss"])
    assert difference[1:].min() > 1e-3


def test_an_option_that_does_not_fit_is_named(tmp_path):
    result = run("maxtext", str(tmp_path), "--jax-ep", "use_ring_of_experts=True")
    assert result.returncode != 0
    assert "MaxText's use_ring_of_experts must be False with jax_ep; got True" in result.stderr
