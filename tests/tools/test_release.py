"""The workflows on GitHub, and tools/release.py: what a tag must agree with."""

import importlib.util
import pathlib
import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
USES = re.compile(r"^\s*(?:- )?uses: *(.*)$", re.MULTILINE)
PINNED = re.compile(r"[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

_SPEC = importlib.util.spec_from_file_location("release", ROOT / "tools/release.py")
release = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(release)


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


def grants(permissions: dict | str | None) -> set[str]:
    """What `permissions` allow to write; "write-all", and none at all, stand for everything."""
    if not isinstance(permissions, dict):
        return {"everything"}
    return {name for name, access in permissions.items() if access == "write"}


def events(content: dict) -> dict:
    return content[True]  # YAML 1.1 reads the key `on` as true


def test_the_workflows_are_those_that_are_checked_here():
    assert [path.stem for path in WORKFLOWS] == ["docs", "jax", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_a_hash_and_names_its_version(path):
    text = path.read_text()
    used = USES.findall(text)
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    assert len(used) == sum("uses" in step for step in steps) > 0
    assert [action for action in used if not PINNED.fullmatch(action)] == []


def test_an_action_has_the_same_hash_everywhere():
    used = {action for path in WORKFLOWS for action in USES.findall(path.read_text())}
    assert len({action.partition("@")[0] for action in used}) == len(used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_only_publishing_and_deploying_may_write(path):
    content = yaml.safe_load(path.read_text())
    assert grants(content["permissions"]) == set()
    writing = {
        (path.stem, name): grants(job["permissions"])
        for name, job in content["jobs"].items()
        if "permissions" in job
    }
    expected = {("wheels", "publish"): {"id-token"}, ("docs", "deploy"): {"contents"}}
    assert writing == {job: what for job, what in expected.items() if job[0] == path.stem}


def steps_of(path) -> list[tuple[dict, dict]]:
    """The steps of a workflow, each with its job."""
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [(job, step) for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_who_may_write_runs_git_and_actions_alone(path):
    """Nothing installed, and nothing of the repository, runs with rights or credentials."""
    for job, step in steps_of(path):
        may_write = grants(job.get("permissions", {}))
        if may_write:
            assert re.match(r"git (fetch|push) ", step.get("run", "git push ")), step
        if step.get("uses", "").startswith("actions/checkout@"):
            persists = step.get("with", {}).get("persist-credentials", True)
            assert persists is ("contents" in may_write), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_install_what_has_hashes(path):
    """jax.yml tests the newest of everything, without rights."""
    for _, step in steps_of(path):
        for line in step.get("run", "").splitlines():
            if re.search(r"\b(pip|pipx|uv|npm|apt-get|apt|curl|wget)\b", line):
                assert re.fullmatch(
                    r"build/release/bin/pip install --require-hashes -r tools/locks/\w+\.txt", line
                )
            for target in re.findall(r"\bmake ([\w-]+)", line):
                assert target == "docs"
            scripts = re.findall(r"tools/(\w+)\.(?:sh|py)", line)
            assert set(scripts) <= {"release", "deploy_docs", *["matrix"] * (path.stem == "jax")}


def test_make_docs_and_cibuildwheel_install_what_has_hashes():
    installs = re.findall(r"^\t\$\(DOCS_BIN\)/pip (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert installs == ["install --quiet --require-hashes -r tools/locks/docs.txt"]
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    for step, lock in (("before-build", "build"), ("before-test", "smoke")):
        wanted = f"pip install --require-hashes -r {{project}}/tools/locks/{lock}.txt"
        assert tool[step] == wanted
    assert tool["build-frontend"] == {"name": "build", "args": ["--no-isolation"]}
    assert "test-requires" not in tool


def pins(name: str) -> dict[str, list[Requirement]]:
    """The requirements of a lock, which all have a version and hashes."""
    text = (ROOT / f"tools/locks/{name}.txt").read_text()
    assert "http" not in text
    found = {}
    for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        requirement, *hashes = entry.replace("\\\n", "").split(" --hash=")
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", each) for each in hashes)
        found.setdefault(normal(requirement), []).append(Requirement(requirement.strip()))
    return found


def normal(requirement: str) -> str:
    return re.sub("[-_.]+", "-", Requirement(requirement.strip()).name).lower()


def locked() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups, build = project["dependency-groups"], project["build-system"]["requires"]
    kernels = groups["cuda-build"] + groups["cuda-toolkit"] + groups["nvshmem-cu13"]
    package = project["project"]["dependencies"]
    package = package + project["project"]["optional-dependencies"]["cli"]
    return {
        "docs": groups["docs"],
        "release": groups["release"],
        "build": [*build, *kernels, "ninja"],
        "smoke": package + groups["smoke"],
    }


@pytest.mark.parametrize("name", ["docs", "release", "build", "smoke"])
def test_the_locks_are_those_of_pyproject(name):
    """tools/lock.sh makes them."""
    found = pins(name)
    for requirement in locked()[name]:
        for pin in found[normal(requirement)]:
            (version,) = pin.specifier
            assert version.operator == "=="
            assert Requirement(requirement).specifier.contains(version.version), requirement
    for requirements in found.values():
        for pin in requirements:
            assert [each.operator for each in pin.specifier] == ["=="], pin


def test_only_a_pushed_tag_is_published_after_its_wheels_and_sources():
    content = workflow("wheels")
    jobs = content["jobs"]
    assert events(content) == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    uploads = [
        name
        for name, job in jobs.items()
        if any("pypi-publish" in str(step.get("uses")) for step in job["steps"])
    ]
    assert uploads == ["publish"]
    assert jobs["publish"]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert set(jobs["publish"]["needs"]) == {"wheels", "sources"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert jobs["publish"]["steps"][-1]["with"] == {"attestations": True}
    # What fails or is skipped stops those that need it.
    assert jobs["wheels"]["needs"] == jobs["sources"]["needs"] == "version"
    assert "if" not in jobs["wheels"] and "if" not in jobs["sources"]
    check = jobs["version"]["steps"][-1]
    assert check["run"] == 'python3 tools/release.py check "$GITHUB_REF_NAME"'
    assert check["if"] == "github.ref_type == 'tag'"


def test_every_week_the_oldest_jax_and_last_nights_are_tested():
    content = workflow("jax")
    assert list(events(content)) == ["schedule", "workflow_dispatch"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest_jax,) = [r for r in project["dependencies"] if r.startswith("jax>=")]
    minors = [int(c.rpartition(".")[2]) for c in project["classifiers"] if "Python :: 3." in c]
    oldest = {"jax": oldest_jax.removeprefix("jax>="), "python": f"3.{min(minors)}"}
    newest = {"jax": "nightly", "python": f"3.{max(minors)}"}
    assert content["jobs"]["test"]["strategy"]["matrix"]["include"] == [oldest, newest]


@pytest.fixture
def root(tmp_path):
    """A release of 0.2.0 in a folder."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 (1 May 2027)\n\n### Bug fixes\n\n- One.\n\n"
        "## 0.1.0\n\n- The first.\n"
    )
    return tmp_path


def test_the_tag_of_a_release_fits(root):
    assert release.problems("v0.2.0", root) == []


@pytest.mark.parametrize("tag", ["0.2.0", "v0.2", "v0.2.0rc1", "v0.1.0", "main"])
def test_a_tag_must_name_the_version(root, tag):
    (problem,) = release.problems(tag, root)
    assert problem == f"The tag must be v0.2.0, as pyproject.toml says; got {tag}."


@pytest.mark.parametrize("line", ["version: 0.1.0", "cff-version: 0.2.0"])
def test_a_citation_must_name_the_version(root, line):
    (root / "CITATION.cff").write_text(f"{line}\n")
    (problem,) = release.problems("v0.2.0", root)
    assert problem.startswith("CITATION.cff must say `version: 0.2.0`; got ")


@pytest.mark.parametrize(
    "changelog",
    [
        "# Changelog\n\n## Unreleased\n\n- One.\n",
        "# Changelog\n\n## 0.2.0\n\n## 0.1.0\n\n- One.\n",  # an empty section
        "# Changelog\n\n## 0.2.0rc1\n\n- One.\n",
        "# Changelog\n\n### 0.2.0\n\n- One.\n",
    ],
)
def test_a_release_needs_its_changes(root, changelog):
    (root / "CHANGELOG.md").write_text(changelog)
    (problem,) = release.problems("v0.2.0", root)
    assert problem == "CHANGELOG.md must have a section `## 0.2.0` that lists changes."


def test_the_citation_of_this_version_is_right():
    """The changes are `Unreleased` until the release, and the tag is the owner's."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    unexpected = [p for p in release.problems(f"v{version}") if "CHANGELOG.md" not in p]
    assert unexpected == []


@pytest.mark.parametrize(
    ("tag", "released", "arguments"),
    [
        ("v0.1.0", [], "--title 0.1.0 0.1 latest"),
        ("v0.1.1", ["v0.1.0", "v0.1.1"], "--title 0.1.1 0.1 latest"),
        ("v0.1.2", ["v0.2.0"], "--title 0.1.2 0.1"),
        ("v0.10.0", ["v0.9.0", "v0.11.0rc1", "vintage"], "--title 0.10.0 0.10 latest"),
        ("v0.3.0rc1", ["v0.2.0"], "0.3.0rc1"),
    ],
)
def test_the_newest_release_has_the_latest_documentation(tag, released, arguments):
    assert release.mike_arguments(tag, released) == arguments.split()
