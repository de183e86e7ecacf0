"""Devices, transports and skips for the whole suite.

By default the tests run on 32 virtual CPU devices of one process. Each option has an environment
variable, for jobs that cannot pass flags:

    --gpu           JAX_EP_TEST_GPU=1         run on this machine's GPUs instead
    --transports    JAX_EP_TEST_TRANSPORTS    comma-separated, instead of the platform's
    --coordinator   JAX_EP_TEST_COORDINATOR   host:port; joins a `jax.distributed` job
    --launcher      JAX_EP_TEST_LAUNCHER      slurm or openmpi: says what the next two do
    --process-id    JAX_EP_TEST_PROCESS_ID
    --n-processes   JAX_EP_TEST_N_PROCESSES
    --n-devices     JAX_EP_TEST_N_DEVICES     CPU devices of all processes together: 32
    --n-nodes       JAX_EP_TEST_N_NODES       nodes of cases that do not say: 1
    --random-cases  JAX_EP_TEST_RANDOM_CASES  cases of test_random_cases.py, each transport: 30
    --random-seed   JAX_EP_TEST_RANDOM_SEED   the seed of their first shape: 0
    --quick         JAX_EP_TEST_QUICK=1       a selection (tests/support/quick.py)

In a job of several processes, run the same files with the same options in every process. Such a job
skips tests whose mesh does not span all devices, and tests for one process.

With several nodes, `host` and `p2p` serve each node by itself, even where they could serve all.
The ranks of a node must be in one process for `host`, on one host for `p2p`.
"""

import collections
import os
import pathlib
import tempfile

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from job import Job, Watch
from quick import without_combinations

CPU_TRANSPORTS = ("xla", "host")
GPU_TRANSPORTS = ("xla", "p2p")
ONE_PROCESS_TRANSPORTS = ("host",)
MANY_MAPPINGS = 20_000


def pytest_addoption(parser) -> None:
    env = os.environ.get
    group = parser.getgroup("jax_ep")
    group.addoption("--gpu", action="store_true", default=env("JAX_EP_TEST_GPU", "0") == "1")
    group.addoption("--quick", action="store_true", default=env("JAX_EP_TEST_QUICK", "0") == "1")
    group.addoption("--transports", default=env("JAX_EP_TEST_TRANSPORTS"))
    group.addoption("--coordinator", default=env("JAX_EP_TEST_COORDINATOR"))
    group.addoption("--launcher", default=env("JAX_EP_TEST_LAUNCHER"))
    group.addoption("--process-id", type=int, default=int(env("JAX_EP_TEST_PROCESS_ID", "0")))
    numbers = {"n-processes": "1", "n-devices": "32", "n-nodes": "1"}
    numbers |= {"random-cases": "30", "random-seed": "0"}
    numbers |= {"min-overlapped-tokens": "1024"}  # of transport nvshmem
    for name, default in numbers.items():
        variable = "JAX_EP_TEST_" + name.upper().replace("-", "_")
        group.addoption(f"--{name}", type=int, default=int(env(variable, default)))


@pytest.hookimpl(tryfirst=True)  # before pytest reads --basetemp
def pytest_configure(config) -> None:
    """Chooses the devices; must run before JAX starts a backend."""
    option = config.option
    job = Job.read(option, os.environ)
    option.n_processes, option.process_id = job.n_processes, job.process_id
    os.environ["JAX_EP_TEST_N_NODES"] = str(option.n_nodes)  # for cases.py, which is imported later
    if option.gpu:
        jax.config.update("jax_platforms", "cuda,cpu")
    else:
        jax.config.update("jax_platforms", "cpu")
        n_local, rest = divmod(option.n_devices, option.n_processes)
        if rest:
            raise pytest.UsageError(
                f"--n-processes must divide --n-devices={option.n_devices}; got "
                f"{option.n_processes}"
            )
        jax.config.update("jax_num_cpu_devices", n_local)
        if option.n_processes == 1:
            _start_backend_that_compiles_faster(option.quick)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if job.n_processes > 1:
        _use_own_temporary_folder(config)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        job.join()
        config.pluginmanager.register(Watch(job, config), "jax_ep job")


def _use_own_temporary_folder(config) -> None:
    """Keeps `tmp_path` out of the folder that pytest's processes share on a host.

    Each of them deletes old folders there, and fails now and then where another one does so too.
    """
    if config.option.basetemp is None:
        folder = tempfile.TemporaryDirectory(prefix="jax_ep_tests_", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = pathlib.Path(folder.name, "pytest")


def _start_backend_that_compiles_faster(quick: bool) -> None:
    """Turns off LLVM's optimizations and, where jax has another way, XLA:CPU's fusion emitters.

    Compiling takes most of the suite's time: optimizations double it, emitters make it 40 % longer,
    splitting programs into parts, for idle cores, 10 %. But only optimized programs round once in
    place of twice. So child processes optimize, unless --quick: jobs of several processes compare
    all transports with the oracle, too.
    """
    if "XLA_FLAGS" in os.environ:
        return
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if jax.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    jax.devices()  # reads the flags
    if not quick:
        del os.environ["XLA_FLAGS"]


@pytest.fixture(scope="session", autouse=True)
def by_nodes_as_asked(request):
    """Serves each node by itself if there are several."""
    if request.config.option.n_nodes == 1:
        yield
        return
    import harness

    with harness.each_node_by_itself():
        yield


@pytest.fixture(scope="session", autouse=True)
def overlap_as_asked(request):
    """Inter-node exchanges overlap with calls of so many tokens."""
    from jax_ep.nodes import overlapped

    overlapped.min_tokens = request.config.option.min_overlapped_tokens


@pytest.fixture(scope="session", autouse=True)
def no_warnings_of_groups_of_other_tests():
    """Those that tests leave open are not watched: the log may be what a later test looks at."""
    from jax_ep.group import drop_watch, dropped

    drop_watch.interval_s = 1e6
    dropped._dropped = collections.deque(maxlen=0)
    yield
    drop_watch._watched.clear()


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Frees all compiled programs after a file's tests if the process has many memory mappings.

    XLA:CPU maps dozens of regions per program. Linux allows a process 65,530 (vm.max_map_count);
    once they are used up, compiling crashes. The file with the most programs maps 15,000.
    """
    yield
    import harness

    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPPINGS:
        harness.SharedJit.forget_programs()
        jax.clear_caches()


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    """Of compiled programs, shared by all tests without jit."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def program_cache(cache_folder):
    """Makes JAX cache all programs on disk, for tests without jit.

    Such tests compile equal operations again and again. Each program is one operation, with at most
    one collective, so the deadlock that `harness.SharedJit` describes cannot happen.
    """
    changes = {
        "jax_compilation_cache_dir": str(cache_folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for values in (changes, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is changes:
            yield


@pytest.fixture
def one_process(request) -> None:
    """Skips the test in jobs of several processes: it needs the arrays of all ranks, or `host`."""
    if request.config.option.n_processes > 1:
        pytest.skip("for one process only")


@pytest.fixture
def float32_matmuls():
    """Matmuls of float32 that are as exact as on CPUs, also on GPUs."""
    with jax.default_matmul_precision("float32"):
        yield


def transports(option) -> tuple[str, ...]:
    """The transports under test."""
    if option.transports:
        return tuple(option.transports.split(","))
    names = GPU_TRANSPORTS if option.gpu else CPU_TRANSPORTS
    several = option.n_processes > 1 and option.n_nodes == 1
    return tuple(n for n in names if not several or n not in ONE_PROCESS_TRANSPORTS)


def pytest_generate_tests(metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", transports(metafunc.config.option))


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items) -> None:
    runnable = []
    for item in items:
        # Not item.keywords: these hold the names of folders, too.
        marks = {mark.name for mark in item.iter_markers()}
        if not config.option.gpu and {"gpu", "multigpu"} & marks:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --gpu"))
        elif "slow" in marks and "slow" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        else:
            runnable.append(item)
    if config.option.quick:
        chosen = without_combinations(runnable)
        left_out = set(runnable) - chosen
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
