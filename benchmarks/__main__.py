"""`python benchmarks`: times the package and plain `jax.lax` baselines. See README.md."""

import fnmatch
import itertools
import json
import pathlib
import subprocess
import sys
from typing import Any

import click
import rich.console
import rich.markdown

_HERE = pathlib.Path(__file__).resolve().parent
_FIND_PLATFORM = "import jax; print(jax.default_backend())"
_FILE = click.Path(path_type=pathlib.Path, exists=True, dir_okay=False)
_FOLDER = click.Path(path_type=pathlib.Path, file_okay=False)
_FORMATS = click.Choice(["markdown", "table", "figure", "json"])
_CONSOLE = rich.console.Console(width=None if sys.stdout.isatty() else 170)
_PROGRESS = rich.console.Console(stderr=True, width=None if sys.stderr.isatty() else 170)


@click.command()
@click.option("--platform", type=click.Choice(["cpu", "gpu"]), help="[default: JAX's]")
@click.option("--quick", is_flag=True, help="Tiny cases, few repeats: tests the harness.")
@click.option("--rehearse", is_flag=True, help="The quick plan for GPUs, on virtual CPU devices.")
@click.option("--only", multiple=True, help="Items to run, by name or pattern, like T128-*.")
@click.option("--list", "list_only", is_flag=True, help="Print the names of the items.")
@click.option("--limit", default=900.0, show_default=True, help="Time limit per item, in seconds.")
@click.option("--seconds-total", default=3600.0, show_default=True, help="Time limit of the run.")
@click.option("--commit", help="Commit of the sources, if there is no .git.")
@click.option("--out", type=_FOLDER, default=_HERE / "results", help="Folder for the results.")
@click.option("--report", "shown", type=_FILE, help="Measure nothing; show this results file.")
@click.option("--format", "form", type=_FORMATS, help="[default: table; --report: markdown]")
def main(platform, quick, rehearse, only, list_only, shown, form, **options):
    """Measures, prints tables, and writes the figures to a file.

    Exits with 1 if a result was wrong or an item failed.
    """
    if shown:
        return _show(shown, form or "markdown")
    import plan

    platform = platform or ("gpu" if rehearse else _default_platform())
    items = [
        item
        for item in plan.make_plan(platform, is_quick=quick or rehearse)
        if not only or any(fnmatch.fnmatchcase(item.name, p) for p in only)
    ]
    if list_only or not items:
        click.echo("\n".join(i.name for i in items) or "no item matches --only")
    else:
        sys.exit(_run(items, platform=platform, rehearse=rehearse, form=form or "table", **options))


def _run(items: list, form: str, **options: Any) -> int:
    import runner

    n_done = itertools.count(1)

    def say(item: Any, seconds: float, lines: list[dict[str, Any]]) -> None:
        n_results = sum("times" in line for line in lines)
        words = [f"[{next(n_done)}/{len(items)}, {seconds:.0f} s] {item.name}: {n_results}"]
        words += [f"FAILED {line['failed']}" for line in lines if "failed" in line]
        _PROGRESS.print("; ".join(words), markup=False)

    run = runner.Run(command=" ".join(["python benchmarks", *sys.argv[1:]]), say=say, **options)
    with _PROGRESS.status("measuring"):
        run.measure(items)
    _show(run.path, form)
    _PROGRESS.print(f"wrote {run.path}", soft_wrap=True)
    return 1 if run.record.rows("failed") else 0


def _show(path: pathlib.Path, form: str) -> None:
    import records
    import report

    runs = records.read(path)
    if form == "json":
        return click.echo(json.dumps([*map(vars, runs)]))
    for run in runs:
        shown = report.Report(run)
        if form == "markdown":
            click.echo(shown.markdown())
        elif form == "table":
            _CONSOLE.print(rich.markdown.Markdown(f"{shown.all_figures()}\n\n{shown.markdown()}"))
        else:
            import figure

            figure.draw(shown, path.with_suffix(".png"))
            click.echo(f"wrote {path.with_suffix('.png')}")


def _default_platform() -> str:
    """JAX's default platform, found by another process: one that asks takes the GPUs' memory."""
    done = subprocess.run([sys.executable, "-c", _FIND_PLATFORM], capture_output=True, text=True)
    return "gpu" if done.stdout.strip() in ("gpu", "cuda") else "cpu"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:  # started by runner.py
        import worker

        worker.main(json.loads(sys.argv[2]))
    else:
        main(prog_name="python benchmarks")
