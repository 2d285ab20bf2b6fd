"""The wheel and the sdist of build/wheels, as `make wheel` leaves them. `make test-wheel` tries them on a bare machine."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build/wheels"
# Where the program and the extension would find a libhwy or a whet that isn't the wheel's.
INHERITED = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}


def run(*command, **variables) -> str:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, env={**INHERITED, **variables})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    tag = "cp312-abi3" if sys.version_info >= (3, 12) else "cp{0}{1}-cp{0}{1}".format(*sys.version_info)
    return next(WHEELS.glob(f"whet-*-{tag}-manylinux_*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel in a folder that is none of the interpreter's own, as after pip install --user."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", folder, wheel)
    return folder


def test_extension_loads_its_own_highway(installed):
    program = "import whet; print(whet.softmax([0.0, 0.0]), open('/proc/self/maps').read())"
    output = run(sys.executable, "-c", program, PYTHONPATH=str(installed))
    assert output.startswith("[0.5 0.5] ")
    assert {Path(path).parent for path in re.findall(r"/\S*libhwy\S*", output)} == {installed / "whet.libs"}


def test_command_runs_and_loads_its_own_highway(installed):
    assert run(installed / "bin/whet", "--version", PYTHONPATH=str(installed)) == "whet 0.1.0\n"
    libraries = re.findall(r"=> (\S*libhwy\S*)", run("ldd", installed / "whet/bin/whet"))
    assert [Path(path).resolve().parent for path in libraries] == [installed / "whet.libs"]


def test_command_ends_with_its_reader(installed):
    """Python ignores SIGPIPE; the program that it starts must not."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([installed / "bin/whet", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True,
                            env={**INHERITED, "PYTHONPATH": str(installed)})
    os.close(writer)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")


def test_needs_nothing_but_glibc_and_the_cpp_runtime(installed):
    paths = [*installed.glob("whet/*.so"), *installed.glob("whet.libs/*"), installed / "whet/bin/whet"]
    assert len(paths) == 3
    for path in paths:
        needed = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", path))}
        outside = needed - {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"}
        assert all(name.startswith("libhwy-") for name in outside), path


def test_wheel_carries_the_licences_of_what_it_contains(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for package in ("LICENSE", "libhwy-dev/copyright", "nlohmann-json3-dev/copyright"):
        assert any(name.endswith(f".dist-info/licenses/{package}") for name in names), package


def test_sdist_holds_the_source_and_nothing_else():
    sdist = next(WHEELS.glob("whet-*.tar.gz"))
    top = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    tracked = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").split("\n")
    assert names == {name for name in tracked if name and not name.startswith(".")} | {"PKG-INFO"}
