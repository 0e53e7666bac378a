"""The command line, in this process: mistakes cost no time, modes do their work."""

import json
import shutil

import pytest
from absl import app, flags
from absl.testing import flagsaver
from paths import ROOT
from tiny import write_config_file

from lld_jax import agent as agent_lib
from lld_jax import main, train
from lld_jax.model import hf
from lld_jax.parallel.preemption import Preempted

TINY = f"--config={ROOT / 'configs' / 'tiny.py'}"


@pytest.fixture
def command(monkeypatch, capsys):
    """`command(*arguments) -> (exit code, or message, stdout)`."""
    # absl would also take over the handlers of signals and of uncaught exceptions.
    monkeypatch.setattr(app, "_run_init", lambda argv, parse: parse(argv))

    def run(*arguments: str):
        monkeypatch.setattr("sys.argv", ["main", *arguments])
        capsys.readouterr()
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as exit:
            main.run()
        return exit.value.code, capsys.readouterr().out

    yield run
    flags.FLAGS.unparse_flags()


@pytest.fixture
def file(tmp_path, run_config):
    return f"--config={write_config_file(tmp_path / 'config.py', run_config)}"


@pytest.fixture
def nothing_opens(monkeypatch):
    """Fails a test that reaches the tokenizer, the weights or the retriever."""

    def opened(*args):
        raise AssertionError("opened")

    monkeypatch.setattr(agent_lib, "open_agent", opened)
    monkeypatch.setattr(hf, "load", opened)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "config: unset; legal is --config=FILE"),
        (["--config=configs/tinny.py"], "no file 'configs/tinny.py'; did you mean"),
        ([TINY, "--config.optim.lrr=1"], "optim.lrr: no such field; did you mean"),
        ([TINY, "--config.steps=many"], "steps: 'many' is not of type int"),
        ([f"{TINY}:lambda=1"], "'lambda=1': legal are name=value"),
        ([TINY, "--config.optim.updates=7"], "optim.updates: 7 does not divide"),
        ([TINY, "--config.model.path=/no/where"], "model.path: '/no/where' does not"),
        ([TINY, "--config.questions.train=none.jsonl"], "no file 'none.jsonl'"),
        ([TINY, "--config.rollout.max_tokens=90"], "rollout.max_tokens: 90 can't"),
        ([TINY, "--config.retrieval.url=http://x"], "exactly one of the two"),
    ],
)
def test_mistakes_are_named_before_anything_is_opened(
    command, nothing_opens, arguments, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    code, _ = command(*arguments, f"--workdir={tmp_path / 'run'}")
    # sys.exit with a text prints it on stderr, and the exit code is 1.
    assert isinstance(code, str) and code.startswith("lld_jax: ")
    assert message in code
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_the_machine_does_not_have(command, nothing_opens, file):
    code, _ = command(file, "--config.mesh.tensor=3")
    assert "tensor 3" in code and "mesh" in code
    code, _ = command(file, "--config.mesh.tensor=3", "--config.optim.micro_rows=6")
    assert "x tensor 3 = 3, but there are 1 devices" in code


def test_words_that_are_no_flags(command, file):
    assert command(file, "train")[0] == 1
    assert command(file, "--mode=sing")[0] == 1


def test_addresses_that_are_no_work_folders(command, nothing_opens, file):
    for address in ("s3://bucket/run", "gs://bucket"):
        code, _ = command(file, f"--workdir={address}")
        assert f"workdir: '{address}'; legal is a folder, or gs://BUCKET" in code


def test_a_finished_run_is_not_started_again(command, file, finished_run):
    code, _ = command(file, f"--workdir={finished_run}")
    assert "holds a finished run; choose another folder" in code


def test_another_config_in_the_folder_of_a_run(command, file, finished_run, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    shutil.copy(finished_run / "config.json", workdir)
    code, _ = command(file, f"--workdir={workdir}", "--config.seed=5")
    assert "seed: 0 there, 5 here" in code


def test_eval_scores_the_last_checkpoint(command, file, finished_run):
    code, out = command(file, f"--workdir={finished_run}", "--mode=eval")
    assert code is None
    found = json.loads(out)
    summary = json.loads((finished_run / "summary.json").read_text())
    assert found["policy"] == f"{finished_run / 'checkpoints'}/5"
    for mode, score in summary["exact_match"].items():
        assert found[f"eval/{mode}/exact_match"] == score["after"]
    for mode, score in summary["searches"].items():
        assert found[f"eval/{mode}/searches"] == score["after"]


def test_eval_of_a_folder_without_a_run(command, file, tmp_path, policy, finished_run):
    """The policy that the config names; nothing is made."""
    arguments = [file, f"--workdir={tmp_path / 'none'}", "--mode=eval"]
    code, out = command(*arguments)
    assert code is None and json.loads(out)["policy"] == str(policy)
    summary = json.loads((finished_run / "summary.json").read_text())
    for mode, score in summary["exact_match"].items():
        assert json.loads(out)[f"eval/{mode}/exact_match"] == score["before"]
    assert not (tmp_path / "none").exists()


def test_ask_prints_the_trajectory_of_another_folder(command, file, finished_run):
    code, out = command(
        file,
        "--mode=ask",
        "--question=Who wrote Road to Polpa?",
        f"--policy={finished_run / 'export'}",
    )
    assert code is None
    parts = [line for line in out.splitlines() if line.startswith("--- ")]
    assert parts[0] == "--- action" and parts[-1].startswith("--- ended: ")
    assert out.splitlines()[-1].startswith(("answer: ", "no answer"))


def test_ask_needs_a_question(command, file):
    assert "--question" in command(file, "--mode=ask")[0]


def test_export_writes_the_last_checkpoint(command, file, finished_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished_run / "checkpoints", workdir / "checkpoints")
    code, out = command(file, f"--workdir={workdir}", "--mode=export")
    assert code is None and out.startswith(f"wrote {workdir / 'export'} from ")
    a, b = (
        (folder / "export" / "model.safetensors").read_bytes()
        for folder in (workdir, finished_run)
    )
    assert a == b
    code, _ = command(file, f"--workdir={tmp_path / 'none'}", "--mode=export")
    assert "has no checkpoint to export" in code


def test_training_prints_its_result(command, file, monkeypatch, tmp_path):
    summary = {
        "exact_match": {"greedy": {"before": 0.25, "after": 0.5}},
        "seconds": 12.3,
    }
    asked = []
    monkeypatch.setattr(
        train, "train", lambda *arguments: asked.append(arguments) or summary
    )
    code, out = command(file, f"--workdir={tmp_path / 'run'}", "--config.steps=7")
    assert code is None
    assert "exact match, greedy: 0.250 before, 0.500 after training" in out
    ((config, workdir),) = asked
    assert config.steps == 7 and workdir == tmp_path / "run"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Preempted("stopped by SIGTERM"), 143),
        (train.Diverged("no finite gradient"), "lld_jax: no finite gradient"),
    ],
)
def test_exit_codes_of_runs_that_end_early(command, file, monkeypatch, error, code):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(train, "train", fail)
    assert command(file)[0] == code
