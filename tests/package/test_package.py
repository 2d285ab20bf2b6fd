"""whet as an installed package: CMake, pkg-config, and from C."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = Path(os.environ["WHET_BUILD"])


def run(*command, **kwargs) -> str:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", path)
    return path


def test_find_package(prefix, tmp_path):
    run("cmake", "-G", "Ninja", "-S", HERE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "uses_cpp") == "0.25 0.1.0\n"
    for program in ("uses_c", "uses_c_v1"):
        assert "checks passed" in run(tmp_path / program, tmp_path / "rule")


def test_pkg_config(prefix, tmp_path):
    pc = next(prefix.rglob("whet.pc"))
    env = {**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}
    flags = run("pkg-config", "--cflags", "--libs", "whet", env=env).split()
    run("g++", "-std=c++20", HERE / "main.cc", "-o", tmp_path / "main", *flags, f"-Wl,-rpath,{pc.parents[1]}")
    assert run(tmp_path / "main") == "0.25 0.1.0\n"


HAS_MPI = shutil.which("mpirun") is not None and (BUILD / "whet-mpi.pc").exists()


@pytest.mark.skipif(not HAS_MPI, reason="built without MPI")
def test_mpi_is_a_package_of_its_own(prefix, tmp_path):
    """By CMake's component and by pkg-config; libwhet itself needs no MPI."""
    launch = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", "2"]
    run("cmake", "-G", "Ninja", "-S", HERE / "mpi", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert run(*launch, tmp_path / "uses_mpi") == "2 ranks: 2.5\n"
    pc = next(prefix.rglob("whet-mpi.pc"))
    env = {**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}
    flags = run("pkg-config", "--cflags", "--libs", "whet-mpi", env=env).split()
    run("mpicxx", "-std=c++20", HERE / "mpi/main.cc", "-o", tmp_path / "main", *flags, f"-Wl,-rpath,{pc.parents[1]}")
    assert run(*launch, tmp_path / "main") == "2 ranks: 2.5\n"
    assert "mpi" not in run("readelf", "-d", next(prefix.rglob("libwhet.so")))


def test_installed_command_finds_its_library(prefix):
    assert run(prefix / "bin" / "whet", "--version") == "whet 0.1.0\n"


def test_exports_nothing_but_whet(prefix):
    """The shared library shows its own names only, and needs no more than Highway beside the C++ runtime."""
    library = next(prefix.rglob("libwhet.so"))
    names = run("nm", "-DC", "--defined-only", library).splitlines()
    foreign = [n for n in names if not any(mark in n for mark in ("whet", " std::", "_init", "_fini"))]
    assert not foreign
    needed = [line.split()[-1].strip("[]") for line in run("readelf", "-d", library).splitlines() if "NEEDED" in line]
    assert {n.split(".so")[0] for n in needed} <= {"libhwy", "libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"}


def test_stays_in_memory_for_its_workers(prefix, tmp_path):
    library = next(prefix.rglob("libwhet.so"))
    run("gcc", "-Wall", "-Wextra", "-Werror", HERE / "unload.c", "-o", tmp_path / "unload", f"-I{prefix}/include", "-ldl")
    assert run(tmp_path / "unload", library) == "unloaded 20 times\n"
    # gcc's unique symbols keep a library by accident; this keeps it whatever the compiler.
    assert "NODELETE" in run("readelf", "-d", library)


def test_public_headers_stand_alone(prefix, tmp_path):
    """Each compiles by itself under strict warnings, and no Highway header hides behind one."""
    for header in sorted((prefix / "include/whet").glob("*.h")):
        if header.name == "mpi.h":
            continue  # needs that of MPI; test_mpi_is_a_package_of_its_own compiles it
        source = tmp_path / "one.cc"
        source.write_text(f"#include <whet/{header.name}>\n")
        deps = run("g++", "-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-M", f"-I{prefix}/include", source)
        run("g++", "-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{prefix}/include", source)
        assert "hwy/" not in deps, header.name
    c_source = tmp_path / "one.c"
    c_source.write_text("#include <whet/c_api.h>\n")
    run("gcc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{prefix}/include", c_source)
