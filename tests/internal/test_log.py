import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

CODE = """
from cortex_internal.lib.log import logger as cortex_logger
from cortex_internal.lib.log import logger
assert logger is cortex_logger
"""


def output(code, level=None):
    environment = {**os.environ, **({"CORTEX_LOG_LEVEL": level} if level else {})}
    return subprocess.run(
        [sys.executable, "-c", CODE + code], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_a_record_is_one_line_with_its_extras():
    code = "logger.info('a %s\\nb', 1, extra={'user': 'é', 'n': 2}); logger.warning('w')"
    assert output(code) == "INFO a 1\\nb user='é' n=2\nWARNING w\n"


@pytest.mark.parametrize(
    ("level", "expected"),
    [(None, "IWE"), ("debug", "DIWE"), ("warning", "WE"), ("error", "E"), ("nonsense", "IWE")],
)
def test_the_level_comes_from_the_environment(level, expected):
    code = "[log(log.__name__) for log in (logger.debug, logger.info, logger.warning, logger.error)]"
    assert "".join(line[0] for line in output(code, level).splitlines()) == expected


def test_other_loggers_do_not_repeat_records():
    code = "import logging, sys; logging.basicConfig(stream=sys.stdout); logger.info('once')"
    assert output(code) == "INFO once\n"


def test_a_traceback_follows_its_line():
    code = "try: 1 / 0\nexcept ZeroDivisionError: logger.exception('failed')"
    lines = output(code).splitlines()
    assert lines[0] == "ERROR failed"
    assert lines[1].startswith("Traceback")
    assert lines[-1].startswith("ZeroDivisionError")
