"""A short soak of all its parts. (Random calls alone are a test of every build.)"""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ["WHET_BUILD"]


def soak(*arguments):
    return subprocess.run([sys.executable, os.path.join(ROOT, "tests/soak/soak.py"), "--build", BUILD, *map(str, arguments)],
                          capture_output=True, text=True, timeout=600)


def test_a_short_soak_finds_nothing_wrong(tmp_path):
    result = soak("--seconds", 8, "--jobs", 1, "--seed", 1, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["calls"][0]["calls"] > 100 and sum(found["lab"][0]["disturbances"].values()) > 0
    assert "calls of the library" in result.stdout and "runs resumed" in result.stdout


def test_a_case_is_its_seed(tmp_path):
    """The same seed draws the same calls, so what a long run found can be seen again."""
    program = os.path.join(BUILD, "tests/soak/whet_soak")
    tallies = []
    for name in ("a", "b"):
        subprocess.run([program, "--seed", "12", "--calls", "50", "--json", tmp_path / name], check=True, capture_output=True)
        tallies.append(json.loads((tmp_path / name).read_text())["functions"])
    assert tallies[0] == tallies[1]


def test_wrong_options_are_named():
    program = os.path.join(BUILD, "tests/soak/whet_soak")
    for arguments, saying in [(["--calls", "x"], "--calls: is 'x'"), (["--zoom", "1"], "--zoom: unknown"),
                              (["--calls", "1", "--check", "none"], "check: is 'none'"), ([], "needed")]:
        result = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert result.returncode == 2 and saying in result.stderr
