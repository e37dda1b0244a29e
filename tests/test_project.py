"""The project around the code: pins, what tracked files may name, the choice of interpreter, the checks in force."""

import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.dtypes import TypePromotionError
from jaxtyping import TypeCheckError

from dsv41.quant import e2m1_codes

ROOT = Path(__file__).parents[1]


def test_constraints_are_plain_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line)] == []
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names))
    assert {"jax", "jaxlib", "pytest", "setuptools"} <= set(names)


def tracked_files() -> list[Path]:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def test_tracked_files_name_no_registry_and_no_home():
    # With spaces for dots, so that this file does not name one either.
    hosts = "pypi org|pythonhosted org|npmjs org|npmjs com|crates io|golang org|debian org|anaconda org"
    home = r"(?<![\w.~-])/(?:home|Users|root)/(?!me\b)[\w.-]+"  # "me" is the one made-up user
    pattern = re.compile("|".join([hosts.replace(" ", r"\."), home, re.escape(f"{ROOT}/")]).encode())
    found = {str(path.relative_to(ROOT)): match[0] for path in tracked_files() if (match := pattern.search(path.read_bytes()))}
    assert found == {}


@pytest.fixture
def find_python(tmp_path):
    """Runs the script among fake interpreters only: ``{path under tmp_path: what it claims to be}``.

    A claim is a version; "3.12.0 bare" cannot make environments, "3.12.0 env" is the Python of one that stands on "base", and
    None, like a pyenv shim, does not run at all.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("ls", "grep", "sort"):
        (tools / tool).symlink_to(shutil.which(tool))

    def run(fakes: dict[str, str | None], python: str = "") -> subprocess.CompletedProcess:
        for name, claim in fakes.items():
            version, _, kind = (claim or "").partition(" ")
            code = f"import sys; sys.version_info = {tuple(map(int, version.split('.')))}; " if claim else ""
            code += "sys.modules['ensurepip'] = None; " if kind == "bare" else ""
            prefix, base = ("sys.prefix + '-base'", str(tmp_path / "base")) if kind == "env" else ("sys.prefix", "")
            code += f"sys.base_prefix = {prefix}; sys._base_executable = {base!r}; "
            line = shlex.join([sys.executable, "-c", code + "exec(sys.argv[1])"]) + ' "$2"' if claim else "exit 127"
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)
        env = {
            "PATH": f"{tmp_path}/first:{tmp_path}/second:{tools}",
            "PYENV_ROOT": f"{tmp_path}/pyenv",
            "PYTHON": python,
        }
        script = ROOT / "scripts" / "find_python.sh"
        return subprocess.run(["/bin/sh", script], env=env, capture_output=True, text=True)

    return run


@pytest.mark.parametrize(
    ("fakes", "chosen"),
    [
        ({"first/python3": "3.12.1"}, "first/python3"),
        ({"first/python3": "3.12.1 env"}, "base"),
        ({"first/python3": "3.11.7", "first/python3.12": None, "second/python3": "3.13.2"}, "second/python3"),
        (
            {"first/python3": "3.11.7", "second/python3.12": "3.12.0", "pyenv/versions/3.13.0/bin/python3": "3.13.0"},
            "second/python3.12",
        ),
        (
            {
                "first/python3": "3.11.7",
                "first/python3.12": None,
                "first/python3.13": "3.13.0 bare",
                **{f"pyenv/versions/3.{n}/bin/python3": f"3.{n}" for n in ("9.18", "11.7", "12.9", "12.10")},
                "pyenv/versions/3.13.0t/bin/python3": "3.13.0",
            },
            "pyenv/versions/3.12.10/bin/python3",
        ),
    ],
    ids=["first", "under an environment", "later on PATH", "PATH before pyenv", "newest of pyenv"],
)
def test_find_python_picks(find_python, tmp_path, fakes, chosen):
    result = find_python(fakes)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{tmp_path / chosen}\n", "")


@pytest.mark.parametrize(
    ("fakes", "python", "says"),
    [
        (
            {"first/python3": "3.11.7", "pyenv/versions/3.11.9/bin/python3": "3.11.9"},
            "",
            r"3\.12 or newer.*\(3\.11\.7\).*\(3\.11\.9\)",
        ),
        ({"first/python3": "3.13.0", "first/old": "3.11.7"}, "old", r"3\.12 or newer.*\(3\.11\.7\)"),
        ({"first/python3": "3.13.0"}, "missing", "found none"),
        ({"first/python3": "3.12.3 bare"}, "", r"python3 \(3\.12\.3\).*python3-venv"),
    ],
    ids=["old", "old by name", "missing by name", "no venv"],
)
def test_find_python_refuses(find_python, fakes, python, says):
    result = find_python(fakes, python)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(f"error: .*{says}.*\n", result.stderr)


def test_annotations_are_checked_in_and_out_of_jit():
    wrong = jnp.zeros(3, jnp.int32)
    for function in (e2m1_codes, jax.jit(e2m1_codes)):
        with pytest.raises(TypeCheckError, match=r"dsv41\.quant\.e2m1_codes"):
            function(wrong)


def test_no_promotion_and_no_warning_passes():
    with pytest.raises(TypePromotionError, match="strict"):
        jnp.zeros(3, jnp.int32) + jnp.zeros(3, jnp.float32)
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros(3) + jnp.zeros((2, 3))
    with pytest.raises(UserWarning, match="seen"):
        warnings.warn("seen", stacklevel=1)
