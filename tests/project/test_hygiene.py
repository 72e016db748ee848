"""The repository speaks of itself alone: no machine paths, no hosts of registries, one place for the version."""

from __future__ import annotations

import json
import re
import tomllib

from hypothesis import HealthCheck, settings
from repository import ROOT, read, tracked

TEXT = (
    ".py",
    ".pyi",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".txt",
    ".cpp",
    ".h",
    ".cu",
    ".proto",
    ".sh",
    ".json",
    ".js",
    ".css",
    ".html",
    "Makefile",
    "run",
)
# Written in pieces, so that this file does not match itself.
FORBIDDEN = [
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.])/" + r"(root|work|mnt|opt)/",
        r"/home/" + r"[a-z]",
        r"pypi\." + r"(org|nvidia)",
        r"python" + r"hosted\.org",
        r"pip install[^#\n]*(?<![\w./-])wicore" + r"[-_]trt(?![\w-]*\.whl)",  # on no index: a stranger may register it
        r"download\." + r"pytorch\.org",
        r"(index|find-links|extra-index)" + r"-url\s*=",
        r"\b(docker|ghcr|quay|nvcr)\." + r"io\b",
    )
]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_no_machine_paths_and_no_registry_hosts() -> None:
    paths = [n for n in tracked() if n.endswith(TEXT)]
    found = {(path, p.pattern) for path in paths for p in FORBIDDEN if p.search(read(path))}
    assert not found


def test_the_patterns_match() -> None:
    for text in (
        "cd /" + "root/x",
        '"/' + 'work/main"',
        "/home/" + "me",
        "https://pypi." + "org/simple",
        "pip install x wicore" + "-trt",
    ):
        assert any(p.search(text) for p in FORBIDDEN), text
    assert not any(p.search("https://host/network/work/x ~/.cache and ./opt/x") for p in FORBIDDEN)


def test_version_is_in_one_place() -> None:
    literal = re.compile(rf"(?i)version\W{{1,4}}{re.escape(VERSION)}")
    names = [n for n in tracked() if n.endswith(TEXT) and literal.search(read(n))]
    assert names == ["pyproject.toml"]


def test_no_build_products_are_tracked() -> None:
    assert not [n for n in tracked() if n.endswith((".so", ".pyc", ".whl", ".safetensors", ".gguf", ".partial"))]


def test_the_lock_of_the_npm_packages_names_those_of_other_systems() -> None:
    """npm 11 refuses a lock that leaves out an optional package, and so installs nothing."""
    packages = json.loads(read("tests/clients/node/package-lock.json"))["packages"]
    kinds = ("dependencies", "optionalDependencies")
    asked = {name for package in packages.values() for kind in kinds for name in package.get(kind, ())}
    assert asked and not asked - {path.rpartition("node_modules/")[2] for path in packages}


def test_no_property_is_timed() -> None:
    """By default an example has 200 ms, and five have a second to be made: too little on a busy machine."""
    assert settings().deadline is None and HealthCheck.too_slow in settings().suppress_health_check
