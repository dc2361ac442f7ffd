"""`tidegate completion` prints a script for each shell, with every command and option."""

import subprocess

import pytest

from tidegate_cli import completion_command, main


@pytest.mark.parametrize("shell", completion_command.SHELLS)
def test_the_script_of_a_shell_has_every_command_and_their_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert not [name for name in (*main.COMPONENTS, *main.COMMANDS) if name not in script]
    assert not [option for option in ("sim-speed", "checked-share", "all-namespaces", "span") if option not in script]


def test_bash_reads_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["completion", "bash"])
    script = capsys.readouterr().out + "\ncomplete -p tidegate\n"
    done = subprocess.run(["bash", "--norc"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tidegate" in done.stdout
