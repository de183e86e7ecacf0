"""Clock rate and power of the GPUs, from NVML; None if nvidia-ml-py is not installed."""

import threading
from typing import Any, Self

import numpy as np

try:
    import pynvml
except ImportError:
    pynvml = None

_INTERVAL_S = 0.05


def handles() -> list[Any]:
    """Returns NVML's handles of all GPUs; none without NVML."""
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # there is no driver
        return []
    n = pynvml.nvmlDeviceGetCount()
    return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(n)]


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver, or None."""
    return str(pynvml.nvmlSystemGetDriverVersion()) if handles() else None


class Clocks:
    """A context manager that samples all GPUs.

    Attributes:
        summary: on exit: medians of SM clock and power over samples and GPUs, and the share of
            samples in which the power limit lowered the clock; None without samples.
    """

    summary: dict[str, float] | None = None

    def __enter__(self) -> Self:
        self._samples: list[tuple[float, float, bool]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(handles(),))
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_over.set()
        self._thread.join()
        if self._samples:
            mhz, watts, is_capped = np.array(self._samples).T
            figures = np.median(mhz), np.median(watts), is_capped.mean()
            names = ("sm_mhz", "watts", "power_capped")
            self.summary = dict(zip(names, map(float, figures), strict=True))

    def _run(self, gpus: list[Any]) -> None:
        while gpus and not self._is_over.wait(_INTERVAL_S):
            self._samples += map(_sample, gpus)


def _sample(gpu: Any) -> tuple[float, float, bool]:
    """Returns MHz, watts, and whether the power limit lowers the clock."""
    mhz = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    fields = [pynvml.NVML_FI_DEV_POWER_INSTANT]
    (power,) = pynvml.nvmlDeviceGetFieldValues(gpu, fields)
    reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    is_capped = bool(reasons & pynvml.nvmlClocksEventReasonSwPowerCap)
    return mhz, power.value.uiVal / 1000, is_capped
