"""The measured items, in order of importance."""

import dataclasses
import functools
import importlib.util
from typing import Any

from baselines import BASELINES
from case import Case
from implementations import AT_COMBINE, AT_DISPATCH, BALANCED, NODES, OURS, REFERENCE
from jax_ep.formats import QUANTIZED
from timing import Repeats

N_CPU_RANKS = 8

# Environment variables of the measuring process, by variant; "" is the users' default.
VARIANTS: dict[str, dict[str, str]] = {
    "": {},
    "no command buffers": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},
    # glibc keeps freed memory, so that no page is mapped twice.
    "memory kept": dict(
        MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**40), MALLOC_ARENA_MAX="1"
    ),
}

_ALL_GATHER, _RAGGED = BASELINES
_ROUND_TRIP, _WITH_GRAD = "round trip", "round trip + grad"


@dataclasses.dataclass(frozen=True)
class Item:
    """One measurement."""

    name: str  # unique; `--only` matches it
    kind: str = "case"  # or "calls", "link", "matmuls", "overhead"
    case: Case | None = None
    implementations: tuple[str, ...] = (*OURS, _ALL_GATHER)
    wall: bool = False  # whether lone calls are timed
    # Lengths of the short and the long chain, by operation; and for bursts, each after a pause.
    chains: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    bursts: tuple[int, int] | None = None
    n_sets: int = 0  # sets of inputs for the kernel clock; 0: not measured
    repeats: Repeats = Repeats(max_samples=40, seconds=2.0)
    variant: str = ""  # in `VARIANTS`
    n_processes: int = 1  # each has its share of the devices, or a GPU
    # Of matmuls: H, F, groups; and the rows per group, on average.
    sizes: tuple[int, int, int] | None = None
    means: tuple[int, ...] = ()


def make_plan(platform: str, *, is_quick: bool) -> list[Item]:
    """Returns all items for a platform, `"cpu"` or `"gpu"`."""
    plans = {"cpu": (_cpu, _cpu_quick), "gpu": (_gpu, _gpu_quick)}
    return plans[platform][is_quick]()


def _item(case: Case, suffix: str = "", **options: Any) -> Item:
    return Item(case.name + suffix, case=case, **options)


# On CPUs: 8 virtual devices.

_CPU = Repeats(max_samples=30, seconds=3.0)
_CPU_CASE = functools.partial(Case, n_experts=64, top_k=8)
_CPU_LENGTHS = {16: (1, 9), 256: (1, 5), 2048: (1, 3)}


def _cpu() -> list[Item]:
    main = [_CPU_CASE(t, h) for t in (16, 256, 2048) for h in (256, 1024)]
    others = [_CPU_CASE(2048, h, capacity=2.0) for h in (256, 1024)]
    others += [_CPU_CASE(2048, 256, routing=r) for r in ("zipf", "half_empty", "one_rank")]
    others.append(_CPU_CASE(256, 1024, token_format="f32"))
    items = [*map(_cpu_item, [*main, *others]), Item("overhead", "overhead")]
    # A chain touches no new pages, so the allocator only matters to lone calls.
    kept = {"variant": "memory kept", "chains": {}}
    items += [_cpu_item(case, "-kept", **kept) for case in main]
    return items + [_cpu_item(case, "-xla", implementations=(REFERENCE,)) for case in main[::2]]


def _cpu_quick() -> list[Item]:
    few = dataclasses.replace(_CPU, max_samples=3)
    skewed = _CPU_CASE(16, 128, routing="zipf", capacity=4.0)
    items = [_cpu_item(_CPU_CASE(16, 256)), _cpu_item(skewed), Item("overhead", "overhead")]
    return [dataclasses.replace(item, repeats=few) for item in items]


def _cpu_item(case: Case, suffix: str = "", **options: Any) -> Item:
    chains = dict.fromkeys((_ROUND_TRIP, _WITH_GRAD), _CPU_LENGTHS[case.n_tokens])
    defaults = {"wall": True, "chains": chains, "repeats": _CPU}
    return _item(case, suffix, **defaults | options)


# On GPUs: all those of the host.

_GPU_CASE = functools.partial(Case, hidden_size=7168, n_experts=256, top_k=8)
_TOKENS = (128, 4096, 8, 1024, 1, 8192, 512, 32, 64)
_GRAD_TOKENS = (8, 128, 1024, 4096)
# `n_sms` of asynchronous calls, and the width of the layer that overlaps with them.
_OVERLAPS = ((16, 12288), (12, 12288), (24, 12288), (20, 8192))
_CALLS = ("dispatch", "combine")
_OVERLAP_GRADS = tuple(f"both + dense + grad{form}" for form in ("", ", then", ", overlap"))
_OVERLAP_OPERATIONS = (*_CALLS, "dense", "dispatch + dense", "combine + dense")
# Expert layers of models: H, F, E, K. The matmuls of the first three are also measured alone.
MODELS = {
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral 8x7B": (4096, 14336, 8, 2),
    "GPT-OSS-120B": (2880, 2880, 128, 4),
}
# The measured kinds of grouped matmuls alone, and their implementations.
MATMULS = ("bfloat16", "FP8", "gradient of weights")
OURS_ALONE, RAGGED_DOT, TOKAMAX = "jax_ep", "lax.ragged_dot", "tokamax"
_NODES_TOKENS = (4096, 8, 128, 1024, 16, 32)
_LAYER_TOKENS = (4096, 8, 128, 8192)
_LAYER = ("layer", "experts", "dense matmuls", _ROUND_TRIP)
_LAYER_GRAD = ("layer + grad", "experts + grad", _WITH_GRAD)


def _gpu() -> list[Item]:
    cases = {n: _GPU_CASE(n, capacity=1.5) for n in _TOKENS}
    items = [Item("link", "link")]
    items += [_gpu_item(case, grads=n in _GRAD_TOKENS) for n, case in cases.items()]
    items += [_calls(), *_formats(cases[4096]), *_formats(cases[128])]
    plain = {"variant": "no command buffers"}
    items += [_gpu_chain(cases[n], "-plain", **plain) for n in (1, 8, 32, 128)]
    items.append(_calls("-plain", **plain))
    items += _overlaps(cases[4096], _OVERLAPS)
    for suffix, name in (("-ragged", _RAGGED), ("-xla", REFERENCE)):
        options = {"implementations": (name,), "chains": {_ROUND_TRIP: (2, 8)}}
        items += [_gpu_chain(cases[n], suffix, **options) for n in (8, 128, 1024)]
    zipf = ((128, None), (4096, 3.0))
    items += [_gpu_item(_GPU_CASE(n, routing="zipf", capacity=c)) for n, c in zipf]
    items += [_nodes(_GPU_CASE(n, capacity=1.5)) for n in _NODES_TOKENS]
    matmuls = [
        _matmul_items(model.split()[0], (h, f, min(e, 32)), (16, 128, 1024), (64, 256, 512))
        for model, (h, f, e, _) in list(MODELS.items())[:3]  # a GPU has at most 32 experts
    ]
    items += [each[0] for each in matmuls]
    return [*items, *_layers(), *_imbalance(), *(item for each in matmuls for item in each[1:])]


def _gpu_quick() -> list[Item]:
    """One tiny item of each kind: a test of the harness."""
    case = Case(16, 64, n_experts=16, top_k=4)
    skewed = dataclasses.replace(case, routing="zipf")
    items = [Item("link", "link"), _gpu_item(case, grads=True), _gpu_item(skewed), _calls()]
    items.append(_gpu_chain(case, "-xla", implementations=(REFERENCE,)))
    # Blocks of BlockwiseFP8 have 128 elements.
    items += _formats(dataclasses.replace(case, hidden_size=128))
    items += [*_overlaps(case, ((4, 128),)), _nodes(case)]
    items += _layer_items(dataclasses.replace(case, expert_size=32))
    items += _layer_items(dataclasses.replace(case, hidden_size=128, expert_size=128))
    return [
        dataclasses.replace(
            item,
            chains=dict.fromkeys(item.chains, (1, 2)),
            bursts=item.bursts and (1, 2),
            n_sets=min(item.n_sets, 2),
            repeats=Repeats(2, None if item.n_processes > 1 else 1.0),
        )
        for item in [*items, *_matmul_items("tiny", (128, 128, 4), (4,), (8,))]
    ]


def _gpu_chain(case: Case, suffix: str = "", **options: Any) -> Item:
    """Chains are longer where steps are short; unrolled baselines compile slowly."""
    n = case.n_tokens
    # A chain of few tokens must be long: starting a program takes as long as ten of its steps.
    lengths = (8, 72) if n <= 64 else (8, 40) if n <= 128 else (4, 16) if n <= 512 else (2, 8)
    return _item(case, suffix, **{"chains": {_ROUND_TRIP: lengths}} | options)


def _gpu_item(case: Case, *, grads: bool = False) -> Item:
    item = _gpu_chain(case, wall=True, n_sets=_n_sets(case))
    chains = {**item.chains, _WITH_GRAD: (2, 8)} if grads else item.chains
    return dataclasses.replace(item, chains=chains)


def _n_sets(case: Case) -> int:
    return 6 if case.n_tokens <= 512 else 3


def _calls(suffix: str = "", **options: Any) -> Item:
    measured = {"chains": {_ROUND_TRIP: (8, 72)}, "repeats": Repeats(max_samples=15, seconds=1.0)}
    return Item("calls" + suffix, "calls", **measured | options)


def _formats(case: Case) -> list[Item]:
    """Dispatch in each quantized format, by the kernel clock, without weights."""
    cases = [dataclasses.replace(case, token_format=name) for name in QUANTIZED]
    return [_item(each, implementations=(AT_COMBINE,), n_sets=_n_sets(case)) for each in cases]


def _nodes(case: Case) -> Item:
    """Round trips of two processes with a GPU each: as one node, and as two."""
    # Few tokens take so little time that a sample needs several calls.
    repeats = Repeats(15, None, n_queued=max(1, min(32, 2048 // case.n_tokens)))
    options = {"implementations": NODES, "chains": {_ROUND_TRIP: (4, 24)}, "n_processes": 2}
    return _item(case, "-nodes", repeats=repeats, **options)


def _matmul_items(model: str, sizes: tuple, means: tuple, more: tuple) -> list[Item]:
    """At some numbers of rows, in a minute; at more; and beside others' matmuls."""
    tokamax = (TOKAMAX,) if importlib.util.find_spec("tokamax") else ()
    repeats = Repeats(max_samples=10, seconds=0.5)

    def item(suffix: str, means: tuple, operations: tuple[str, ...], *others: str) -> Item:
        options = {"chains": dict.fromkeys(operations, (2, 6)), "sizes": sizes, "means": means}
        options |= {"implementations": (OURS_ALONE, *others), "repeats": repeats}
        return Item(f"matmuls-{model}{suffix}", "matmuls", **options)

    of_others = item("-others", means, MATMULS[:1], RAGGED_DOT, *tokamax)
    return [item("", means, MATMULS), item("-more", more, MATMULS), of_others]


def _layers() -> list[Item]:
    """Layers of all models and their parts; then with the matmuls of others, which are slow."""
    sizes = [(n, *model) for n in _LAYER_TOKENS for model in MODELS.values()]
    # Groups as large as DeepSeek-V3's on eight GPUs; long sequences.
    sizes += [(4096, 7168, 2048, 64, 8), (16384, *MODELS["Qwen3-30B-A3B"])]
    items = []
    for n, h, f, e, k in sizes:
        items += _layer_items(Case(n, h, e, k, capacity=1.5, expert_size=f))
    return sorted(items, key=lambda item: item.implementations != (AT_DISPATCH,))


def _imbalance() -> list[Item]:
    """Layers whose busiest rank of 4 has twice the mean, and balanced ones: with copies, without.

    The capacity of the latter has room for all rows, so both compute the same.
    """
    options = {"implementations": (AT_DISPATCH, BALANCED), "repeats": Repeats(10, 2.0)}
    options["chains"] = dict.fromkeys(("layer", "layer + grad"), (1, 3))
    items = []
    for n, model in ((16384, "Qwen3-30B-A3B"), (4096, "Qwen3-30B-A3B"), (4096, "DeepSeek-V3")):
        h, f, e, k = MODELS[model]
        for routing, capacity in (("skewed", 3.0), ("uniform", 2.0)):
            case = Case(n, h, e, k, routing=routing, capacity=capacity, expert_size=f)
            items.append(_item(case, "-balanced", **options))
    return items


def _layer_items(case: Case) -> list[Item]:
    """In bfloat16, with other matmuls, and in FP8 if rows and values have whole blocks."""
    lengths = (1, 9) if case.n_tokens <= 128 else (1, 3)

    def item(case: Case, suffix: str, names: tuple[str, ...], operations: tuple[str, ...]) -> Item:
        chains, repeats = dict.fromkeys(operations, lengths), Repeats(max_samples=10, seconds=2.0)
        return _item(case, suffix, implementations=names, chains=chains, repeats=repeats)

    operations = _LAYER + _LAYER_GRAD if case.n_tokens > 128 else _LAYER
    items = [item(case, "", (AT_DISPATCH,), operations)]
    if case.hidden_size % 128 == 0 and case.expert_size % 128 == 0:
        quantized = dataclasses.replace(case, token_format="blockwise_fp8")
        grads = ("layer + grad", "layer + grad in FP8") if case.n_tokens > 128 else ()
        items.append(item(quantized, "", (AT_DISPATCH,), ("layer", "experts", *grads)))
    if case.n_tokens in (128, 4096):
        items.append(item(case, "-lax", (_ALL_GATHER,), ("layer",)))
    return items


def _overlaps(case: Case, sizes: tuple[tuple[int, int], ...]) -> list[Item]:
    """Calls alone on all multiprocessors; then on `n_sms` of them, alone and beside a layer."""
    alone = dict.fromkeys(_CALLS, (4, 24)) | dict.fromkeys(_OVERLAP_GRADS, (2, 8))
    options = {"implementations": (AT_DISPATCH,), "bursts": (2, 10)}
    options["repeats"] = Repeats(max_samples=10, seconds=2.0, n_queued=4)
    items = []
    for n_sms, width in ((None, sizes[0][1]), *sizes):
        chains = dict.fromkeys(_OVERLAP_OPERATIONS, (4, 24)) if n_sms else alone
        of_width = dataclasses.replace(case, n_sms=n_sms, width=width)
        items.append(_item(of_width, chains=chains, **options))
    return items
