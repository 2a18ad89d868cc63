from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.projects.requirements import parse_requirements

GOOD = r"""
# a comment
numpy
numpy==2.0.0  # another
scikit-learn >=1.3, <2 ; python_version >= "3.9"
requests[security,socks]~=2.31
torch==2.0.1+cpu --index-url https://download.pytorch.org/whl/cpu
--extra-index-url https://example.com/simple
--find-links=./wheels
-r more.txt
-rmore.txt
-e ./package
-e git+https://example.com/x.git@main#egg=x
--no-index
--pre
git+https://example.com/x.git@v1.0#egg=x
https://example.com/x-1.0-py3-none-any.whl
x @ https://example.com/x.tar.gz
./local
wheels/x-1.0-py3-none-any.whl
x-1.0-py3-none-any.whl
file:///opt/x.whl
six==1.16.0 \
    --hash=sha256:1e61c37477a1626458e36f7b1d82aa5c9b094fa4802892072e49de9c60c4c926 \
    --hash=sha256:8abb2f1d86890a2dfb989f9a77cfcfd3e47c2a354b01111771326f8aa26e0254
pandas \
    >=2
token @ https://${TOKEN}@example.com/token.whl
"""

BAD = [
    ("numpy=1.0", 1, 1, "'numpy=1.0' is not a requirement", "write numpy==1.0"),
    ("numpy 1.0", 1, 1, "'numpy 1.0' is not a requirement", "write numpy==1.0"),
    ("six\n  numpy = 1.17.3 # pinned", 2, 3, "'numpy = 1.17.3' is not a requirement", "write numpy==1.17.3"),
    ("numpy==", 1, 1, "'numpy==' is not a requirement", "write it as name==version"),
    ("numpy==1.0 pandas", 1, 1, "'numpy==1.0 pandas' is not a requirement", "write numpy==1.0"),
    ("!pip install numpy", 1, 1, "'!pip install numpy' is not", "write a package's name, such as numpy==2.0.0"),
    ("pip install numpy", 1, 1, "'pip install numpy' is not a requirement", "write it as name==version"),
    ("six\n\nrequests[security", 3, 1, "'requests[security' is not a requirement", "write it as name==version"),
    ("numpy==1.0; python_versio < '3'", 1, 1, "is not a requirement", "write numpy==1.0"),
    ("a \\\n b \\\n c", 1, 1, "is not a requirement", "write it as name==version"),
    ("--requirment more.txt", 1, 1, "unknown option '--requirment'", "did you mean --requirement?"),
    ("--zzzz", 1, 1, "unknown option '--zzzz'", "remove the line"),
    ("-r", 1, 1, "-r requires a value", "write -r VALUE, or remove the line"),
    ("--pre yes", 1, 1, "--pre takes no value", "write --pre"),
    ("cortex==0.31.0", 1, 1, "'cortex' would replace the module cortex", "remove the line: it is installed"),
    ("<<<<<<< HEAD", 1, 1, "'<<<<<<< HEAD' is not a requirement", "write a package's name, such as numpy==2.0.0"),
]


def test_accepts_what_installers_accept() -> None:
    assert parse_requirements(GOOD, "requirements.txt") == []


@pytest.mark.parametrize(("text", "line", "column", "message", "fix"), BAD)
def test_reports_a_bad_line_with_its_fix(text: str, line: int, column: int, message: str, fix: str) -> None:
    [found] = parse_requirements(text, "deps/requirements.txt")
    assert (found.file, found.line, found.column, found.fix) == ("deps/requirements.txt", line, column, fix)
    assert message in found.message
    assert "\n" not in str(found)


def test_reports_all_bad_lines() -> None:
    text = "\n".join(["six"] + [text for text, *_ in BAD[:3]])
    assert [found.line for found in parse_requirements(text, "r.txt")] == [2, 3, 5]


@given(st.text())
def test_any_text_is_accepted_or_reported(text: str) -> None:
    parse_requirements(text, "requirements.txt")
