"""MoE layers as their publishers store and define them: made-up tensors, and NumPy's results.

Every formula is written from the model's definition and loops over tokens and choices.
"""

import json

import ml_dtypes
import numpy as np

E, K, H, F, S, T = 8, 2, 256, 128, 256, 16
N_GROUPS, TOPK_GROUPS, SCALING = 4, 2, 2.5
LIMIT = 0.5  # GPT-OSS's limit is 7, which no value here would reach
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # then the same with a minus


def random(rng, *shape, dtype=ml_dtypes.bfloat16):
    return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(dtype)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    exp = np.exp(x - x.max())
    return exp / exp.sum()


def gated(x, gate, up, down):
    """Of matrices `[n_out, n_in]`."""
    hidden = gate @ x
    return down @ (hidden * sigmoid(hidden) * (up @ x))


def best(scores, n=K):
    return np.argsort(-scores, kind="stable")[:n]


class Published:
    """A model's layers: `tensors` makes those of one, `result` is what it does to a token.

    `config` has the fields of `config.json` that say something of them.
    """

    prefix = "model.layers.{}.mlp."
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

    def tensors(self, layer, seed=0):
        rng = np.random.default_rng([layer, seed])
        return {self.prefix.format(layer) + key: x for key, x in self.make(rng).items()}

    def make(self, rng):
        tensors = {"gate.weight": random(rng, E, H)}
        for e in range(E):
            tensors |= self.make_expert(rng, f"experts.{e}", F)
        return tensors

    def make_expert(self, rng, key, size):
        shapes = {"gate": (size, H), "up": (size, H), "down": (H, size)}
        return {f"{key}.{self.names[n]}.weight": random(rng, *x) for n, x in shapes.items()}

    def results(self, tensors, layer, tokens):
        """In float64, `[T, H]`."""
        prefix = self.prefix.format(layer)
        own = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
        numbers = {k: np.asarray(x, np.float64) for k, x in own.items() if x.dtype != np.uint8}
        return np.stack([self.result(numbers, x) for x in np.asarray(tokens, np.float64)])

    def result(self, tensors, x):
        weights = self.weights(tensors, x)
        return sum(w * self.expert(tensors, f"experts.{e}", x) for e, w in weights.items())

    def expert(self, tensors, key, x):
        names = [self.names[n] for n in ("gate", "up", "down")]
        return gated(x, *[tensors[f"{key}.{name}.weight"] for name in names])


class Qwen3(Published):
    def __init__(self, normalizes=True):
        self.normalizes = normalizes
        self.config = {
            "model_type": "qwen3_moe",
            "hidden_size": H,
            "intermediate_size": 3 * F,
            "moe_intermediate_size": F,
            "norm_topk_prob": normalizes,
            "num_experts": E,
            "num_experts_per_tok": K,
        }

    def weights(self, tensors, x):
        scores = softmax(tensors["gate.weight"] @ x)
        ids = best(scores)
        total = scores[ids].sum() if self.normalizes else 1
        return dict(zip(ids, scores[ids] / total, strict=True))


class Mixtral(Published):
    config = {
        "model_type": "mixtral",
        "hidden_size": H,
        "intermediate_size": F,
        "num_experts_per_tok": K,
        "num_local_experts": E,
    }
    prefix = "model.layers.{}.block_sparse_moe."
    names = {"gate": "w1", "up": "w3", "down": "w2"}

    def weights(self, tensors, x):
        logits = tensors["gate.weight"] @ x
        ids = best(logits)
        return dict(zip(ids, softmax(logits[ids]), strict=True))


class DeepseekV3(Published):
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": H,
        "intermediate_size": 3 * F,
        "moe_intermediate_size": F,
        "n_group": N_GROUPS,
        "n_routed_experts": E,
        "n_shared_experts": S // F,
        "norm_topk_prob": True,
        "num_experts_per_tok": K,
        "routed_scaling_factor": SCALING,
        "topk_group": TOPK_GROUPS,
    }

    def make(self, rng):
        bias = random(rng, E, dtype=np.float32)
        shared = self.make_expert(rng, "shared_experts", S)
        return super().make(rng) | shared | {"gate.e_score_correction_bias": bias}

    def weights(self, tensors, x):
        scores = sigmoid(tensors["gate.weight"] @ x)
        biased = scores + tensors["gate.e_score_correction_bias"]
        groups = biased.reshape(N_GROUPS, -1)
        chosen = best(np.sort(groups)[:, -2:].sum(axis=-1), TOPK_GROUPS)
        masked = np.full_like(groups, -np.inf)
        masked[chosen] = groups[chosen]
        ids = best(masked.reshape(-1))
        return dict(zip(ids, SCALING * scores[ids] / scores[ids].sum(), strict=True))

    def result(self, tensors, x):
        return super().result(tensors, x) + self.expert(tensors, "shared_experts", x)


class GptOss(Published):
    config = {
        "model_type": "gpt_oss",
        "hidden_size": H,
        "intermediate_size": F,
        "num_experts_per_tok": K,
        "num_local_experts": E,
        "swiglu_limit": LIMIT,
    }

    def make(self, rng):
        return {
            "router.weight": random(rng, E, H),
            "router.bias": random(rng, E),
            "experts.gate_up_proj": random(rng, E, H, 2 * F),
            "experts.gate_up_proj_bias": random(rng, E, 2 * F),
            "experts.down_proj": random(rng, E, F, H),
            "experts.down_proj_bias": random(rng, E, H),
        }

    def weights(self, tensors, x):
        logits = tensors["router.weight"] @ x + tensors["router.bias"]
        ids = best(logits)
        return dict(zip(ids, softmax(logits[ids]), strict=True))

    def expert(self, tensors, key, x):
        e = int(key.removeprefix("experts."))
        bias = tensors["experts.gate_up_proj_bias"][e]
        hidden = x @ tensors["experts.gate_up_proj"][e] + bias
        gate, up = np.minimum(hidden[::2], LIMIT), np.clip(hidden[1::2], -LIMIT, LIMIT)
        values = (up + 1) * gate * sigmoid(1.702 * gate)
        return values @ tensors["experts.down_proj"][e] + tensors["experts.down_proj_bias"][e]


def in_fp8(tensors, seed=0):
    """Experts as e4m3 codes of blocks of 128 x 128, and as the numbers that these stand for."""
    rng, codes, numbers = np.random.default_rng(seed), dict(tensors), dict(tensors)
    for key in [key for key in tensors if "_proj.weight" in key]:
        n, m = tensors[key].shape
        code = rng.uniform(-448, 448, (n, m)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(1e-4, 4e-4, (n // 128, m // 128)).astype(np.float32)
        codes |= {key: code, f"{key}_scale_inv": scale}
        each = np.kron(scale, np.ones((128, 128), np.float32))
        numbers[key] = code.astype(np.float32) * each
    return codes, numbers


def in_mxfp4(tensors, seed=0):
    """Experts as blocks of 32 along their inputs, and as the numbers that these stand for."""
    rng, codes, numbers = np.random.default_rng(seed), dict(tensors), dict(tensors)
    for key in [key for key in tensors if key.endswith("_proj")]:
        n_experts, n_in, n_out = codes.pop(key).shape
        blocks = rng.integers(256, size=(n_experts, n_out, n_in // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 124, size=blocks.shape[:-1]).astype(np.uint8)
        codes |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values = np.empty((*blocks.shape[:-1], 32), np.float32)
        signed = np.concatenate([E2M1, -E2M1])
        values[..., 0::2], values[..., 1::2] = signed[blocks & 15], signed[blocks >> 4]
        values *= np.exp2(scales.astype(np.float32) - 127)[..., None]
        numbers[key] = values.reshape(n_experts, n_out, n_in).swapaxes(1, 2)
    return codes, numbers


def write_safetensors(path, tensors):
    """By the definition of the format: the header's length, the header, then the numbers."""
    kinds = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for key, x in tensors.items():
        ends = [len(data), len(data) + x.nbytes]
        header[key] = {"dtype": kinds[x.dtype.name], "shape": x.shape, "data_offsets": ends}
        data += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
