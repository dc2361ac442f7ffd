"""`tidegate bench` names a file that it cannot read before it works."""

import pytest

from tidegate_sim import bench


def test_a_trace_file_that_does_not_exist_gives_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["prefix", "--checked-share", "0", "--trace-file", "/nosuch", "--workflows", "1"]) == 1
    assert "tidegate bench: cannot use /nosuch: No such file or directory" in capsys.readouterr().err
