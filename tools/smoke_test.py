# SPDX-License-Identifier: Apache-2.0
"""Checks an installed jax_ep: is it complete, and does it work?

Usage: python -P tools/smoke_test.py [--transport NAME] [--cuda] [--architectures [LIST]]

Runs on 8 virtual CPU devices; with --transport p2p, on up to 8 GPUs. -P keeps Python from importing
modules of this folder. Imports only what jax_ep requires; skips doctor, and says so, where the
extra `cli` is not installed. Stops with an error at the first check that fails.
"""

import argparse
import importlib
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep

RELEASE_ARCHITECTURES = "80,90,90a,100f"  # the default of CMakeLists.txt
N_TOKENS, TOP_K, HIDDEN_SIZE = 16, 2, 64


def main() -> None:
    """Runs the checks; each prints a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--transport", default="host", choices=["host", "p2p", "xla"])
    parser.add_argument("--cuda", action="store_true", help="require the CUDA extension")
    parser.add_argument(
        "--architectures",
        nargs="?",
        const=RELEASE_ARCHITECTURES,
        help="those that the CUDA extension must have; without a list, those of a release",
    )
    options = parser.parse_args()
    on_gpus = options.transport == "p2p"
    if not on_gpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 16)  # before jaxlib 0.12, two threads per device
    check_package()
    check_licenses()
    importlib.import_module("jax_ep._ffi")
    if options.cuda or on_gpus or options.architectures:
        check_cuda_extension()
    if options.architectures:
        check_architectures(set(options.architectures.split(",")))
    check_round_trip(jax.devices()[:8], options.transport)
    run_doctor("gpu" if on_gpus else "cpu")


def check_package() -> None:
    """The package is an installed one, not the sources."""
    folder = pathlib.Path(jax_ep.__file__).parent
    if (folder.parent / "pyproject.toml").exists():
        raise SystemExit(f"jax_ep must be an installed package; got the sources in {folder}.")
    print(f"jax_ep {jax_ep.__version__} in {folder}, Python {sys.version.split()[0]}")


def check_licenses() -> None:
    """The metadata names the licenses, and their texts are installed."""
    package = metadata.distribution("jax_ep")
    names = package.metadata.get_all("License-File") or []
    texts = [path for path in package.files or [] if "licenses" in path.parts]
    if not names or len(texts) != len(names):
        raise SystemExit(f"Each License-File must be installed; got {names} and {texts}.")
    print(f"license: {package.metadata['License-Expression']}; {len(texts)} files")


def check_cuda_extension() -> None:
    """The CUDA extension loads, which needs no GPU, and has the grouped matmuls."""
    extension = importlib.import_module("jax_ep._ffi_cuda")
    targets = extension.targets()
    missing = {"jax_ep_grouped_matmul", "jax_ep_gated_scaled_matmul"} - set(targets)
    if missing:
        raise SystemExit(f"The CUDA extension must have {missing}; has {sorted(targets)}.")
    print(f"CUDA extension: {len(targets)} targets; versions: {extension.cuda_versions()}")


def check_architectures(expected: set[str]) -> None:
    """The CUDA extension has machine code for exactly these architectures."""
    spec = importlib.util.find_spec("jax_ep._ffi_cuda")
    installed = [p for s in sys.path for p in pathlib.Path(s).glob("nvidia/cu*/bin/cuobjdump")]
    program = shutil.which("cuobjdump") or next(iter(installed), None)
    if program is None:
        raise SystemExit(
            "--architectures needs cuobjdump, on PATH or by pip install nvidia-cuda-cuobjdump."
        )
    listing = subprocess.run(
        [program, spec.origin], capture_output=True, text=True, check=True
    ).stdout
    found = listed_architectures(listing)
    if found != expected:
        raise SystemExit(f"Architectures must be {sorted(expected)}; got {sorted(found)}.")
    size = pathlib.Path(spec.origin).stat().st_size / 1e6
    print(f"architectures: {', '.join(sorted(found))}; {size:.1f} MB")


def listed_architectures(listing: str) -> set[str]:
    """The architectures of the machine code in the output of cuobjdump."""
    # Not --list-elf, which prints 100 for 100f.
    return set(re.findall(r"Fatbin elf code:\n=+\narch = sm_(\w+)", listing))


def check_round_trip(devices: list, transport: str) -> None:
    """With identity experts, a token comes back as its sum of weights times itself: exactly."""
    n_ranks = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    config = jax_ep.EPConfig(
        n_experts=2 * n_ranks,
        top_k=TOP_K,
        hidden_size=HIDDEN_SIZE,
        max_tokens_per_rank=N_TOKENS,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
    )
    random = np.random.default_rng(0)
    tokens = random.integers(-100, 100, (n_ranks * N_TOKENS, HIDDEN_SIZE)).astype(np.float32)
    ids = random.integers(0, config.n_experts, (n_ranks * N_TOKENS, TOP_K)).astype(np.int32)
    weights = random.integers(1, 8, ids.shape).astype(np.float32)
    with jax_ep.ep_init(mesh, "ep", config, transport) as group:

        def layer(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            rows = jax_ep.dispatch(group, tokens, ids, weights)
            return jax_ep.combine(group, rows.tokens, rows)

        spec = jax.P("ep")
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec)
        out = np.asarray(jax.jit(mapped)(tokens, ids, weights))
    n_wrong = int((out != tokens * weights.sum(axis=1, keepdims=True)).sum())
    if n_wrong:
        raise SystemExit(f"A round trip must be exact; {n_wrong} of {out.size} numbers differ.")
    print(f"round trip: exact on {n_ranks} devices ({devices[0].device_kind}), {transport}")


def run_doctor(platform: str) -> None:
    """`python -m jax_ep doctor` finds a transport that works."""
    if importlib.util.find_spec("click") is None or importlib.util.find_spec("rich") is None:
        print("doctor: not run, the extra `cli` is not installed")
        return
    ranks = ["--ranks", "8"] if platform == "cpu" else []
    subprocess.run(
        [sys.executable, "-P", "-m", "jax_ep", "doctor", "--platform", platform, *ranks], check=True
    )


if __name__ == "__main__":
    main()
