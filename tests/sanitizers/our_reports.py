"""Prints ThreadSanitizer's reports, except those that involve code that XLA compiled.

Code that XLA compiles just in time calls memset and memcpy. TSan sees these calls, but not how XLA
orders them with ours. Such code has no symbols: in a report, the caller of the C library's function
is `<null>`.

Usage: our_reports.py FILE...; exit status 1 if there is a report to print.
"""

from __future__ import annotations

import pathlib
import re
import sys

_BETWEEN = "=" * 18
_BY_COMPILED_CODE = re.compile(
    r"^ +#0 (mem\w+) .*\n(?: +#\d+ \1 .*\n)* +#\d+ <null> <null>", re.MULTILINE
)


def ours(text: str) -> list[str]:
    """Returns the reports in one of TSan's files that concern jax_ep."""
    reports = (part.strip() for part in text.split(_BETWEEN))
    return [
        report
        for report in reports
        if "WARNING: ThreadSanitizer" in report and not _BY_COMPILED_CODE.search(report)
    ]


def main() -> int:
    reports = [report for path in sys.argv[1:] for report in ours(pathlib.Path(path).read_text())]
    print("\n\n".join(reports))
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
