"""Arguments of a model in shell commands: a real shell must read each of them as one literal text."""

import subprocess

import pytest

from twinkle.errors import InvalidInputError
from twinkle_agentic.envs.command_template import CommandTemplate

ATTACKS = [
    "plain",
    "PATH=x",
    "two words",
    "; rm -rf *",
    "$(touch owned)",
    "`touch owned`",
    "a\ntouch owned\n",
    "it's",
    "'; touch owned; '",
    '"; touch owned; "',
    '" && touch owned && "',
    "\\'; touch owned; #",
    "\\",
    "$HOME ${HOME} ~ * ? [a-z] {a,b} !!",
    "> owned",
    "| tee owned",
    "-n",
    "",
    "ünïcode\t\r",
]


@pytest.fixture
def shell(tmp_path):
    """Run a command in a folder with one file; return what it prints, and check that the folder stays as it is."""
    (tmp_path / "kept").write_text("here")

    def run(command):
        done = subprocess.run(["/bin/bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=60, check=True)
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        return done.stdout.decode()

    return run


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("printf '[%s]' {x}", "", ""),
        ("printf '[%s]' \"{x}\"", "", ""),
        ("printf '[%s]' '{x}'", "", ""),
        ("printf '[%s]' --flag={x}", "--flag=", ""),
        ('printf \'[%s]\' "say \\"{x}\\" now"', 'say "', '" now'),
        ("printf '[%s]' 'a'\"'{x}'\"'b'", "a'", "'b"),
        ("printf '[%s]' {{{x}}}", "{", "}"),
    ],
    ids=["plain", "double", "single", "flag", "escaped", "mixed", "braces"],
)
def test_a_shell_reads_every_text_as_it_is(shell, template, before, after):
    made = CommandTemplate(template)
    printed = shell("\nprintf '\\0'\n".join(made.fill({"x": attack}) for attack in ATTACKS))
    assert printed.split("\0") == [f"[{before}{attack}{after}]" for attack in ATTACKS]


def test_a_text_does_not_change_the_words_around_it(shell):
    assert shell("A=1; AB=2; " + CommandTemplate("printf '%s' $A{x}").fill({"x": "B"})) == "1B"
    assert shell(CommandTemplate("./{x} true || printf no").fill({"x": "PATH=x"})) == "no"  # no assignment: a command


def test_several_arguments_and_formats(shell):
    template = CommandTemplate("printf '%s|' {a} \"{b:>4}\" {c!r} {d[k]}")
    assert shell(template.fill({"a": "$(id)", "b": 7, "c": "x", "d": {"k": "; ls"}})) == "$(id)|   7|'x'|; ls|"
    assert CommandTemplate("ls -l $(pwd) # all").fill({}) == "ls -l $(pwd) # all"  # no placeholder: any command


@pytest.mark.parametrize(
    "template",
    [
        "echo $(cat {x})",
        "echo `cat {x}`",
        "cat <<E\n{x}\nE",
        "(( {x} ))",
        "[[ {x} -eq 1 ]]",
        "a[{x}]=1",
        "echo ${x}",  # the placeholder after a dollar would become $'…', in which backslashes count
        "echo $'{x}'",
        "echo ${{{x}}}",
        "echo ${{A:-{x}}}",
        "ls # {x}",
        "eval {x}",
        "cd / && eval {x}",
        "bash -c {x}",
        "/bin/sh -e -c '{x}'",
        "bash -lc {x}",
        "export A={x}",
        "echo $[ {x} + 1 ]",
        "sh '-c' {x}",
        "'sh' -c {x}",
        "$SHELL -c {x}",
        "bash \\\n-x \\\n-c {x}",
        "echo {x} | bash",
        "echo {x} | sudo /bin/sh -s",
        "bash <(echo {x})",
        "\\eval {x}",
        "e''val {x}",
        "env -S {x}",
        "trap {x} EXIT",
        "ssh host ls {x}",
        "printf -v {x} a",
        "printf {x} {y} a",  # the first may be -v, and the second a subscript with a command
        "read {x} < names",
        "test -v {x}",
        "[ {x} {y} ]",
        "{x} {y}",  # 'eval' is a command, with and without quotes
        "ls && '{x}' {y}",
        "if ! A=1 {x} {y}; then ls; fi",
        "A={x}; $A {y}",
        "echo \\{x}",
        "echo '{x}",
        "echo {}",
        "echo {0}",
        "echo {x:{y}}",
        "awk '{print $1}' {x}",
        "echo {x} }",
    ],
)
def test_templates_that_a_shell_could_read_otherwise(template):
    with pytest.raises(InvalidInputError, match="command_template"):
        CommandTemplate(template)


@pytest.mark.parametrize(
    "template",
    [
        "bash run.sh {x}",
        "./run.sh {x} && $HOME/bin/tool {y}",
        'while read line; do grep -c -- {x} "$line"; done < names',
        "[ {x} = {y} ] && [ -n {x} ]",
        "git log --grep={x} | grep -v bash",
        "cat {x} | sort | tee out.sh",
        "env A={x} python3 tool.py {y}",
        "PATTERN={x} ./search {y}",
        "find . -name {x} -exec wc -l {{}} +",
    ],
)
def test_ordinary_templates_are_allowed(template):
    CommandTemplate(template)


def test_arguments_that_cannot_be_used():
    template = CommandTemplate("cat {path}")
    with pytest.raises(InvalidInputError, match="arguments with 'path'"):
        template.fill({"file": "x"})
    with pytest.raises(InvalidInputError, match="without NUL"):
        template.fill({"path": "a\0b"})
