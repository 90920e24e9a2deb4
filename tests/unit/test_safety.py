"""What our own code must not contain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.runs import ROOT

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "multiprocessing", "joblib"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "eval", "exec", "np.load", "numpy.load", "os.system"}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                yield module
            case ast.Call(func=function) if ast.unparse(function) in FORBIDDEN_CALLS:
                yield ast.unparse(function)
            case ast.keyword(arg="trust_remote_code"):
                yield "trust_remote_code"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield "shell=True"


@pytest.mark.parametrize("file", sorted((ROOT / "onbeat").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_pickle_no_foreign_code_and_no_shell(file: Path) -> None:
    assert list(offences(file.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from multiprocessing import Queue", "import torch\ntorch.load('x')", "eval('1')",
        "f(trust_remote_code=True)", "run('ls', shell=True)",
    ],
)  # fmt: skip
def test_the_scan_sees_what_it_looks_for(source: str) -> None:
    assert list(offences(source))
