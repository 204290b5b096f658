"""Importing the package needs neither io_uring nor liburing, CUDA or root, and imports no engine."""

from __future__ import annotations

import subprocess
import sys

import fastpersist


def _run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=300).stdout


def test_importing_loads_no_engine_and_no_command_line() -> None:
    loaded = _run("import sys, fastpersist; print('\\n'.join(sys.modules))").split()
    assert "fastpersist.engines.base" in loaded
    for module in ("fastpersist.engines.io_uring", "fastpersist.engines.posix", "liburing", "typer", "rich", "fastpersist.cli"):
        assert module not in loaded


def test_without_liburing_the_package_works_and_says_so() -> None:
    output = _run(
        "import sys; sys.modules['liburing'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'liburing' else real(name, *a)\n"
        "import fastpersist\n"
        "from fastpersist.engines import _liburing; _liburing._candidates = lambda: ['liburing-missing.so']\n"
        "print(fastpersist.available()['io_uring']); print(fastpersist.open_engine('auto').name)"
    )
    assert "usable=False" in output
    assert "pip install liburing" in output
    assert output.split()[-1] == "posix"


def test_public_names_exist() -> None:
    for name in fastpersist.__all__:
        assert hasattr(fastpersist, name)
