"""Trains a tiny Mixtral with MaxText's trainer on 8 CPU devices; prints the steps as JSON.

Usage: train_maxtext.py FOLDER [--jax-ep] [OPTION=VALUE ...]

FOLDER receives what MaxText writes. The options are MaxText's; later ones win.
"""

import argparse
import json
import os
import pathlib

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # before MaxText is imported: no Google Cloud

import jax
import maxtext
from maxtext.trainers.pre_train import train

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
BASE = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
MODEL = """
    model_name=default decoder_block=mixtral base_emb_dim=64 base_num_query_heads=4 head_dim=16
    base_num_kv_heads=4 base_mlp_dim=64 base_moe_mlp_dim=64 base_num_decoder_layers=2
    num_experts=8 num_experts_per_tok=2 load_balance_loss_weight=1 vocab_size=512
    dtype=float32 weight_dtype=float32 matmul_precision=highest attention=dot_product
"""
RUN = """
    run_name=tiny steps=5 learning_rate=0.02 per_device_batch_size=2 max_target_length=16
    ici_fsdp_parallelism=2 ici_expert_parallelism=4 hardware=cpu skip_jax_distributed_system=True
    dataset_type=synthetic megablox=False enable_checkpointing=False enable_tensorboard=False
    enable_goodput_recording=False monitor_goodput=False log_config=False
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--jax-ep", action="store_true")
    parser.add_argument("options", nargs="*")
    given = parser.parse_intermixed_args()
    given.folder.mkdir(exist_ok=True)
    metrics = given.folder / "metrics.jsonl"
    paths = [f"base_output_directory={given.folder}", f"metrics_file={metrics}"]
    arguments = ["train.py", str(BASE), *MODEL.split(), *RUN.split(), *paths, *given.options]
    if given.jax_ep:
        import jax_ep.integrations.maxtext

        jax_ep.integrations.maxtext.install()
    train.main(arguments)
    for line in metrics.read_text().splitlines():
        step = json.loads(line)
        print(json.dumps({name: step[f"learning/{name}"] for name in RESULTS}))


RESULTS = "lm_loss", "moe_lb_loss", "raw_grad_norm"
if __name__ == "__main__":
    main()
