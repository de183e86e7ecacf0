"""Turns a run into Markdown tables: those of docs/speed.md, and all figures."""

from typing import Any

from implementations import AT_COMBINE, AT_DISPATCH, BALANCED, NODES, OURS
from jax_ep.formats import FORMATS, QUANTIZED
from plan import MODELS, OURS_ALONE
from records import TABLES, Row, Run

ROUND_TRIPS = ("round trip", "round trip + grad")
# Tables that have no report of their own.
_PLAIN = ("kernels", "steps", "silu", "tests", "training", "training_parts")
_NONE = "–"
_MODEL_SIZES = ("hidden_size", "expert_size", "n_experts", "top_k")


class Report:
    """A run, shown as tables.

    Attributes:
        on_gpu: whether GPUs were measured.
        best_of_ours: the implementation that is compared with the fastest baseline.
        by_name: the cases.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.on_gpu = run, run.facts.get("platform") != "cpu"
        self.best_of_ours = AT_DISPATCH if self.on_gpu else AT_COMBINE
        self.by_name = {case["name"]: case for case in run.rows("cases")}
        self._times: dict[tuple, dict[str, Row]] = {}  # by implementation
        for row in run.rows("times"):
            where = row["case"], row.get("variant", ""), row["operation"], row["clock"]
            self._times.setdefault(where, {})[row["implementation"]] = row

    def us(
        self, case: str, operation: str, clock: str, name: str, variant: str = ""
    ) -> float | None:
        """Returns a median in µs; the fastest baseline's if `name` is `"lax"`.

        None if there is none. Periods are differences of times; where noise hides them, so that
        the lower quartile is not positive, there is none.
        """
        found = self._times.get((case, variant, operation, clock), {})
        figures = [found[n]["us"] for n in found if n == name or name == "lax" == n[:3]]
        seen = (median for median, lower, _ in figures if lower > 0 or clock != "chain")
        return min(seen, default=None)

    def cases(self, routing: str = "uniform") -> list[str]:
        """Returns the names of cases with bfloat16 tokens, without layers, by size."""
        chosen = {
            name: (case["n_tokens"], case["hidden_size"], case.get("capacity", 0))
            for name, case in self.by_name.items()
            if (case["routing"], case["token_format"]) == (routing, "bf16")
            if not case["width"] and not case["expert_size"]
        }
        return sorted(chosen, key=chosen.__getitem__)

    def label(self, name: str) -> str:
        """Returns T; on CPUs also H, and the capacity if it is below the worst case."""
        case = self.by_name[name]
        if self.on_gpu:
            return str(case["n_tokens"])
        capacity = f", {case['capacity']:g}×" if "capacity" in case else ""
        return f"{case['n_tokens']}, {case['hidden_size']}{capacity}"

    def markdown(self) -> str:
        """Returns all tables that have rows, those of docs/speed.md first, and the link's rates."""
        parts = [self._periods(operation) for operation in ROUND_TRIPS]
        if self.on_gpu:
            parts += [self._kernels(), self._formats(), self._link(), self._overlaps()]
            parts += [self._layers(), self._imbalance(), self._matmuls()]
            parts += [self._nodes(), self._calls()]
            parts.append(self._periods("round trip", variant="no command buffers"))
        else:
            parts.insert(0, self._speedups(""))
            parts.append(self._speedups("memory kept"))
        others = ("zipf", "half_empty", "one_rank")
        parts += [self._periods("round trip", routing) for routing in others]
        parts += map(self._plain, _PLAIN)
        return "\n\n".join(filter(None, parts))

    def all_figures(self) -> str:
        """Returns one table of all figures, and what failed or was not measured."""
        rows = {
            ", ".join(filter(None, where)): {n: row["us"] for n, row in found.items()}
            for where, found in self._times.items()
        }
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        cells = [[what, *(_spread(row.get(n)) for n in names)] for what, row in rows.items()]
        parts = [_table("all figures, µs: median (quartiles)", ["", *names], cells)]
        for key in ("failed", "not_measured"):
            rows = self.run.rows(key)
            parts += [f"{key.replace('_', ' ')}: {row['item']}: {row['why']}" for row in rows]
        return "\n\n".join(filter(None, parts))

    def _plain(self, name: str) -> str:
        rows = [[str(row.get(c, "")) for c in TABLES[name]] for row in self.run.rows(name)]
        return _table(name, [*TABLES[name]], rows)

    def _by_case(self, title, header, cells, routing="uniform") -> str:
        """A table with a row for each case that has a figure."""
        rows = [[self.label(case), *cells(case)] for case in self.cases(routing)]
        rows = [row for row in rows if any(cell != _NONE for cell in row[1:])]
        return _table(title, ["T" if self.on_gpu else "T, H", *header], rows)

    def _ratio(self, case: str, operation: str, clock: str, variant: str) -> str:
        """The speed-up: the fastest baseline's time divided by ours."""
        key = case, operation, clock
        lax, ours = (self.us(*key, n, variant) for n in ("lax", self.best_of_ours))
        return f"{lax / ours:.1f}×" if lax and ours else _NONE

    def _periods(self, operation: str, routing: str = "uniform", variant: str = "") -> str:
        def cells(case: str) -> list[str]:
            us = [self.us(case, operation, "chain", n, variant) for n in (*OURS, "lax")]
            ratio = self._ratio(case, operation, "chain", variant)
            return [*map(_us, us[:2]), f"{_us(us[2])} ({ratio})" if us[2] else _NONE]

        header = [name.removeprefix("jax_ep, ") for name in OURS] + ["best `jax.lax`"]
        words = [variant, "" if routing == "uniform" else f"{routing} routing"]
        title = ", ".join(filter(None, [operation, "period in a chain, µs", *words]))
        return self._by_case(title, header, cells, routing)

    def _speedups(self, variant: str) -> str:
        columns = [("dispatch", "wall"), ("combine", "wall"), *((o, "chain") for o in ROUND_TRIPS)]

        def cells(case: str) -> list[str]:
            return [self._ratio(case, *column, variant) for column in columns]

        title = ", ".join(filter(None, ["speed-up over the best `jax.lax`", variant]))
        return self._by_case(title, [", ".join(column) for column in columns], cells)

    def _kernels(self) -> str:
        """Times of our kernels, and the rate at which tokens leave each GPU."""

        def cells(name: str) -> list[str]:
            case, found = self.by_name[name], []
            for operation in ("dispatch", "combine"):
                us = self.us(name, operation, "kernel", AT_DISPATCH)
                found += [_us(us), _rate(case, us)]
            return [*found, _us(self.us(name, "combine", "kernel", AT_COMBINE))]

        combines = "combine, weights at dispatch", "GB/s", "combine, weights at combine"
        return self._by_case("kernels, µs of GPU time", ["dispatch", "GB/s", *combines], cells)

    def _formats(self) -> str:
        """Dispatch by token format, for each T at which all formats were measured."""
        names = ["bf16", *QUANTIZED]
        found: dict[int, dict[str, tuple[dict, float]]] = {}
        for name, case in self.by_name.items():
            us = self.us(name, "dispatch", "kernel", AT_COMBINE)
            if us and case["routing"] == "uniform":
                found.setdefault(case["n_tokens"], {})[case["token_format"]] = case, us
        rows = []
        for n_tokens, by_format in sorted(found.items()):
            if by_format.keys() >= set(names):
                figures = [by_format[name] for name in names]
                rows.append([f"T = {n_tokens}, µs", *(_us(us) for _, us in figures)])
                rows.append(["GB/s off the GPU", *(_rate(*both) for both in figures)])
        types = [f"`{type(FORMATS[name]()).__name__}`" for name in names]
        return _table("dispatch by token format, kernel", ["", *types], rows)

    def _calls(self) -> str:
        """Gaps between kernels in a chain, and how many kernels of others are in one."""
        rows = []
        operations = "period", "dispatch", "combine", "gap by period", "gap"
        for case, variant in dict.fromkeys(w[:2] for w in self._times if w[3] == "gaps"):
            us = [self.us(case, o, "gaps", AT_DISPATCH, variant) for o in operations]
            others = ", ".join(
                f"{row['name']}: {row['per_gap']:.2g}"
                for row in self.run.rows("gap_kernels")
                if (row["case"], row.get("variant", "")) == (case, variant)
            )
            where = ", ".join(filter(None, [case, variant]))
            rows.append([where, *map(_us, us[:3]), *(_form(x, ".2f") for x in us[3:]), others])
        header = ["", *operations, "other kernels in a gap"]
        return _table("gaps between calls in a chain, µs", header, rows)

    def _overlaps(self) -> str:
        """Overlap. "hidden" is the share of the shorter of call and layer that adds no time."""
        header = ["call, n_sms, width", "on all SMs", "on n_sms", "layer", "both"]
        header += ["hidden of n_sms", "of all", "longer", "kernels", "speed-up"]
        cases = {n: case for n, case in self.by_name.items() if case["width"]}
        whole = next((name for name, case in cases.items() if "n_sms" not in case), "")
        rows = []
        for operation in ("dispatch", "combine"):
            both = f"{operation} + dense"
            for name, case in cases.items():
                for clock in ("chain", "chain in bursts"):
                    us = [self.us(whole, operation, clock, AT_DISPATCH)]
                    keys = [(name, o) for o in (operation, "dense", both)]
                    us += [self.us(*key, clock, AT_DISPATCH) for key in keys]
                    others = [self.us(*k, "other kernels", AT_DISPATCH) for k in keys]
                    label = f"{operation}, {case.get('n_sms')}, {case['width']}"
                    label = label if clock == "chain" else "in bursts"
                    rows += [[label, *_overlap_cells(us, others)]] if all(us) else []
        return _table("an asynchronous call beside a dense layer, µs", header, rows)

    def layers(self, *, balanced: bool = False) -> list[tuple[str, str]]:
        """Returns the model and the name of each bfloat16 case with experts, by model and T.

        `balanced`: the cases that were also measured with balanced ranks, or the others.
        """
        found = [
            (list(MODELS.values()).index(sizes), case["n_tokens"], name)
            for name, case in self.by_name.items()
            if case["token_format"] == "bf16"
            if balanced == (self.layer_us(name, "layer", BALANCED) is not None)
            if (sizes := tuple(case[key] for key in _MODEL_SIZES)) in MODELS.values()
        ]
        return [(list(MODELS)[i], name) for i, _, name in sorted(found)]

    def layer_us(self, name: str, operation: str, by: str = AT_DISPATCH) -> float | None:
        """Returns the period of a layer, or of a part of it."""
        return self.us(name, operation, "chain", by)

    def _layers(self) -> str:
        rows = []
        for model, name in self.layers():
            operations = "layer", "experts", "dense matmuls", "round trip", "layer + grad"
            layer, experts, dense, exchange, grad = (self.layer_us(name, o) for o in operations)
            quantized = name.replace("-E", "-blockwise_fp8-E")
            fp8, lax = self.layer_us(quantized, "layer"), self.layer_us(name, "layer", "lax")
            parts = experts + exchange if experts and exchange else None
            cells = [_ms(layer), _share(layer, parts), _share(dense, experts)]
            in_fp8 = [self.layer_us(quantized, o) for o in ("layer + grad", "layer + grad in FP8")]
            ratios = [(grad, grad, layer), (fp8, layer, fp8), *((us, grad, us) for us in in_fp8)]
            cells += [_with_ratio(*each) for each in (*ratios, (lax, lax, layer))]
            rows.append([model, str(self.by_name[name]["n_tokens"]), *cells])
        header = ["", "T", "layer", "of its parts", "experts, of the dense rate", "with gradients"]
        header += ["in FP8", "with gradients", "with gradients in FP8", "`jax.lax`"]
        return _table("expert layers, ms", header, rows)

    def _imbalance(self) -> str:
        rows = []
        for model, name in self.layers(balanced=True):
            case, cells = self.by_name[name], []
            for operation in ("layer", "layer + grad"):
                us = [self.layer_us(name, operation, by) for by in (AT_DISPATCH, BALANCED)]
                cells += [_ms(us[0]), _with_ratio(us[1], *us)]
            rows.append([model, str(case["n_tokens"]), case["routing"], *cells])
        header = ["", "T", "routing", "layer", "balanced", "with gradients", "balanced"]
        return _table("layers with and without balanced ranks, ms", header, rows)

    def _matmuls(self) -> str:
        """Grouped matmuls: TFLOP/s, and the time relative to the larger of the limits."""
        cases = self.run.rows("matmuls")
        names = {case["name"] for case in cases}
        keys = [(where[2], n) for where, by in self._times.items() if where[0] in names for n in by]
        columns = [key for key in dict.fromkeys(keys) if key[1] not in ("dense", "memory")]
        rows = []
        for case in cases:
            mflops = 2e-6 * case["n_rows"] * case["k"] * case["n"]
            row = [case["name"]]
            for operation, name in columns:
                us = self.us(case["name"], operation, "chain", name)
                share = _share(us, self._limit(case["limits"], operation))
                row.append(f"{mflops / us:.0f} ({share})" if us else _NONE)
            rows.append(row)
        titles = [o if name == OURS_ALONE else f"{o}, {name}" for o, name in columns]
        title = "grouped matmuls, TFLOP/s (time / the larger limit)"
        return _table(title, ["", *titles], rows)

    def _limit(self, case: str, operation: str) -> float | None:
        """The dense matmul's time, the faster one for FP8, or that of the memory if longer."""
        names = ["bfloat16", "FP8"] if operation == "FP8" else ["bfloat16"]
        dense = [us for name in names if (us := self.us(case, name, "chain", "dense"))]
        memory = self.us(case, operation, "chain", "memory") or 0
        return max(min(dense), memory) if dense else None

    def _nodes(self) -> str:
        def cells(case: str) -> list[str]:
            us = [self.us(case, ROUND_TRIPS[0], "chain", name) for name in NODES]
            return [f"{_us(x)} ({_share(x, us[0])})" if x else _NONE for x in us]

        title = "processes as one node, and as nodes: round trip, µs (times as long)"
        return self._by_case(title, [*NODES], cells)

    def _link(self) -> str:
        link = next(iter(self.run.rows("links")), {})
        form = "Link, GB/s off each GPU: {:.0f} by stores of a kernel, {:.0f} by copy engines."
        return form.format(link["gb_s"], link["gb_s_by_copy_engines"]) if link else ""


def _form(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _us(us: float | None) -> str:
    return _form(us, ".1f" if us is not None and us < 100 else ".0f")


def _ms(us: float | None) -> str:
    return _form(us and us / 1000, ".3g")


def _share(part: float | None, whole: float | None) -> str:
    return _form(part / whole if part and whole else None, ".2f")


def _with_ratio(us: float | None, above: float | None, below: float | None) -> str:
    return f"{_ms(us)} ({above / below:.1f}×)" if us and above and below else _NONE


def _overlap_cells(us: list, others: list) -> list[str]:
    on_all, on_some, dense, both = us
    shares = [(call + dense - both) / min(call, dense) for call in (on_some, on_all)]
    cells = [f"{x:.0f}" for x in us] + [f"{x:.0%}" for x in (*shares, both / dense - 1)]
    slower = ""
    if all(x is not None for x in others) and others[1]:
        slower = f"{(others[2] - others[0]) / others[1] - 1:.0%}"
    return [*cells, slower, f"{(on_all + dense) / both:.2f}"]


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{title}:\n\n{text}" if rows else ""


def _rate(case: dict[str, Any], us: float | None) -> str:
    """GB/s that leave a GPU: one payload with scales per (token, rank)."""
    n_bytes = case["remote_messages"] * case["token_bytes"]
    return f"{n_bytes / us * 1e-3:.0f}" if us else _NONE


def _spread(us: list[float] | None) -> str:
    return "{} ({} to {})".format(*map(_us, us)) if us else _NONE
