"""Every block of code in README and docs is run here, or says why not.

A block that cannot run carries `<!-- not run: WHY -->` above it; a page of such blocks, `<!-- blocks not run: WHY -->`;
a block that wants an optional package, `<!-- needs: PACKAGE -->`.

The Python blocks of a page run one after the other, in one namespace. Of shell blocks, the `wbmm` commands run. Where a
page has a large model, the smallest of the family runs, without a download. Shell commands that do not run are parsed:
programs, options, configurations and files must exist. Of pages that a command wrote (docs/results, models), the
commands are parsed.
"""

import argparse
import importlib.util
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import timm
import torch

from tests.test_habits import TARGETS
from wbmm import cli
from wbmm.data.images import draw_landscape
from wbmm.models.named_mixers import MIXERS
from wbmm.ops import BACKENDS
from wbmm.train.config import load_config

ROOT = Path(__file__).parents[1]
WRITTEN = [path.relative_to(ROOT) for folder in ("docs/results", "models") for path in (ROOT / folder).rglob("*.md")]
BY_HAND = [Path(name) for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "wbmm/ops/README.md")]
BY_HAND += [path for path in (file.relative_to(ROOT) for file in (ROOT / "docs").rglob("*.md")) if path not in WRITTEN]
MARK = r"(?:^<!-- (?P<mark>(?:not run|needs): \w[^\n]+?) -->\n+)?"
BLOCK = re.compile(MARK + r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
WHOLE_PAGE = re.compile(r"^<!-- blocks not run: (.+?) -->$", re.MULTILINE)
SHELL, OUTPUT = ("bash", "sh"), ("text", "bibtex")
PRINTED = {  # what examples have to print; most of them check themselves
    "CONTRIBUTING.md": "windowed (2, 64, 56, 56) window (7, 7)",
    "docs/migrate.md": "[(1, 40, 56, 56), (1, 80, 28, 28), (1, 160, 14, 14), (1, 320, 7, 7)]",
}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    mark: str  # the comment above it
    line: int

    @property
    def why_not(self) -> str | None:
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else None


def blocks(page: Path, *languages: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    whole = WHOLE_PAGE.search(text)
    found = []
    for match in BLOCK.finditer(text):
        mark = match["mark"] or (f"not run: {whole[1]}" if whole else "")
        found.append(Block(match["language"], match["code"], mark, text[: match.start("code")].count("\n") + 1))
    return [block for block in found if not languages or block.language in languages]


def shrink(code: str) -> str:
    """The smallest model in place of a larger one, and no download."""
    patterned = r"(?!.*pattern=\()"  # a pattern has as many letters as its model has blocks
    code = re.sub(r"(?<![a-z])(wbmm|unireplknet)_[tsb](?![a-z0-9])" + patterned, r"\1_a", code)
    return re.sub(r'("wbmm_\w+"), pretrained=True', r"\1", code)


def ids(page: Path) -> str:
    return page.as_posix()


@pytest.mark.parametrize("page", BY_HAND, ids=ids)
def test_blocks_say_what_they_are(page):
    for block in blocks(page):
        known = block.language in ("python", "yaml", *SHELL, *OUTPUT)
        assert known, f"{page}:{block.line}: a block of {block.language or 'what?'}"
        for named in re.findall(r"tests/[\w/.]+", block.mark):
            assert (ROOT / named).exists(), f"{page}:{block.line}: there is no {named}"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """A folder with the files that the pages speak of."""
    folder = tmp_path_factory.mktemp("workshop")
    for index in range(12):
        target = folder / "photos" / ("cat", "dog")[index % 2] / f"{index}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        draw_landscape(index).resize((64, 64)).save(target)
    for name in ("cat.jpg", "new.jpg", "photo.jpg"):
        draw_landscape(99).resize((80, 64)).save(folder / name)
    for model in ("wbmm_a", "wbmm_a_dense"):
        torch.save(timm.create_model(model).state_dict(), folder / f"{model}.pth")
    shutil.copy(folder / "wbmm_a.pth", folder / "wbmm_a_in1k_224_w7.pth")
    return folder


@pytest.fixture
def _restored(monkeypatch):
    """What examples register is forgotten afterwards."""
    monkeypatch.setattr("wbmm.models.named_mixers.MIXERS", dict(MIXERS))
    before = list(BACKENDS)
    yield
    BACKENDS[:] = before


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("page", [page for page in BY_HAND if blocks(page, "python")], ids=ids)
def test_python_blocks_run(page, workshop, tmp_path, monkeypatch, capsys):
    shutil.copytree(workshop, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for block in blocks(page, "python"):
        package = block.mark.removeprefix("needs: ")
        if block.why_not or (package and not importlib.util.find_spec(package)):
            compile(block.code, str(page), "exec")
            continue
        if block.code.startswith("_base_"):
            load_example(block.code, tmp_path / "example.py")
            continue
        lines = "\n" * (block.line - 1)  # so that a traceback has the line of the page
        exec(compile(lines + shrink(block.code), str(ROOT / page), "exec"), names)
    assert PRINTED.get(str(page), "") in capsys.readouterr().out


def load_example(code: str, file: Path) -> None:
    """A configuration for MMSegmentation or MMDetection: its base is found, and its variables reach the model."""
    from wbmm.mm.networks import load_mm_config

    file.write_text(code, encoding="utf-8")
    config = load_mm_config(file)
    assert config.model.backbone.arch == config.arch == "wbmm_t_dense"


@pytest.mark.parametrize("page", [page for page in BY_HAND if blocks(page, "yaml")], ids=ids)
def test_yaml_blocks_are_configurations(page, tmp_path):
    """Each begins with a comment that says which file it is."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for block in blocks(page, "yaml"):
        file = tmp_path / block.code.splitlines()[0].removeprefix("# ")
        file.write_text(block.code, encoding="utf-8")
        load_config(file)


def commands(block: Block) -> list[tuple[dict[str, str], list[str]]]:
    """The commands of a shell block, each with the variables before it; $NAME is what a line of the block set."""
    found, shell = [], {}
    code = re.sub(r"\\\n\s*", "", block.code)
    for line in code.splitlines():
        words = [shell.get(word, word) for word in shlex.split(line, comments=True)]
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            words, rest = words[:end], words[end + 1 :]
            variables = {}
            while words and re.match(r"[A-Z_]+=", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words:
                found.append((variables, words))
            else:
                shell |= {f"${name}": value for name, value in variables.items()}
            words = rest
    return found


class Parsed(BaseException):
    """The arguments were accepted; nothing is run."""


@pytest.fixture
def parse(monkeypatch, capsys):
    """Runs a program up to the point where its arguments are parsed, and gives these."""

    def stop_after(method):
        def parse_and_stop(parser, *arguments, **options):
            raise Parsed(method(parser, *arguments, **options))

        return parse_and_stop

    def run(words, start):
        with monkeypatch.context() as patch:
            for name in ("parse_args", "parse_intermixed_args"):
                patch.setattr(argparse.ArgumentParser, name, stop_after(getattr(argparse.ArgumentParser, name)))
            patch.setattr(sys, "argv", words)
            try:
                start()
            except Parsed as parsed:
                return parsed.args[0]
            except SystemExit:
                pass
        pytest.fail(f"{shlex.join(words)}: {(capsys.readouterr().err.splitlines() or ['not parsed'])[-1]}")

    return run


def check(variables: dict[str, str], words: list[str], why_not: str | None, parse) -> None:
    """The program exists, takes these arguments, and the files of the repository that they name are there."""
    for word in words:
        inside = re.match(r"(configs|scripts|tools|docs|models)/", word) and not re.search(r"[A-Z]{4}|[<*]", word)
        assert not inside or (ROOT / word).exists(), f"{shlex.join(words)}: there is no {word}"
    program = words.pop(0)
    words = words[1:] if program in ("sbatch", "exec") else words
    script = next((word for word in words if word.endswith(".py")), None)
    if program == "wbmm":
        arguments = parse(["wbmm", *words], lambda: cli.main(words))
        check_overrides(arguments if words[0] == "train" else None)
    elif program == "make":
        assert words[0] in TARGETS
    elif program.endswith(("train_dist.sh", "train_slurm.sh")) or program == "sbatch":
        check({}, ["python", f"tools/{variables.get('TOOL', 'train')}.py", *words], why_not, parse)
    elif script and program in ("python", "torchrun") and words[0] != "-m":
        words = words[words.index(script) :]
        arguments = parse(words, lambda: runpy.run_path(str(ROOT / script), run_name="__main__"))
        check_overrides(arguments if script == "tools/train.py" else None)
    else:
        assert why_not, f"{program} is not run by the tests: say why not above the block"


def check_overrides(train: argparse.Namespace | None) -> None:
    """key=value pairs of a training command are valid for its configuration."""
    if train and train.config and not train.data and (ROOT / "configs" / train.config).exists():
        load_config(ROOT / "configs" / train.config, train.overrides)
    elif train and train.config and train.config.startswith(("configs/", "table:")) and "CONFIG" not in train.config:
        load_config(train.config, train.overrides)


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # of torchrun's decorator: output is captured here
@pytest.mark.parametrize("page", [page for page in [*BY_HAND, *WRITTEN] if blocks(page, *SHELL)], ids=ids)
def test_shell_commands_are_valid(page, parse, monkeypatch):
    monkeypatch.chdir(ROOT)
    for block in blocks(page, *SHELL):
        for variables, words in commands(block):
            check(variables, words, block.why_not or (page in WRITTEN) or None, parse)


DONE = set()  # commands that another page has run


@pytest.mark.parametrize("page", [page for page in BY_HAND if blocks(page, *SHELL)], ids=ids)
def test_shell_commands_run(page, workshop, monkeypatch, capsys):
    monkeypatch.chdir(workshop)
    for block in blocks(page, *SHELL):
        for _, words in [] if block.why_not else commands(block):
            command = [shrink(word) for word in words]
            assert command[0] == "wbmm", f"{page}:{block.line}: {command[0]} is not run: say why above the block"
            if command[1] == "train":
                command += ["--model", "wbmm_a", "--size", "32", "--epochs", "1"]
            if tuple(command) not in DONE:
                code = cli.main(command[1:])
                assert code == 0, f"{page}:{block.line}: {shlex.join(command)}: {capsys.readouterr().err}"
            DONE.add(tuple(command))


def test_an_unmarked_block_that_cannot_run_is_found(parse):
    block = Block("bash", "tensorboard --logdir runs\n", "", 1)
    ((variables, words),) = commands(block)
    with pytest.raises(AssertionError, match="say why not"):
        check(variables, words, block.why_not, parse)


def test_a_command_with_a_wrong_option_is_found(parse):
    for words in (["wbmm", "export", "a.pt", "--fromat", "onnx"], ["python", "tools/train_seg.py", "C.py", "--resum3"]):
        with pytest.raises(pytest.fail.Exception, match="unrecognized arguments"):
            check({}, words, None, parse)


def test_small_models_stand_in_for_large_ones():
    code = 'create_model("wbmm_t_hier", pretrained=True); load("wbmm_t_in1k.pth", "unireplknet_s", "wbmm_a.tiny50")'
    small = 'create_model("wbmm_a_hier"); load("wbmm_a_in1k.pth", "unireplknet_a", "wbmm_a.tiny50")'
    assert shrink(code) == small
