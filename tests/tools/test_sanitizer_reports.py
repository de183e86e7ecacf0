"""Which of ThreadSanitizer's reports `make sanitize` shows."""

import importlib.util
import pathlib

_PATH = pathlib.Path(__file__).parents[1] / "sanitizers" / "our_reports.py"
_SPEC = importlib.util.spec_from_file_location("our_reports", _PATH)
our_reports = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(our_reports)

REPORT = """==================
WARNING: ThreadSanitizer: data race (pid=1)
  Write of size 8 at 0x7fe78d6b1000 by thread T30 (mutexes: write M222):
    #0 Encode ffi/host/encode.cc:23 (_ffi.so+0x99dde)

  Previous write of size 8 at 0x7fe78d6b1000 by thread T23 (mutexes: write M215):
    #0 memset ../sanitizer_common_interceptors.inc:799 (libtsan.so+0x5cbc4)
    #1 memset ../sanitizer_common_interceptors.inc:797 (libtsan.so+0x5cbc4)
    #2 {caller} (0x7fe78e75e0ae)
==================
"""


def test_reports_about_code_that_xla_compiled_are_left_out() -> None:
    assert our_reports.ours(REPORT.format(caller="<null> <null>")) == []


def test_a_report_about_our_own_memset_is_shown() -> None:
    text = REPORT.format(caller="Zero ffi/host/memory.cc:86")
    assert len(our_reports.ours(text)) == 1
    both = text + REPORT.format(caller="<null> <null>")
    assert len(our_reports.ours(both)) == 1


def test_a_report_with_an_unknown_caller_further_up_is_shown() -> None:
    caller = "Zero ffi/host/memory.cc:86\n    #3 <null> <null>"
    assert len(our_reports.ours(REPORT.format(caller=caller))) == 1
