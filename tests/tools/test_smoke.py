"""tools/smoke_test.py: its checks pass what works, and catch what does not."""

import importlib
import pathlib

import jax
import pytest

import jax_ep

pytestmark = pytest.mark.usefixtures("one_process")
LISTING = """
Fatbin elf code:
================
arch = sm_90a
host = linux

Fatbin elf code:
================
arch = sm_100f
compressed

Fatbin ptx code:
================
arch = sm_80
"""


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "tools"))
    return importlib.import_module("smoke_test")


def devices():
    return jax.devices("cpu")[:4]


@pytest.mark.parametrize("name", ["host", "xla"])
def test_a_round_trip_is_exact(smoke, name, capsys):
    smoke.check_round_trip(devices(), name)
    assert f"exact on 4 devices (cpu), {name}" in capsys.readouterr().out


def test_a_wrong_round_trip_is_an_error(smoke, monkeypatch):
    combine = jax_ep.combine
    monkeypatch.setattr(jax_ep, "combine", lambda *arrays: combine(*arrays).at[0, 0].add(1))
    with pytest.raises(SystemExit, match="4 of 4096 numbers differ"):
        smoke.check_round_trip(devices(), "host")


def test_sources_are_not_a_package(smoke, monkeypatch, tmp_path):
    monkeypatch.setattr(jax_ep, "__file__", str(tmp_path / "jax_ep" / "__init__.py"))
    smoke.check_package()
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(SystemExit, match="must be an installed package; got the sources in"):
        smoke.check_package()


def test_architectures_are_read_from_a_listing(smoke):
    assert smoke.listed_architectures(LISTING) == {"90a", "100f"}
