"""What a command can tell wrong is told before a base is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.debug_model import MODEL
from support.small_engines import BUSHY, random_heads

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import HEADS
from medusa_kit.errors import UsageError
from medusa_kit.heads import save_heads
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

Run = Callable[..., tuple[int, str, str]]
BIAS = ["--logit-bias", "259=1"]  # debug-tiny has tokens 0..258
COMMANDS: dict[str, tuple[list[str], str]] = {
    "a bias in generate": (["generate", "Hi.", *BIAS], "logit_bias names token id 259; expected 0"),
    "a bias in chat": (["chat", *BIAS], "logit_bias names token id 259; expected 0..258"),
    "a bias in data": (["data", "generate", "HEADS/prompts.txt", "-o", "HEADS/out.jsonl", *BIAS],
                       "logit_bias names token id 259"),
    "heads of generate": (["generate", "Hi.", "--heads", "./gone"], "no heads at gone"),
    "heads of chat": (["chat", "--heads", "./gone"], "no heads at gone"),
    "heads of verify": (["verify", "--heads", "./gone"], "no heads at gone"),
    "the second heads of bench": (["bench", "--heads", "HEADS", "--heads", "./gone"],
                                  "no heads at gone"),
    "the tree of verify": (["verify", "--heads", "HEADS", "--tree", "./gone.json"], "gone.json"),
    "statistics": (["tree-search", "--heads", "HEADS"], "no statistics at"),
    "statistics by name": (["tree-search", "--statistics", "./gone.npz"], "no statistics at gone"),
    "answers": (["tree-search", "--heads", "HEADS", "--answers", "./gone.jsonl"], "gone.jsonl"),
    "prompts": (["tree-search", "--heads", "HEADS", "--prompts", "./gone.txt"], "gone.txt"),
    "a tree to judge": (["tree-search", "--heads", "HEADS", "--choices", "./gone.json"],
                        "no tree file at gone.json"),
    "sizes": (["tree-search", "--heads", "HEADS", "--sizes", "many"], "sizes 'many'"),
    "a size": (["tree-search", "--heads", "HEADS", "--sizes", "4,0"], "size 0 is out of range"),
    "one tree, two sizes": (["tree-search", "--choices", "./gone.json", "--nodes", "4"],
                            "no --nodes"),
    "an attention": (["generate", "Hi.", "--attention", "flush"], "did you mean flash"),
}  # fmt: skip


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    save_heads(random_heads(load_base_model("debug-tiny", device="cpu")), folder)
    save_tree(BUSHY, folder / "tree.json", {HEADS: stored_digest(folder)})
    (folder / "prompts.txt").write_text("Hi.\n")
    return folder


@pytest.mark.parametrize("case", COMMANDS)
def test_told_before_a_base_is_loaded(
    run: Run, heads: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise UsageError("a base was loaded")

    monkeypatch.setattr(BaseModel, "__init__", load)
    arguments, message = COMMANDS[case]
    code, out, err = run(*(one.replace("HEADS", str(heads)) for one in arguments), *MODEL)
    assert (code, out) == (code or 1, "")
    assert message in err.replace("\n", " ")
    assert "a base was loaded" not in err


def test_a_bias_within_the_vocabulary_is_left_alone(run: Run) -> None:
    code, out, _ = run("generate", "Hi.", "-n", "3", "--logit-bias", "258=-1", *MODEL)
    assert (code, bool(out)) == (0, True)


def test_a_files_digest_is_begun_before_the_libraries_are_imported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()
    monkeypatch.setattr("medusa_kit.base.own_models.begin_digest", begun.append)
    (tmp_path / "model.gguf").write_bytes(b"none")
    code, _, err = run("generate", "Hi.", "-m", tmp_path / "model.gguf")
    assert (code, begun[0]) == (1, str(tmp_path / "model.gguf"))  # loading begins it too
    assert "is it a GGUF file?" in err


def test_an_attention_that_cannot_be_used_is_no_success(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    code, out, err = run("generate", "Hi.", "--attention", "triton", *MODEL)
    assert (code, out) == (2, "")
    assert "Triton kernels need a GPU" in err
    assert "attention auto" in err


def test_what_chooses_the_base_reaches_it(
    run: Run, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the commands that do not decode with an engine of all options."""
    given: list[dict[str, Any]] = []

    def load(*names: str, **options: Any) -> None:
        given.append({**dict.fromkeys(names, True), **options})
        raise UsageError("a base was loaded")

    monkeypatch.setattr("medusa_kit.engine.load.load", load)
    monkeypatch.setattr("medusa_kit.infer.cpu.packed_base.base_for_decoding", load)
    monkeypatch.setattr("medusa_kit.base.names._cached", lambda: ["org/base"])
    file = tmp_path / "engine.yaml"
    file.write_text("model: org/base\nrevision: v1\ndrafter: suffix\ncache: float16\n")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Count to {i}.\n" for i in range(8)))
    run("data", "generate", prompts, "-o", tmp_path / "a", "-m", "org/base", "--revision", "v1")
    assert given.pop() == {"org/base": True, "revision": "v1", "dtype": "auto", "device": "auto"}
    run("tree-search", "--prompts", prompts, "-m", "org/base", "--revision", "v1")
    chosen = {"model": "org/base", "revision": "v1", "dtype": "auto", "device": "auto",
              "heads": "auto", "force": False}  # fmt: skip
    root_alone = {
        "tree": CandidateTree.root_only()
    }  # what lies beside heads may be of earlier ones
    assert given.pop() == {**chosen, **root_alone}
    run("tree-search", "--prompts", prompts, "--config", file, "--dtype", "float32")
    asked = {**chosen, **root_alone, "dtype": "float32", "cache": "float16"}
    assert given.pop() == asked


def test_doctor_says_where_prompts_belong(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "some prompts.txt"
    prompts.write_text("What is a river?\nName a city.\n")
    code, _, err = run("doctor", str(prompts))
    assert (code, f"hint: --data '{prompts}' checks" in err) == (2, True)
    code, _, err = run("doctor", "debug-tiny", "--data", str(prompts))
    assert code == 2
    assert "has prompts alone; expected what heads were trained on, with answers" in err
    assert f"hint: `medusa-kit data generate '{prompts}'` makes answers" in err
    code, _, err = run("doctor", "--prompts", str(prompts))
    assert (code, "hint: --data FILE takes what the heads were trained on" in err) == (2, True)
