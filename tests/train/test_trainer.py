import errno
import json
import os
import signal

import pytest
import torch

from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    IncompatibleBaseError,
    MedusaKitError,
)
from medusa_kit.heads import load_heads
from medusa_kit.train import loop
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.run.schedule import learning_rate
from medusa_kit.train.trainer import train_heads


class Crash(Exception):
    pass


def crash_after(monkeypatch, updates, action=None):
    """Let the run do so many updates, then raise (or act) in the middle of the next one."""
    original, done = loop.TrainingLoop._update, []

    def update(self, arguments):
        if len(done) == updates:
            if action is None:
                raise Crash
            action()
        done.append(1)
        original(self, arguments)

    monkeypatch.setattr(loop.TrainingLoop, "_update", update)
    return lambda: monkeypatch.setattr(loop.TrainingLoop, "_update", original)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained_weights(base, folder):
    return load_heads(folder, base).state_dict()


def assert_same_weights(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def stuttering_rows():
    """Each token occurs once or twice, at random, so the last two tokens tell more than one."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for row in range(30):
        ids, token = [], row % 20
        while len(ids) < 24:
            ids += [token] * int(torch.randint(1, 3, (), generator=generator))
            token = (token + 1) % 20
        rows.append(EncodedExample(ids[:24], [i >= 2 for i in range(24)], row + 1))
    return rows


def test_heads_that_read_the_path_learn_more_from_it(tiny_base, make_recipe, tmp_path):
    """The same text: what follows depends on the token before, which only they are shown."""
    base, top1 = tiny_base(), {}
    kinds = ["medusa", "hydra", "recurrent"]
    for kind in kinds:
        recipe = make_recipe(
            output_dir=str(tmp_path / kind),
            heads={"num_heads": 3, "kind": kind},
            train={"epochs": 12, "learning_rate": 0.02},
        )
        report = train_heads(base, stuttering_rows(), recipe)
        top1[kind] = report.scores.top1
        assert load_heads(report.heads_folder, base).config.kind == kind
    for kind in kinds[1:]:
        assert all(top1[kind][k] > top1["medusa"][k] + 0.1 for k in (0, 2))


@pytest.mark.parametrize(
    "more",
    [{}, {"average": 0.5, "precision": "bfloat16"}, {"optimizer": "muon", "learning_rate": 0.1}],
)
def test_recurrent_heads_learn_to_count(tiny_base, counting_rows, make_recipe, tmp_path, more):
    base, found = tiny_base(), {}
    for updates in ("few", "many"):
        recipe = make_recipe(
            output_dir=str(tmp_path / updates),
            heads={"num_heads": 3, "kind": "recurrent", "mlp_size": 20, "save_dtype": "bfloat16"},
            train={
                "epochs": 1 if updates == "few" else 12,
                "learning_rate": 0.02,
                **more,
            },
        )
        report = train_heads(base, counting_rows(), recipe)
        found[updates] = report.scores
        assert load_heads(report.heads_folder, base).config.mlp_size == 20
    assert all(
        many < 0.5 * few for few, many in zip(found["few"].loss, found["many"].loss, strict=True)
    )
    assert all(many > few for few, many in zip(found["few"].top1, found["many"].top1, strict=True))
    assert min(found["many"].top1) > 0.9


def agreement(base, heads, rows):
    """How often the first head guesses the token that the base would choose."""
    agreed = []
    for row in rows:
        hidden_TD = base.hidden_states(torch.tensor([row.input_ids]))[0]
        said_T = base.head_logits(hidden_TD).argmax(-1)
        guesses_T = heads.candidates(hidden_TD, 1)[0, :, 0]
        written = [t for t in range(len(row.input_ids) - 2) if row.loss_mask[t + 1]]
        agreed += [bool(guesses_T[t] == said_T[t + 1]) for t in written]
    return sum(agreed) / len(agreed)


def test_soft_targets_teach_what_the_base_would_say(
    tiny_base, counting_rows, make_recipe, tmp_path
):
    """The base is random, so its own tokens are unrelated to the text."""
    base, found = tiny_base(), {}
    for name, options in {
        "text": {},
        "base": {"loss": "soft", "soft_share": 1.0, "soft_top": 8},
    }.items():
        recipe = make_recipe(
            output_dir=str(tmp_path / name),
            heads={"num_heads": 2, "num_blocks": 2},
            train={"epochs": 30, "learning_rate": 0.03, "keep": "last", **options},
        )  # fmt: skip
        report = train_heads(base, counting_rows(), recipe)
        heads = load_heads(report.heads_folder, base)
        found[name] = agreement(base, heads, counting_rows()), report.scores.top1[0]
    assert found["base"][0] > 0.25 > 2 * found["text"][0]
    assert found["text"][1] > 2 * found["base"][1]


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
def test_training_learns_to_count_and_leaves_the_base_alone(
    tiny_base, counting_rows, make_recipe, projection
):
    base = tiny_base()
    before = base.weights_digest()
    reduced = {"reduced_size": 24} if projection == "reduced" else {}
    recipe = make_recipe(
        heads={"num_heads": 2, "num_blocks": 2, "projection": projection, **reduced},
        train={"epochs": 30, "learning_rate": 0.03},
    )
    report = train_heads(base, counting_rows(), recipe)
    assert base.weights_digest() == before
    losses = [line["loss"] for line in metrics(RunFolder(recipe).path) if "loss" in line]
    assert losses[-1] < 0.6 * losses[0]
    assert report.scores.top1[0] > 0.3  # guessing gets 1 in 23
    assert report.scores.top5[0] >= report.scores.top1[0]
    heads = load_heads(report.heads_folder, base)
    assert heads.config.projection == projection


@pytest.mark.parametrize("features", ["memory", "live"])
@pytest.mark.usefixtures("often")
def test_a_crashed_run_resumes_to_the_same_weights(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path, features
):
    base, train = tiny_base(), {"features": features, "accumulation": 2, "epochs": 5}
    straight = make_recipe(output_dir=str(tmp_path / "straight"), train=train)
    expected = trained_weights(base, train_heads(base, counting_rows(), straight).heads_folder)

    recipe = make_recipe(train=train)
    mend = crash_after(monkeypatch, 6)
    with pytest.raises(Crash):
        train_heads(base, counting_rows(), recipe)
    mend()
    resumed_at = []
    original = loop.TrainingLoop.updates
    monkeypatch.setattr(
        loop.TrainingLoop, "updates", lambda self: resumed_at.append(self.step) or original(self)
    )
    report = train_heads(base, counting_rows(), recipe)
    assert resumed_at == [4]  # save_every
    assert_same_weights(trained_weights(base, report.heads_folder), expected)
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == [line["step"] for line in metrics(tmp_path / "straight")]
    assert not (tmp_path / "run/checkpoint").exists()


@pytest.mark.usefixtures("often")
def test_ctrl_c_saves_after_the_update_and_the_next_run_goes_on(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path, capsys
):
    base = tiny_base()
    straight = make_recipe(output_dir=str(tmp_path / "straight"))
    expected = trained_weights(base, train_heads(base, counting_rows(), straight).heads_folder)
    recipe = make_recipe()
    mend = crash_after(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_heads(base, counting_rows(), recipe)
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopped after update 7" in capsys.readouterr().err
    mend()
    report = train_heads(base, counting_rows(), recipe)
    captured = capsys.readouterr()
    assert "continuing from update 7" in captured.err
    assert captured.out == ""
    assert_same_weights(trained_weights(base, report.heads_folder), expected)


def test_ctrl_c_after_the_last_update_is_not_lost(
    tiny_base, counting_rows, make_recipe, monkeypatch, capsys
):
    """Nor where the run that goes on has no update left."""
    base, recipe, original = tiny_base(), make_recipe(), loop.TrainingLoop._updates

    def updates(self):
        yield from original(self)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "_updates", updates)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train_heads(base, counting_rows(), recipe)
            stopped = f"stopped after update {loop_updates(recipe)} of {loop_updates(recipe)}"
            assert stopped in capsys.readouterr().err
    report = train_heads(base, counting_rows(), recipe)
    assert report.num_updates == loop_updates(recipe)


@pytest.mark.usefixtures("often")
def test_a_run_may_make_do_with_fewer_updates_and_goes_on_with_their_number(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    """The schedule ends with them, and a new process knows them from the checkpoint."""

    def pace(step, planned):
        return 9 if step == 3 else planned + 100 if step < 3 else planned

    base, rates = tiny_base(), []
    monkeypatch.setattr(loop, "learning_rate", lambda train, step, total: (
        rates.append((step, total)) or learning_rate(train, step, total)))  # fmt: skip
    straight = make_recipe(output_dir=str(tmp_path / "straight"), train={"epochs": 5})
    report = train_heads(base, counting_rows(), straight, pace=pace)
    expected = trained_weights(base, report.heads_folder)
    most = loop_updates(straight)
    assert report.num_updates == 9 < most
    assert rates == [(step, most if step < 3 else 9) for step in range(9)]
    recipe = make_recipe(train={"epochs": 5})
    mend = crash_after(monkeypatch, 6)
    with pytest.raises(Crash):
        train_heads(base, counting_rows(), recipe, pace=pace)
    mend()
    rates.clear()
    report = train_heads(base, counting_rows(), recipe, pace=lambda step, planned: planned)
    assert rates == [(step, 9) for step in range(4, 9)]
    assert_same_weights(trained_weights(base, report.heads_folder), expected)


def loop_updates(recipe):
    """Of all epochs: twelve rows of twenty tokens, a fifth held out."""
    per_epoch = round(10 * 20 / recipe.train.micro_batch_positions)
    return per_epoch * recipe.train.epochs


@pytest.mark.usefixtures("often")
def test_another_recipe_or_a_finished_run_is_refused(tiny_base, counting_rows, make_recipe):
    base, recipe = tiny_base(), make_recipe()
    train_heads(base, counting_rows(), recipe)
    with pytest.raises(ConfigError, match="finished"):
        RunFolder(recipe).open()
    with pytest.raises(ConfigError, match=r"train\.learning_rate: 0\.5 ≠ 0\.01"):
        RunFolder(make_recipe(train={"learning_rate": 0.5})).open()
    folder = RunFolder(make_recipe(train={"learning_rate": 0.5}))
    folder.open(fresh=True)
    assert (RunFolder(recipe).path / "run.json").exists()  # until the new run begins
    folder.begin()
    assert not (RunFolder(recipe).path / "run.json").exists()


@pytest.mark.usefixtures("often")
def test_a_checkpoint_of_other_data_or_another_base_is_refused(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    base, recipe = tiny_base(), make_recipe()
    mend = crash_after(monkeypatch, 6)
    with pytest.raises(Crash):
        train_heads(base, counting_rows(), recipe)
    mend()
    with pytest.raises(ConfigError, match="data changed"):
        train_heads(base, counting_rows(count=13), recipe)
    other = tiny_base()
    other.model.lm_head.weight.data += 1
    changed = type(base)(other.model, None, "other", "memory")
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        train_heads(changed, counting_rows(), recipe)
    (RunFolder(recipe).load().folder / "state.pt").write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        train_heads(base, counting_rows(), recipe)


@pytest.mark.usefixtures("often")
def test_a_checkpoint_of_a_base_with_another_mlp_is_refused(
    tiny_base, counting_rows, make_recipe, monkeypatch, capsys
):
    base, recipe = tiny_base(), make_recipe()
    mend = crash_after(monkeypatch, 6)
    with pytest.raises(Crash):
        train_heads(base, counting_rows(), recipe)
    mend()
    other = tiny_base().model
    other.model.layers[0].mlp.down_proj.weight.data *= 1.5
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        train_heads(type(base)(other, None, "tuned", "memory"), counting_rows(), recipe)
    progress = RunFolder(recipe).load().folder / "progress.json"
    old = Fingerprint.parse(base.info.fingerprint).output  # all that version 1 was
    progress.write_text(json.dumps({**json.loads(progress.read_text()), "base": old}))
    train_heads(base, counting_rows(), recipe)
    assert "its fingerprint is an old one" in capsys.readouterr().err


@pytest.mark.usefixtures("often")
def test_a_full_disk_keeps_the_last_checkpoint(tiny_base, counting_rows, make_recipe, monkeypatch):
    base, recipe, save, calls = tiny_base(), make_recipe(), torch.save, []

    def full_the_second_time(state, path):
        calls.append(path.name)
        if calls.count("state.pt") == 2 and path.name == "state.pt":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", full_the_second_time)
    with pytest.raises(MedusaKitError, match=r"No space left.*step 4 is safe"):
        train_heads(base, counting_rows(), recipe)
    assert RunFolder(recipe).load().progress["step"] == 4
    leftovers = [path.name for path in (RunFolder(recipe).path / "checkpoint").iterdir()]
    assert leftovers == ["step-00000004"]


def test_a_loss_that_is_not_finite_names_the_update(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    base = tiny_base()

    def poison(self, update):
        if self.step == 2:
            update.batches[0].hidden_PD.fill_(float("nan"))
        original(self, update)

    original = loop.TrainingLoop._update
    monkeypatch.setattr(loop.TrainingLoop, "_update", poison)
    recipe = make_recipe(train={"save_every": 2})
    with pytest.raises(MedusaKitError, match="loss is nan at update 3"):
        train_heads(base, counting_rows(), recipe)
    bad = torch.load(RunFolder(recipe).path / "bad_update.pt")
    assert bad["step"] == 3
    assert bad["batches"][0]["hidden_PD"].isnan().all()
    assert RunFolder(recipe).load().progress["step"] == 2


def test_a_changed_base_is_noticed(tiny_base, counting_rows, make_recipe, monkeypatch):
    base = tiny_base()
    original = loop.TrainingLoop.updates

    def careless(self):
        original(self)
        base.model.model.norm.weight.data[0] += 1

    monkeypatch.setattr(loop.TrainingLoop, "updates", careless)
    with pytest.raises(MedusaKitError, match="changed the weights of the frozen base"):
        train_heads(base, counting_rows(), make_recipe())


def test_no_usable_rows_fail_before_anything_is_written(tiny_base, make_recipe, tmp_path):
    with pytest.raises(DataError, match="0 usable"):
        train_heads(tiny_base(), [], make_recipe())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("token", [32, -1])
def test_rows_in_memory_are_checked_too(tiny_base, counting_rows, make_recipe, tmp_path, token):
    rows = counting_rows()
    rows[3].input_ids[5] = token
    with pytest.raises(DataError, match=f"row 4 holds the token id {token}; the model has ids 0"):
        train_heads(tiny_base(), rows, make_recipe())


def test_wandb_without_the_package_says_what_to_install(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb") as caught:
        train_heads(tiny_base(), counting_rows(), make_recipe(logging={"wandb": True}))
    assert "logging.wandb=false" in caught.value.hint


def test_prompts_may_be_trained_on_and_are_never_judged(
    tiny_base, counting_rows, make_recipe, tmp_path
):
    base, reports = tiny_base(), {}
    for train_on in ("answers", "all"):
        recipe = make_recipe(
            output_dir=str(tmp_path / train_on),
            data={"sources": ["unused"], "eval_fraction": 0.2, "train_on": train_on},
            train={"loss": "soft", "soft_share": 1.0, "soft_top": 4, "learning_rate": 1e-30},
        )  # fmt: skip
        reports[train_on] = train_heads(base, counting_rows(10, 5, 9), recipe)
    answers, prompts = reports["answers"], reports["all"]
    assert (answers.num_positions, prompts.num_positions) == (8 * 9, 8 * 13)
    assert prompts.scores == answers.scores  # as good as untrained, judged on the same tokens
