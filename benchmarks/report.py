"""Turns a record into Markdown tables: those of README.md, and all figures."""

from typing import Any

from case import FORMATS
from implementations import AT_COMBINE, AT_DISPATCH, OURS
from plan import CAPACITY, MODELS

ROUND_TRIPS = ("round trip", "round trip + grad")
_NONE = "–"
_MODEL_SIZES = ("hidden_size", "expert_size", "n_experts", "top_k")
_RATES = (
    "dense",
    "bfloat16",
    "transposed weights",
    "FP8",
    "gradient of rows",
    "gradient of weights",
)


class Report:
    """A record, shown as tables.

    Attributes:
        on_gpu: whether GPUs were measured.
        best_of_ours: the implementation that is compared with the fastest baseline.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.on_gpu = record["platform"] == "gpu"
        self.best_of_ours = AT_DISPATCH if self.on_gpu else AT_COMBINE

    def us(
        self, case: str, operation: str, clock: str, name: str, variant: str = ""
    ) -> float | None:
        """Returns a median in µs; the fastest baseline's if `name` is `"lax"`.

        None if there is none. Periods are differences of times; where noise hides them, so that
        the lower quartile is not positive, there is none.
        """
        where = f"{case}, {variant}" if variant else case
        found = self.record["results"].get(where, {}).get(operation, {}).get(clock, {})
        figures = [found[n]["us"] for n in found if n == name or name == "lax" == n[:3]]
        seen = (median for median, lower, _ in figures if lower > 0 or clock != "chain")
        return min(seen, default=None)

    def cases(self, routing: str = "uniform") -> list[str]:
        """Returns the names of cases with bfloat16 tokens and no dense layer, by size.

        Leaves out those that only compare capacities.
        """
        others = {name for pair in self._capacity_pairs() for name in pair}
        chosen = {
            name: (case["n_tokens"], case["hidden_size"], case["capacity"] or 0)
            for name, case in self.record["cases"].items()
            if (case["routing"], case["token_format"]) == (routing, "bf16")
            if not case["width"] and not case.get("expert_size") and name not in others
        }
        return sorted(chosen, key=chosen.__getitem__)

    def label(self, name: str) -> str:
        """Returns T; on CPUs also H, and the capacity if it is below the worst case."""
        case = self.record["cases"][name]
        if self.on_gpu:
            return str(case["n_tokens"])
        capacity = f", {case['capacity']:g}×" if case["capacity"] else ""
        return f"{case['n_tokens']}, {case['hidden_size']}{capacity}"

    def markdown(self) -> str:
        """Returns all tables that have rows, those of README.md first, and the link's rates."""
        parts = [self._periods(operation) for operation in ROUND_TRIPS]
        if self.on_gpu:
            parts += [self._kernels(), self._formats(), self._link(), self._overlaps()]
            parts += [self._layers(), self._matmuls()]
            parts += [self._calls(), self._first_calls(), self._capacities()]
            parts.append(self._periods("round trip", variant="no command buffers"))
        else:
            parts.insert(0, self._speedups(""))
            parts += [self._speedups("memory kept"), self._overheads()]
        for routing in ("zipf", "half_empty", "one_rank"):
            parts.append(self._periods("round trip", routing))
        return "\n\n".join(filter(None, parts))

    def all_figures(self) -> str:
        """Returns one table of all figures, and what failed or was not measured."""
        rows = {
            f"{case}, {operation}, {clock}": {n: f["us"] for n, f in found.items()}
            for case, by_operation in self.record["results"].items()
            for operation, by_clock in by_operation.items()
            for clock, found in by_clock.items()
        }
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        cells = [[what, *(_spread(row.get(n)) for n in names)] for what, row in rows.items()]
        parts = [_table("all figures, µs: median (quartiles)", ["", *names], cells)]
        for key in ("failed", "not_measured"):
            parts += [f"{key.replace('_', ' ')}: {why}" for why in self.record[key]]
        return "\n\n".join(filter(None, parts))

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
        columns = [(name, "wall") for name in ("dispatch", "combine")]
        columns += [(name, "chain") for name in ROUND_TRIPS]
        title = ", ".join(filter(None, ["speed-up over the best `jax.lax`", variant]))
        header = [f"{operation}, {clock}" for operation, clock in columns]
        return self._by_case(
            title, header, lambda case: [self._ratio(case, *c, variant) for c in columns]
        )

    def _kernels(self) -> str:
        """Times of our kernels, and the rate at which tokens leave each GPU."""

        def cells(name: str) -> list[str]:
            case, found = self.record["cases"][name], []
            for operation in ("dispatch", "combine"):
                us = self.us(name, operation, "kernel", AT_DISPATCH)
                found += [_us(us), _rate(case, us)]
            return [*found, _us(self.us(name, "combine", "kernel", AT_COMBINE))]

        header = ["dispatch", "GB/s", "combine, weights at dispatch", "GB/s"]
        header.append("combine, weights at combine")
        return self._by_case("kernels, µs of GPU time", header, cells)

    def _formats(self) -> str:
        """Dispatch by token format, for each T at which all formats were measured."""
        names = [name for name in FORMATS if name != "float32"]
        found: dict[int, dict[str, tuple[dict, float]]] = {}
        for name, case in self.record["cases"].items():
            us = self.us(name, "dispatch", "kernel", AT_COMBINE)
            if us and case["routing"] == "uniform":
                found.setdefault(case["n_tokens"], {})[case["token_format"]] = case, us
        rows = []
        for n_tokens, by_format in sorted(found.items()):
            if len(by_format) == len(names):
                figures = [by_format[name] for name in names]
                rows.append([f"T = {n_tokens}, µs", *(_us(us) for _, us in figures)])
                rows.append(["GB/s off the GPU", *(_rate(*both) for both in figures)])
        types = [f"`{type(FORMATS[name]()).__name__}`" for name in names]
        return _table("dispatch by token format, kernel", ["", *types], rows)

    def _overheads(self) -> str:
        found = self.record["overheads"].items()
        rows = [[name, *(f"{us:.1f}" for us in figures["us"])] for name, figures in found]
        title = "wall time of a jitted call of minimal size on one device, µs"
        return _table(title, ["", "median", "quartiles", ""], rows)

    def _calls(self) -> str:
        """Gaps between kernels in a chain, and how many kernels of others are in one."""
        rows = []
        for where, found in self.record.get("calls", {}).items():
            names = "period", "dispatch", "combine", "gap by period", "gap"
            us = [found[name]["us"][0] if name in found else None for name in names]
            others = found.get("others", {})
            count = f"{sum(others.values()):.2g}" if "gap" in found else _NONE
            listed = ", ".join(f"{name}: {n:.2g}" for name, n in others.items())
            rows.append([where, *map(_us, us[:3]), *map(_us_2, us[3:]), count, listed])
        header = ["", "period", "dispatch", "combine", "gap by period", "gap in the trace"]
        header += ["other kernels in a gap", ""]
        return _table("gaps between calls in a chain, µs", header, rows)

    def _first_calls(self) -> str:
        """First calls of compiled programs, beside those of programs that only return arrays."""
        rows = []
        for where, found in self.record.get("first_calls", {}).items():
            ours, others = found["round trips"], found["as many results"]
            for ordinal in ours:
                both = [each[ordinal]["us"] for each in (ours, others)]
                more = f"{both[0][0] - both[1][0]:.1f}"
                rows.append([f"{where}, {ordinal} call", *map(_spread, both), more])
        header = ["", "round trips", "as many results", "more"]
        return _table("first calls of a compiled program, µs: median (quartiles)", header, rows)

    def _capacity_pairs(self) -> list[tuple[str, str]]:
        """The names of each case that was measured at `CAPACITY` and at the worst case."""
        cases = self.record["cases"]
        pairs = [(f"{name}-{CAPACITY:g}x", name) for name in cases]
        pairs = [pair for pair in pairs if pair[0] in cases]
        return sorted(pairs, key=lambda pair: cases[pair[1]]["n_tokens"])

    def _capacities(self) -> str:
        operation, rows = "round trip + grad", []
        for pair in self._capacity_pairs():
            some, worst = (self.us(name, operation, "chain", AT_DISPATCH) for name in pair)
            n_tokens = self.record["cases"][pair[0]]["n_tokens"]
            rows.append([str(n_tokens), _us(some), _us(worst), _share(worst, some)])
        header = ["T", f"{CAPACITY:g}×", "worst case", f"worst case / {CAPACITY:g}×"]
        return _table(f"{operation} by capacity, period in a chain, µs", header, rows)

    def _overlaps(self) -> str:
        """Overlap. "hidden" is the share of the shorter of call and layer that adds no time."""
        header = ["call, n_sms, width", "on all SMs", "on n_sms", "layer", "both"]
        header += ["hidden of n_sms", "of all", "longer", "kernels", "speed-up"]
        cases = {n: case for n, case in self.record["cases"].items() if case["width"]}
        whole = next((name for name, case in cases.items() if not case["n_sms"]), "")
        rows = []
        for operation in ("dispatch", "combine"):
            both = f"{operation} + dense"
            for name, case in cases.items():
                for clock in ("chain", "chain in bursts"):
                    us = [self.us(whole, operation, clock, AT_DISPATCH)]
                    keys = [(name, o) for o in (operation, "dense", both)]
                    us += [self.us(*key, clock, AT_DISPATCH) for key in keys]
                    others = [self.us(*k, "other kernels", AT_DISPATCH) for k in keys]
                    label = f"{operation}, {case['n_sms']}, {case['width']}"
                    label = label if clock == "chain" else "in bursts"
                    rows += [[label, *_overlap_cells(us, others)]] if all(us) else []
        return _table("an asynchronous call beside a dense layer, µs", header, rows)

    def layers(self) -> list[tuple[str, str]]:
        """Returns the model and the name of each bfloat16 case with experts, by model and T."""
        models = {sizes: model for model, sizes in MODELS.items()}
        found = []
        for name, case in self.record["cases"].items():
            if case.get("expert_size") and case["token_format"] == "bf16":
                sizes = tuple(case[key] for key in _MODEL_SIZES)
                model = models.get(sizes, "other")
                found.append((list(models.values()).index(model), case["n_tokens"], model, name))
        return [(model, name) for _, _, model, name in sorted(found)]

    def layer_us(
        self, name: str, operation: str, implementation: str = AT_DISPATCH
    ) -> float | None:
        """Returns the period of a layer, or of a part of it."""
        return self.us(name, operation, "chain", implementation)

    def _layers(self) -> str:
        rows = []
        for model, name in self.layers():
            layer, experts, dense, exchange, grad = (
                self.layer_us(name, operation)
                for operation in ("layer", "experts", "dense matmuls", "round trip", "layer + grad")
            )
            quantized = name.replace("-E", "-blockwise_fp8-E")
            fp8, lax = self.layer_us(quantized, "layer"), self.layer_us(name, "layer", "lax")
            parts = experts + exchange if experts and exchange else None
            rows.append(
                [
                    model,
                    str(self.record["cases"][name]["n_tokens"]),
                    _ms(layer),
                    _share(layer, parts),
                    _share(dense, experts),
                    _with_ratio(grad, grad, layer),
                    _with_ratio(fp8, layer, fp8),
                    _with_ratio(lax, lax, layer),
                ]
            )
        header = ["", "T", "layer", "of its parts", "experts, of the dense rate", "with gradients"]
        header += ["in FP8", "`jax.lax`"]
        return _table("expert layers, ms", header, rows)

    def _matmuls(self) -> str:
        """Grouped matmuls: TFLOP/s, and of the dense matmul's rate in the same run."""
        rows = []
        for name, found in self.record.get("matmuls", {}).items():
            if "flops" in found:
                rate = {
                    k: found["flops"] / v["us"][0] * 1e-6 for k, v in found.items() if k in _RATES
                }
                shares = [f"{rate[k]:.0f} ({rate[k] / rate['dense']:.2f})" for k in _RATES[1:]]
                rows.append([name, f"{rate['dense']:.0f}", *shares])
        return _table("grouped matmuls, TFLOP/s (of the dense rate)", ["", *_RATES], rows)

    def _link(self) -> str:
        link = self.record.get("link", {})
        rates = {"gb_s": "stores of a kernel", "gb_s_by_copy_engines": "copy engines"}
        words = [f"{link[k]:.0f} by {name}" for k, name in rates.items() if k in link]
        return f"Link, GB/s off each GPU: {', '.join(words)}." if words else ""


def _ms(us: float | None) -> str:
    return _NONE if us is None else f"{us / 1000:.3g}"


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.2f}" if part and whole else _NONE


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
    if us is None:
        return _NONE
    median, low, high = map(_us, us)
    return f"{median} ({low} to {high})"


def _us(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _us_2(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"
