"""Data files go into a built package: whoever installs it without a checkout needs them as well."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "evener"


def test_every_data_file_is_packaged():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["evener"]
    packaged = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    data = {f for f in PACKAGE.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert PACKAGE / "diagnosis" / "rules.json" in data
    assert not data - packaged
