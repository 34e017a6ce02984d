"""The test plan names only what exists, and everything that it must name."""

import ast
import tomllib
from pathlib import Path

import pytest

from sim.regress import CASES

ROOT = Path(__file__).resolve().parents[2]
PLAN = tomllib.loads((ROOT / "sim/testplan.toml").read_text(encoding="utf-8"))["feature"]
BENCHES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "sim").glob("bench_*.py"))


def functions(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def is_test(path, node):
    if path.startswith("tests/"):
        return node.name.startswith("test_")
    return any("cocotb.test" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("feature", PLAN, ids=lambda feature: feature["name"])
def test_feature_has_tests_and_they_exist(feature):
    assert set(feature) <= {"name", "spec", "tests", "cases"}
    assert feature["spec"]
    assert feature["tests"], "a feature needs a test"
    for name in feature["tests"]:
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), path
        assert function in functions(path), name
        assert is_test(path, functions(path)[function]), name
    assert set(feature.get("cases", [])) <= set(CASES)


def test_features_have_names_of_their_own():
    assert len({feature["name"] for feature in PLAN}) == len(PLAN)


def test_every_configuration_is_in_the_plan():
    assert set(CASES) == {case for feature in PLAN for case in feature.get("cases", [])}


def test_every_cocotb_test_is_in_the_plan():
    named = {name for feature in PLAN for name in feature["tests"]}
    found = {f"{path}::{name}" for path in BENCHES for name, node in functions(path).items() if is_test(path, node)}
    assert found
    assert found <= named
