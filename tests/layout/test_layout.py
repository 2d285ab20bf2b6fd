"""How the repository is laid out: layers of folders, documents that are true, nothing of this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ["WHET_BUILD"])

# Includes point one way: a folder of src may include these.
LAYERS = {
    "core": {"core"},
    "kernels": {"kernels", "core"},
    "c_api": {"c_api", "core"},
    "files": {"files"},
    "results": {"results", "files"},
    "mpi": {"mpi"},
    "lab": {"lab", "results", "files", "kernels", "core"},
    "report": {"report", "results", "files"},
    "cli": {"cli", "lab", "report", "results", "files"},
}


def sources(*suffixes: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / n for n in names if n.endswith(suffixes) and (ROOT / n).is_file()]


def test_layers():
    wrong = []
    for path in sources(".cc", ".h"):
        folder = path.relative_to(ROOT).parts
        if folder[0] != "src" or path.name.endswith("_test.cc"):
            continue
        for include in re.findall(r'#include "([a-z_]+)/', path.read_text()):
            if include not in LAYERS[folder[1]]:
                wrong.append(f"{path.relative_to(ROOT)} includes {include}/")
    assert not wrong


def test_bindings_see_public_headers_only():
    for path in (ROOT / "python/bindings").iterdir():
        for include in re.findall(r'#include "(.*)"', path.read_text()):
            assert (path.parent / include).is_file() and "/" not in include, f"{path.name} includes {include}"


def test_simd_stays_in_kernels():
    for path in sources(".cc", ".h"):
        relative = path.relative_to(ROOT)
        if relative.parts[:2] != ("src", "kernels"):
            assert "hwy/highway.h" not in path.read_text(), relative


def test_public_headers_name_no_dependency():
    for path in (ROOT / "include").rglob("*.h"):
        assert not re.search(r"#include\s*[<\"](hwy|nlohmann|CLI)", path.read_text()), path.name


@pytest.mark.parametrize("document", ["README.md", "HACKING.md", "CONTRIBUTING.md"])
def test_documents_name_files_that_exist(document):
    missing = []
    for name in re.findall(r"`([A-Za-z0-9_.-]+/[A-Za-z0-9_./-]*)`", (ROOT / document).read_text()):
        if not name.startswith("build/") and not (ROOT / name).exists():
            missing.append(name)
    assert not missing


def test_readme_program_is_the_example_and_prints_what_it_says():
    readme = (ROOT / "README.md").read_text()
    program = re.search(r"```cpp\n(.*?)```", readme, re.S).group(1)
    assert program == (ROOT / "examples/first.cc").read_text()
    output = subprocess.run([BUILD / "bin/example_first"], capture_output=True, text=True, check=True).stdout
    assert output in readme


def test_readme_picture_shows_the_results():
    drawn = subprocess.run([sys.executable, ROOT / "tools/accuracy_svg.py"], capture_output=True, text=True, check=True).stdout
    assert drawn == (ROOT / "docs/accuracy.svg").read_text(), "stale: tools/accuracy_svg.py > docs/accuracy.svg"
    first_screen = (ROOT / "README.md").read_text().split("```")[0]
    assert "](docs/accuracy.svg)" in first_screen
    for accuracy in re.findall(r">([\d.]+ %) [a-z]", drawn):
        assert accuracy in first_screen


@pytest.mark.parametrize("name", ["paper", "sharp"])
def test_committed_results_are_what_whet_reads_and_writes(name):
    def report(form):
        return subprocess.run([BUILD / "bin/whet", "report", ROOT / "results" / name, "--format", form], capture_output=True,
                              text=True, check=True).stdout

    (run,) = json.loads(report("json"))["runs"]
    assert run["results"] == json.loads((ROOT / "results" / name / "results.json").read_text())
    assert report("md") == (ROOT / "results" / name / "tables.md").read_text()


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_commands_in_documents_run(page, tmp_path):
    """Every line of a ```console block that starts with `$ whet` runs, in order, in one folder."""
    text = (ROOT / "docs" / page).read_text()
    env = {**os.environ, "PATH": f"{BUILD / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["python3", "-c", "import numpy; numpy.save('logits.npy', numpy.random.default_rng(0)"
                    ".normal(size=(8, 1000)).astype('float32'))"], cwd=tmp_path, check=True, env={
                        **env, "PATH": f"{ROOT / 'build/venv/bin'}:{env['PATH']}"})
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        for command in re.findall(r"^\$ (whet .*)$", block, re.M):
            result = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
            assert result.returncode == 0, f"{command}: {result.stderr}"


def test_nothing_of_this_machine():
    needle = re.compile(r"/(root|home|work)/|https?://(?!arxiv|opensource)[a-z0-9.-]*(pypi|debian|anaconda)", re.I)
    for path in sources(".cc", ".h", ".c", ".py", ".md", ".txt", ".sh", ".json", ".toml", ".pyi", "Makefile"):
        if path.name != "test_layout.py":
            assert not needle.search(path.read_text()), path.relative_to(ROOT)


@pytest.mark.parametrize("group, has, lacks", [("demo", ["g++", "cmake", "node-d3"], ["clang", "libgtest-dev", "chromium"]),
                                               ("tests", ["g++", "clang", "libgtest-dev", "chromium"], []),
                                               ("aarch64", ["libhwy-dev:arm64", "qemu-user"], ["libhwy-dev", "clang"])])
def test_setup_without_root_prints_the_line_to_run(group, has, lacks, tmp_path):
    """On a machine that has none of the packages."""
    for name, script in (("dpkg-query", "exit 1"), ("id", "echo 1000")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    result = subprocess.run([ROOT / "tools/setup.sh", group], capture_output=True, text=True,
                            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert result.returncode == 1 and result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("  sudo apt-get update && sudo apt-get install -y --no-install-recommends ")
    packages = line.split()[9:]
    assert set(has) <= set(packages) and not set(lacks) & set(packages)


def test_tests_assert():
    """A test file that checks nothing can't fail."""
    for path in sources("_test.cc"):
        assert re.search(r"EXPECT_|ASSERT_", path.read_text()), path.name
