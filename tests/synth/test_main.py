"""One entry to the commands: only those that exist, each with what follows it."""

from types import SimpleNamespace

import pytest

from synth import __main__ as module
from synth.__main__ import available, main


def test_a_command_gets_what_follows_it_and_gives_its_status(monkeypatch):
    given = []

    def command(arguments):
        given.append(list(arguments))
        return 7

    monkeypatch.setattr(module.importlib, "import_module", lambda name: SimpleNamespace(main=command))
    assert main(["area", "--list", "x y"]) == 7
    assert given == [["--list", "x y"]]


def test_help_lists_what_exists_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setitem(module.COMMANDS, "absent", "no such module")
    assert main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert listed == list(available())
    assert {"area", "report"} <= set(listed)
    assert "absent" not in listed


@pytest.mark.parametrize(("arguments", "got"), [([], "nothing"), (["aera"], "'aera'"), (["--list"], "'--list'")])
def test_anything_else_is_one_line(arguments, got, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [f"error: command must be one of {', '.join(available())}, not {got}"]
