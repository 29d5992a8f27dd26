"""A template that writes the date: a run that goes on another day reads the text of its first."""

import json
from datetime import datetime

import pytest
from support.text.marked_tokens import marked_tokenizer

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.template import rendered_on
from medusa_kit.errors import CheckpointError
from medusa_kit.train.loop import TrainingLoop
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train

pytestmark = pytest.mark.usefixtures("often")

DATED = (
    "{{ 'On ' + strftime_now(\"%d %b %Y\") + strftime_now('%H:%M') }}{% for m in messages %}"
    "{{ '<U>' if m.role == 'user' else '<A>' }}{{ m.content + '<E>' }}{% endfor %}"
    "{% if add_generation_prompt %}<A>{% endif %}"
)
TODAY, TOMORROW = datetime(2026, 5, 1, 23, 59), datetime(2026, 5, 2, 0, 1)


@pytest.fixture
def day(monkeypatch):
    """Sets what templates and runs take for now."""

    def to(date):
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return date

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        monkeypatch.setattr("medusa_kit.train.run.folder._now", lambda: date, raising=False)

    return to


def test_a_date_is_written_in_place_of_todays(day):
    day(TODAY)
    tokenizer = marked_tokenizer(DATED, ["<U>", "<A>"])

    def begins():
        return tokenizer.decode(encode_prompt(tokenizer, "q")).partition("<U>")[0]

    assert begins() == "On 01 May 202623:59"
    with rendered_on(TOMORROW):
        assert begins() == "On 02 May 202600:01"
    assert begins() == "On 01 May 202623:59"


@pytest.fixture
def base():
    loaded = load_base_model("debug-tiny", device="cpu")
    tokenizer = marked_tokenizer(DATED, ["<U>", "<A>"])
    assert len(tokenizer) <= loaded.info.vocab_size
    return wrap_model(loaded.model, tokenizer)


@pytest.fixture
def recipe(make_recipe, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}" * 9}]
            for n in range(12)]  # fmt: skip
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return make_recipe(data={"sources": [str(path)], "eval_fraction": 0.2})


def test_a_stopped_run_goes_on_past_midnight(base, recipe, day, monkeypatch, capsys):
    original, done = TrainingLoop._update, []

    def update(self, arguments):
        if len(done) == 6:
            raise KeyboardInterrupt
        done.append(1)
        original(self, arguments)

    def run():
        return train(recipe, load_frozen=lambda *_, **__: base)

    day(TODAY)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_update", update)
        with pytest.raises(KeyboardInterrupt):
            run()
    (progress,) = RunFolder(recipe).path.glob("checkpoint/*/progress.json")
    saved = progress.read_text()
    progress.write_text(json.dumps({**json.loads(saved), "date": "once"}))
    with pytest.raises(CheckpointError, match="cannot be read: Invalid isoformat"):
        run()
    progress.write_text(saved)
    day(TOMORROW)
    run()
    assert "continuing from update" in capsys.readouterr().err
